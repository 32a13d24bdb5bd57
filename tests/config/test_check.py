"""Checks of keys against one another, and in a world of so many processes."""

import pytest

from dtrain import recipe as config
from dtrain.base.ranges import find_out_of_range
from dtrain.optim.update import SCHEDULES
from dtrain.policy.optimizer import OPTIMIZER_NAMES
from dtrain.recipe import schema
from dtrain.training import SECTIONS, load_recipe
from tests.tiny import check

FOUR = "train.micro_batch=4"
WHOLE = {"model": {"path": "m"}, "data": {"train": {"path": "t.jsonl"}}, "train": {"steps": 10}}


def problems(world_size, *overrides):
    return check(load_recipe(WHOLE, overrides), world_size)


def test_a_whole_recipe_has_no_problem():
    for world_size in (1, 2, 4, 16):
        assert problems(world_size) == []
    assert problems(1, "sft.label_smoothing=0.1") == []
    assert problems(1, "optimizer.name=muon", "optimizer.lr=0", "optimizer.adam_lr=1e-3") == []
    assert problems(1, "optimizer.name=torch.optim.SGD", "optimizer.lr=0", "optimizer.kwargs={lr: 0.1}") == []


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize(("total", "micro"), [(64, 4), (8, 1), (24, 3)])
def test_accumulation_is_derived_or_refused_with_sizes_that_fit(world_size, total, micro):
    recipe = load_recipe(WHOLE, [f"train.global_batch={total}", f"train.micro_batch={micro}"])
    errors = check(recipe, world_size)
    if total % (micro * world_size) == 0:
        sizes = config.derive_sizes(recipe, world_size)
        assert errors == [] and sizes.dp == world_size
        assert sizes.global_batch == sizes.micro_batch * sizes.accumulation * sizes.dp
        return
    assert len(errors) == 1
    proposals = errors[0].rstrip(".").split(". Set ")[1].replace(" or ", ", ").split(", ")
    assert proposals
    for proposal in proposals:
        assert check(load_recipe(recipe, [proposal]), world_size) == []


def test_a_batch_smaller_than_the_ranks_is_answered_with_what_fits():
    assert problems(4, "train.global_batch=2", "train.micro_batch=1") == [
        "train.global_batch=2 is not micro_batch × accumulation × dp: micro_batch 1 × dp 4 = 4 does not divide it. "
        "Set train.global_batch=4."
    ]


