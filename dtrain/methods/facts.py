"""What is known of a method before anything is built: what the recipe's check, the preview, a plan and the start of a
run must know of it. A class per method; nobody outside this package asks for a method's name. No torch.
"""

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType

from dtrain.config import words
from dtrain.config.schema import Distill, Recipe, Sampling
from dtrain.config.world import automatic_batch
from dtrain.data.judged import Judged
from dtrain.data.prompts import PromptOptions
from dtrain.losses import token_options
from dtrain.losses.preference_options import LOSSES
from dtrain.methods import dpo_section, grpo_section
from dtrain.ranges import NUMBER, is_number, shown
from dtrain.rollout.tools import tool_schemas

HEAD = "score"
"""The module of a classifier that gives its outputs."""
REWARD_MODEL = "grpo.reward_model.path"
"""The key of a model with another head than the vocabulary's."""


class Facts:
    """Of a method without a section, a second model or rows of its own.

    kind: what a sample of the data is: examples, pairs, labelled (replies that are wanted or not) or prompts. ranges:
    of its section's keys, as `dtrain.check.RANGES`. best: what of `config.schema.BEST` it measures. adapter_rates: the
    learning rate below which a fresh adapter hardly learns, and a usual one. curves: the fields of metrics.jsonl that
    tell what was learned, and their names for a reader. more_steps: what of its section makes a pass more steps.
    """

    kind = "examples"
    ranges: tuple = ()
    best: tuple[str, ...] = ("val_loss", "loss")
    more_steps: str | None = None
    adapter_rates = (5e-5, "2e-4")
    curves: Mapping[str, str] = MappingProxyType({"loss": "loss", "val_loss": "validation loss"})

    def missing(self, recipe: Recipe) -> list[str]:
        """What the section must say and does not, one line each."""
        return []

    def problems(self, recipe: Recipe) -> list[str]:
        """What is wrong in the section and around it, beside its ranges, one line each."""
        return []

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        """Why rows of a format (`data.*.format`) are not for this method; None: they are."""
        if format == "question":
            return "a question has no answer to train on; method=grpo draws its own"
        return f"method={recipe.method} does not train on pairs; set method=dpo" if format == "preference" else None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        """Key and path of the models that are needed beside the one that is trained."""
        return []

    def code(self, recipe: Recipe) -> list[tuple[str, str | None, str]]:
        """(key, name or import path, what it is) of the code that the section may name."""
        return []

    def prompts(self, recipe: Recipe) -> PromptOptions | None:
        """How the data's prompts are made, where it is prompts. Raises UserError for tools whose source does not
        tell."""
        return None

    def labels(self, recipe: Recipe) -> int | None:
        """Outputs of the head that the model has in place of the vocabulary's; None: it has that one."""
        return None

    def judged(self, recipe: Recipe) -> Judged | None:
        """The number of each of the data's rows that the loss reads."""
        return None

    def rows_of_a_sample(self, recipe: Recipe) -> int:
        """Rows of a batch that one of `train.global_batch` is: a pair that is not packed is two."""
        return 2 if self.kind == "pairs" and not recipe.data.packing else 1

    def is_dynamic(self, recipe: Recipe) -> bool:
        """Whether a number of tokens bounds a micro-batch, not one of rows."""
        return recipe.train.dynamic_batch

    def automatic_batch(self, recipe: Recipe, rows: int) -> int:
        """What `train.global_batch=auto` is, where the first pass over the data has so many rows."""
        return automatic_batch(rows)

    def row_length(self, recipe: Recipe) -> int:
        """Tokens of a full row: a packed row of pairs holds two sequences' worth."""
        return recipe.data.max_length * (2 if self.kind == "pairs" and recipe.data.packing else 1)

    def longest_row(self, recipe: Recipe) -> int:
        """Tokens of the longest row that a forward may be given."""
        return self.row_length(recipe)

    def needs_reference(self, recipe: Recipe) -> bool:
        """Whether the loss compares with a reference."""
        return False

    def holds_reference(self, recipe: Recipe) -> bool:
        """Whether the reference's weights stay on the devices beside the policy's."""
        return self.needs_reference(recipe)

    def teacher(self, recipe: Recipe) -> str | None:
        """The path of a teacher that stays on the devices beside the policy."""
        return None

    def reward_model(self, recipe: Recipe) -> str | None:
        """The path of a reward model that stays on the devices beside the policy."""
        return None

    def sends_weights(self, recipe: Recipe) -> bool:
        """Whether updated weights leave the run over a process group that reaches beyond this host."""
        return False


