"""The table of fields beside the rows that runs of every method write."""

import pytest

from dtrain.commands.report.charts import charts_of
from dtrain.training import METHODS, method_class
from dtrain.training.metrics.records import EVALUATION, FIELDS, find_field
from tests.methods import test_distill, test_dpo_runs, test_kto, test_on_policy, test_reward
from tests.running import metrics, run
from tests.tiny import tiny_grpo, tiny_recipe, write_prompts

SHORT = ("train.steps=3", "train.validate_every=3")
RARE = {"mfu", "moe_load", "moe_idle", "shared_tokens"}
ELSEWHERE = {  # fields that no run here writes: what they need is in `where`
    "dpo": {"pair_weight"},
    "grpo": {"lost_frac", "environment/NAME", "tool_calls", "tool_failures", "off_policy_frac", "val_loss"}
    | {"router_replay_differs"},
}


def writes(method, field):
    """A method writes its own fields, and those that are no method's."""
    own = method_class(method).measures
    return field.name in own or not any(field.name in method_class(name).measures for name in METHODS)


def recipes(root, method):
    """One or more of the method, with a validation on the training data."""

    def with_val(make, *given, **options):
        path = make(*given, **options).data.train.path
        return make(*given, f"data.val.path={path}", **options)

    if method == "reward":
        tasks = "pairs", "classes", "numbers"
        return [with_val(test_reward.recipe_at, root, task, *SHORT, name=task) for task in tasks]
    if method == "grpo":
        rewards = "grpo.rewards=[{fn: tests.methods.judges.even}, {fn: tests.methods.judges.wanted}]"
        return [with_val(tiny_grpo, root, rewards, "grpo.beta=0.1", *SHORT)]
    if method == "distill":
        shapes = {"all": (), "top": ("distill.top_k=3",)}
        drawn = with_val(test_on_policy.recipe_at, root, *SHORT, name="drawn")
        return [drawn, *(with_val(test_distill.recipe_at, root, *SHORT, *more, name=n) for n, more in shapes.items())]
    make = {"sft": tiny_recipe, "dpo": test_dpo_runs.recipe_of, "kto": test_kto.recipe_of}[method]
    return [with_val(make, root, *SHORT)]


@pytest.mark.processes
@pytest.mark.parametrize("method", METHODS)
def test_runs_write_the_fields_of_the_table_and_no_others(tmp_path, method):
    written = {name for recipe in recipes(tmp_path, method) for row in metrics(run(recipe)) for name in row}
    known = {name: find_field(name) for name in written}
    assert [name for name, one in known.items() if one is None or not writes(method, one)] == []
    promised = {one.name for one in FIELDS if writes(method, one)} - RARE - ELSEWHERE.get(method, set())
    assert promised - {one.name for one in known.values()} == set()


@pytest.mark.processes
def test_evaluations_write_the_fields_of_the_table(tmp_path):
    write_prompts(tmp_path / "asked.jsonl", count=4)
    judged = "eval.rewards=[{fn: tests.methods.judges.even}, {fn: tests.methods.judges.wanted}]"
    shape = (f"eval.path={tmp_path}/asked.jsonl", judged, "eval.sampling.max_new_tokens=4")
    rows = metrics(run(tiny_recipe(tmp_path, *shape, "train.steps=1", "scheduler.warmup_steps=0")))
    names = {name.removeprefix("eval_") for row in rows for name in row if name.startswith("eval_")}
    families = {name.partition("/")[0] + "/NAME" if "/" in name else name for name in names}
    assert {"pass@K" if name.startswith("pass@") else name for name in families} == {one.name for one in EVALUATION}


def test_the_table_knows_the_methods_and_what_reports_read():
    assert len({one.name for one in FIELDS}) == len(FIELDS)
    for method in map(method_class, METHODS):
        assert all(find_field(name) is not None for name in (*method.measures, *method.curves))
    titles = {chart.lines[0][0]: (chart.title, chart.unit) for chart in charts_of(one.name for one in FIELDS)}
    assert titles["mem_gib"] == ("Peak memory of rank 0", "GiB")
    assert titles["forward_kl"] == ("KL(teacher ‖ student)", "nats")