@pytest.mark.parametrize(
    ("world_size", "overrides", "answer"),
    [
        (4, ["parallel.dp_shard=3"], "dp_shard 3 × dp_replicate 1 × cp 1 × tp 1 = 3 is not 4 processes"),
        (4, ["parallel.dp_shard=3"], "Set parallel.dp_shard=4 or -1, or launch.nproc=3"),
        (3, ["parallel.tp=2"], "= 2 does not divide 3 processes"),
        (1, ["parallel.dp_shard=0"], "parallel.dp_shard=0 must be at least 1, or -1"),
        (1, ["sft.label_smoothing=1"], "sft.label_smoothing=1.0 must be from 0 to below 1"),
        (
            1,
            ["sft.label_smoothing=0.1", "sft.loss=dft"],
            "has no meaning for sft.loss=dft. Leave it out, or set sft.loss",
        ),
        (1, ["sft.loss=ddft"], "sft.loss=ddft is not a loss of tokens; did you mean dft?"),
        (1, ["sft.kwargs.gamma=2"], "sft.kwargs.gamma is not read by sft.loss=nll. Leave it out"),
        (1, ["train.steps=10", "train.epochs=1"], "train.steps=10 and train.epochs=1 exclude each other"),
        (1, ["train.steps=null"], "train.steps or train.epochs is missing"),
        (1, ["model.path=null"], "model.path is missing"),
        (1, ["data.train.path=null"], "data.train.path is missing"),
        (1, ["data.train.sources=[]"], "data.train.sources is empty"),
        (1, ["data.train.sources=[{weight: -1}]"], "data.train.sources[0].path is missing"),
        (1, ["data.train.sources=[{weight: -1}]"], "data.train.sources[0].weight=-1.0 must be"),
        (1, ["data.val={format: text}"], "data.val.path is missing"),
        (1, ["train.validate_every=5"], "train.validate_every=5 needs a validation set"),
        (1, ["run.name=a/b"], "run.name=a/b is not the name of one directory"),
        (
            1,
            ["optimizer.name=admaw"],
            "optimizer.name=admaw is not one of adamw, adam, sgd, adafactor, muon. Did you mean",
        ),
        (1, ["optimizer.name=AdamW"], "Did you mean adamw?"),
        (1, ["scheduler.name=cosin"], "scheduler.name=cosin is not one of constant, cosine, linear, wsd. Did you mean"),
        (1, ["scheduler=[{name: linear},{name: x}]"], "scheduler[1].name=x is not one of"),
        (1, ["scheduler=[{name: linear},{name: cosine}]"], "scheduler[0].steps is missing. Set it; only the last"),
        (1, ["scheduler=[]"], "scheduler=[] has no stages"),
        (1, ["scheduler.min_lr_ratio=2"], "scheduler.min_lr_ratio=2.0 must be from 0 to 1"),
        (1, ["scheduler.warmup_steps=-1"], "scheduler.warmup_steps=-1 must be at least 0"),
        (1, ["optimizer.lr=.nan"], "optimizer.lr=nan must be a finite number"),
        (1, ["optimizer.betas=[0.9]"], "optimizer.betas=[0.9] must be two numbers"),
        (1, ["train.max_grad_norm=0"], "train.max_grad_norm=0.0 must be more than 0, or null"),
        (1, ["checkpoint.allow_changes=[optimzer]"], "optimzer is not a key of a recipe; did you mean optimizer?"),
        (1, ["method=grpo", "train.global_batch=48"], "Set train.global_batch=16 or 128"),
        (1, ["method=grpo", "grpo.group_size=1", "train.global_batch=16"], "grpo.group_size=1 with grpo.advantage"),
        (1, ["method=grpo", "grpo.scale=leave_one_out", "grpo.group_size=2"], "leaves fewer than two of them"),
        (1, ["method=grpo", "data.max_length=512"], "grpo.sampling.max_new_tokens=512 leaves no room for a prompt"),
        (1, ["method=grpo", "grpo.loss=gsop"], "grpo.loss=gsop is not a policy loss; did you mean gspo?"),
        (1, ["method=grpo", "grpo.sampling.temperature=0"], "grpo.sampling.temperature=0.0 must be a finite"),
        (1, ["method=grpo", "grpo.sampling.temperature=1e-50"], "grpo.sampling.temperature=1e-50 must be a finite"),
        (1, ["method=grpo", f"grpo.sampling.top_k={2**70}"], "must be at least 1, below 2**31"),
        (1, ["method=grpo", f"grpo.beta={10**400}"], "grpo.beta=inf must be a finite number"),
        (1, ["method=grpo", "grpo.beta=1e20"], "at least 0, from 1e-10 to 1e+10 in size"),
        (1, ["method=grpo", "grpo.kwargs={old_kl_coef: 1e-12}"], "old_kl_coef=1e-12 must be a finite number"),
        (1, ["method=dpo", "dpo.beta=1e300"], "above 0, from 1e-10 to 1e+10 in size"),
        (1, ["method=dpo", "dpo.sft_weight=1e300"], "dpo.sft_weight=1e+300 must be"),
        (1, ["method=distill", "distill.temperature=1e-300"], "distill.temperature=1e-300 must be"),
        (1, ["method=grpo", "grpo.reward_model={path: a, weight: .nan}"], "grpo.reward_model.weight=nan must be a fin"),
        (1, ["method=grpo", "grpo.rewards=[{weight: 1e300}]"], "weight=1e+300 must be a finite number, from 1e-10"),
        (1, ["method=grpo", "grpo.rewards=[{weight: 2}]"], "grpo.rewards[0].fn is missing"),
        (1, ["method=grpo", "grpo.rewards=[{fn: math_exct}]"], "did you mean math_exact?"),
        (1, ["method=grpo", "grpo.engine=http"], "grpo.engine=http needs grpo.server.urls"),
        (1, ["method=grpo", "grpo.max_off_policy_steps=1"], "needs grpo.engine=http"),
        (1, ["method=grpo", "grpo.router_replay=true"], "with grpo.engine=native the same router samples and trains"),
        (2, ["method=grpo", "grpo.cuda_graphs=true", "parallel.tp=2"], "parallel.tp=2 sends within every layer"),
        (1, ["method=grpo", "grpo.cuda_graphs=true", "grpo.unshard=false"], "and grpo.unshard=false gathers weights"),
        (1, ["method=grpo", "grpo.cuda_graphs=true", "launch.device=cpu"], "and launch.device=cpu has none"),
        (1, ["method=grpo", "grpo.cuda_graphs=true", "grpo.engine=http"], "and grpo.engine=http does not decode here"),
        (
            1,
            ["method=grpo", "grpo.max_off_policy_steps=1", "grpo.engine=http", "grpo.server.urls=[http://a:1]"],
            "less than the 2 optimizer steps of a rollout",
        ),
        (1, ["method=grpo", "grpo.sync_every=4"], "grpo.beta=0 keeps none"),
        (1, ["method=grpo", "data.train.format=text"], "method=grpo draws its own answers to prompts"),
        (1, ["method=grpo", "checkpoint.keep_best=val_loss"], "by method=grpo. Use loss or val_reward_mean"),
        (1, ["data.train.format=question"], "a question has no answer to train on"),
        (1, ["parallel.reshard_after_forward=often"], "reshard_after_forward=often must be default, true or false"),
        (1, ["parallel.custom_plan={}"], "parallel.custom_plan={} must be a table"),
        (4, ["parallel.cp=4", "data.max_length=7"], "parallel.cp=4 cuts a sequence into 8 chunks"),
        (4, ["parallel.cp=4", "data.max_length=7"], "Set data.max_length=8 or more, or parallel.cp=3 or less"),
        (
            1,
            ["data.train.path=a.jsonl", "data.train.sources=[{path: a.jsonl}]"],
            "data.train.path and data.train.sources are both set",
        ),
        (1, ["checkpoint.keep_every=0"], "checkpoint.keep_every=0 must be at least 1, or null"),
        (1, ["checkpoint.keep_best=val_loss"], "checkpoint.keep_best=val_loss needs a validation set"),
        (
            1,
            ["checkpoint.keep_best=loos"],
            "checkpoint.keep_best=loos is not one of val_loss, loss, val_reward_mean or null",
        ),
        (
            1,
            ["checkpoint.keep_best=val_loss", "train.validate_every=null", "data.val=9"],
            "=null. Set train.validate_every=100",
        ),
        (1, ["data.train.format=preference"], "method=sft does not train on pairs; set method=dpo"),
        (1, ["method=dpo", "data.train.format=messages"], "method=dpo trains on pairs; set it to preference"),
        (1, ["method=dpo", "dpo.loss=sigmoyd"], "dpo.loss=sigmoyd is not a preference loss; did you mean sigmoid?"),
        (1, ["method=dpo", "dpo.loss=[sigmoid,hinge]", "dpo.loss_weights=[1]"], "1 numbers for 2 losses"),
        (1, ["method=dpo", "dpo.loss=hinge", "dpo.label_smoothing=0.1"], "dpo.label_smoothing is not read by hinge"),
        (1, ["method=dpo", "dpo.kwargs.gamma=1", "dpo.loss=simpo"], "dpo.kwargs.gamma is not read by simpo. Did you"),
        (1, ["method=dpo", "dpo.kwargs.gamma=1", "dpo.loss=simpo"], "Did you mean dpo.kwargs.simpo_gamma?"),
        (1, ["method=dpo", "dpo.beta=0"], "dpo.beta=0.0 must be a finite number above 0"),
        (1, ["method=dpo", "data.loss_on=all"], "data.loss_on=all has no effect with method=dpo"),
        (1, ["method=dpo", "dpo.ld_alpha=2"], "dpo.ld_alpha=2.0 must be from 0 to 1"),
        (1, ["method=dpo", "dpo.reference=none", "dpo.sync_every=5"], "dpo.sync_every=5 needs a reference"),
        (1, ["method=dpo", "dpo.precompute=true", "dpo.sync_every=5"], "dpo.sync_every=null or dpo.precompute=false"),
    ],
)
def test_each_mistake_is_named_with_its_fix(world_size, overrides, answer):
    assert answer in "\n".join(problems(world_size, *overrides))