class SftFacts(Facts):
    ranges = (("sft.label_smoothing", lambda v: is_number(v) and 0 <= v < 1, "from 0 to below 1"),)
    curves = MappingProxyType({**Facts.curves, "token_accuracy": "token accuracy"})

    def problems(self, recipe: Recipe) -> list[str]:
        """Of `sft.loss`, its options and label smoothing."""
        section, losses = recipe.sft, token_options.LOSSES
        if section.loss not in losses:
            return [f"sft.loss={section.loss} is no loss of tokens{words.hint('sft.loss', section.loss, losses)}"]
        named, found = losses[section.loss], []
        for key, value in section.kwargs.items():
            allowed, sentence = token_options.RANGES.get(key, NUMBER)
            if key not in named.options:
                found.append(f"sft.kwargs.{key} is not read by {section.loss}; leave it out")
            elif not allowed(value):
                found.append(f"sft.kwargs.{key}={shown(value)} must be {sentence}")
        if section.label_smoothing and not named.smooths:
            smoothing = [name for name, one in losses.items() if one.smooths]
            found.append(
                f"sft.label_smoothing={section.label_smoothing} has no meaning for sft.loss={section.loss}: leave it "
                f"out, or set sft.loss={' or '.join(smoothing)}"
            )
        return found


class DpoFacts(Facts):
    kind = "pairs"
    ranges = dpo_section.SECTION_RANGES
    adapter_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 1e-6
    curves = MappingProxyType({**Facts.curves, "accuracy": "accuracy"})

    def problems(self, recipe: Recipe) -> list[str]:
        return dpo_section.problems(recipe)

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format == "question":
            return super().refuses(recipe, format)
        if format not in ("auto", "preference", "tokenized"):
            return "method=dpo trains on pairs; set it to preference, or method=sft"
        return None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        return dpo_section.other_reference("dpo", recipe.dpo.reference)

    def needs_reference(self, recipe: Recipe) -> bool:
        """Not where every loss of the list goes without."""
        section = recipe.dpo
        names = [section.loss] if isinstance(section.loss, str) else section.loss
        reads = any(LOSSES[name].needs_reference for name in names if name in LOSSES)
        return reads and section.reference not in (None, "none")

    def holds_reference(self, recipe: Recipe) -> bool:
        return self.needs_reference(recipe) and not recipe.dpo.precompute


class KtoFacts(Facts):
    kind = "labelled"
    ranges = (
        ("kto.beta", lambda v: is_number(v) and v > 0, "a finite number, more than 0, 1e-10 to 1e10"),
        ("kto.desirable_weight", lambda v: is_number(v) and v >= 0, "a finite number, at least 0, up to 1e10"),
        ("kto.undesirable_weight", lambda v: is_number(v) and v >= 0, "a finite number, at least 0, up to 1e10"),
        ("kto.sync_every", lambda v: v >= 1, "at least 1, or null for a reference that stands still"),
        ("kto.sync_mix", lambda v: 0 < v <= 1, "more than 0, up to 1"),
    )
    adapter_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 5e-6
    curves = MappingProxyType({**Facts.curves, "rewards_margin": "margin of rewards"})

    def problems(self, recipe: Recipe) -> list[str]:
        section, found = recipe.kto, dpo_section.base_problems(recipe, "kto", recipe.kto.reference)
        if section.reference in (None, "none"):
            found.append("kto.reference=none: a reply's reward is measured against a reference; set it to start")
        if section.desirable_weight == section.undesirable_weight == 0:
            found.append("kto.desirable_weight and kto.undesirable_weight are both 0: nothing would be learned")
        if recipe.data.loss_on != "assistant":
            found.append(dpo_section.no_loss_on(recipe))
        return found

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("text", "question"):
            return "method=kto trains on replies with a label; give it prompt, completion and label"
        return None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        return dpo_section.other_reference("kto", recipe.kto.reference)

    def needs_reference(self, recipe: Recipe) -> bool:
        return True


