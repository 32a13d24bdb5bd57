"""The sections of dtrain's own methods: their keys with types, defaults, ranges and documentation. Imports no torch.

A recipe is typed with these classes before torch is imported, so a wrong key is reported at once, and `dtrain help` and
the completion of the shell list all keys. A method of one's own has its section in its own file. The keys that methods
with rollouts share are in dtrain/recipe/rollouts.py.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dtrain.base.ranges import DIVISOR, FRACTION, UP_TO_1, WEIGHT, at_least, is_number
from dtrain.recipe.rollouts import RolloutSection, Sampling


@dataclass
class Sft:
    """`sft`: read by method sft."""

    loss: str = "nll"
    """nll: −log p of each trained token. dft: that times p, as a constant (arXiv:2508.05629). Or the import path of a
    loss of your own (docs/plugins.md)."""
    label_smoothing: Annotated[float, (lambda v: is_number(v) and 0 <= v < 1, "from 0 to below 1")] = 0.0
    """With nll: this share of a token's loss is the mean of −log p over the whole vocabulary, as in transformers. The
    validation loss has it too."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More options of the loss."""


@dataclass
class Dpo:
    """`dpo`: read by method dpo."""

    loss: str | list[str] = "sigmoid"
    """A loss's name (dtrain/losses/preference/options.py lists them), the import path of a loss of your own
    (docs/plugins.md), or a list of these with `loss_weights`."""
    beta: float = 0.1
    """Strength of the pull towards the reference."""
    label_smoothing: float = 0.0
    """The share of preferences that are assumed to be wrong."""
    reference: str | None = "start"
    """start: the weights that training starts from; none (also null); base: the model without its adapter (`lora`),
    even where that was trained before; or the path of a model of the same shapes."""
    sft_weight: Annotated[float, WEIGHT] = 0.0
    """Weight of the chosen completions' own negative log-likelihood per token in the loss."""
    loss_weights: list[float] | None = None
    """Weights of the names in `loss`, in their order. null: 1 each."""
    f_divergence: str = "reverse_kl"
    """The divergence from the reference: reverse_kl | forward_kl | js_divergence | alpha_divergence."""
    ld_alpha: Annotated[float | None, (FRACTION[0], "from 0 to 1, or null for no weights")] = None
    """LD-DPO's weight of the tokens beyond the shorter completion. null: off."""
    use_weighting: bool = False
    """WPO: a pair's loss is weighted by how likely the policy finds its completions (arXiv:2406.11827)."""
    precompute: bool = False
    """The reference scores all data once, before the first step, into the data's cache. After that it takes no memory
    and no time. This pays where the run sees each pair more than once. These scores come from other batches, so they
    are rounded otherwise: `accuracy` is a toss-up in the first step, where policy and reference are the same."""
    sync_every: Annotated[int | None, at_least(1, ", or null for a reference that stands still")] = None
    """The reference moves towards the policy every N steps. null: it does not change."""
    sync_mix: Annotated[float, UP_TO_1] = 0.6
    """Step of its move: reference = sync_mix · policy + (1 − sync_mix) · reference."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More options of the losses, such as `{simpo_gamma: 0.5}` for simpo."""

    @property
    def losses(self) -> list[str]:
        """The names in `loss`, as a list."""
        return [self.loss] if isinstance(self.loss, str) else list(self.loss)


@dataclass
class Kto:
    """`kto`: read by method kto."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: a reply's reward is compared with the divergence from the reference. apo_zero_unpaired: with zero."""
    beta: Annotated[float, DIVISOR] = 0.1
    """Strength of the pull towards the reference."""
    desirable_weight: Annotated[float, WEIGHT] = 1.0
    """Weight of the replies that are wanted. Where a file has few of them, more than 1 makes up for it."""
    undesirable_weight: Annotated[float, WEIGHT] = 1.0
    """Weight of the others."""
    reference: str = "start"
    """As `dpo.reference`: start, base, or the path of a model of the same shapes."""
    sync_every: Annotated[int | None, at_least(1, ", or null for a reference that stands still")] = None
    """The reference moves towards the policy every N steps. null: it does not change."""
    sync_mix: Annotated[float, UP_TO_1] = 0.6
    """Step of its move: reference = sync_mix · policy + (1 − sync_mix) · reference."""


