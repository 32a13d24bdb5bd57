"""A whole step from a few layers and micro-batches of it: everything in it grows evenly with either.

Layers of one kind are alike, so a peak within the third layer's forward, say, or within the last layer's backward is
so many bytes and so many more for each further layer. Two traces, a period of the layer types apart, give both numbers;
phases are named by their distance from the first layer or from the last. Of the micro-batches the first and the last
differ from those between.
"""

import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from dtrain.checkpoint.peft.config import adapter_of
from dtrain.commands.plan.children import side_by_side
from dtrain.commands.plan.collectives import Collective
from dtrain.commands.plan.memory import Phase
from dtrain.commands.plan.trace import TRACED, Trace, trace_step
from dtrain.models.common.adapter_config import LoraLayer, adaptable, modules
from dtrain.models.common.config import ModelConfig
from dtrain.policy.config import PolicyConfig
from dtrain.recipe import Sizes
from dtrain.run.spec import RunSpec

_QUESTION = 16  # bytes: two numbers
_MARGIN = 2  # layers at either end that differ from those between: prefetched, kept gathered


@dataclass(frozen=True)
class Step:
    """Memory, traffic and arithmetic of one rank in an optimizer step, in bytes.

    trained: of the parameters those that are; table: those that are embeddings for each layer. lightest: the smallest
    parameters that a rank has. peak: with the optimizer's state. parts: what it is made of. moment: where
    it is. activations: kept for the backward of a micro-batch, at most. traffic: (messages, bytes). flops: by the dtype
    of their operands. moved: read and written by all other operations.
    """

    parameters: int
    trained: int
    gradients: int
    state: int
    lightest: int
    peak: int
    parts: Counter[str]
    moment: Phase
    activations: int
    traffic: dict[Collective, tuple[int, int]]
    flops: dict[torch.dtype, int]
    moved: int
    table: int = 0


def plan_step(spec: RunSpec, *, rank: int = 0, whole: bool = False) -> Step:
    """Return the step of rank `rank` in the world of `spec`, whose devices are of type cpu or cuda.

    whole: trace every layer. Nothing is sent, no weight is read; the traces run in processes forked from this one, in
    which torch.distributed must not be up.
    """
    config = spec.model_config
    layers, period = config.num_hidden_layers, _period(config.layer_types)
    few = 2 * max(_MARGIN, period + 1 if period > 1 else 0)
    few += (layers - few) % period
    is_whole = whole or not _alike(spec.recipe, config) or few + 2 * period > layers
    cuts = [
        replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
        for count in ([layers] if is_whole else [few, few + period])
    ]
    trace, *longer = side_by_side([partial(trace_step, spec, cut, rank) for cut in cuts])
    return _of_micro_batches(_of_layers(trace, longer[0], layers) if longer else trace, spec.sizes)


def _alike(recipe: PolicyConfig, config: ModelConfig) -> bool:
    """Return whether all layers of a type train the same parameters, and no layer needs another's keys."""
    if config.shared_layers:
        return False
    if recipe.lora is None:
        patterns = "".join([*recipe.train.train_only, *recipe.train.freeze])
        return not any(sign in patterns for sign in "0123456789?[")  # without these, a pattern means every layer
    adapter = adapter_of(asdict(recipe.lora))
    layers: list[dict[str, LoraLayer | None]] = [{} for _ in config.layer_types]
    whole = dict.fromkeys(adapter.saved(modules(config)))
    for name, low in {**whole, **adapter.adapted(adaptable(config))}.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            layers[int(match[1])][match[2]] = low
    of_type = dict(zip(config.layer_types, layers, strict=True))
    return all(of_type[kind] == layer for kind, layer in zip(config.layer_types, layers, strict=True))


def _period(types: tuple[str, ...]) -> int:
    """Return the number of layers after which their types repeat; all of them if they never do."""
    fits = (n for n in range(1, len(types)) if all(kind == types[i % n] for i, kind in enumerate(types)))
    return next(fits, len(types))


def _of_layers(shorter: Trace, longer: Trace, layers: int) -> Trace:
    """Return the step of `layers` layers, from two of fewer layers."""
    times, half = (layers - shorter.layers) // (longer.layers - shorter.layers), shorter.layers // 2

    def line(first: Counter, second: Counter) -> Counter:
        return Counter({key: first[key] + (second[key] - first[key]) * times for key in {**first, **second}})

    def anchored(layer: int | None, count: int) -> int | None:
        """Return the index of `layer` among `count` layers from the nearer end: the last one is -1."""
        return layer if layer is None or layer < half else layer - count

    others = {
        (phase, number, anchored(layer, longer.layers)): peak for (phase, number, layer), peak in longer.peaks.items()
    }
    peaks = {}
    for (phase, number, layer), peak in shorter.peaks.items():
        place = anchored(layer, shorter.layers)
        layer = place + layers if place is not None and place < 0 else place
        peaks[Phase(phase, number, layer)] = line(peak, others[phase, number, place])
    return Trace(layers, longer.micro_batches, peaks, line(shorter.counts, longer.counts))


def _of_micro_batches(trace: Trace, sizes: Sizes) -> Step:
    """Return the step of all micro-batches, from at most `TRACED` of them."""
    total: Counter[tuple] = Counter()
    more = max(1, sizes.accumulation - TRACED + 1)
    for (number, *what), value in trace.counts.items():
        total[tuple(what)] += value * (more if number is not None and number % TRACED == 1 else 1)
    if sizes.world_size > 1:  # the trainer asks whether any rank has to stop
        question = Collective("all", "all-reduce", sizes.world_size, True)
        total += Counter({("messages", question): 1, ("bytes", question): _QUESTION})
    moment, peak = max(trace.peaks.items(), key=lambda entry: entry[1].total())
    state = total["state",]
    # A planned CPU holds the stand-ins of a micro-batch's rows beside the rows themselves, a real one does not.
    rows = max(0, total["rows",] * max(1, sizes.accumulation) // trace.micro_batches - total["micro rows",])
    parts = peak + Counter({"optimizer state": state, "rows": rows})
    return Step(
        total["parameters",],
        total["trained",],
        total["gradients",],
        state,
        total["lightest",],
        parts.total(),
        parts,
        moment,
        max(peak["activations"] for peak in trace.peaks.values()),
        {key[1]: (count, total["bytes", key[1]]) for key, count in total.items() if key[0] == "messages"},
        {key[1]: count for key, count in total.items() if key[0] == "flops"},
        total["moved",],
        total["table",],
    )
