"""Sizes that a recipe leaves to `auto`: what the plan chooses, what needs none, and what a run does with them."""

import json
from collections import Counter

import pytest

import dtrain
from dtrain.base.errors import UserError
from dtrain.commands.plan.choose import FREE_SHARE, TooLarge, choose
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.memory import Phase
from dtrain.commands.plan.plan import make_plan, resolve_plan
from dtrain.commands.plan.step import Step
from dtrain.launch.devices import resolve_nproc
from dtrain.memory.low_bit_adam import moment_kind
from dtrain.recipe.world import FASTEST_VALUES, replace_auto, replace_keys, unresolved_auto_keys
from dtrain.training import load_recipe
from dtrain.training.directory import ABOUT
from dtrain.training.inputs import RunInputs, World
from dtrain.training.sizing import (
    MACHINE,
    Sizing,
    describe_machine,
    previous_sizing,
    share_sizing,
    sizing_with_plan,
    small_model_sizing,
)
from tests.tiny import tiny_recipe, write_model

H100 = GPUS["h100"]
AUTO = [f"{key}=auto" for key in FASTEST_VALUES]
ROWS = ["data.max_length=512", "train.global_batch=2", "train.dtype=bfloat16"]
LADDER = [
    {},
    {"train.activation_checkpointing": "selective"},
    {"train.activation_checkpointing": "full"},
]


def peak_of(recipe, values, micro=1):
    return make_plan(replace_keys(replace_auto(recipe), {**values, "train.micro_batch": micro}), 1, H100).step.peak


def memory_for(peak):
    """Memory of a device of which `peak` leaves the share that a choice leaves free."""
    return int(peak / (1 - FREE_SHARE)) + 1


@pytest.mark.slow
@pytest.mark.processes
def test_the_first_combination_that_fits_is_chosen(tmp_path):
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false", "train.micro_batch=1")
    peaks = [peak_of(recipe, values) for values in LADDER]
    assert peaks == sorted(peaks, reverse=True)
    for values, peak in zip(LADDER[1:], peaks[1:], strict=True):
        choice = choose(resolve_plan(recipe, 1, "cuda", H100), memory_for(peak), H100)
        assert (
            choice.values == {key: FASTEST_VALUES[key] for key in unresolved_auto_keys(recipe)} | values
            and choice.peak == peak
        )
        kind = values["train.activation_checkpointing"]
        assert f"train.activation_checkpointing={kind} (auto): to save memory" in choice.lines


@pytest.mark.slow
@pytest.mark.processes
def test_rows_are_added_to_a_micro_batch_while_they_make_the_step_faster_and_fit(tmp_path):
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false")
    peaks = {micro: peak_of(recipe, {}, micro) for micro in (1, 2)}
    plenty = choose(resolve_plan(recipe, 1, "cuda", H100), H100.budget, H100)
    assert plenty.values["train.micro_batch"] == 2 and plenty.peak == peaks[2]  # its kernels are short
    assert "train.micro_batch=2 (auto): all rows of a rank" in plenty.lines
    recipe = load_recipe(recipe, ["train.activation_checkpointing=none"])
    fewer = choose(resolve_plan(recipe, 1, "cuda", H100), memory_for(peaks[1]), H100)
    assert fewer.peak == peaks[1] and "train.micro_batch=1 (auto): more do not fit" in fewer.lines


@pytest.mark.slow
@pytest.mark.processes
def test_where_nothing_fits_the_nearest_ways_are_named(tmp_path):
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false")
    least = peak_of(recipe, {"train.activation_checkpointing": "full"})
    with pytest.raises(TooLarge, match="this does not fit: .* what fits: ") as caught:
        choose(resolve_plan(recipe, 1, "cuda", H100), int(least * 0.6), H100)
    ways = str(caught.value).split("what fits: ")[1].split(", or ")
    assert 1 <= len(ways) <= 2
    other = load_recipe(recipe, [*ways[0].split(" (peak")[0].split(), "train.activation_checkpointing=full"])
    by_one = replace_auto(replace_keys(other, {"train.micro_batch": 1}))
    assert make_plan(by_one, other.launch.num_processes, H100).step.peak < least


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_what_visits_the_device_at_the_step_costs_the_time_of_its_link(tmp_path, state):
    model = f"model.path={write_model(tmp_path / 'model', 'llama', hidden_size=64, intermediate_size=128)}"
    words = [*ROWS, model, "parallel.optimizer_offload=true", f"optimizer.state={state}"]
    plan = make_plan(replace_auto(tiny_recipe(tmp_path, *words)), 1, H100)
    weights = plan.spec.model.named_parameters()
    moments = {"float32": 8, "bfloat16": 4}  # bytes of two; embeddings' and small tensors' stay float32
    expected = sum(weight.numel() * (4 + moments[moment_kind(name, weight.shape, state)]) for name, weight in weights)
    assert plan.step.host_optimizer_bytes == expected
    assert plan.time.optimizer == pytest.approx(plan.step.host_optimizer_bytes / (H100.host * 0.8))
    assert make_plan(replace_auto(tiny_recipe(tmp_path, *ROWS)), 1, H100).step.host_optimizer_bytes == 0


