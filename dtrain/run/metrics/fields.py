"""Every field of metrics.jsonl: its unit and what it means. The one table of them, for the order of a row, the report's
labels and docs/metrics.md (tools/metrics_reference.py). `Method.measures` says which a method writes; those that no
method names are written under all. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_PAIRED = "under reward: reward.task=pairs"


@dataclass(frozen=True)
class MetricField:
    """A field of a training row, or of a validation row under `val_` and its name.

    title: for a reader. unit: "" for a number without one. where: what has to be so for the field to be written; "":
    always.
    """

    name: str
    title: str
    unit: str
    meaning: str
    where: str = ""


_ROW = (
    MetricField("step", "Step", "", "Optimizer steps that are done, from 1."),
    MetricField("epoch", "Epoch", "passes", "Passes over the training set that are done after this step."),
    MetricField("loss", "Loss", "", "The method's loss over the whole global batch. Only training rows have it."),
    MetricField(
        "val_loss", "Validation loss", "", "The same loss over all of `data.val`.", where="train.validate_every"
    ),
    MetricField("grad_norm", "Gradient norm", "", "The norm of the whole model's gradient, before it is clipped."),
    MetricField(
        "lr",
        "Learning rate",
        "",
        "The rate of this step. Warm-up begins at 0, under every schedule, wsd too: the first of w warm-up steps has a "
        "rate of 0, the s-th lr·(s − 1) ÷ w.",
    ),
    MetricField(
        "tokens",
        "Tokens of a step",
        "tokens",
        "Tokens of the step's global batch over all ranks, trained or not, without padding. Of a rollout: prompts and "
        "completions. The forwards of a reference or a teacher are not counted again.",
    ),
    MetricField("tokens_per_sec", "Tokens per second", "tokens/s", "`tokens` ÷ `step_time`, of all ranks together."),
    MetricField(
        "mfu",
        "Model FLOPs utilisation",
        "share",
        "The share of the GPUs' peak that the model's own arithmetic takes. What is computed again is not counted.",
        where="CUDA, bfloat16 or float16, a GPU whose peak is known",
    ),
    MetricField(
        "mem_gib",
        "Peak memory of rank 0",
        "GiB",
        "The peak so far of rank 0. On CUDA: what torch had allocated on its GPU. On a CPU: all that the process held.",
    ),
    MetricField(
        "step_time",
        "Time of a step",
        "s",
        "From the end of the step before, with its data and rollout. Validation, evaluation and saves are not in it.",
    ),
    MetricField("data_time", "Time for data", "s", "The part of `step_time` that the step waited for its batch."),
)
_METHODS = (
    MetricField(
        "token_accuracy",
        "Token accuracy",
        "share",
        "Trained tokens that the model found likeliest, of equally likely ones the one of the lowest id.",
    ),
    MetricField(
        "rewards_chosen",
        "Reward of chosen replies",
        "",
        "The mean reward of the better replies. dpo, kto: β·log π/π_ref of the reply. reward: the model's output.",
        where=_PAIRED,
    ),
    MetricField("rewards_rejected", "Reward of rejected replies", "", "Of the others.", "reward.task=pairs"),
    MetricField("rewards_margin", "Reward margin", "", "Chosen − rejected.", "reward.task=pairs"),
    MetricField(
        "accuracy",
        "Accuracy",
        "share",
        "Pairs whose chosen reply has the larger reward; under reward.task=classes texts whose class is right.",
        where="under reward: reward.task=pairs or classes",
    ),
    MetricField("pair_weight", "Weight of a pair", "", "WPO's weight, the mean.", where="dpo.use_weighting"),
    MetricField("logps_chosen", "log p of wanted replies", "nats", "The mean of log π of a wanted reply."),
    MetricField("logps_rejected", "log p of other replies", "nats", "The same of the others."),
    MetricField(
        "kl",
        "KL to the reference",
        "nats",
        "The divergence from the reference. grpo: the mean over tokens of its estimate k3. kto: z, with which a "
        "reply's reward is compared.",
        where="grpo.beta above 0, or kto.loss=kto",
    ),
    MetricField(
        "reward_mean",
        "Reward",
        "",
        "grpo: the mean reward of the rollout that the step trains on. reward: the model's mean output.",
        where="under reward: reward.task=pairs or numbers",
    ),
    MetricField(
        "reward_std",
        "Reward spread in a group",
        "",
        "The standard deviation (n − 1) of the rewards of a group, the mean over the rollout's groups.",
    ),
    MetricField(
        "reward/NAME",
        "Rewards by function",
        "",
        "The mean of one reward, before its weight.",
        where="two rewards or more",
    ),
    MetricField(
        "frac_zero_std",
        "Groups that are all alike",
        "share",
        "Groups of the rollout whose rewards are all equal: their advantages are 0, and they teach nothing.",
    ),
    MetricField(
        "completion_len",
        "Completion length",
        "tokens",
        "Tokens that the model drew for a completion, the mean over the rollout; in an environment in all its turns.",
        where="under distill: distill.samples=student",
    ),
    MetricField(
        "truncated_frac",
        "Completions cut off",
        "share",
        "Completions that max_new_tokens or max_length ended.",
        where="under distill: distill.samples=student",
    ),
    MetricField("lost_frac", "Episodes lost", "share", "Episodes whose environment failed.", "an environment"),
    MetricField("environment/NAME", "Environment", "", "The mean of what the environment measured.", "an environment"),
    MetricField("tool_calls", "Tool calls", "", "Calls of tools for each completion.", "grpo.tools"),
    MetricField("tool_failures", "Failed tool calls", "", "Those of them that failed.", "grpo.tools"),
    MetricField("entropy", "Entropy", "nats", "Of the distribution that tokens were drawn from, the mean."),
    MetricField(
        "mismatch_kl",
        "Engine against trainer, KL",
        "nats",
        "k3 of KL(π_sampler ‖ π_old): how far the engine's probabilities are from the trainer's.",
        where="the sampler's probabilities",
    ),
    MetricField("approx_kl", "KL to the old policy", "nats", "k3 of KL(π_old ‖ π)."),
    MetricField("ratio", "Ratio", "", "π ÷ π_old, as the loss has it."),
    MetricField("clip_frac", "Clipped tokens", "share", "`clip_low` + `clip_high`."),
    MetricField("clip_low", "Clipped from below", "share", "Tokens without gradient since π fell too far."),
    MetricField("clip_high", "Clipped from above", "share", "Tokens without gradient since π rose too far."),
    MetricField(
        "correction",
        "Weight for the mismatch",
        "",
        "The mean weight that corrects for the sampler's probabilities.",
        where="grpo.kwargs.sampling_correction",
    ),
    MetricField(
        "oob_frac",
        "Weights out of bounds",
        "share",
        "Tokens whose weight the bounds cut, or made 0.",
        where="grpo.kwargs.sampling_correction",
    ),
    MetricField(
        "off_policy_frac",
        "Tokens left out as off-policy",
        "share",
        "Tokens of sequences that have drifted off.",
        where="grpo.kwargs.off_policy_mask_threshold",
    ),
    MetricField(
        "rollout_time",
        "Time of a rollout",
        "s",
        "Drawing and judging the rollout; in its first step alone.",
        where="under distill: distill.samples=student",
    ),
    MetricField("train_time", "Time of an update", "s", "The part of `step_time` that trained."),
    MetricField(
        "forward_kl",
        "KL(teacher ‖ student)",
        "nats",
        "The mean over the trained tokens.",
        where="no top_k, or zero_outside_topk=false",
    ),
    MetricField(
        "reverse_kl",
        "KL(student ‖ teacher)",
        "nats",
        "The same in the other direction.",
        where="no top_k, or zero_outside_topk=false",
    ),
    MetricField(
        "topk_mass",
        "Student's share of the top k",
        "share",
        "The probability that the student gives to the teacher's top k.",
        where="distill.top_k",
    ),
    MetricField(
        "moe_load",
        "Load of the fullest expert",
        "",
        "Tokens of the fullest expert ÷ the mean of all experts, the mean over the layers. 1: all have alike.",
        where="a mixture of experts",
    ),
    MetricField(
        "moe_idle", "Experts without a token", "share", "The mean over the layers.", where="a mixture of experts"
    ),
    MetricField(
        "router_replay_differs",
        "Replayed choices that differ",
        "share",
        "Choices of experts that the trainer's router would have made otherwise.",
        where="grpo.router_replay",
    ),
)
FIELDS = (*_ROW, *_METHODS)
ROW_ORDER = tuple(field.name for field in _ROW)
"""The order in which a row is written; a method's own fields follow in the order they came."""

