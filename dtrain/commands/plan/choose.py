"""Choice of what a recipe leaves to `auto`: micro-batch, checkpointing, reduction and offload, for a device's memory.

The method. Whatever needs less memory costs time. `_ladder` has the combinations in the order of their times; each
needs less memory than the one before. A bisection finds the first whose planned step fits with one row a micro-batch,
unless even the one of the least memory does not.
The optimizer's state goes to the host where nothing else fits, or where that is faster than tiles.
Then the micro-batch grows as far as it makes the step faster and fits. Where it stays too small to hide what its passes
send, the last combination is compared by the estimate too. A choice is a function of recipe, world and device alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any

from dtrain.base.errors import RecipeError, UserError
from dtrain.base.hardware import free_host_memory, num_cores
from dtrain.commands.plan.hardware import GPUS, USABLE_MEMORY, Hardware, estimate_step, gib
from dtrain.commands.plan.plan import Plan, divisors, make_plan, problems, resolve_plan, with_keys
from dtrain.commands.plan.step import Step, num_traces, plan_steps
from dtrain.policy.build import max_masked_row_length
from dtrain.recipe import Recipe, derive_sizes
from dtrain.recipe.schema import Lora
from dtrain.recipe.world import (
    DEFAULT_MICRO_BATCH,
    FASTEST_VALUES,
    MICRO_BATCH,
    format_choices,
    format_overrides,
    replace_keys,
    unresolved_auto_keys,
)
from dtrain.training.sizing import Sizing
from dtrain.training.step_spec import StepSpec

FREE_SHARE = 0.1
"""Share of a device's memory that a choice leaves free."""
LAUNCH = 6e-6  # seconds in which the host starts a kernel
HIDING = 2  # times what a pass sends and starts that its computing should take

OFFLOAD = "parallel.optimizer_offload"

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Choice(Sizing):
    """Sizes by the plan. peak: bytes of a rank's tensors."""

    peak: int


class TooLarge(UserError):
    """No choice fits into the memory."""


@dataclass(frozen=True)
class _Tried:
    """A combination with a micro-batch whose step was planned."""

    values: Values
    micro: int
    step: Step
    time: float


def choose(spec: StepSpec, memory: int, hardware: Hardware | None = None, host: int | None = None) -> Choice:
    """Return values for the open keys of a spec of `resolve_plan`, on devices with `memory` bytes each.

    hardware: whose numbers decide what is fast; None: the first of the table. host: bytes of the host's memory for each
    rank, where what is offloaded has to lie; None: as much as it takes. Plans in processes forked from this one.
    Raises TooLarge, which names what would fit; UserError where there is no plan of the recipe.
    """
    return _Search(spec, memory, hardware, host).choice()


def chosen_plan(recipe: Any, world_size: int, hardware: Hardware, budget: int | None = None) -> Plan:
    """Return the plan of `recipe` as of `make_plan`, with values chosen for what it leaves to `auto`."""
    if not unresolved_auto_keys(recipe):
        return make_plan(recipe, world_size, hardware, budget)
    is_cpu = recipe.launch.device == "cpu"
    memory = (
        free_host_memory(world_size) if is_cpu else int((hardware.budget if budget is None else budget) / USABLE_MEMORY)
    )
    choice = choose(resolve_plan(recipe, world_size, "cpu" if is_cpu else "cuda", hardware), memory, hardware)
    plan = make_plan(replace_keys(recipe, choice.values), world_size, hardware, budget)
    return replace(plan, choices=choice.lines)