def test_small_models_on_a_cpu_need_no_plan(tmp_path):
    recipe = tiny_recipe(tmp_path, *AUTO)
    assert small_model_sizing(RunInputs.of(recipe, World(2)), 2**34).values == FASTEST_VALUES
    assert small_model_sizing(RunInputs.of(recipe, World(2)), 2**24) is None
    assert small_model_sizing(RunInputs.of(load_recipe(recipe, ["data.max_length=100000"]), World(2)), 2**34) is None


def test_a_batch_decides_how_many_rows_are_usual(tmp_path):
    for total, ranks, micro in [(8, 1, 4), (6, 1, 3), (8, 4, 2), (7, 1, 1), (2, 1, 2)]:
        recipe = tiny_recipe(tmp_path, "train.micro_batch=auto", f"train.global_batch={total}")
        assert RunInputs.of(recipe, World(ranks)).recipe.train.num_micro_batch_rows == micro


def test_a_run_keeps_what_it_chose_on_the_same_machine_alone(tmp_path):
    recipe = tiny_recipe(tmp_path, *AUTO)
    values = FASTEST_VALUES | {"train.micro_batch": 2, "train.activation_checkpointing": "full"}
    machine = describe_machine(1, "cpu", 2**34)
    spec = RunInputs.of(recipe, World(1))
    assert previous_sizing(spec, machine) is None
    spec.run.path.mkdir(parents=True)
    spec.run.config.write_text(dtrain.recipe.to_yaml(replace_keys(recipe, values)))
    (spec.run.path / ABOUT).write_text(json.dumps({MACHINE: machine}))
    assert previous_sizing(spec, machine).values == values
    assert previous_sizing(RunInputs.of(load_recipe(recipe, ["train.steps=20"]), World(1)), machine).values == values
    assert previous_sizing(spec, describe_machine(1, "cpu", 2**33)) is None
    assert previous_sizing(spec, describe_machine(2, "cpu", 2**34)) is None
    assert previous_sizing(RunInputs.of(load_recipe(recipe, ["data.max_length=16"]), World(1)), machine) is None
    assert previous_sizing(RunInputs.of(load_recipe(recipe, ["checkpoint.resume=null"]), World(1)), machine) is None


class Store(dict):
    """A store of one process."""

    def set(self, key, value):
        self[key] = value.encode()

    get = dict.__getitem__


def test_all_ranks_get_what_the_first_one_decides(tmp_path):
    recipe, store = tiny_recipe(tmp_path, *AUTO), Store()
    sizing = Sizing(FASTEST_VALUES | {"train.micro_batch": 1}, ("why",))
    first = share_sizing(recipe, 0, 0, store, lambda: sizing)
    second = share_sizing(recipe, 1, 0, store, lambda: pytest.fail("only the first rank decides"))
    assert first == second and first[0].train.micro_batch == 1 and first[1] == ("why",)

    def refuse():
        raise UserError("too large")

    for rank in range(2):
        with pytest.raises(UserError, match="too large"):
            share_sizing(recipe, rank, 1, store, refuse)