# Of a set of `eval`: after `eval_`, or `eval_<set>_`.
EVALUATION = (
    MetricField("reward_mean", "Reward", "", "The mean reward of the answers."),
    MetricField("reward_stderr", "Its standard error", "", "Over the prompts."),
    MetricField("reward/NAME", "Rewards by function", "", "The mean of one reward.", where="two rewards or more"),
    MetricField("pass@K", "pass@K", "share", "Prompts of which one of K answers passes.", where="rewards of 0 to 1"),
    MetricField("completion_len", "Completion length", "tokens", "The mean over the answers."),
    MetricField("truncated_frac", "Answers cut off", "share", "Answers that max_new_tokens ended."),
    MetricField("unknown", "Answers without a reward", "answers", "How many rewards are not known."),
    MetricField("time", "Time", "s", "Of the evaluation."),
)

_BY_NAME: Mapping[str, MetricField] = MappingProxyType({field.name: field for field in FIELDS})


def field_of(name: str) -> MetricField | None:
    """The table's entry of a field of a row, of a training or a validation row; None for one that it has not."""
    entry = _BY_NAME.get(name) or _BY_NAME.get(name.removeprefix("val_"))
    family = name.partition("/")[0] + "/NAME"
    return entry or (_BY_NAME.get(family) if "/" in name else None)
