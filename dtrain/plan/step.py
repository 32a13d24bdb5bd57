"""A whole step from a few layers and micro-batches of it: everything in it grows evenly with either.

Layers of one kind are alike, so a peak within the third layer's forward, say, or within the last layer's backward is
so many bytes and so many more for each further layer. Two traces, a period of the layer types apart, give both numbers;
pieces of the timeline are told by their distance from the first layer or from the last. Of the micro-batches the first
and the last differ from those between.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dtrain.config import Sizes
from dtrain.config.schema import Recipe
from dtrain.models.config import ModelConfig
from dtrain.plan.children import side_by_side
from dtrain.plan.costs import Cost
from dtrain.plan.memory import Piece
from dtrain.plan.trace import TRACED, Lane, Watched, watch_step

_QUESTION = 16  # bytes: two numbers
_MARGIN = 2  # layers at either end that differ from those between: prefetched, kept gathered


@dataclass(frozen=True)
class Step:
    """What one rank holds, sends and computes in an optimizer step. Bytes.

    peak: with the optimizer's state. parts: what it is made of. moment: where it is, (phase, pass, layer).
    activations: kept for the backward of a micro-batch, at most. traffic: (count, bytes) by lane.
    """

    parameters: int
    gradients: int
    state: int
    lightest: int
    peak: int
    parts: Counter
    moment: tuple[str, int | None, int | None]
    activations: int
    traffic: dict[Lane, tuple[int, int]]
    cost: Cost


def plan_step(
    recipe: Recipe, config: ModelConfig, sizes: Sizes, *, rank: int = 0, device: str = "cuda", whole: bool = False
) -> Step:
    """A step of `recipe` on rank `rank` of `sizes.world_size`, on a device of type `device` (cpu or cuda).

    whole: trace every layer. Nothing is sent, no weight is read; the traces run in processes forked from this one, in
    which torch.distributed must not be up.
    """
    recipe = replace(recipe, train=replace(recipe.train, compile=False))
    layers, period = config.num_hidden_layers, _period(config.layer_types)
    few = 2 * max(_MARGIN, period + 1 if period > 1 else 0)
    few += (layers - few) % period

    def watched(count: int) -> Callable[[], Watched]:
        cut = replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
        return partial(watch_step, recipe, cut, sizes, rank=rank, device=device)

    if whole or few + 2 * period > layers:
        (seen,) = side_by_side([watched(layers)])
    else:
        seen = _extended(*side_by_side([watched(few), watched(few + period)]), layers)
    return _of_micro_batches(seen, sizes)


def _period(types: tuple[str, ...]) -> int:
    """After how many layers their types repeat; all of them where they never do."""
    fits = (n for n in range(1, len(types)) if all(kind == types[i % n] for i, kind in enumerate(types)))
    return next(fits, len(types))


def _extended(one: Watched, two: Watched, layers: int) -> Watched:
    """The step of `layers` layers from those of fewer."""
    times = (layers - one.layers) // (two.layers - one.layers)

    def line(first: int, second: int) -> int:
        return first + (second - first) * times

    def lines(first: Counter, second: Counter) -> Counter:
        return Counter({key: line(first[key], second[key]) for key in {**first, **second}})

    first_half = one.layers // 2
    pieces = {}
    others = {_anchored(key, two.layers, first_half): piece for key, piece in two.pieces.items()}
    for key, piece in one.pieces.items():
        other = others[_anchored(key, one.layers, first_half)]
        phase, number, layer = key
        place = layer if layer is None or layer < first_half else layer + layers - one.layers
        pieces[phase, number, place] = Piece(line(piece.peak, other.peak), lines(piece.parts, other.parts))
    traffic = {
        number: {
            lane: tuple(map(line, lanes.get(lane, (0, 0)), two.traffic[number][lane])) for lane in two.traffic[number]
        }
        for number, lanes in ((number, one.traffic.get(number, {})) for number in two.traffic)
    }
    costs = {
        number: Cost(
            lines(cost.flops, two.costs[number].flops),
            line(cost.moved, two.costs[number].moved),
            line(cost.operations, two.costs[number].operations),
        )
        for number, cost in one.costs.items()
    }
    return Watched(
        layers,
        pieces,
        traffic,
        costs,
        line(one.parameters, two.parameters),
        line(one.gradients, two.gradients),
        line(one.state, two.state),
        line(one.lightest, two.lightest),
        two.micro_batches,
        two.rows,
        two.micro_rows,
    )


def _anchored(key: tuple, layers: int, first_half: int) -> tuple:
    """A piece's key with its layer counted from the nearer end; the last layer is −1."""
    phase, number, layer = key
    return phase, number, layer if layer is None or layer < first_half else layer - layers


def _of_micro_batches(seen: Watched, sizes: Sizes) -> Step:
    """The step of all micro-batches from at most `TRACED` of them."""
    traffic: dict[Lane, tuple[int, int]] = defaultdict(lambda: (0, 0))
    if sizes.world_size > 1:  # the trainer asks whether any rank was told to stop
        traffic["all", "all-reduce", sizes.world_size, True] = 1, _QUESTION
    total = Cost()
    more = max(1, sizes.accumulation - TRACED + 1)
    for number in {*seen.traffic, *seen.costs}:
        times = more if number is not None and number % TRACED == 1 else 1
        for lane, (count, size) in seen.traffic.get(number, {}).items():
            known = traffic[lane]
            traffic[lane] = known[0] + times * count, known[1] + times * size
        cost = seen.costs.get(number, Cost())
        total += Cost(
            Counter({k: v * times for k, v in cost.flops.items()}), cost.moved * times, cost.operations * times
        )
    moment, piece = max(seen.pieces.items(), key=lambda entry: entry[1].peak)
    parts = Counter({name: size for name, size in piece.parts.items() if size})
    # A planned CPU holds the stand-ins of a micro-batch's rows beside the rows themselves, a real one does not.
    rows = max(0, seen.rows * max(1, sizes.accumulation) // seen.micro_batches - seen.micro_rows)
    return Step(
        seen.parameters,
        seen.gradients,
        seen.state,
        seen.lightest,
        piece.peak + seen.state + rows,
        parts + Counter({"optimizer state": seen.state, "rows": rows}),
        moment,
        max(piece.parts["activations"] for piece in seen.pieces.values()),
        dict(traffic),
        total,
    )
