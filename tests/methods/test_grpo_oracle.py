"""A GRPO run against the same steps written again: the plain model, its own advantages, loss, clipping and AdamW."""

import json
import math
from pathlib import Path

import pytest
import torch

from dtrain import models
from tests.running import metrics, run, weights
from tests.serve.serving import make_model
from tests.tiny import tiny_grpo

GROUP, LR, TEMPERATURE, TOP_P, CLIP, BETA, ENTROPY, CACHE, LONGEST = 4, 1e-2, 0.7, 0.9, 0.2, 0.1, 0.02, 3, 6
STOPS = range(40, 60)  # words that end a completion, so that some are whole and some are cut
SETTINGS = (
    "model.init=pretrained",
    "scheduler={name: constant, warmup_steps: 0}",
    f"optimizer.lr={LR}",
    "train.steps=4",
    "train.global_batch=16",
    "checkpoint.every=4",
    f"grpo.sampling={{temperature: {TEMPERATURE}, top_p: {TOP_P}, stop: [{','.join(f'w{i}' for i in STOPS)}]}}",
    f"grpo.sampling.max_new_tokens={LONGEST}",
    "grpo.updates_per_rollout=2",
    f"grpo.beta={BETA}",
    f"grpo.kwargs={{entropy_coef: {ENTROPY}}}",
    f"grpo.overlong_cache={CACHE}",
    "grpo.mask_truncated=true",
)


def scores(model, prompt, ids):
    """log p of each of `ids` by temperature and top-p, −inf where the nucleus leaves it out, and the entropies before
    top-p, [s] each."""
    logits = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1] / TEMPERATURE
    whole = logits.log_softmax(-1)
    found = []
    for row, p, token in zip(logits, whole.detach().exp(), ids, strict=True):
        nucleus, mass = [], 0.0
        for candidate in p.argsort(descending=True).tolist():
            if mass >= TOP_P:
                break
            nucleus.append(candidate)
            mass += p[candidate].item()
        found.append(row[token] - row[nucleus].logsumexp(0) if token in nucleus else row.new_tensor(-math.inf))
    return torch.stack(found), -(whole.exp() * whole).sum(-1)


def advantages(rewards):
    found = []
    for start in range(0, len(rewards), GROUP):
        group = torch.tensor(rewards[start : start + GROUP], dtype=torch.float64)
        found += ((group - group.mean()) / (group.std() + 1e-4) if len(set(group.tolist())) > 1 else group * 0).tolist()
    return found


def loss_of(name, model, drawn, old, reference):
    """The loss of one step on all of a rollout; drawn: (prompt, ids, advantage, whether it was cut)."""
    trained = [index for index, one in enumerate(drawn) if not one[3]]
    tokens, total = sum(len(drawn[index][1]) for index in trained), 0.0
    for index in trained:
        prompt, ids, advantage, _ = drawn[index]
        now, entropies = scores(model, prompt, ids)
        known = now.isfinite() & old[index].isfinite()
        now, before = torch.where(known, now, 0), torch.where(known, old[index], 0)
        ratio = torch.where(known, (now - before).exp(), 0)
        if name == "gspo":
            ratio = (now - before).mean().exp().expand(len(ids))
        each = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        compared = known & reference[index].isfinite()
        gap = torch.where(compared, reference[index] - now, 0)
        each = each + BETA * ratio * (gap.exp() - 1 - gap)
        total = total + (each.sum() / tokens if name == "dapo" else each.mean() / len(drawn))
        total = total - ENTROPY * torch.where(known, entropies, 0).sum() / tokens
    return total


@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo"])
def test_a_run_is_the_steps_written_again(tmp_path, name):
    """Two rollouts of two passes each: losses, norms and the weights in the end, to 1e-10."""
    path = make_model(tmp_path, 1)
    recipe = tiny_grpo(tmp_path, f"model.path={path}", f"grpo.loss={name}", *SETTINGS)
    run(recipe)
    samples = [json.loads(line) for line in (Path(recipe.run.dir) / "run" / "samples.jsonl").open()]
    model, start = (models.from_pretrained(path, torch.float64) for _ in range(2))
    wide = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    narrow = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    rows = iter(metrics(recipe))
    for step in (1, 3):
        mine = [row for row in samples if row["step"] == step]
        words = [[int(word[1:]) for word in row["completion"].split()] for row in mine]
        cut = [ids[-1] not in (1, *STOPS) for ids in words]
        assert [row["finish"] == "length" for row in mine] == cut and 0 < sum(cut) < len(cut)
        rewards = [
            round(sum(token % 2 == 0 for token in ids) / len(ids), 1) - max(0, len(ids) - LONGEST + CACHE) / CACHE
            for ids in words
        ]
        assert [row["reward"] for row in mine] == pytest.approx(rewards, rel=1e-12)
        drawn = list(zip([row["prompt"] for row in mine], words, advantages(rewards), cut, strict=True))
        with torch.no_grad():
            old, reference = ([scores(one, *row[:2])[0] for row in drawn] for one in (model, start))
        for _ in range(2):
            loss = loss_of(name, model, drawn, old, reference)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            row = next(rows)
            assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-10, abs=1e-12)
    found = weights(recipe, 4)
    for key, value in model.named_parameters():
        torch.testing.assert_close(found[f"model.{key}"], value.detach(), rtol=0, atol=1e-10)
