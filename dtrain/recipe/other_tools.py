"""Translation of another tool's file to a recipe: its keys under our names, that tool's defaults where they differ.

`other_tools.yaml` holds the tools, `key_aliases` the names of keys and values that all tools share. Here is what takes
more than one key: batch sizes, betas, warm-up, clips, adapters, lists of datasets and rewards. What has no place in a
recipe is named in a comment of it, never left out in silence.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from dtrain.recipe import key_aliases
from dtrain.recipe.saved import flat, merge
from dtrain.recipe.schema import OPTIMIZERS, SCHEDULES, Lora, Recipe

Fit = Callable[[str, Any], tuple[Any, list[str]]]
"""(key, value) → the value in the key's own type, and what is wrong with it."""

_LISTED = ("data.train.path", "data.val.path", "lora.target", "lora.modules_to_save")  # "a,b" is two entries
_NAMES = {"optimizer.name": OPTIMIZERS, "scheduler.name": SCHEDULES}
_FILE_READERS = ("json", "csv", "parquet", "arrow", "text")  # names for load_dataset; the files are in data_files
_LORA_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass
class Tool:
    """An entry of `other_tools.yaml`, whose head says what the fields are."""

    name: str
    version: str
    marks: list[str]
    like: str | None = None
    keys: dict[str, str] = field(default_factory=dict)
    nulls: list[str] = field(default_factory=list)
    methods: dict[str, list[str]] = field(default_factory=dict)
    adapter: list[str] | None = None
    accumulation: int | None = None
    alpha_by_rank: float | None = None
    warmup: str = "down"
    defaults: dict[str, dict] = field(default_factory=dict)
    components: dict[str, dict] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)


@cache
def tools() -> dict[str, Tool]:
    """Return the tools by name."""
    entries: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")))
    made: dict[str, Tool] = {}
    for entry in entries:
        base = asdict(made[entry["like"]]) if "like" in entry else {}
        made[entry["name"]] = Tool(**merge(base, entry))
    return made


def tool_of(theirs: Mapping[str, Any]) -> Tool | None:
    """Return the tool that a file with these dotted keys is written for, where a key shows it: the table's last."""
    known = tools().values()
    marked = (tool for tool in known if any(re.fullmatch(mark, key) for mark in tool.marks for key in theirs))
    return next(reversed([*marked]), None)


