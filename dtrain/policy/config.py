"""The sections of a recipe that a policy reads."""

from typing import Any, ClassVar, Protocol, runtime_checkable

from dtrain.recipe.schema import Data, Lora, Model, Moe, Optimizer, Parallel, Run, Scheduler, Stage, Train


@runtime_checkable
class PolicyConfig(Protocol):
    """Dataclass with the sections that a policy is built by; a recipe is one.

    run: the seed. data: the length of rows, whether they are packed, and the chat template that is saved.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    run: Run
    model: Model
    data: Data
    parallel: Parallel
    train: Train
    lora: Lora | None
    optimizer: Optimizer
    scheduler: Scheduler | list[Stage]
    moe: Moe
