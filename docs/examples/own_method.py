"""A method of your own: odds-ratio preference optimisation (ORPO, arXiv:2403.07691), which needs no reference model.

    dtrain run sft method=own_method:OddsMethod model.path=Qwen/Qwen3-0.6B data.train.path=pairs.jsonl odds.weight=0.2

`dtrain run` finds this file because it is in the working directory. Rows have `chosen` and `rejected` completions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import dtrain


@dataclass
class OddsKeys:
    """`odds`: read by method odds."""

    weight: float = 0.1
    """Weight of the odds ratio, lambda in the paper."""


class OddsMethod(dtrain.Method):
    """Mean over pairs of −log p(chosen) per token − weight · log sigmoid(log odds ratio)."""

    name = "odds"
    Section = OddsKeys
    section: OddsKeys
    about = "odds-ratio preference optimisation"
    kind = "pairs"  # batches contain pairs of documents: 2i is the chosen, 2i + 1 the rejected completion
    measures = ("accuracy",)

    def format_problem(self, format):
        is_possible = format in ("auto", "preference", "tokenized")
        return None if is_possible else "method=odds trains on pairs. Set data.train.format=preference"

    def loss(self, source, batch, global_seqs, global_tokens):
        is_trained = batch["labels"] != -100
        logprobs = source.logprobs().logprobs  # [B, S/cp]
        # Sums over the tokens of each document, the same on every context-parallel rank.
        totals = source.sum_by_document(torch.stack([logprobs * is_trained, is_trained.to(logprobs)]))
        mean_logprobs = totals[0] / totals[1].clamp(min=1)  # [documents]
        chosen, rejected = mean_logprobs[0::2], mean_logprobs[1::2]

        # log(p / (1 − p)) of both completions. A padding pair has p = 1, which would be infinite.
        bounded = torch.stack([chosen, rejected]).clamp(max=-1e-6)
        log_odds = bounded - torch.log(-torch.expm1(bounded))
        ratio = log_odds[0] - log_odds[1]
        losses = -chosen - self.section.weight * F.logsigmoid(ratio)

        loss = losses.sum() * 2 / global_seqs  # two documents per pair, over all ranks and micro-batches
        totals = {"loss": losses.sum(), "right": (ratio > 0).sum(), "pairs": torch.full_like(losses, 1).sum()}
        # All context-parallel ranks have the same sums, so each contributes its share of them.
        return source.count_once(loss), {name: source.count_once(value.detach()) for name, value in totals.items()}

    def train_metrics(self, sums):
        return {"accuracy": sums["right"] / max(sums["pairs"], 1)}

    def val_metrics(self, sums):
        pairs = max(sums["pairs"], 1)
        return {"val_loss": sums["loss"] / pairs, "val_accuracy": sums["right"] / pairs}
