"""Uses of dtrain's public names, which mypy checks with the package (pyproject.toml). Nothing here runs.

mypy reports a name that `__all__` of a package does not export. The last two lines are wrong on purpose: mypy reports
an unused `type: ignore` if a package accepts any name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import assert_type

import torch

import dtrain
from dtrain import RunResult, losses, run
from dtrain.data.rows.rows import Cursor
from dtrain.losses import TrainingSamplingParams
from dtrain.methods import Method
from dtrain.models import ModelConfig, from_pretrained, read_config
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel import get_grad_norm
from dtrain.parallel.context import create_context_parallel_ctx
from dtrain.policy import DTensorPolicyWorker, Policy


def train(recipe: dtrain.Recipe, runtime: dtrain.Runtime) -> None:
    print(recipe.run.name, runtime.rank)


def use_functions(path: Path, logps: torch.Tensor) -> None:
    assert_type(run("sft", ["train.steps=1"]), RunResult)
    assert_type(dtrain.run(path, train=train), RunResult)
    assert_type(dtrain.models.read_config(path), ModelConfig)
    assert_type(read_config(path), ModelConfig)
    assert_type(dtrain.losses.preference_loss("dpo", logps, logps, logps, logps, beta=0.1), torch.Tensor)
    assert_type(get_grad_norm([logps], None, None), float)
    assert_type(from_pretrained(path), CausalLM)
    assert_type(dtrain.from_pretrained(path, torch.float64), CausalLM)
    assert_type(dtrain.validate("sft", ["train.steps=1"]), list[str])
    assert_type(dtrain.Policy.from_recipe(dtrain.load_recipe("sft"), dtrain.Runtime()), Policy)
    module: torch.nn.Module = from_pretrained(path)
    context: Callable[..., object] = create_context_parallel_ctx
    print(module, context)


def use_classes() -> None:
    assert_type(TrainingSamplingParams().top_p, float)
    print(Cursor.__name__, Method.__name__, Policy.__name__, DTensorPolicyWorker.__name__)


def use_missing_names() -> None:
    print(dtrain.no_such_name)  # type: ignore[attr-defined]
    print(losses.no_such_name)  # type: ignore[attr-defined]
