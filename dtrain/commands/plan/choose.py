"""Values for the recipe keys that are `auto`: micro-batch, checkpointing, gradient reduction and offload.

The method. Every setting that saves memory costs time. `_ladder` returns combinations of settings in the order of their
times. Each needs less memory than the one before:

    none < reduce_each < selective checkpointing < full checkpointing < tile=mlp < activation_offload < tile=all

A bisection finds the first combination that fits with one row per micro-batch. If none fits, or only a tiled one, the
same ladder is tried with the optimizer's state on the host, and the faster result is used. Then the micro-batch grows
as long as it makes the step faster and fits. If it stays too small to hide the communication of a pass, the last
combination of the ladder, which leaves room for more rows, is compared too.

The choice depends only on the recipe, the world and the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any, NamedTuple

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

FREE_SHARE = 0.1  # share of a device's memory that a choice leaves free
LAUNCH_SECONDS = 6e-6  # time that the host needs to start a kernel
HIDING_FACTOR = 2  # computing a pass should take this many times as long as its communication and kernel starts

OFFLOAD = "parallel.optimizer_offload"

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Choice(Sizing):
    """Sizes that were chosen with a plan.

    Attributes:
        peak: Planned peak of a rank's tensors, in bytes.
    """

    peak: int


class TooLarge(UserError):
    """No combination of settings fits into the memory."""


@dataclass(frozen=True)
class _PlannedCombination:
    """A combination of settings with a micro-batch, and its planned step.

    Attributes:
        values: Values of the keys that are `auto`, without the micro-batch.
        micro_batch: Rows of a micro-batch.
        step: The planned step.
        time: Estimated seconds of the step. 0 on CPUs, for which there is no estimate.
    """

    values: Values
    micro_batch: int
    step: Step
    time: float


class _Change(NamedTuple):
    """A change of the recipe that may let it fit.

    Attributes:
        overrides: The change as the user writes it.
        recipe: The changed recipe.
        num_ranks: The number of ranks.
    """

    overrides: str
    recipe: Recipe
    num_ranks: int


def choose(spec: StepSpec, memory: int, hardware: Hardware | None = None, host: int | None = None) -> Choice:
    """Choose values for the keys of a recipe that are `auto`. Plans steps in processes that are forked from this one.

    Args:
        spec: The step, from `resolve_plan`.
        memory: Bytes of each device.
        hardware: Devices whose speed decides what is fast. None: the first of the table.
        host: Bytes of the host's memory per rank, for what is offloaded. None: no limit.

    Raises:
        TooLarge: If no combination fits. The message names changes that would.
        UserError: If the recipe cannot be planned.
    """
    return _Search(spec, memory, hardware, host).choice()


def chosen_plan(recipe: Recipe, world_size: int, hardware: Hardware, budget: int | None = None) -> Plan:
    """Return the plan of a recipe, like `make_plan`, with values chosen for the keys that are `auto`."""
    if not unresolved_auto_keys(recipe):
        return make_plan(recipe, world_size, hardware, budget)
    if recipe.launch.device == "cpu":
        device_type, memory = "cpu", free_host_memory(world_size)
    else:
        # A budget is the memory for tensors, which is a share of the device's memory.
        tensor_memory = hardware.budget if budget is None else budget
        device_type, memory = "cuda", int(tensor_memory / USABLE_MEMORY)
    choice = choose(resolve_plan(recipe, world_size, device_type, hardware), memory, hardware)
    plan = make_plan(replace_keys(recipe, choice.values), world_size, hardware, budget)
    return replace(plan, choices=choice.lines)


class _Search:
    """Search for a combination of settings that fits and is fast (the method is in the module's docstring).

    Attributes:
        budget: Bytes of a device that a choice may use.
        host_budget: The same of the host, per rank.
        rows: Rows of a rank in a step.
        micro_batches: Sizes of a micro-batch that are possible, if the key is `auto`, otherwise empty.
        smallest_micro_batch: The smallest of them, or the recipe's own.
        planned: The combinations that were planned, by their values and micro-batch.
        ladder: Combinations of settings, from the fastest to the one with the least memory.
        offloaded_ladder: The same with the optimizer's state on the host. Empty if that is not possible.
    """

    def __init__(self, spec: StepSpec, memory: int, hardware: Hardware | None, host: int | None):
        self.spec = spec
        self.recipe = spec.original_recipe
        self.world_size = spec.world.size
        self.keys = unresolved_auto_keys(self.recipe)
        self.memory = memory
        self.budget = int(memory * (1 - FREE_SHARE))
        self.host_budget = inf if host is None else host * (1 - FREE_SHARE)
        self.hardware = hardware or next(iter(GPUS.values()))
        self.is_gpu = spec.world.device_type == "cuda"
        self.rows = spec.sizes.global_batch // spec.sizes.dp
        self.micro_batches: list[int] = []
        if MICRO_BATCH in self.keys:
            self.micro_batches = [size for size in divisors(self.rows) if self._attention_fits(size)]
        self.smallest_micro_batch = (
            self.micro_batches[0] if self.micro_batches else spec.recipe.train.num_micro_batch_rows
        )
        self.planned: dict[tuple, _PlannedCombination] = {}
        self.ladder = self._ladder()
        self.offloaded_ladder = self._ladder(is_offloaded=True)

    def _attention_fits(self, micro_batch: int) -> bool:
        """Return whether attention of a micro-batch can be computed without a mask that is too large.

        Packed completions of a micro-batch are one row, so a larger micro-batch means a longer row.
        """
        recipe, device_type = self.spec.recipe, self.spec.world.device_type
        if micro_batch == 1 or device_type != "cuda":
            return True
        max_masked = max_masked_row_length(recipe, self.spec.precision, device_type)
        method = self.spec.method_class(replace_keys(recipe, {MICRO_BATCH: micro_batch}))
        return max_masked is None or method.max_row_length() <= max_masked

    def choice(self) -> Choice:
        """Run the search. Raises TooLarge if nothing fits."""
        ladder = self.ladder
        # The bisection begins at the last combination without tiles and activation offload, which most often decides.
        quick = [values for values in ladder if not _is_tiled(values) and not values.get("train.activation_offload")]
        found = self._first_that_fits(ladder, first=len(quick) - 1)
        if found is None or _is_tiled(found.values):
            # Offloading the optimizer's state may be faster than tiles.
            offloaded = self._first_that_fits(self.offloaded_ladder, first=len(self.offloaded_ladder) - 1)
            if found is None or (offloaded is not None and offloaded.time < found.time):
                ladder = self.offloaded_ladder or ladder
                found = offloaded
        if found is None:
            found = self._least_memory(ladder[-1])
        else:
            found = self._with_more_rows(found, ladder[-1])
        values = {}
        for key in self.keys:
            values[key] = found.micro_batch if key == MICRO_BATCH else found.values[key]
        lines = self._lines(found, values, self._fast_micro_batch(found))
        return Choice(values, tuple(lines), found.step.peak)

    def _ladder(self, is_offloaded: bool = False) -> list[Values]:
        """Return combinations of the open keys, each slower and with less memory than the one before.

        Args:
            is_offloaded: Whether all of them have `parallel.optimizer_offload`. The list is empty if that key is not
                open or not possible.
        """
        base = {key: FASTEST_VALUES[key] for key in self.keys if key != MICRO_BATCH}
        if is_offloaded:
            offload = {OFFLOAD: True}
            if OFFLOAD not in base or not self.is_gpu or self._is_refused(offload):
                return []
            base |= offload
        ladder: list[Values] = [base]
        for change in self._memory_savers(self.spec.recipe):
            if change.keys() <= base.keys() and not self._is_refused(base | change):
                base = base | change
                ladder.append(base)
        return ladder

    def _memory_savers(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yield changes that save memory, in the order of their cost. Each is made in addition to those before."""
        num_shards = self.spec.sizes.dp_shard * self.spec.sizes.cp
        has_several_micro_batches = self.rows > self.smallest_micro_batch
        # With bfloat16 masters the accumulated gradients are rounded stochastically. reduce_each would round them once
        # per micro-batch instead of once per step.
        if num_shards > 1 and has_several_micro_batches and recipe.train.masters == "float32":
            yield {"parallel.reduce_each": True}
        yield {"train.activation_checkpointing": "selective"}
        yield {"train.activation_checkpointing": "full"}
        yield {"train.tile": "mlp"}
        yield {"train.activation_offload": True}
        yield {"train.tile": "all"}

    def _is_refused(self, values: Values) -> bool:
        """Return whether a run would refuse the recipe with these values."""
        return bool(problems(replace_keys(self.spec.recipe, values), self.world_size))

    def _spec_with(self, spec: StepSpec, values: Values, micro_batch: int) -> StepSpec:
        """Return `spec` with `values`, and with the micro-batch if that is open."""
        changes = dict(values)
        if self.micro_batches:
            changes[MICRO_BATCH] = micro_batch
        recipe = replace_keys(spec.recipe, changes)
        return with_keys(spec, recipe, derive_sizes(recipe, spec.world.size))

    def _plan(self, combinations: Sequence[tuple[Values, int]]) -> list[_PlannedCombination]:
        """Plan the steps of combinations (values, micro-batch). Each is planned only once."""
        keys = []
        new: dict[tuple, tuple[Values, int]] = {}
        for values, micro_batch in combinations:
            key = (*values.items(), micro_batch)
            keys.append(key)
            if key not in self.planned:
                new[key] = (values, micro_batch)
        specs = [self._spec_with(self.spec, values, micro_batch) for values, micro_batch in new.values()]
        for key, spec, step in zip(new, specs, plan_steps(specs), strict=True):
            values, micro_batch = new[key]
            time = self._time(step, spec) if self.is_gpu else 0.0
            self.planned[key] = _PlannedCombination(values, micro_batch, step, time)
        return [self.planned[key] for key in keys]

    def _time(self, step: Step, spec: StepSpec) -> float:
        """Return the estimated seconds of a step, which cannot be shorter than the host needs to start its kernels."""
        time = estimate_step(step, spec.sizes, self.hardware)
        return max(time.total, step.num_kernels * LAUNCH_SECONDS + time.exposed + time.optimizer)

    def _fits(self, step: Step) -> bool:
        host_bytes = step.host_activations + step.host_optimizer_bytes if self.is_gpu else 0
        return step.peak <= self.budget and host_bytes <= self.host_budget

    def _first_that_fits(self, ladder: Sequence[Values], first: int) -> _PlannedCombination | None:
        """Return the first combination of a ladder that fits with the smallest micro-batch. None if none fits.

        Device memory decreases along the ladder, so the search is a bisection. Traces run in parallel processes, so a
        round plans as many combinations as there are processors. For example, a round plans the indices 0, 5 and 9. If
        only 9 fits, the answer is between 6 and 9. Host memory does not decrease along the ladder. It is checked
        afterwards, for one combination after the other, from the first one that fits on the device.

        Args:
            ladder: The combinations.
            first: A guess of the answer. The first round plans this index and the indices just before it.
        """
        num_at_once = max(1, num_cores() // num_traces(self.spec))
        # The answer is in [low, high]. `high` is the length of the ladder while none is known to fit.
        low, high = 0, len(ladder)
        for index, values in enumerate(ladder):
            if self._is_known_too_large(values):
                low = index + 1
        any_fits = False
        while low < high:
            if low <= first < high:
                indices = list(range(max(low, first + 1 - num_at_once), first + 1))
            else:
                count = min(num_at_once, high - low)
                indices = sorted({low + (high - low) * (number + 1) // (count + 1) for number in range(count)})
            planned = self._plan([(ladder[index], self.smallest_micro_batch) for index in indices])
            fits = [combination.step.peak <= self.budget for combination in planned]
            if any(fits):
                any_fits = True
                number = fits.index(True)
                high = indices[number]
                if number > 0:
                    low = indices[number - 1] + 1
            elif any_fits or not self._is_hopeless(planned[-1]):
                low = indices[-1] + 1
            else:
                low = len(ladder)
        for values in ladder[high:]:
            (combination,) = self._plan([(values, self.smallest_micro_batch)])
            if self._fits(combination.step):
                return combination
        return None

    def _is_known_too_large(self, values: Values) -> bool:
        """Return whether a combination with an offloaded optimizer is known to need too much memory.

        The same combination without the offload was planned. The offload saves at most the optimizer's state, the
        masters and their rounded copies.
        """
        key = (*{**values, OFFLOAD: False}.items(), self.smallest_micro_batch)
        known = self.planned.get(key)
        if known is None:
            return False
        step = known.step
        return step.peak - step.optimizer_state - 2 * step.trained_parameters > self.budget

    def _is_hopeless(self, planned: _PlannedCombination) -> bool:
        """Return whether no combination can fit, given a planned one that does not fit."""
        if planned.step.resident > self.budget:
            return True
        last = (self.offloaded_ladder or self.ladder)[-1]
        (least,) = self._plan([(last, self.smallest_micro_batch)])
        return least.step.peak > self.budget

    def _with_more_rows(self, planned: _PlannedCombination, last: Values) -> _PlannedCombination:
        """Return the fastest combination with more rows in a micro-batch.

        If `planned` has no room for enough rows to be fast, the `last` combination of the ladder is compared with it.
        On CPUs no times are estimated that could be compared.
        """
        best, fast_micro_batch = self._largest_micro_batch(planned)
        if self.is_gpu and best.micro_batch < fast_micro_batch and last != planned.values:
            (other,) = self._plan([(last, self.smallest_micro_batch)])
            if self._fits(other.step):
                other, _ = self._largest_micro_batch(other)
                if other.time < best.time:
                    best = other
        return best

    def _largest_micro_batch(self, planned: _PlannedCombination) -> tuple[_PlannedCombination, int]:
        """Enlarge the micro-batch of a combination as long as that makes the step faster and fits.

        Returns:
            The combination with the enlarged micro-batch, and the micro-batch from which on a step is fast
            (`_fast_micro_batch`), which is also the limit of the enlargement.
        """
        fast_micro_batch = self._fast_micro_batch(planned)
        larger = [size for size in self.micro_batches if planned.micro_batch < size <= fast_micro_batch]
        while larger:
            # Estimate the memory of a row from the planned step, and try the largest micro-batch that should fit.
            parts = planned.step.parts
            per_row = (parts["activations"] + parts["loss"] + parts["temporaries"] + 1) / planned.micro_batch
            estimated_limit = planned.micro_batch + (self.budget - planned.step.peak) / per_row
            micro_batch = max([size for size in larger if size <= estimated_limit], default=larger[0])
            (candidate,) = self._plan([(planned.values, micro_batch)])
            if not self._fits(candidate.step):
                larger = [size for size in larger if size < micro_batch]
            elif micro_batch == larger[0]:
                # The estimate may have been too low, so larger ones are tried once more.
                planned = candidate
                larger = [size for size in larger if size > micro_batch]
            else:
                planned = candidate
                larger = []
        return planned, fast_micro_batch

    def _fast_micro_batch(self, planned: _PlannedCombination) -> int:
        """Return the smallest micro-batch with which computing a pass hides its communication and kernel starts.

        On CPUs, where no times are estimated, return the largest micro-batch up to DEFAULT_MICRO_BATCH.
        """
        if not self.is_gpu:
            return max(
                [size for size in self.micro_batches if size <= DEFAULT_MICRO_BATCH], default=planned.micro_batch
            )
        spec = self._spec_with(self.spec, planned.values, planned.micro_batch)
        time = estimate_step(planned.step, spec.sizes, self.hardware)
        num_passes = spec.sizes.accumulation
        seconds_per_row = (time.arithmetic + time.memory) / (num_passes * planned.micro_batch)
        overhead_per_pass = max(time.hidden, planned.step.num_kernels * LAUNCH_SECONDS) / num_passes
        for size in self.micro_batches:
            if size * seconds_per_row >= HIDING_FACTOR * overhead_per_pass:
                return size
        return self.rows

    def _least_memory(self, values: Values) -> _PlannedCombination:
        """Return the combination with the least memory. It may use the memory that a choice usually leaves free.

        Raises:
            TooLarge: If it needs more than the devices have.
        """
        (planned,) = self._plan([(values, self.smallest_micro_batch)])
        host_bytes = planned.step.host_activations + planned.step.host_optimizer_bytes
        if planned.step.peak <= self.memory and host_bytes <= self.host_budget / (1 - FREE_SHARE):
            return planned
        host = ""
        if host_bytes > self.host_budget:
            host = f"; it also needs {gib(host_bytes)} of the host's memory for each rank"
        settings = " ".join(format_overrides({MICRO_BATCH: planned.micro_batch} | dict(values)))
        changes = [f"{overrides} (peak {gib(peak)})" for overrides, peak in islice(self._changes_that_fit(planned), 2)]
        fix = f"what fits: {', or '.join(changes)}" if changes else "use a smaller model, or more devices"
        raise TooLarge(
            f"this does not fit: the smallest planned peak is {gib(planned.step.peak)} ({settings}), and a device has "
            f"{gib(self.memory)}{host}; {fix}"
        )

    def _changes_that_fit(self, planned: _PlannedCombination) -> Iterator[tuple[str, int]]:
        """Yield overrides with which `planned` would fit, each with its peak: the smallest change first.

        At most one change of each kind is yielded.
        """
        step = planned.step
        kinds = [*self._adapter_changes(), self._shorter_rows(step), self._more_ranks(step)]
        for changes in kinds:
            for change in changes:
                peak = self._peak_with(change, planned.values)
                if peak is not None:
                    yield change.overrides, peak
                    break

    def _adapter_changes(self) -> list[list[_Change]]:
        """Return the changes to LoRA and to LoRA on weights in 4 bits, unless the recipe has them already."""
        recipe = self.recipe
        lora = recipe.lora or Lora()
        nf4 = replace(lora, quantize="nf4")
        kinds = []
        if recipe.lora is None:
            kinds.append([_Change("lora={}", replace(recipe, lora=lora), self.world_size)])
        if nf4 != recipe.lora:
            kinds.append([_Change("lora.quantize=nf4", replace(recipe, lora=nf4), self.world_size)])
        return kinds

    def _shorter_rows(self, step: Step) -> list[_Change]:
        """Return changes to shorter rows, without those that cannot fit by a lower bound of the peak.

        Shorter rows do not reduce parameters and optimizer state, and reduce the rest of the peak at most in proportion
        to the length of a row, or to its square if attention needs a mask.
        """
        length = self.recipe.data.max_length
        always = step.parameters + step.optimizer_state  # without gradients, which may not exist yet at the peak
        has_mask = max_masked_row_length(self.spec.recipe, self.spec.precision, self.spec.world.device_type) is not None
        exponent = 2 if has_mask else 1
        changes = []
        for part in (2, 4, 8):
            lower_bound = max(step.resident, always + (step.peak - always) / part**exponent)
            if lower_bound <= self.budget:
                shorter = replace_keys(self.recipe, {"data.max_length": length // part})
                changes.append(_Change(f"data.max_length={length // part}", shorter, self.world_size))
        return changes

    def _more_ranks(self, step: Step) -> list[_Change]:
        """Return changes to more ranks, without those that cannot fit by a lower bound of the peak.

        More ranks reduce parameters, gradients and optimizer state at most in proportion to their number. With more
        ranks there are fewer micro-batches, and a single micro-batch keeps no unsharded gradients. The peak may
        therefore shrink by more than the factor, and only the resident bytes give a bound.
        """
        changes = []
        for factor in (2, 4, 8):
            num_ranks = self.world_size * factor
            if step.resident <= factor * self.budget:
                changes.append(_Change(f"launch.nproc={num_ranks}", self.recipe, num_ranks))
        return changes

    def _peak_with(self, change: _Change, values: Values) -> int | None:
        """Plan a change with `values` and the smallest micro-batch. Return its peak, or None if it does not fit."""
        hardware = self.hardware if self.is_gpu else None
        try:
            recipe = replace_keys(change.recipe, values)
            spec = resolve_plan(recipe, change.num_ranks, self.spec.world.device_type, hardware)
            (step,) = plan_steps([self._spec_with(spec, {}, self.smallest_micro_batch)])
        except RecipeError:  # the change is refused for another reason
            return None
        return step.peak if self._fits(step) else None

    def _lines(self, planned: _PlannedCombination, values: Values, fast_micro_batch: int) -> Iterator[str]:
        """Yield lines for the terminal about the choice."""
        if MICRO_BATCH in values:
            if planned.micro_batch == self.rows:
                reason = "all rows of a rank"
            elif planned.micro_batch >= fast_micro_batch:
                reason = "more would not be faster"
            else:
                reason = "more do not fit"
            (choice,) = format_choices(self.spec.original_recipe, {MICRO_BATCH: planned.micro_batch})
            yield f"{choice} (auto): {reason}"
        usual: dict[str, Any] = {}
        for_memory: dict[str, Any] = {}
        for key, value in values.items():
            if key != MICRO_BATCH:
                (usual if value == FASTEST_VALUES[key] else for_memory)[key] = value
        for override in format_overrides(for_memory):
            yield f"{override} (auto): to save memory"
        if usual:
            yield f"{', '.join(format_overrides(usual))} (auto)"
        yield f"planned peak {gib(planned.step.peak)} of {gib(self.memory)}"


def _is_tiled(values: Values) -> bool:
    return values.get("train.tile", "none") != "none"
