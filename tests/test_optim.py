"""Groups, optimizers and schedules: against torch's own classes and transformers' schedules."""

import json
import math
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, SequentialLR

from dtrain.base.errors import UserError
from dtrain.optim.update import SCHEDULES, build_scheduler
from dtrain.policy.optimizer import OPTIMIZERS, build_optimizer
from dtrain.recipe import schema
from tests.world import run_world


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.linear = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, ids):
        return self.norm(self.linear(self.embed(ids))).square().mean()


def make_net():
    torch.manual_seed(0)
    net = Net().double()
    nn.init.normal_(net.norm.weight)
    return net


def train_net(net, optimizer, steps=5):
    for step in range(steps):
        net(torch.arange(6) + step % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def optimizer_of(net, **fields):
    return build_optimizer(schema.Optimizer(**{"lr": 0.1, **fields}), net.named_parameters())


def test_decay_takes_matrices_and_embeddings_and_leaves_vectors_and_frozen_ones():
    net = make_net()
    decayed, rest = optimizer_of(net, weight_decay=0.3).param_groups
    assert decayed["weight_decay"] == 0.3 and rest["weight_decay"] == 0.0
    by_kwargs = optimizer_of(net, weight_decay=0.1, kwargs={"weight_decay": 0.3}).param_groups
    assert [group["weight_decay"] for group in by_kwargs] == [0.3, 0.0]
    assert {id(p) for p in decayed["params"]} == {id(net.embed.weight), id(net.linear.weight)}
    assert {id(p) for p in rest["params"]} == {id(net.linear.bias), id(net.norm.weight), id(net.norm.bias)}


def torch_optimizer(name, net):
    decayed = {"params": [net.embed.weight, net.linear.weight], "weight_decay": 0.3}
    rest = {"params": [net.linear.bias, net.norm.weight, net.norm.bias], "weight_decay": 0.0}
    groups, adam = [decayed, rest], {"lr": 0.1, "betas": (0.8, 0.7), "eps": 1e-3}
    return {
        "adamw": lambda: torch.optim.AdamW(groups, **adam, foreach=False),
        "adam": lambda: torch.optim.Adam(groups, **adam, foreach=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=0.1, foreach=False),
        "torch.optim.RAdam": lambda: torch.optim.RAdam(groups, **adam, foreach=False),
        "torch.optim.Adagrad": lambda: torch.optim.Adagrad(groups, lr=0.1, eps=1e-3, foreach=False),
    }[name]()


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim.RAdam", "torch.optim.Adagrad"])
def test_an_optimizer_by_name_or_path_is_torchs_with_every_field_read(name):
    net, reference = make_net(), make_net()
    kwargs = {"momentum": 0.9} if name == "sgd" else {}
    built = optimizer_of(net, name=name, betas=[0.8, 0.7], eps=1e-3, weight_decay=0.3, kwargs=kwargs)
    expected = train_net(reference, torch_optimizer(name, reference))
    for value, wanted in zip(train_net(net, built), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


def test_fused_where_it_is_and_kwargs_win():
    net = make_net()
    assert optimizer_of(net).defaults["fused"]
    assert not optimizer_of(net, kwargs={"fused": False}).defaults["fused"]
    built = optimizer_of(net, kwargs={"foreach": True, "amsgrad": True, "eps": 0.5})
    assert built.defaults["foreach"] and built.defaults["amsgrad"] and built.defaults["eps"] == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamww"}, r"optimizer\.name=adamww is unknown\. Did you mean adam"),
        ({"name": "lion"}, r"optimizer\.name=lion is unknown\. Known: adamw, adam, sgd, adafactor"),
        ({"name": "no_such_package.Lion"}, r"optimizer\.name=no_such_package\.Lion cannot be imported"),
        ({"name": "torch.optim.Lion"}, r"torch\.optim has no Lion"),
        ({"kwargs": {"momentum": 1}}, r"refuses its settings.*momentum.*optimizer\.kwargs"),
        ({"lr": -1.0}, r"optimizer\.name=adamw refuses its settings: Invalid learning rate"),
        ({"name": "math.sqrt"}, r"optimizer\.name=math\.sqrt"),
        ({"name": "torch.optim.SparseAdam"}, r"steps sparse gradients only, and these are dense; take adamw"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        optimizer_of(make_net(), **fields)


def sharded_step(rank, name):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    train_net(net, optimizer_of(net, name=name, weight_decay=0.3))
    trained = {key: parameter for key, parameter in net.named_parameters() if parameter.requires_grad}
    return {key: parameter.full_tensor().tolist() for key, parameter in trained.items()}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_shards_take_the_steps_of_the_whole(name):
    net = make_net()
    train_net(net, optimizer_of(net, name=name, weight_decay=0.3))
    expected = dict(net.named_parameters())
    for result in run_world(sharded_step, 2, name):
        for key, value in result.items():
            wanted = expected[key].detach()
            torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["adafactor", "torch.optim.Adafactor", "torch.optim.Rprop"])
def test_what_cannot_step_shards_is_refused_by_name(name):
    with pytest.raises(AssertionError, match=f"UserError: optimizer.name={name} cannot step sharded parameters"):
        run_world(sharded_step, 2, name)


def rates(section, steps, total_steps, lr=0.5):
    """The learning rate that each of `steps` optimizer steps uses."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=lr)
    schedule = build_scheduler(section, optimizer, total_steps)
    used = []
    for _ in range(steps):
        used += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return used


def rates_of(make, steps, lr=0.5):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=lr)
    scheduler = make(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


ORACLES = {
    "constant": lambda warm: partial(transformers.get_constant_schedule_with_warmup, num_warmup_steps=warm),
    "cosine": lambda warm: partial(
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=warm,
        num_training_steps=40,
        min_lr_rate=0.0,
    ),
    "linear": lambda warm: partial(
        transformers.get_linear_schedule_with_warmup, num_warmup_steps=warm, num_training_steps=40
    ),
    "wsd": lambda warm: partial(
        transformers.get_wsd_schedule, num_warmup_steps=warm, num_decay_steps=8, num_training_steps=40, min_lr_ratio=0.0
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_are_transformers(name, warmup):
    section = schema.Scheduler(name=name, warmup_steps=warmup, min_lr_ratio=0.0)
    assert rates(section, 40, 40) == pytest.approx(rates_of(ORACLES[name](warmup), 40), rel=1e-12, abs=1e-15)


def test_min_lr_ratio_is_reached_at_the_last_step_and_kept():
    for name in ("cosine", "linear", "wsd"):
        section = schema.Scheduler(name=name, warmup_steps=5, min_lr_ratio=0.2)
        used = rates(section, 43, 40)
        assert used[:6] == pytest.approx([0.5 * s / 5 for s in range(6)], rel=1e-12)
        assert used[40:] == pytest.approx([0.1] * 3, rel=1e-12)
        assert min(used[5:40]) > 0.1
    oracle = partial(
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=5,
        num_training_steps=40,
        min_lr_rate=0.2,
    )
    used = rates(schema.Scheduler(name="cosine", warmup_steps=5, min_lr_ratio=0.2), 40, 40)
    assert used == pytest.approx(rates_of(oracle, 40), rel=1e-12)


def test_wsd_decays_over_a_fifth_or_over_what_is_said():
    used = rates(schema.Scheduler(name="wsd", warmup_steps=0), 50, 50)
    assert used[:41] == [0.5] * 41 and used[41] < 0.5
    used = rates(schema.Scheduler(name="wsd", warmup_steps=0, kwargs={"decay_steps": 5}), 50, 50)
    assert used[:46] == [0.5] * 46 and used[46] < 0.5


def test_a_schedule_by_import_path_is_torchs():
    section = schema.Scheduler(name="torch.optim.lr_scheduler.OneCycleLR", kwargs={"max_lr": 2.0, "total_steps": 30})
    assert rates(section, 29, 30) == rates_of(partial(OneCycleLR, max_lr=2.0, total_steps=30, cycle_momentum=False), 29)


def stage(name, steps, **fields):
    return schema.Stage(name=name, steps=steps, **fields)


def test_stages_are_sequential_lr():
    stages = [
        stage("linear", 10, warmup_steps=4, min_lr_ratio=0.5),
        stage("torch.optim.lr_scheduler.MultiStepLR", 10, kwargs={"milestones": [3, 6], "gamma": 0.1}),
        stage("cosine", None, min_lr_ratio=0.0),
    ]

    def reference(optimizer):
        first = transformers.get_linear_schedule_with_warmup(optimizer, 4, 16)  # halfway down after 10
        second = MultiStepLR(optimizer, [3, 6], 0.1)
        third = transformers.get_cosine_schedule_with_warmup(optimizer, 0, 20)
        return SequentialLR(optimizer, [first, second, third], [10, 20])

    used = rates(stages, 40, 40)
    assert used == pytest.approx(rates_of(reference, 40), rel=1e-12)
    assert used[0] == 0.0 and used[10] == 0.5 and used[13] == pytest.approx(0.05) and used[20] == 0.5


@pytest.mark.trap(
    "a resumed schedule goes on at another step",
    "huggingface/diffusers PR#8312",
    "the rate of a third of the run",
    "the rates of the uninterrupted run",
)
@pytest.mark.parametrize(
    "section",
    [
        schema.Scheduler(name="cosine", warmup_steps=3),
        schema.Scheduler(name="torch.optim.lr_scheduler.MultiStepLR", kwargs={"milestones": [2, 15], "gamma": 0.1}),
        schema.Scheduler(name="torch.optim.lr_scheduler.OneCycleLR", kwargs={"max_lr": 2.0, "total_steps": 30}),
        schema.Scheduler(name="torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", kwargs={"T_0": 4}),
        [stage("linear", 6), stage("torch.optim.lr_scheduler.ExponentialLR", None, kwargs={"gamma": 0.9})],
    ],
    ids=["cosine", "multistep", "onecycle", "restarts", "stages"],
)
@pytest.mark.parametrize("at", [0, 1, 6, 13])
def test_a_resumed_schedule_goes_on_exactly(section, at):
    whole = rates(section, 29, 30)

    def fresh():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
        return optimizer, build_scheduler(section, optimizer, 30)

    optimizer, schedule = fresh()
    for _ in range(at):
        optimizer.step()
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    optimizer, schedule = fresh()
    optimizer.param_groups[0]["lr"] = 123.0
    schedule.load_state_dict(state)
    used = []
    for _ in range(29 - at):
        used += schedule.get_last_lr()
        assert optimizer.param_groups[0]["lr"] == used[-1]
        optimizer.step()
        schedule.step()
    assert used == whole[at:]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (schema.Scheduler(name="cosin"), r"scheduler\.name=cosin is unknown\. Did you mean cosine\?"),
        (schema.Scheduler(name="cosine", kwargs={"cycles": 2}), r"scheduler\.kwargs: cosine does not know cycles"),
        (schema.Scheduler(name="torch.optim.lr_scheduler.StepLR"), r"refuses its settings: .*step_size"),
        (schema.Scheduler(name="torch.optim.lr_scheduler.ReduceLROnPlateau"), r"needs metrics at every step"),
        ([stage("linear", None), stage("cosine", 5)], r"scheduler\[0\]\.steps is missing"),
        ([stage("linear", 5), stage("cosin", 5)], r"scheduler\[1\]\.name=cosin"),
        ([stage("linear", 0)], r"scheduler\[0\]\.steps=0"),
        ([], "no stages"),
    ],
)
def test_schedule_mistakes_are_named(section, message):
    with pytest.raises(UserError, match=message):
        rates(section, 1, 10)


def test_warmup_longer_than_the_run_only_warms_up():
    used = rates(schema.Scheduler(name="cosine", warmup_steps=100), 10, 10)
    assert used == pytest.approx([0.5 * s / 100 for s in range(10)])
    assert all(math.isfinite(value) for value in used)