class GrpoFacts(Facts):
    kind = "prompts"
    ranges = grpo_section.SECTION_RANGES
    adapter_rates = (5e-6, "1e-5")  # full tuning takes 1e-6
    curves = MappingProxyType({"reward_mean": "reward", "val_reward_mean": "validation reward"})
    best = ("loss", "val_reward_mean")
    more_steps = "a smaller grpo.prompts_per_step"

    def problems(self, recipe: Recipe) -> list[str]:
        return grpo_section.problems(recipe)

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("preference", "text"):
            return "method=grpo draws its own answers to prompts; give it messages, question or prompt_completion"
        return None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        is_another = self.needs_reference(recipe) and recipe.grpo.reference not in ("start", "base")
        rates = self.reward_model(recipe)
        found = [("grpo.reference", recipe.grpo.reference)] if is_another else []
        return found + ([(REWARD_MODEL, rates)] if rates else [])

    def reward_model(self, recipe: Recipe) -> str | None:
        return recipe.grpo.reward_model.path

    def code(self, recipe: Recipe) -> list[tuple[str, str | None, str]]:
        named = [(f"grpo.rewards[{i}].fn", one.fn, "reward") for i, one in enumerate(recipe.grpo.rewards)]
        for i, one in enumerate(recipe.grpo.tools):
            named += [(f"grpo.tools[{i}].fn", one.fn, "tool"), (f"grpo.tools[{i}].mcp", one.mcp, "server of tools")]
        named.append(("grpo.verifiers.name", recipe.grpo.verifiers.name, "environment of verifiers"))
        return [*named, ("grpo.environment", recipe.grpo.environment, "environment")]

    def prompts(self, recipe: Recipe) -> PromptOptions:
        section = recipe.grpo
        room = recipe.data.max_length, section.sampling.max_new_tokens
        tools = [schema for _, schema in tool_schemas(section.tools)] if section.tools else []
        return PromptOptions.within(
            *room, section.system_prompt, tools=tools, answers=section.verifiers.name is not None
        )

    def longest_row(self, recipe: Recipe) -> int:
        """Packed, a micro-batch is one row."""
        return recipe.data.max_length * (recipe.train.micro_batch if recipe.data.packing else 1)

    def is_dynamic(self, recipe: Recipe) -> bool:
        return recipe.train.dynamic_batch or recipe.grpo.dynamic_batch

    def automatic_batch(self, recipe: Recipe, rows: int) -> int:
        return recipe.grpo.prompts_per_step * recipe.grpo.group_size

    def needs_reference(self, recipe: Recipe) -> bool:
        return bool(recipe.grpo.beta)

    def sends_weights(self, recipe: Recipe) -> bool:
        return recipe.grpo.server.weights == "broadcast"


class DistillFacts(Facts):
    ranges = (
        ("distill.top_k", lambda v: 1 <= v < 2**31, "at least 1, below 2**31, or null for the whole vocabulary"),
        ("distill.temperature", lambda v: is_number(v) and v > 0, "a finite number, more than 0, 1e-10 to 1e10"),
        ("distill.mixed_kl_weight", lambda v: 0 <= v <= 1, "from 0 to 1"),
        ("distill.jsd_beta", lambda v: 0 <= v <= 1, "from 0 to 1"),
        ("distill.student_share", lambda v: 0 < v <= 1, "more than 0, up to 1; distill.samples=data has none"),
        ("distill.prompts_per_step", lambda v: v >= 1, "at least 1, or null for those of a step"),
        *grpo_section.sampling_ranges("distill"),
    )

    def missing(self, recipe: Recipe) -> list[str]:
        if recipe.distill.teacher:
            return []
        return ["distill.teacher is missing: set it to the directory of a model with the student's vocabulary"]

    def problems(self, recipe: Recipe) -> list[str]:
        """Keys that are read where the student draws."""
        section, default = recipe.distill, Distill()
        named = [key for key in ("student_share", "prompts_per_step") if getattr(section, key) != getattr(default, key)]
        drawn = (f"sampling.{one.name}" for one in fields(Sampling))
        named += [key for key in drawn if attrgetter(key)(section) != attrgetter(key)(default)]
        return [
            f"distill.{key} says how the student draws, and distill.samples=data trains on the data's own completions: "
            "leave it out, or set distill.samples=student"
            for key in named
        ] + self.unread(section)

    def unread(self, section: Distill) -> list[str]:
        """Keys of the divergence that the recipe's divergence does not read."""
        readers = {
            "jsd_beta": (section.kl == "jsd", "distill.kl=jsd"),
            "mixed_kl_weight": (section.kl == "mixed", "distill.kl=mixed"),
            "zero_outside_topk": (section.top_k is not None, "distill.top_k"),
        }
        return [
            f"distill.{key}={shown(getattr(section, key))} is read with {reader} alone: leave it out, or set that"
            for key, (is_read, reader) in readers.items()
            if not is_read and getattr(section, key) != getattr(Distill(), key)
        ]

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        return [("distill.teacher", recipe.distill.teacher)] if recipe.distill.teacher else []

    def teacher(self, recipe: Recipe) -> str | None:
        return recipe.distill.teacher


