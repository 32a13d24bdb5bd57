"""The directory of a model: its config, tokenizer and chat template. Imports no torch."""

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.models.common.config import ModelConfig
from dtrain.models.read_config import read_config


class ModelDirectory:
    """The directory of one of a run's models. Each file is read at most once, when it is first needed.

    Attributes:
        path: The directory.
        labels: Outputs of the model's head, as in `read_config`.
        implementation: Whose modules compute the model, as in `read_config`.
    """

    def __init__(self, path: str | Path, labels: int | None, *template_options: Any, implementation: str = "auto"):
        """Name the directory; nothing is read.

        Args:
            path: The directory.
            labels: As in `read_config`.
            template_options: Further arguments of `choose_template`.
            implementation: As in `read_config`.
        """
        self.path = Path(path)
        self.labels = labels
        self.implementation = implementation
        self._template_options = template_options

    @cached_property
    def config(self) -> ModelConfig:
        """config.json. Raises UserError if it is no model for the run."""
        return read_config(self.path, self.labels, implementation=self.implementation)

    @cached_property
    def vision_config(self) -> ModelConfig:
        """config.json with the vision tower. Raises UserError if dtrain does not have the tower."""
        return read_config(self.path, self.labels, vision=True, implementation=self.implementation)

    @cached_property
    def any_config(self) -> ModelConfig | None:
        """config.json of a model with any head; None if it cannot be read."""
        with suppress(UserError):
            return self.config
        with suppress(UserError):
            return read_config(self.path, 0, implementation=self.implementation)
        return None

    @cached_property
    def config_with_tower(self) -> ModelConfig:
        """`vision_config` if dtrain can read it, else `config`. Raises UserError."""
        with suppress(UserError):
            return self.vision_config
        return self.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UserError."""
        return Tokenizer.from_directory(self.path)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, or None. Raises UserError."""
        return choose_template(self.path, self.tokenizer, *self._template_options)