def test_problems_come_together():
    errors = problems(3, "parallel.tp=2", "model.path=null", "optimizer.lr=-1", "optimizer.eps=-1", "train.steps=0")
    assert len(errors) == 5


def test_what_recipes_may_switch_off_passes():
    assert (
        problems(1, "train.max_grad_norm=null", "checkpoint.every=null", "checkpoint.keep_last=null", "data.val=null")
        == []
    )
    assert problems(1, "optimizer.name=torch.optim.Adagrad", "checkpoint.allow_changes=[optimizer.lr,data]") == []
    saved = "checkpoint.allow_changes=[data.fingerprint,optimizer.kwargs.amsgrad]"  # as a refused resume says
    assert problems(1, saved) == []
    assert problems(1, "scheduler=[{name: linear, steps: 3},{name: cosine}]") == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=2", "parallel.cp=2", "parallel.dp_replicate=2"],
        ["parallel.custom_plan=package.plan", "parallel.reshard_after_forward=true", "parallel.cpu_offload=true"],
        ["parallel.custom_plan={model.layers.*.mlp: block}", "parallel.reshard_after_forward=false"],
        ["parallel.cp=4", "data.max_length=8"],
    ],
)
def test_meshes_and_plans_pass(overrides):
    assert problems(8, *overrides) == []


