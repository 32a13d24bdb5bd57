"""Model and optimizer through a checkpoint: a resumed run takes the steps that the uninterrupted one takes."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.dcp.training_state import (
    allocate_state,
    model_tensors,
    optimizer_state,
    restore_optimizer,
    training_tensors,
)
from tests.cases import run_cases
from tests.checkpoint.tiny import VOCAB, on_mesh, seeded, whole
from tests.world import run_world

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "adamw-tensor-lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def grouped(model):
    named = list(model.named_parameters())
    return [
        {"params": [tensor for _, tensor in named if tensor.dim() > 1]},
        {"params": [tensor for _, tensor in named if tensor.dim() < 2], "weight_decay": 0.0},
    ]


def build(kind, seed, sizes=None, tied=False):
    model = seeded(seed, tied=tied, dtype=torch.float64)
    if sizes:
        model = on_mesh(model, **sizes)
    return model, OPTIMIZERS[kind](grouped(model))


def take_steps(model, optimizer, first, last):
    for step in range(first, last):
        ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))
        cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        for group in optimizer.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()


def save(directory, step, model, optimizer):
    state = {"optimizer": optimizer_state(model, optimizer)}
    CheckpointStore(directory).save(step, training_tensors(model, optimizer), state)


def resume(directory, step, model, optimizer, **kwargs):
    store = CheckpointStore(directory)
    restore_optimizer(model, optimizer, store.read_state(step)["optimizer"], **kwargs)
    store.load(step, training_tensors(model, optimizer))


def weights(model):
    return {name: whole(tensor).detach() for name, tensor in model_tensors(model).items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, kind, at):
    model, optimizer = build(kind, 0)
    take_steps(model, optimizer, 0, at)
    save(tmp_path, at, model, optimizer)
    take_steps(model, optimizer, at, 6)

    other, resumed = build(kind, 1)
    resume(tmp_path, at, other, resumed)
    take_steps(other, resumed, at, 6)
    for name, tensor in weights(model).items():
        assert torch.equal(weights(other)[name], tensor), name


def steps_on(rank, directory, kind, sizes, first, last, tied):
    model, optimizer = build(kind, first, sizes, tied)
    if first:
        resume(directory, first, model, optimizer)
    take_steps(model, optimizer, first, last)
    save(directory, last, model, optimizer)


def test_a_run_moves_over_world_sizes(tmp_path):
    kinds = {"adamw": False, "adamw-fused": True, "sgd-momentum": True}  # and whether the head is tied
    for ranks, sizes, first in ((3, {"shard": 3}, 0), (4, {"replicate": 2, "shard": 2}, 2)):
        cases = {kind: (tmp_path / kind, kind, sizes, first, first + 2, tied) for kind, tied in kinds.items()}
        run_cases(steps_on, ranks, cases)
    for kind, tied in kinds.items():
        reference, optimizer = build(kind, 0, tied=tied)
        take_steps(reference, optimizer, 0, 6)
        model, optimizer = build(kind, 9, tied=tied)
        resume(tmp_path / kind, 4, model, optimizer)
        take_steps(model, optimizer, 4, 6)
        for name, tensor in weights(reference).items():
            assert (weights(model)[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), (kind, name)


def test_allocating_changes_no_parameter_option_or_gradient():
    for kind in OPTIMIZERS:
        model, optimizer = build(kind, 0)
        before, rates = weights(seeded(0, dtype=torch.float64)), [group["lr"] for group in optimizer.param_groups]
        allocate_state(optimizer)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items()), kind
        assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_without_state_gets_none(tmp_path):
    model, optimizer = build("adamw", 0)
    take_steps(model, optimizer, 0, 1)
    del optimizer.state[model.lm_head.weight]
    save(tmp_path, 1, model, optimizer)
    other, resumed = build("adamw", 1)
    resume(tmp_path, 1, other, resumed)
    assert other.lm_head.weight not in resumed.state and len(resumed.state) == 5


def test_options_come_back_but_for_those_kept(tmp_path):
    model, optimizer = build("adamw", 0)
    take_steps(model, optimizer, 0, 2)
    save(tmp_path, 2, model, optimizer)
    other, resumed = build("adamw", 1)
    resumed.param_groups[0]["betas"] = (0.5, 0.6)
    resume(tmp_path, 2, other, resumed, keep_options=["betas"])
    assert resumed.param_groups[0]["betas"] == (0.5, 0.6)
    assert resumed.param_groups[1]["betas"] == (0.9, 0.999) and resumed.param_groups[1]["lr"] == 1e-2 * 0.9 * 0.9
    assert resumed.param_groups[1]["weight_decay"] == 0.0


def test_another_optimizer_or_other_groups_are_refused(tmp_path):
    model, optimizer = build("adamw", 0)
    take_steps(model, optimizer, 0, 1)
    save(tmp_path, 1, model, optimizer)
    other, sgd = build("sgd-momentum", 1)
    with pytest.raises(UserError, match="exp_avg.*momentum_buffer"):
        resume(tmp_path, 1, other, sgd)
    other, _ = build("adamw", 1)
    with pytest.raises(UserError, match="2 parameter groups, the recipe's 1"):
        resume(tmp_path, 1, other, torch.optim.AdamW(other.parameters()))
    first, *_, last = other.parameters()
    save(tmp_path, 2, other, torch.optim.AdamW([first]))
    with pytest.raises(UserError, match="the checkpoint has trained .* and not .* release of dtrain that wrote it"):
        resume(tmp_path, 2, other, torch.optim.AdamW([last]))


class Local(torch.optim.Optimizer):
    """Keeps state as plain tensors of the rank's shard, as optimizers written before DTensor do."""

    def __init__(self, parameters, shape):
        super().__init__(parameters, {"lr": 1.0})
        self.shape = shape

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            held = {"shard": local.detach().clone(), "number": 3, "other": torch.ones(7, 7), "words": {"no": "json"}}
            self.state[parameter]["kept"] = held[self.shape]