class Translation:
    """A file of another tool, key by key.

    values: our key → value. origins: our key → what its value comes from, where the file does not say it. notes: what
    has no place in a recipe. lost: their keys that are not carried over.
    """

    def __init__(self, theirs: Mapping[str, Any], method: str | None, usual: Recipe, known: list[str], fit: Fit):
        self.tool, self._usual = tool_of(theirs), usual  # our defaults
        self.theirs, self.known, self._fit = dict(theirs), known, fit
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.lost: list[str] = []
        self._refused: set[str] = set()  # our keys whose value did not fit: their tool's default is not what is meant
        self.method = method or self._method()
        methods_first = sorted(self.theirs, key=lambda key: (key_aliases.moved(key, "") or ("",))[0] != "method")
        for key in methods_first:
            self._carry(key, self.theirs[key])
            self.method = str(self.values.get("method", self.method))
        if self.tool:
            self._join(self.tool)

    def answer(self) -> str:
        """Return the message to the file's user: which tool it is for, and `text`."""
        if self.tool is None:
            head = "it is written for another tool, whose defaults are not known here; what has a key here, to copy"
        else:
            version = f"{self.tool.name} {self.tool.version}"
            head = f"it is written for {self.tool.name}; as a recipe, to copy, with the defaults of {version}"
        return f"{head} (train.global_batch is that of one GPU):\n{self.text()}"

    def text(self) -> str:
        """Return the recipe as YAML, with a comment where a value is the tool's default, and the notes below."""
        order = {key: index for index, key in enumerate(self.known)}
        place = {key: next((order[own] for own in order if f"{own}.".startswith(f"{key}.")), -1) for key in self.values}
        lines = _lines({key: self.values[key] for key in sorted(self.values, key=lambda key: place[key])}, self.origins)
        lines += [f"# {note}" for note in self.notes]
        return "\n".join(lines + ([f"# not carried over: {', '.join(self.lost)}"] if self.lost else []))

    def _method(self) -> str:
        """Return the method whose keys the file has; our default where it has none of another."""
        names = {name for key in self.theirs for name in (key, key.rpartition(".")[2], f"{key.partition('.')[0]}.*")}
        methods = self.tool.methods if self.tool else {}
        return next((method for method, marks in methods.items() if names & {*marks}), self._usual.method)

    def _carry(self, key: str, value: Any) -> None:
        """Carry one of their keys over to ours, or note that it is lost."""
        leaf, ours = key.rpartition(".")[2], self._key(key)
        if ours == "" or value == -1 or (leaf == "top_k" and value == 0):
            return
        is_off = value == 0 and leaf == "max_grad_norm"  # also where null is the default
        if self.tool and (is_off or (leaf in self.tool.nulls and not value)):
            self._put(key, ours or (key_aliases.moved(key, 1.0) or ("", 0))[0], None)
            return
        if value is None or (value == "auto" and ours is None):
            return
        if isinstance(value, str) and "${" in value:
            self.lost.append(key)
            return
        if ours and ours.startswith(f"{self.method}.") and ".kwargs" not in ours and ours not in self.known:
            self.lost.append(key)  # of another method than the file's
            return
        if ours is None:
            ours = key if key in self.known else None
        if ours is None and (moved := key_aliases.moved(key, value)):
            ours, value = moved
        if ours is None:
            same = [own for own in self.known if own.rpartition(".")[2] == leaf]
            ours = same[0] if len(same) == 1 else None
        if ours is None:
            if (
                leaf not in key_aliases.NEEDLESS
                and value is not False
                and not (key_aliases.answer(key) or "").startswith("dtrain needs")
            ):
                self.lost.append(key)
            return
        self._put(key, ours, value)

    def _key(self, key: str) -> str | None:
        """Return our key as the tool's table has it; "" where nothing is lost without it, None where it is missing."""
        if self.tool is None:
            return None
        parts = key.split(".")
        prefixes = [f"{'.'.join(parts[:end])}." for end in range(len(parts), 0, -1)]
        names = [key, *prefixes, ".".join(parts[-2:]), parts[-1]]
        ours = next((self.tool.keys[name] for name in names if name in self.tool.keys), None)
        return ours and ours.format(method=self.method)

    def _put(self, theirs: str, key: str, value: Any) -> None:
        """Put a value of theirs under our key, if it fits; a problem becomes a note."""
        meant = key_aliases.meant(key, value) or ""
        if meant:
            value, _, remark = meant.partition(",")
            value, remark = yaml.safe_load(value), remark.strip()
            if extra := re.fullmatch(r"with ([\w.]+=\w+(?: and [\w.]+=\w+)*)", remark):
                for pair in extra[1].split(" and "):
                    self._put(theirs, pair.partition("=")[0], yaml.safe_load(pair.partition("=")[2]))
            elif remark:
                self.notes.append(f"{theirs}={self.theirs[theirs]}: {key}={value}, {remark}")
        if isinstance(value, str) and key in _LISTED and "," in value:
            value = [part.strip() for part in value.split(",")]
        if isinstance(value, list) and len(value) == 1 and (key.endswith(".path") or value == ["all-linear"]):
            value = value[0]
        if key == "data.train.path" and value in _FILE_READERS:
            return
        section, is_option, option = key.partition(".kwargs.")
        if is_option:
            key = f"{section}.kwargs"
        if key.endswith(".kwargs") and not isinstance(value, Mapping):
            value = {option or theirs.rpartition(".")[2]: value}
        if key.endswith(".kwargs") and key in self.values:
            value = {**self.values[key], **value}
        elif key in self.values:
            return
        fitted, problems = self._fit(key, value)
        if isinstance(value, str) and key in _NAMES and value not in _NAMES[key] and "." not in value:
            problems = [f"{key}={value} is none of {', '.join(_NAMES[key])}"]
        if problems:
            self._refused.add(key)
            if key == "method":
                self.values[key] = value  # the recipe is refused too, and trains by no other method
            if isinstance(original := self.theirs.get(theirs), list | Mapping):
                self.lost.append(theirs)
            else:
                self.notes.append(f"{theirs}={original} is not carried over: {problems[0]}")
        else:
            self.values[key] = fitted

    def _leaf(self, *names: str) -> Any:
        """Return the value of the first of their keys that has one of these names, and holds a value."""
        values = (self.theirs[key] for name in names for key in self.theirs if key.rpartition(".")[2] == name)
        return next((value for value in values if value is not None), None)

    def _join(self, tool: Tool) -> None:
        """Put what takes more than one key, and the tool's defaults."""
        for place, value in self.theirs.items():
            matches = [brought for pattern, brought in tool.components.items() if re.fullmatch(pattern, str(value))]
            for key, setting in (pair for brought in matches for pair in flat(brought).items()):
                self.values.setdefault(key, setting)
                self.origins.setdefault(key, f"{value.rpartition('.')[2]} of {tool.name} {tool.version}")
            if not matches and place in ("dataset._component_", "loss._component_"):
                self.lost.append(f"{place}: {value}")
        self.method = self.values["method"] = str(self.values.get("method", self.method))
        has_adapter = self._adapter(tool)
        defaults = tool.defaults.get("all", {})
        for layer in (self.method, *(["lora"] if has_adapter else [])):
            defaults = merge(defaults, tool.defaults.get(layer, {}))
        theirs_by_default = {} if "scheduler" in self.values else {"scheduler": defaults.get("scheduler")}
        stages = isinstance(theirs_by_default.get("scheduler"), list)
        usual = flat(defaults) if not stages else flat({**defaults, "scheduler": None}) | theirs_by_default
        self._data(tool)
        self._batch(tool, usual)
        self._optimizer(usual)
        self._losses()
        self._length(tool, usual)
        self._schedule(tool, usual)
        self._default(tool, usual)
        self.notes += [note for layer, notes in tool.notes.items() if self._has(layer, has_adapter) for note in notes]

    def _has(self, layer: str, has_adapter: bool) -> bool:
        """Return whether the notes of a layer are for this recipe."""
        if layer.startswith("no "):
            return has_adapter >= layer.startswith("no lora.") and layer.removeprefix("no ") not in self.values
        key, _, value = layer.partition("=")
        is_value = str(self.values.get(key, self.theirs.get(key))) == value
        return {"all": True, "lora": has_adapter, self.method: True}.get(layer, is_value)

    def _default(self, tool: Tool, usual: Mapping[str, Any]) -> None:
        """Put the tool's default of each key that the file leaves out, where dtrain's differs."""
        own = asdict(self._usual)
        own["lora"] = {key.name: key.default for key in fields(Lora)}
        own = flat(own)
        for key, value in usual.items():
            fitted, problems = self._fit(key, value)
            places = {*self.values, *self._refused}
            is_said = any(f"{place}.".startswith(f"{key}.") or f"{key}.".startswith(f"{place}.") for place in places)
            if not is_said and not problems and (key not in own or own[key] != fitted):
                self.values[key] = fitted
                self.origins[key] = f"{tool.name} {tool.version}'s default"

    def _adapter(self, tool: Tool) -> bool:
        """Return whether the file trains an adapter. Without one its keys of adapters are not read there."""
        if tool.adapter is None:
            return False
        key, usual, wanted = tool.adapter
        value = self.theirs.get(key)
        has_adapter = re.fullmatch(wanted, usual if value is None else str(value)) is not None
        if not has_adapter:
            unread = [name for name in self.values if name.startswith("lora.") and name != "lora.path"]
            for name in unread:
                del self.values[name]
            if unread:
                self.notes.append(
                    f"not carried over: {', '.join(unread)}, which {tool.name} reads with an adapter only"
                )
            return False
        if "qlora" in str(value):
            self._put(key, "lora.quantize", "nf4")
        if self.values.pop("train.masters", None):
            self.notes.append("PEFT keeps adapters in float32, whatever the base's type")
        if tool.alpha_by_rank and "lora.alpha" not in self.values:
            rank = self.values.get("lora.rank", flat(tool.defaults["lora"])["lora.rank"])
            self.values["lora.alpha"] = tool.alpha_by_rank * rank
            self.origins["lora.alpha"] = f"{tool.name} {tool.version}'s default, {tool.alpha_by_rank:g} × rank"
        if layers := self._leaf("lora_attn_modules"):
            self.values["lora.target"] = [_LORA_LAYERS.get(layer, layer) for layer in layers]
            if self._leaf("apply_lora_to_mlp"):
                self.values["lora.target"] += _MLP
        if self._leaf("match_all_linear"):
            self.values["lora.target"] = "all-linear"
        return True

    def _data(self, tool: Tool) -> None:
        entries = self._leaf("datasets")
        if isinstance(entries, list) and all(isinstance(entry, Mapping) and "path" in entry for entry in entries):
            self._put("datasets", "data.train.path", _paths(entries))
            kinds = {entry.get("type") for entry in entries}
            if self.method != self._usual.method:  # a type reads pairs, prompts or marks there; here columns are found
                self.lost += [f"datasets.type: {kind}" for kind in sorted(map(str, kinds - {None}))]
            elif len(kinds) == 1 and isinstance(kind := kinds.pop(), str):
                self._put("datasets", "data.train.format", kind.partition(".")[0])
            more = sorted({key for entry in entries for key in entry} - {"path", "type", "data_files", "ds_type"})
            self.lost += [f"datasets.{key}" for key in more]
        elif entries:
            self.lost.append("datasets")
        if tests := self._leaf("test_datasets"):
            self._put("test_datasets", "data.val.path", _paths(tests))
        if (column := self._leaf("dataset_text_field")) not in (None, "text"):
            self.values["data.train.columns"] = {"text": column}
        if self._leaf("stage") in ("pt", "pretrain"):
            self.values |= {"data.train.format": "text", "data.loss_on": "all"}
            self.values.setdefault("data.packing", True)
        if self.values.get("train.validate_every") and not any(key.startswith("data.val") for key in self.values):
            del self.values["train.validate_every"]
            self.notes.append("train.validate_every needs data.val")
        size = self._leaf("packed_sequence_size")
        if size:
            self.values |= {"data.packing": True, "data.max_length": size}

    def _batch(self, tool: Tool, usual: dict[str, Any]) -> None:
        names = ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum")
        accumulation, micro = self._leaf(*names), self.values.get("train.micro_batch")
        micro = None if micro == "auto" else micro
        if tool.accumulation and isinstance(accumulation or 1, int):
            batch = (micro or usual.get("train.micro_batch", 1)) * (accumulation or tool.accumulation)
            is_said = micro is not None or accumulation is not None
            (self.values if is_said else usual).setdefault("train.global_batch", batch)
        groups, prompts = f"{self.method}.group_size", f"{self.method}.prompts_per_step"
        if groups not in self.known or prompts in {**usual, **self.values}:
            return
        group = self.values.get(groups, usual.get(groups, 1))
        batch = self.values.get("train.global_batch", usual.get("train.global_batch", group))
        micro = micro or usual.get("train.micro_batch", 1)
        steps = self._leaf("steps_per_generation")
        rollout = self._leaf("generation_batch_size") or (micro * steps if steps else batch)
        if rollout % group:
            self.notes.append(f"{prompts}: {rollout} completions of a rollout are no multiple of {group}")
            self._refused.add(prompts)
        else:
            usual[prompts] = rollout // group

    def _optimizer(self, usual: Mapping[str, Any]) -> None:
        first, second = self._leaf("adam_beta1"), self._leaf("adam_beta2")
        if first is not None or second is not None:
            before = usual.get("optimizer.betas", [0.9, 0.999])
            pair = [before[0] if first is None else first, before[1] if second is None else second]
            self._put("adam_beta1", "optimizer.betas", pair)
        is_half = self._leaf("fp16") or usual.get("train.dtype") != "bfloat16" or self._key("bf16") == ""
        if self._leaf("bf16") is False and not is_half:
            self.values.setdefault("train.dtype", "float32")
        if self.tool and self.tool.name == "torchtune" and self._leaf("dtype") == "bf16":
            self.values["train.masters"] = "bfloat16"

    def _losses(self) -> None:
        """Put clips, rewards and moving references."""
        low, high = self._leaf("epsilon", "ratio_clip_min"), self._leaf("epsilon_high", "ratio_clip_max")
        if low is not None or high is not None:
            low = 0.2 if low is None else low
            self._put("epsilon", "grpo.clip", [low, low if high is None else high])
        rewards, weights = self._leaf("reward_funcs"), self._leaf("reward_weights") or []
        if rewards:
            rewards = rewards if isinstance(rewards, list) else [rewards]
            names = [(key_aliases.meant("grpo.rewards.fn", name) or str(name)).partition(",")[0] for name in rewards]
            weights = [*weights, *[1.0] * (len(names) - len(weights))]
            self.values["grpo.rewards"] = [
                {"fn": name} | ({"weight": weight} if weight != 1 else {})
                for name, weight in zip(names, weights, strict=False)
            ]
        if self._leaf("sync_ref_model"):
            every, mix = (64, 0.9) if self.tool and self.tool.name == "axolotl" else (512, 0.6)
            self._put("sync_ref_model", f"{self.method}.sync_every", self._leaf("ref_model_sync_steps") or every)
            self._put("sync_ref_model", f"{self.method}.sync_mix", self._leaf("ref_model_mixup_alpha") or mix)
        if self.values.get("grpo.advantage") in (True, False):
            self.values["grpo.advantage"] = "leave_one_out" if self.values["grpo.advantage"] else "group"

    def _length(self, tool: Tool, usual: dict[str, Any]) -> None:
        """Put steps or epochs: a recipe has one of them."""
        per_epoch, epochs = self._leaf("max_steps_per_epoch"), self.values.get("train.epochs", 1)
        if per_epoch:
            self.values["train.steps"] = per_epoch * epochs
        if not self.values.get("train.steps", True):  # 0: not said
            del self.values["train.steps"]
        if "train.steps" in self.values or ("train.epochs" not in self.values and "train.steps" in usual):
            self.values.pop("train.epochs", None)
            usual.pop("train.epochs", None)
        elif "train.epochs" in self.values:
            usual.pop("train.steps", None)

    def _schedule(self, tool: Tool, usual: dict[str, Any]) -> None:
        values = self.values
        if tool.name == "Automodel" and any(key.startswith("lr_scheduler.") for key in self.theirs):
            self._automodel_schedule()
        rate, floor = values.get("optimizer.lr", usual.get("optimizer.lr")), self._leaf("min_lr")
        if floor is not None and rate and "scheduler" not in values:
            values["scheduler.min_lr_ratio"] = floor / rate
        name = values.get("scheduler.name", usual.get("scheduler.name"))
        if self._leaf("lr_scheduler_type", "lr_scheduler") == "constant" and tool.warmup != "down":
            values["scheduler.warmup"] = 0  # transformers' constant has no warm-up, constant_with_warmup has
            values.pop("scheduler.warmup_steps", None)
        share = self._leaf("warmup_steps")
        if isinstance(share, float) and 0 < share < 1:  # transformers 5 takes a share under this name
            values["scheduler.warmup"] = share
            self._refused.discard("scheduler.warmup_steps")
            self.notes = [note for note in self.notes if not note.startswith("warmup_steps=")]
            values.pop("scheduler.warmup_steps", None)
        if values.get("scheduler.warmup_steps") == 0 and "scheduler.warmup" in values:
            del values["scheduler.warmup_steps"]
        if tool.warmup == "axolotl" and values.get("scheduler.warmup_steps") == 1:
            values["scheduler.warmup_steps"] = 2
        if "scheduler.warmup_steps" in values:
            usual.pop("scheduler.warmup", None)
        share = values.get("scheduler.warmup", usual.get("scheduler.warmup"))
        if isinstance(share, float) and 0 < share < 1 and name != "constant":
            self._share(tool, share, values.get("train.steps"), is_said="scheduler.warmup" in values)

    def _share(self, tool: Tool, share: float, steps: int | None, is_said: bool) -> None:
        """Put the steps of a warm-up that is a share of all, as the tool rounds it."""
        if steps is None:
            if tool.warmup == "axolotl":
                self.notes.append("axolotl warms up for 100 steps at most by default, and for 2 where a share gives 1")
            elif tool.warmup == "up":
                self.notes.append(f"{tool.name} rounds a share of warm-up up to whole steps; here it is rounded down")
            return
        count = math.ceil(steps * share) if tool.warmup == "up" else int(steps * share)
        if tool.warmup == "axolotl":
            count = count if is_said else min(count, 100)
            count = 2 if count == 1 else count
        self.values.pop("scheduler.warmup", None)
        self.values["scheduler.warmup_steps"] = count
        self.origins["scheduler.warmup_steps"] = f"{share:g} of train.steps, as {tool.name} {tool.version} rounds it"

    def _automodel_schedule(self) -> None:
        """Put a rise from a tenth of the rate, then the style down to a hundredth of it."""
        rate, steps = self.values.get("optimizer.lr"), self.values.get("train.steps")
        warmup = self._leaf("lr_warmup_steps")
        style, floor = str(self._leaf("lr_decay_style") or "cosine").lower(), self._leaf("min_lr")
        if warmup is None and steps is not None:
            warmup = min(1000, steps // 10)
        if warmup is None or style not in ("cosine", "linear", "constant"):
            why = "a tenth of the steps, and at most 1000" if warmup is None else f"lr_decay_style={style}"
            self.notes.append(f"lr_scheduler is not carried over: {why}; write scheduler with train.steps")
            self._refused |= {"scheduler.name", "scheduler.warmup"}
            return
        ratio = 0.01 if floor is None or not rate else floor / rate
        start = (self._leaf("init_lr") or 0.1 * rate) / rate if rate else 0.1
        falls: dict[str, Any] = {"name": style} | ({} if style == "constant" else {"min_lr_ratio": ratio})
        rise = {"start_factor": start, "total_iters": warmup}
        stages = [{"name": "torch.optim.lr_scheduler.LinearLR", "steps": warmup, "kwargs": rise}, falls]
        self.values["scheduler"] = stages if warmup else stages[1:]
        self.origins["scheduler"] = "Automodel warms up from a tenth of the rate and falls to a hundredth"
        self.theirs = {key: value for key, value in self.theirs.items() if key != "lr_scheduler.min_lr"}


def _paths(entries: list[Mapping[str, Any]]) -> list[str]:
    """Return the files or hub ids of the entries of `datasets`."""
    paths: list[str] = []
    for entry in entries:
        files = entry.get("data_files") or entry["path"]
        paths += files if isinstance(files, list) else [files]
    return paths


def _lines(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return dotted keys as lines of YAML in block style, each with the comment of its origin."""
    lines: list[str] = []
    above: list[str] = []
    for key, value in values.items():
        *sections, leaf = key.split(".")
        shared = 0
        while shared < len(sections) and sections[: shared + 1] == above[: shared + 1]:
            shared += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        above = sections
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
        line = f"{'  ' * len(sections)}{leaf}: {text.strip().removesuffix('...').strip()}"
        lines.append(f"{line}  # {origins[key]}" if key in origins else line)
    return lines
