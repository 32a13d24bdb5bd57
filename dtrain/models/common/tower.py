"""The text tower of a multimodal checkpoint: its names in files, and the tensors that an export copies."""

import re

from dtrain.models.common.decoder import CausalLM


class TextTower(CausalLM):
    """A model that may be the text tower of a multimodal checkpoint (`config.is_text_tower`).

    Attributes:
        tower_prefixes: Prefixes in files in place of `model.`, the most common one first.
        head_prefixes: Prefixes in files in place of `lm_head.`.
        carried_patterns: Patterns (re.fullmatch) of the tensors of other towers.
        is_tied_by_default: Default of `tie_word_embeddings` in multimodal files.
        allows_flat_config: Whether config.json may have the fields of `text_config` at its top level.
    """

    tower_prefixes: tuple[str, ...]
    head_prefixes: tuple[str, ...] = ("lm_head.",)
    carried_patterns: tuple[str, ...]
    is_tied_by_default = False
    allows_flat_config = False

    def text_name(self, name: str) -> str:
        """Return the name of a parameter in the files of the text model."""
        return name

    def checkpoint_names(self, name: str) -> list[str]:
        """Override `CausalLM.checkpoint_names`."""
        vision_name = self._name_in_vision_tower(name)
        if vision_name is not None and self.vision_tower is not None:
            return self.vision_tower.file_names(vision_name)
        name = self.text_name(name)
        if not self.config.is_text_tower:
            return [name]
        if name.startswith("lm_head."):
            return [prefix + name.removeprefix("lm_head.") for prefix in self.head_prefixes]
        return [prefix + name.removeprefix("model.") for prefix in self.tower_prefixes]

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """Override `CausalLM.carried_checkpoint_names`: the tensors of other towers, if they are not built."""
        if not self.config.is_text_tower:
            return ()
        if self.config.vision is None or self.vision_tower is None:
            return self.carried_patterns
        built_prefixes = []
        for prefixes in self.vision_tower.file_prefixes.values():
            built_prefixes += [re.escape(prefix) for prefix in prefixes]
        is_not_built = f"(?!{'|'.join(built_prefixes)})"
        others = [f"{is_not_built}(?:{pattern})" for pattern in self.carried_patterns]
        return (*others, *self.vision_tower.carried_patterns)

    def _name_in_vision_tower(self, name: str) -> str | None:
        """Return the name of a parameter within its vision tower. None for a parameter of the text model."""
        inner_name = name.removeprefix("model.")
        if inner_name == name:
            return None
        child = inner_name.split(".")[0]
        for tower in self.model.vision:
            if child in [child_name for child_name, _ in tower.named_children()]:
                return inner_name
        return None