class _Search:
    def __init__(self, spec: StepSpec, memory: int, hardware: Hardware | None, host: int | None):
        self.spec, self.recipe, self.world_size = spec, spec.original_recipe, spec.world.size
        self.keys, self.memory, self.budget = unresolved_auto_keys(self.recipe), memory, int(memory * (1 - FREE_SHARE))
        self.host_budget = inf if host is None else host * (1 - FREE_SHARE)
        self.hardware = hardware or next(iter(GPUS.values()))
        self.is_gpu = spec.world.device_type == "cuda"
        self.rows = self.spec.sizes.global_batch // self.spec.sizes.dp  # of a rank
        self.micros = [micro for micro in divisors(self.rows) if self._has_a_kernel(micro)]
        self.micros = self.micros if MICRO_BATCH in self.keys else []
        self.least = self.micros[0] if self.micros else self.spec.recipe.train.num_micro_batch_rows
        self.known: dict[tuple, _Tried] = {}  # what was planned, by combination and micro-batch
        self.ladder, self.offloaded = self._ladder(), self._ladder(is_offloaded=True)

    def _has_a_kernel(self, micro: int) -> bool:
        """Return whether attention of a micro-batch needs no mask that is too large: packed completions are one row."""
        recipe, device = self.spec.recipe, self.spec.world.device_type
        length = self.spec.method_class(replace_keys(recipe, {MICRO_BATCH: micro})).max_row_length()
        longest = max_masked_row_length(recipe, self.spec.precision, device) if device == "cuda" else None
        return micro == 1 or longest is None or length <= longest

    def choice(self) -> Choice:
        ladder, offloaded = self.ladder, self.offloaded
        quick = [values for values in ladder if not _is_tiled(values) and not values.get("train.activation_offload")]
        tried = self._first_that_fits(ladder, first=len(quick) - 1)
        if tried is None or _is_tiled(tried.values):
            other = self._first_that_fits(offloaded, first=len(offloaded) - 1)
            if tried is None or (other is not None and other.time < tried.time):
                ladder, tried = offloaded or ladder, other
        if tried is None:
            tried = self._least(ladder[-1])
        else:
            tried = self._with_more_rows(tried, ladder[-1])
        values = {key: tried.micro if key == MICRO_BATCH else tried.values[key] for key in self.keys}
        return Choice(values, tuple(self._lines(tried, values, self._wanted(tried))), tried.step.peak)

    def _ladder(self, is_offloaded: bool = False) -> list[Values]:
        """Return combinations of the open keys, each of more time and less memory than the one before; is_offloaded:
        all with `parallel.optimizer_offload`, [] where that is not open or refused."""
        base = {key: FASTEST_VALUES[key] for key in self.keys if key != MICRO_BATCH}
        if is_offloaded:
            offload = {OFFLOAD: True}
            if OFFLOAD not in base or not self.is_gpu or self._refused(offload):
                return []
            base |= offload
        ladder: list[Values] = [base]
        for more in self._means(self.spec.recipe):
            if more.keys() <= base.keys() and not self._refused(base | more):
                base = base | more
                ladder.append(base)
        return ladder

    def _means(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yield changes in the order in which they are made, each beside those before."""
        shards = self.spec.sizes.dp_shard * self.spec.sizes.cp
        # Sums of masters in bfloat16 are rounded at random, each micro-batch's under reduce_each.
        if shards > 1 and self.rows > self.least and recipe.train.masters == "float32":
            yield {"parallel.reduce_each": True}
        yield {"train.activation_checkpointing": "selective"}
        yield {"train.activation_checkpointing": "full"}
        yield {"train.tile": "mlp"}
        yield {"train.activation_offload": True}
        yield {"train.tile": "all"}

    def _refused(self, values: Values) -> bool:
        return bool(problems(replace_keys(self.spec.recipe, values), self.world_size))

    def _at(self, spec: StepSpec, values: Values, micro: int) -> StepSpec:
        """Return `spec` with `values` and a micro-batch, where that is open."""
        recipe = replace_keys(spec.recipe, {**values, **({MICRO_BATCH: micro} if self.micros else {})})
        return with_keys(spec, recipe, derive_sizes(recipe, spec.world.size))

    def _tried(self, combinations: Sequence[tuple[Values, int]]) -> list[_Tried]:
        """Return `combinations` with their steps. Each is planned once."""
        keys = {(*values.items(), micro): (values, micro) for values, micro in combinations}
        new = {key: combination for key, combination in keys.items() if key not in self.known}
        specs = [self._at(self.spec, values, micro) for values, micro in new.values()]
        for (key, (values, micro)), spec, step in zip(new.items(), specs, plan_steps(specs), strict=True):
            self.known[key] = _Tried(values, micro, step, self._time(step, spec) if self.is_gpu else 0.0)
        return [self.known[key] for key in keys]

    def _time(self, step: Step, spec: StepSpec) -> float:
        time = estimate_step(step, spec.sizes, self.hardware)
        return max(time.total, step.num_kernels * LAUNCH + time.exposed + time.optimizer)

    def _fits(self, step: Step) -> bool:
        on_host = step.host_activations + step.host_optimizer_bytes if self.is_gpu else 0
        return step.peak <= self.budget and on_host <= self.host_budget

    def _first_that_fits(self, ladder: Sequence[Values], first: int) -> _Tried | None:
        """Return the first combination that fits with the least micro-batch; as many are planned at once as there are
        processors for. first: the place to begin at, with those before it: what most probably decides.

        The bisection is by the device's memory, of which each takes less than the one before. The host's is looked at
        from the first on that fits there.
        """
        width, high, fits_device = max(1, num_cores() // num_traces(self.spec)), len(ladder), False
        low = 1 + max((place for place, values in enumerate(ladder) if self._is_too_much(values)), default=-1)
        while low < high:
            places: Sequence[int] = range(max(low, first + 1 - width), first + 1)
            if not low <= first < high:
                count = min(width, high - low)
                places = sorted({low + (high - low) * (number + 1) // (count + 1) for number in range(count)})
            every = self._tried([(ladder[place], self.least) for place in places])
            fits = [tried.step.peak <= self.budget for tried in every]
            if any(fits):
                number, fits_device = fits.index(True), True
                high, low = places[number], places[number - 1] + 1 if number else low
            else:
                low = places[-1] + 1 if fits_device or not self._is_hopeless(every[-1]) else len(ladder)
        candidates = (self._tried([(values, self.least)])[0] for values in ladder[high:])
        return next((tried for tried in candidates if self._fits(tried.step)), None)

    def _is_too_much(self, values: Values) -> bool:
        """Return whether a combination is known to take too much: by its plan, or by the one with the optimizer's state
        on the device, where there is at most this state, the masters and what they are rounded to for it to save."""
        known = self.known.get((*{**values, OFFLOAD: False}.items(), self.least))
        return (
            known is not None
            and known.step.peak - known.step.optimizer_state - 2 * known.step.trained_parameters > self.budget
        )

    def _is_hopeless(self, tried: _Tried) -> bool:
        """Return whether none fits beside one that does not: what they hold alike is too much, or the least of all."""
        if tried.step.resident > self.budget:
            return True
        (least,) = self._tried([((self.offloaded or self.ladder)[-1], self.least)])
        return least.step.peak > self.budget

    def _with_more_rows(self, tried: _Tried, last: Values) -> _Tried:
        """Return the fastest of `tried` with more rows a micro-batch, and of the `last` combination where these are
        fewer than make the step fast. For a CPU no times are estimated that could be compared."""
        best, wanted = self._largest(tried)
        if self.is_gpu and best.micro < wanted and last != tried.values:
            (other,) = self._tried([(last, self.least)])
            if self._fits(other.step):
                best = min(best, self._largest(other)[0], key=lambda each: each.time)
        return best

    def _largest(self, tried: _Tried) -> tuple[_Tried, int]:
        """Return `tried` with the largest micro-batch that fits, up to the one that makes the step fast; and that."""
        wanted = self._wanted(tried)
        larger = [micro for micro in self.micros if tried.micro < micro <= wanted]
        while larger:
            parts = tried.step.parts
            per_row = (parts["activations"] + parts["loss"] + parts["temporaries"] + 1) / tried.micro
            most = tried.micro + (self.budget - tried.step.peak) / per_row
            micro = max([micro for micro in larger if micro <= most], default=larger[0])
            (more,) = self._tried([(tried.values, micro)])
            if self._fits(more.step):
                tried, larger = more, [each for each in larger if each > micro] if micro == larger[0] else []
            else:
                larger = [each for each in larger if each < micro]
        return tried, wanted

    def _wanted(self, tried: _Tried) -> int:
        """Return the micro-batch from which on a pass computes longer than it sends and starts kernels."""
        if not self.is_gpu:
            return max([micro for micro in self.micros if micro <= DEFAULT_MICRO_BATCH], default=tried.micro)
        spec = self._at(self.spec, tried.values, tried.micro)
        time, passes = estimate_step(tried.step, spec.sizes, self.hardware), spec.sizes.accumulation
        of_row = (time.arithmetic + time.memory) / (passes * tried.micro)
        of_pass = max(time.hidden, tried.step.num_kernels * LAUNCH) / passes
        return next((micro for micro in self.micros if micro * of_row >= HIDING * of_pass), self.rows)

    def _least(self, values: Values) -> _Tried:
        """Return the combination of the least memory. Raises TooLarge where it is more than the devices have."""
        (tried,) = self._tried([(values, self.least)])
        host = tried.step.host_activations + tried.step.host_optimizer_bytes
        if tried.step.peak <= self.memory and host <= self.host_budget / (1 - FREE_SHARE):
            return tried
        also = f"; it also takes {gib(host)} of the host's memory for each rank" if host > self.host_budget else ""
        chosen = {MICRO_BATCH: tried.micro} | dict(values)
        least = " ".join(format_overrides(chosen))
        ways = [f"{overrides} (peak {gib(peak)})" for overrides, peak in islice(self._ways(tried), 2)]
        fix = f"what fits: {', or '.join(ways)}" if ways else "take a smaller model, or more devices"
        raise TooLarge(
            f"this does not fit: the least that was planned takes {gib(tried.step.peak)} ({least}), and a device has "
            f"{gib(self.memory)}{also}; {fix}"
        )

    def _ways(self, tried: _Tried) -> Iterator[tuple[str, int]]:
        """Yield overrides with which what was `tried` fits, each with its peak: the nearest first. Those that hold too
        much alike are not planned: shorter rows hold as much, more ranks at least their share. What comes and goes
        shrinks at most with a row, masks with its square. With more ranks it may vanish: they have fewer micro-batches,
        and a single one keeps no unsharded gradients."""
        values, held, peak = tried.values, tried.step.resident, tried.step.peak
        always = tried.step.parameters + tried.step.optimizer_state  # gradients may not be there yet at the peak
        recipe, world = self.recipe, self.world_size
        lora, length, nproc = recipe.lora or Lora(), recipe.data.max_length, "launch.nproc"
        nf4 = replace(lora, quantize="nf4")
        has_mask = max_masked_row_length(self.spec.recipe, self.spec.precision, self.spec.world.device_type) is not None
        groups = [
            [("lora={}", replace(recipe, lora=lora), world)] if recipe.lora is None else [],
            [("lora.quantize=nf4", replace(recipe, lora=nf4), world)] if nf4 != recipe.lora else [],
            [
                (f"data.max_length={length // part}", replace_keys(recipe, {"data.max_length": length // part}), world)
                for part in (2, 4, 8)
                if max(held, always + (peak - always) / part ** (2 if has_mask else 1)) <= self.budget
            ],
            [(f"{nproc}={world * times}", recipe, world * times) for times in (2, 4, 8) if held <= times * self.budget],
        ]
        for group in groups:
            for overrides, other, ranks in group:
                with suppress(RecipeError):
                    spec = resolve_plan(
                        replace_keys(other, values),
                        ranks,
                        self.spec.world.device_type,
                        self.hardware if self.is_gpu else None,
                    )
                    (step,) = plan_steps([self._at(spec, {}, self.least)])
                    if self._fits(step):
                        yield overrides, step.peak
                        break

    def _lines(self, tried: _Tried, values: Values, wanted: int) -> Iterator[str]:
        if MICRO_BATCH in values:
            why = "more would not be faster" if tried.micro >= wanted else "more do not fit"
            why = "all rows of a rank" if tried.micro == self.rows else why
            (choice,) = format_choices(self.spec.original_recipe, {MICRO_BATCH: tried.micro})
            yield f"{choice} (auto): {why}"
        others = {key: value for key, value in values.items() if key != MICRO_BATCH}
        usual = {key: value for key, value in others.items() if value == FASTEST_VALUES[key]}
        for text in format_overrides({key: value for key, value in others.items() if key not in usual}):
            yield f"{text} (auto): for memory"
        if usual:
            yield f"{', '.join(format_overrides(usual))} (auto)"
        yield f"planned peak {gib(tried.step.peak)} of {gib(self.memory)}"


def _is_tiled(values: Values) -> bool:
    return values.get("train.tile", "none") != "none"
