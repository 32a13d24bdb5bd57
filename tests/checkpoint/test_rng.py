import json
import random
from types import SimpleNamespace

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.training_state import random_state, set_random_state
from dtrain.training import resume


def draws():
    return random.random(), random.gauss(0, 1), torch.rand(3).tolist(), torch.randn(3).tolist()


@pytest.fixture(autouse=True)
def untouched():
    python, cpu = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(python)
    torch.set_rng_state(cpu)


def test_generators_go_on_where_they_were():
    random.gauss(0, 1)
    state = json.loads(json.dumps(random_state()))
    expected = draws()
    draws()
    set_random_state(state)
    assert draws() == expected


def test_a_resume_puts_them_where_they_were(monkeypatch):
    state = json.loads(json.dumps(random_state()))
    expected = draws()
    monkeypatch.setattr(resume.config, "diff_recipes", lambda *recipes: [])
    saved = SimpleNamespace(read_rank_state=lambda step: (state, 0)), {"recipe": "", "method": {}, "policy": {}}
    start = SimpleNamespace(checkpoint=saved, step=1, verified=True)
    policy = SimpleNamespace(checkpoint=SimpleNamespace(load=lambda *step, **more: None))
    method = SimpleNamespace(load=lambda state: None, tensors=dict)
    resume.restore(start, None, policy, method)
    assert draws() == expected


def test_copies_are_repeatable_and_differ():
    state = random_state()
    seen = []
    for copy in (0, 1, 2, 1):
        set_random_state(state, copy)
        seen.append(draws())
    assert seen[1] == seen[3]
    assert seen[0] != seen[1] != seen[2] != seen[0]


@pytest.mark.parametrize("harm", [{"python": [3]}, {"torch": "!!"}, {"torch": "AAAA"}, {"python": [3, [1, 2], None]}])
def test_a_damaged_state_is_said(harm):
    with pytest.raises(UserError, match="random state is damaged"):
        set_random_state(random_state() | harm)
