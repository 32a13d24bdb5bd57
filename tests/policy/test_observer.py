"""A `StepObserver` that a user passes to a policy, and the queries about an optimizer's state."""

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.models.read_config import read_config
from dtrain.optim.local_shard import allocate_state
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.policy import BuildOptions, Policy, StepObserver
from tests.tiny import VOCAB, tiny_recipe
from tests.world import run_world

FORWARD = ["forward_begins", "head_begins", "loss", "head_ends", "forward_ends"]
BACKWARD = ["backward_begins", "backward_ends"]
UPDATE = ["update_begins", "update_ends"]


class Recorder(StepObserver):
    """The names of the events in order, and what can be seen at some of them."""

    def __init__(self):
        self.events, self.rows, self.had_gradients = [], [], []
        self.model = None

    def forward_begins(self, batch):
        self.events.append("forward_begins")
        self.rows.append(batch["input_ids"].shape)

    def head_begins(self):
        self.events.append("head_begins")

    def head_ends(self):
        self.events.append("head_ends")

    def forward_ends(self):
        self.events.append("forward_ends")

    def backward_begins(self):
        self.events.append("backward_begins")

    def backward_ends(self):
        self.events.append("backward_ends")

    def gradients_complete(self, model):
        self.events.append("gradients_complete")
        self.model = model
        self.had_gradients.append(self.has_gradients())

    def update_begins(self):
        self.events.append("update_begins")

    def update_ends(self):
        self.events.append("update_ends")
        self.had_gradients.append(self.has_gradients())

    def has_gradients(self):
        return any(parameter.grad is not None for parameter in self.model.parameters())


def rows(count, length=12):
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        made.append(
            {
                "input_ids": ids[:-1],
                "labels": ids[1:].clone(),
                "position_ids": torch.arange(length),
                "seq_ids": torch.zeros(length, dtype=torch.int64),
            }
        )
    return collate(made)


def policy_of(recipe, rank=0, world_size=1, **more):
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    return Policy(recipe, read_config(recipe.model.path), build_mesh(runtime, dp_shard=world_size), runtime, **more)


def observed(rank, recipe, world_size):
    """Return the events of a step of two micro-batches, of log-probabilities and of an evaluation."""
    observer = Recorder()
    policy = policy_of(recipe, rank, world_size, observer=observer)
    policy.init_optimizer(10)

    def loss(source, batch, global_sequences, global_tokens):
        observer.events.append("loss")
        return -source.weighted_sum() / global_tokens, {}

    def value(source):
        observer.events.append("loss")
        return source.logprobs().logprobs

    batch = rows(4)
    policy.forward_backward(batch, loss, 2)
    policy.optimizer_step()
    step, observer.events = observer.events, []
    policy.token_values(batch, value, 4)
    scored, observer.events = observer.events, []
    policy.evaluate(batch, loss, 4)
    return step, scored, observer.events, observer.rows, observer.had_gradients


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_observer_sees_the_events_of_a_step_in_order(tmp_path, ranks):
    recipe = tiny_recipe(tmp_path, f"train.global_batch={4 * ranks}")
    for step, scored, evaluated, shapes, had_gradients in run_world(observed, ranks, recipe, ranks):
        assert step == [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD, "gradients_complete", *UPDATE]
        assert scored == evaluated == FORWARD
        assert shapes == [(2, 12), (2, 12), (4, 12), (4, 12)]
        assert had_gradients == [True, False]


def trained(rank, recipe, world_size, observer):
    policy = policy_of(recipe, rank, world_size, observer=observer)
    policy.init_optimizer(10)
    for _ in range(3):
        policy.forward_backward(rows(4), lambda source, _, __, tokens: (-source.weighted_sum() / tokens, {}), 2)
        policy.optimizer_step()
    return {name: local_tensor(parameter).detach() for name, parameter in policy.model.named_parameters()}


def test_a_run_that_is_observed_has_the_same_weights(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.global_batch=4")
    ((alone,), (observed_weights,)) = (run_world(trained, 1, recipe, 1, each) for each in (None, Recorder()))
    assert alone.keys() == observed_weights.keys()
    assert all(torch.equal(weight, observed_weights[name]) for name, weight in alone.items())


def stepped(rank, recipe, world_size):
    """Return the bytes of the state by the updater before and after a step, those of the tensors, and the weights."""
    policy = policy_of(recipe, rank, world_size)
    policy.init_optimizer(10)
    before = {name: local_tensor(parameter).detach().clone() for name, parameter in policy.model.named_parameters()}
    policy.updater.allocate_state()
    is_unchanged = all(
        torch.equal(before[name], local_tensor(parameter)) for name, parameter in policy.model.named_parameters()
    )
    allocated = policy.updater.device_state_bytes()
    policy.forward_backward(rows(4), lambda source, _, __, tokens: (-source.weighted_sum() / tokens, {}), 2)
    policy.optimizer_step()
    states = [value for state in policy.optimizer.state.values() for value in state.values()]
    held = sum(local_tensor(value).nbytes for value in states)
    with pytest.raises(ValueError, match="there are gradients"):
        fresh = policy_of(recipe, rank, world_size)
        fresh.init_optimizer(10)
        fresh.forward_backward(rows(4), lambda source, _, __, tokens: (-source.weighted_sum() / tokens, {}), 2)
        allocate_state(fresh.optimizer)
    return is_unchanged, allocated, policy.updater.device_state_bytes(), held, policy.updater.host_state_bytes()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_is_as_large_as_a_step_makes_it(tmp_path, name):
    keys = "train.global_batch=8", "scheduler.warmup_steps=0", f"optimizer.name={name}"
    recipe = tiny_recipe(tmp_path, *keys)
    for is_unchanged, allocated, after, held, on_host in run_world(stepped, 2, recipe, 2):
        assert is_unchanged
        assert allocated == after == held > 0
        assert on_host == 0


def without_memory(rank, recipe):
    policy = policy_of(recipe, options=BuildOptions(materialize=False))
    policy.init_reference_model(recipe.model.path)
    tensors = [*policy.model.parameters(), *policy.reference.tensors.values()]
    return {tensor.device.type for tensor in tensors}


def test_a_policy_that_is_not_materialized_has_shapes_alone(tmp_path):
    """`model.init=pretrained` of a directory without weights: none is read."""
    recipe = tiny_recipe(tmp_path, "model.init=pretrained")
    assert run_world(without_memory, 1, recipe) == [{"meta"}]