def test_without_a_plan_little_memory_is_taken(tmp_path):
    recipe = tiny_recipe(tmp_path, *AUTO)
    sizing = sizing_with_plan(recipe, describe_machine(1, "NVIDIA H100", 2**36), 2**36, None)
    assert sizing.values["train.micro_batch"] == 1 and sizing.values["train.activation_checkpointing"] == "full"


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_little_memory_has_its_sizes_from_the_plan(tmp_path, monkeypatch, capfd):
    recipe = tiny_recipe(tmp_path, *AUTO, "train.steps=2", "train.compile=auto")
    small = replace_keys(replace_auto(recipe), {"train.micro_batch": 1, "launch.device": "cpu"})
    peak = make_plan(small, 1, H100).step.peak
    monkeypatch.setattr("dtrain.launch.rank.free_host_memory", lambda *_: memory_for(peak))
    result = dtrain.run(recipe)
    assert "planned peak" in capfd.readouterr().err
    saved = load_recipe(result.directory / "config.yaml")
    assert unresolved_auto_keys(saved) == [] and saved.train.num_micro_batch_rows < 4 and saved.train.compile is False


def test_layers_are_compiled_on_gpus_that_can(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, "train.compile=auto")
    for spec, is_here, device, is_compiled in [
        (None, True, "cuda", False),
        (None, False, "cuda", True),  # a plan's
        ("triton", True, "cuda", True),
        ("triton", True, "cpu", False),
    ]:
        monkeypatch.setattr("dtrain.recipe.world.find_spec", {"triton": spec}.get)
        assert RunInputs.of(recipe, World(1, device, is_here)).recipe.train.compile is is_compiled
    written = tiny_recipe(tmp_path, "train.compile=true")
    assert RunInputs.of(written, World(1)).recipe.train.compile is True and replace_auto(recipe).train.compile is False


def test_processes_are_those_of_the_devices(monkeypatch):
    recipe = load_recipe({"launch": {"nproc": "auto"}})
    assert recipe.launch.num_processes == 1
    for count, expected in [(0, 1), (1, 1), (3, 2), (8, 8)]:  # 3 cannot share 64 rows
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert resolve_nproc(recipe).launch.nproc == expected
    assert resolve_nproc(load_recipe(recipe, ["parallel.tp=3", "train.global_batch=6"])).launch.nproc == 6
    assert resolve_nproc(load_recipe(recipe, ["launch.device=cpu"])).launch.nproc == 1


class Planned:
    """Plans of no step: peaks of a row and the host's bytes by the place of a combination in a ladder of six, and what
    a rank holds alike, its gradients among it."""

    def __init__(self, peaks, held, gradients=0, host=(0,) * 6):
        self.peaks, self.held, self.gradients, self.host, self.seen = peaks, held, gradients, host, []

    def __call__(self, specs):
        return [self.step(spec.recipe) for spec in specs]

    def place(self, values):
        place = ["none", "selective", "full"].index(values["train.activation_checkpointing"])
        tile = values["train.tile"]
        return place + (0 if tile == "none" else 1 + values["train.activation_offload"] + (tile == "all"))

    def step(self, recipe):
        place = self.place({f"train.{key}": value for key, value in vars(recipe.train).items()})
        self.seen.append((place, recipe.data.max_length, recipe.lora is not None))
        parts = Counter(dict.fromkeys(["activations", "loss", "temporaries"], 0))
        fixed, peak = (
            (self.held - self.gradients, 0, self.gradients, 0, 0),
            self.peaks[place] * recipe.train.num_micro_batch_rows,
        )
        return Step(*fixed, peak, parts, Phase("update"), 0, {}, {}, 0, 1, host_activations=self.host[place])


@pytest.mark.parametrize("fitting", range(6))
def test_few_combinations_are_planned_and_each_once(tmp_path, monkeypatch, fitting):
    planned = Planned([90 if place < fitting else 10 for place in range(6)], held=10)
    monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false", "train.micro_batch=1")
    choose(resolve_plan(recipe, 1, "cuda", H100), 50, H100)
    assert len(planned.seen) == len({*planned.seen}) <= 4
    assert planned.seen[0][0] == 2  # full checkpointing decides most often, and tiles take long to plan


def test_nothing_is_planned_for_a_cpu_to_compare_times(tmp_path, monkeypatch):
    planned = Planned([90, 40, 30, 20, 20, 10], held=10)
    monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS)
    choice = choose(resolve_plan(recipe, 1, "cpu", None), 50)
    assert planned.place(choice.values) == 1 and choice.values["train.micro_batch"] == 1
    assert 5 not in {place for place, *_ in planned.seen}