class OnPolicyFacts(DistillFacts):
    """Of distillation where the student draws its samples."""

    kind = "prompts"

    def problems(self, recipe: Recipe) -> list[str]:
        section, found = recipe.distill, self.unread(recipe.distill)
        rollout, batch, longest = section.prompts_per_step, recipe.train.global_batch, recipe.data.max_length
        if rollout is not None and isinstance(batch, int) and rollout >= 1 and batch >= 1 and rollout % batch:
            found.append(
                f"train.global_batch={batch} does not divide a rollout of distill.prompts_per_step={rollout} prompts: "
                f"set distill.prompts_per_step={-(-rollout // batch) * batch}, or leave it out"
            )
        if longest >= 2 and section.sampling.max_new_tokens >= longest:
            found.append(grpo_section.no_room("distill", section.sampling.max_new_tokens, longest))
        if section.student_share == 1 and recipe.data.loss_on != "assistant":
            found.append(
                f"data.loss_on={recipe.data.loss_on} plays no part where the student draws every sample: what it draws "
                "is trained; leave it out, or lower distill.student_share"
            )
        return found

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("preference", "text"):
            return (
                "distill.samples=student draws its own answers to prompts; give it messages, question or "
                "prompt_completion, or set distill.samples=data"
            )
        if format == "question" and recipe.distill.student_share < 1:
            return "a question has no answer for the data's part of the samples: set distill.student_share=1"
        return None

    def prompts(self, recipe: Recipe) -> PromptOptions:
        section = recipe.distill
        loss_on = recipe.data.loss_on if section.student_share < 1 else None
        return PromptOptions.within(recipe.data.max_length, section.sampling.max_new_tokens, None, loss_on)

    def longest_row(self, recipe: Recipe) -> int:
        """Packed, a micro-batch is one row."""
        return recipe.data.max_length * (recipe.train.micro_batch if recipe.data.packing else 1)

    def automatic_batch(self, recipe: Recipe, rows: int) -> int:
        return recipe.distill.prompts_per_step or super().automatic_batch(recipe, rows)


class RewardFacts(Facts):
    """Of a head that rates or classifies texts: of labelled ones."""

    ranges = (
        (
            "reward.center_rewards_coefficient",
            lambda v: is_number(v) and v >= 0,
            "a finite number, at least 0, up to 1e10, or null for none",
        ),
        ("reward.num_labels", lambda v: 1 <= v <= 2**20, "at least 1, up to 2**20, or null"),
    )
    curves = MappingProxyType({**Facts.curves, "accuracy": "accuracy"})

    def missing(self, recipe: Recipe) -> list[str]:
        if recipe.reward.task != "classes" or recipe.reward.num_labels is not None:
            return []
        return ["reward.num_labels is missing: set it to the number of classes, which are 0, 1, .. in the rows' label"]

    def problems(self, recipe: Recipe) -> list[str]:
        section, found = recipe.reward, []
        if section.task == "classes" and section.num_labels == 1:
            found.append("reward.num_labels=1: there is nothing to tell from one class; set it to 2 or more")
        if section.task != "classes" and section.num_labels not in (None, 1):
            found.append(
                f"reward.num_labels={section.num_labels}: reward.task={section.task} has one output; leave it out, or "
                "set reward.task=classes"
            )
        if section.task != "pairs" and section.center_rewards_coefficient is not None:
            found.append("reward.center_rewards_coefficient is read with reward.task=pairs alone: leave it out")
        if recipe.lora is not None and recipe.lora.path is None and HEAD not in recipe.lora.modules_to_save:
            named = ", ".join([*recipe.lora.modules_to_save, HEAD])
            found.append(
                f"lora: the head of rewards is trained whole beside the adapter: set lora.modules_to_save=[{named}]"
            )
        if recipe.eval is not None:
            found.append("eval draws answers, and a model with a head of rewards gives none: leave it out")
        if recipe.data.loss_on != "assistant":
            found.append(
                f"data.loss_on={recipe.data.loss_on} plays no part under method=reward, which reads a text at its last "
                "token: leave it out"
            )
        return found

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("preference", "question"):
            return f"reward.task={recipe.reward.task} reads texts with a label; set reward.task=pairs for preferences"
        return None

    def labels(self, recipe: Recipe) -> int | None:
        return recipe.reward.num_labels or 1

    def judged(self, recipe: Recipe) -> Judged | None:
        return Judged("label", recipe.reward.num_labels if recipe.reward.task == "classes" else None)


class RewardPairFacts(RewardFacts):
    """Of pairs of a better and a worse answer."""

    kind = "pairs"

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format not in ("auto", "preference", "tokenized"):
            return "reward.task=pairs reads preferences; set it to preference, or reward.task=classes or numbers"
        return None

    def judged(self, recipe: Recipe) -> Judged | None:
        return Judged("margin")


ON_POLICY = OnPolicyFacts()
REWARD_PAIRS = RewardPairFacts()
FACTS: Mapping[str, Facts] = MappingProxyType(
    {
        "sft": SftFacts(),
        "dpo": DpoFacts(),
        "kto": KtoFacts(),
        "grpo": GrpoFacts(),
        "distill": DistillFacts(),
        "reward": RewardFacts(),
    }
)


def facts_of(recipe: Recipe) -> Facts:
    if recipe.method == "reward" and recipe.reward.task == "pairs":
        return REWARD_PAIRS
    is_on_policy = recipe.method == "distill" and recipe.distill.samples == "student"
    return ON_POLICY if is_on_policy else FACTS[recipe.method]