def test_flash_linear_attention_is_refused_where_it_cannot_be():
    (error,) = problems(1, "model.linear_attention=fla", "launch.device=cpu")
    assert "model.linear_attention=fla needs CUDA" in error and "Set model.linear_attention=auto" in error
    (error,) = problems(1, "model.linear_attention=fla", "run.deterministic=true")
    assert "sums in no fixed order" in error and "Set model.linear_attention=torch" in error


def test_varlen_attention_is_refused_where_it_cannot_be():
    (errors,) = problems(2, "model.attention=varlen", "launch.device=cpu", "parallel.cp=2", "train.dtype=float32")
    assert "has launch.device=cpu and train.dtype=float32. Set model.attention=auto" in errors
    assert problems(2, "model.attention=varlen", "train.dtype=bfloat16", "parallel.cp=2") == []


def test_every_violation_of_a_mesh_is_listed():
    errors = problems(6, "parallel.tp=4", "parallel.cp=4", "data.max_length=4")
    assert len(errors) == 2
    assert "cp 4 × tp 4 = 16 does not divide 6 processes" in errors[0] and "parallel.cp=2 or less" in errors[1]


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (
            ["parallel.dp_shard=3", "parallel.tp=2", "train.micro_batch=4"],
            "micro_batch 4 × dp 3 = 12 does not divide it",
        ),
        (["parallel.dp_replicate=5", FOUR], "micro_batch 4 × dp 5 = 20 does not divide it"),
        (
            ["parallel.cp=3", "train.global_batch=6", "train.micro_batch=4"],
            "micro_batch 4 × dp 1 = 4 does not divide it",
        ),
    ],
)
def test_a_batch_that_fits_no_world_is_listed_beside_the_mesh(overrides, answer):
    errors = problems(4, *overrides)
    assert len(errors) == 2 and "4 processes" in errors[0] and answer in errors[1]
    fixed = errors[1].rstrip(".").split(". Set ")[1].split(", ")[0].split(" or ")[0]
    assert len(problems(4, *overrides, fixed)) == 1


def test_names_are_those_that_optim_knows():
    assert set(schema.OPTIMIZERS) == set(OPTIMIZER_NAMES)
    assert set(schema.SCHEDULES) == set(SCHEDULES)


def test_every_default_is_in_its_range():
    sections = schema.make_recipe_type(SECTIONS, SECTIONS)(
        eval=schema.Eval(), lora=schema.Lora(), scheduler=[schema.Stage()]
    )
    assert find_out_of_range(sections) == []
    assert find_out_of_range(schema.Launch(nproc=0), "launch.") == [
        ("launch.nproc", 0, "a whole number, at least 1, or auto")
    ]