@dataclass
class Grpo(RolloutSection):
    """`grpo`: read by method grpo. A rollout is prompts_per_step × group_size completions. An optimizer step trains on
    train.global_batch of them, and each pass over a rollout uses every completion once."""

    updates_per_rollout: Annotated[int, at_least(1)] = 1
    """Passes over a rollout."""
    loss: str = "dapo"
    """Name of the policy loss (dtrain/losses/policy/options.py lists them), or the import path of a loss of your own
    (docs/plugins.md)."""
    beta: float = 0.0
    """Weight of the divergence from the reference. 0: there is no reference."""
    clip: list[float] = field(default_factory=lambda: [0.2, 0.2])
    """How far the ratio may go below and above 1 before it is clipped."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More options of the loss, such as `{delta: 2.0}`."""
    reference: str = "start"
    """The model that `beta` pulls towards. start: the weights at the start of training. base: the model without its
    adapter (`lora`), even if the adapter was trained before. Or the path of a model of the same shapes."""
    sync_every: Annotated[int | None, at_least(1, ", or null for a reference that stands still")] = None
    """Move the reference towards the policy every N steps. null: never."""
    sync_mix: Annotated[float, UP_TO_1] = 0.6
    """Size of a move: reference = sync_mix · policy + (1 − sync_mix) · reference."""
    dynamic_batch: bool = False
    """true, as `train.dynamic_batch`: a micro-batch has completions of similar length, as many as fit with padding into
    micro_batch × max_length tokens. false: it has micro_batch completions."""
    max_mismatch: Annotated[float | None, (lambda v: v > 0, "more than 0, or null for no check")] = 0.1
    """The run ends at its first rollout if the log-probabilities of the sampled tokens by trainer and engine differ by
    more than this (mean absolute difference). null: never."""


@dataclass
class Distill:
    """`distill`: read by method distill."""

    teacher: str | None = None
    """Required. The directory or hub id of a model with the student's vocabulary, of any size. It is frozen, and
    sharded over the same mesh."""
    top_k: Annotated[
        int | None, (lambda v: 1 <= v < 2**31, "at least 1, below 2**31, or null for the whole vocabulary")
    ] = None
    """Compare only the teacher's k tokens with the highest probabilities. null: all tokens, exactly."""
    kl: Literal["forward", "reverse", "mixed", "jsd"] = "forward"
    """forward: KL(teacher || student), reverse: KL(student || teacher), mixed: both, jsd: the generalized
    Jensen-Shannon divergence (arXiv:2306.13649)."""
    temperature: Annotated[float, DIVISOR] = 1.0
    """Divides the logits of both; the loss is multiplied by its square."""
    mixed_kl_weight: Annotated[float, FRACTION] = 0.5
    """The forward KL's share where `kl` is mixed; the reverse KL has the rest."""
    jsd_beta: Annotated[float, FRACTION] = 0.5
    """The teacher's share of the mixture where `kl` is jsd. 0: the forward KL; 1: the reverse KL."""
    zero_outside_topk: bool = True
    """With `top_k`. true: the teacher is zero outside its top k, and what the student gives to other tokens counts
    against it. false: the student too is normalised over the teacher's top k, and free elsewhere."""
    samples: Literal["data", "student"] = "data"
    """Whose completions are trained on. student: the data's rows are prompts, as under method grpo. The student
    samples completions during training, and learns from these."""
    student_share: Annotated[float, (UP_TO_1[0], "more than 0, up to 1; distill.samples=data has none")] = 1.0
    """The share of a step's samples that the student generates. The rest are the data's."""
    prompts_per_step: Annotated[int | None, at_least(1, ", or null for those of a step")] = None
    """Prompts of a rollout, a multiple of train.global_batch. null: as many, so that the weights of
    each step sample its own completions."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the student's completions."""


@dataclass
class RewardKeys:
    """`reward`: read by method reward."""

    task: Literal["pairs", "classes", "numbers"] = "pairs"
    """What the rows are. pairs: chosen and rejected answers, with a `margin` where they have one; classes, numbers:
    texts or messages with a `label`, a whole number from 0 or any number."""
    num_labels: Annotated[int | None, (lambda v: 1 <= v <= 2**20, "at least 1, up to 2**20, or null")] = None
    """How many classes there are. null: one output, a reward."""
    center_rewards_coefficient: Annotated[float | None, (WEIGHT[0], f"{WEIGHT[1]}, or null for none")] = None
    """The weight of (r_chosen + r_rejected)², which keeps rewards near zero (arXiv:2312.09244). null: none."""