def local_state(rank, directory, shape):
    model = on_mesh(seeded(0), shard=2)
    optimizer = Local(model.parameters(), shape)
    optimizer.step()
    try:
        save(directory, 1, model, optimizer)
    except UserError as error:
        return str(error)
    return "saved"


def test_plain_state_of_a_shard_is_placed_like_its_parameter(tmp_path):
    assert run_world(local_state, 2, tmp_path, "shard") == ["saved", "saved"]
    expected = weights(seeded(0))
    model = seeded(1)
    optimizer = Local(model.parameters(), "shard")
    resume(tmp_path, 1, model, optimizer)
    for name, tensor in model_tensors(model).items():
        assert torch.equal(optimizer.state[tensor]["kept"], expected[name])


@pytest.mark.parametrize("shape, said", [("other", "cannot tell which part"), ("words", "dict 'kept'")])
def test_state_that_no_checkpoint_can_hold_is_refused(tmp_path, shape, said):
    assert said in run_world(local_state, 2, tmp_path, shape)[0]


def test_numbers_in_the_state_come_back(tmp_path):
    model = seeded(0)
    optimizer = Local(model.parameters(), "number")
    optimizer.step()
    save(tmp_path, 1, model, optimizer)
    other = seeded(0)
    resumed = Local(other.parameters(), "number")
    resume(tmp_path, 1, other, resumed)
    assert {entries["kept"] for entries in resumed.state.values()} == {3}


def sharded_again(rank):
    model = on_mesh(seeded(0, tied=True), shard=2)
    names = list(model_tensors(model))
    optimizer = torch.optim.SGD(model.parameters())
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    # The root's weights stay gathered after a forward; the checkpoint's tensors are the optimizer's all the same.
    held = model_tensors(model)
    assert [id(tensor) for tensor in held.values()] == [id(tensor) for tensor in optimizer.param_groups[0]["params"]]
    return list(held) == names


def test_gathered_weights_are_not_what_is_saved():
    assert run_world(sharded_again, 2) == [True, True]