@pytest.mark.parametrize("cores", [1, 2, 4, 8])
def test_a_choice_is_the_same_for_any_number_of_processors(tmp_path, monkeypatch, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(cores)}, raising=False)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false", "train.micro_batch=1")
    spec = resolve_plan(recipe, 1, "cuda", H100)
    rising = [0, 0, 0, 0, 100, 100]
    for peaks, host, place in [
        ([90, 90, 90, 40, 30, 20], rising, 3),
        ([90, 40, 40, 40, 30, 20], rising, 1),
        ([50, 45, 40, 30, 30, 20], [100, 60, 20, 20, 20, 20], 2),  # as with activation_offload=true
        ([90, 90, 90, 90, 30, 20], rising, None),
    ]:
        planned = Planned(peaks, held=10, host=host)
        monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
        if place is None:  # what fits on the device takes too much of the host
            with pytest.raises(TooLarge, match="it also needs .* for each rank; use a smaller model, or more devices"):
                choose(spec, 60, H100, host=50)
        else:
            assert planned.place(choose(spec, 60, H100, host=50).values) == place


def test_nothing_is_planned_that_holds_too_much_alike(tmp_path, monkeypatch):
    planned = Planned([90] * 6, held=80)
    monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false", "train.micro_batch=1")
    with pytest.raises(TooLarge, match="the smallest planned peak is"):
        choose(resolve_plan(recipe, 1, "cuda", H100), 50, H100)
    assert {length for _, length, _ in planned.seen} == {512}  # shorter rows hold as much
    assert [place for place, _, adapted in planned.seen if not adapted][:2] == [2, 5]  # then more devices, of two on


def test_shorter_rows_are_planned_where_the_peak_may_have_no_gradients(tmp_path, monkeypatch):
    planned = Planned([90] * 6, held=40, gradients=30)
    monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "parallel.optimizer_offload=false", "train.micro_batch=1")
    with pytest.raises(TooLarge):
        choose(resolve_plan(recipe, 1, "cuda", H100), 50, H100)
    assert {length for _, length, _ in planned.seen} == {512, 128, 64}  # of 90 a half of 80 would be too much


def test_beside_the_least_that_takes_too_much_only_more_devices_are_planned(tmp_path, monkeypatch):
    planned = Planned([90] * 6, held=10)
    monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "train.micro_batch=1")
    with pytest.raises(TooLarge, match="the smallest planned peak is"):
        choose(resolve_plan(recipe, 1, "cuda", H100), 50, H100)
    as_it_is = [place for place, length, adapted in planned.seen if length == 512 and not adapted]
    assert as_it_is == [2, 5, 5]  # and that on 2 devices, which have fewer micro-batches: of 4 each would have no row


@pytest.mark.slow
@pytest.mark.processes
def test_more_devices_are_named_where_one_micro_batch_keeps_no_unsharded_gradients(tmp_path):
    recipe = tiny_recipe(
        tmp_path, "train.micro_batch=auto", "train.global_batch=4", "train.activation_checkpointing=full"
    )
    plans = {
        ranks: make_plan(replace_auto(replace_keys(recipe, {"train.micro_batch": 1})), ranks, H100) for ranks in (2, 4)
    }
    two, four = plans[2].step, plans[4].step
    assert two.resident / 2 + two.peak - two.resident > four.peak  # what comes and goes shrinks
    with pytest.raises(TooLarge, match="what fits: .*launch.nproc=4 "):
        choose(resolve_plan(recipe, 2, "cuda", H100), memory_for(four.peak), H100)


def test_the_offload_of_the_optimizer_is_not_planned_where_it_saves_too_little(tmp_path, monkeypatch):
    planned = Planned([90, 90, 90, 90, 40, 10], held=10)
    monkeypatch.setattr("dtrain.commands.plan.choose.plan_steps", planned)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    recipe = tiny_recipe(tmp_path, *AUTO, *ROWS, "train.micro_batch=1")
    choose(resolve_plan(recipe, 1, "cuda", H100), 50, H100)
    # With the offload: the first 5, which is the least, and the second 4.
    assert [place for place, *_ in planned.seen] == [2, 5, 4, 3, 4, 5]
