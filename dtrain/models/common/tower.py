"""The text tower of a multimodal checkpoint: what the files call its tensors, and what an export carries beside it."""

import re

from dtrain.models.common.decoder import CausalLM


class TextTower(CausalLM):
    """A model that may be one part of a multimodal checkpoint (config.is_text_tower).

    tower_names: what files call `model.` then, the likeliest first; head_names: what they call `lm_head.`;
    carried: patterns (re.fullmatch) of the other parts' tensors. is_tied: the default of tie_word_embeddings in such
    files; may_be_flat: whether they may have the fields of `text_config` beside the others.
    """

    tower_prefixes: tuple[str, ...]
    head_prefixes: tuple[str, ...] = ("lm_head.",)
    carried_patterns: tuple[str, ...]
    is_tied_by_default = False
    allows_flat_config = False

    def text_name(self, name: str) -> str:
        """Return what the files of the text model alone call parameter `name`."""
        return name

    def checkpoint_names(self, name: str) -> list[str]:
        if (part := self._vision_part(name)) is not None and self.vision_tower is not None:
            return self.vision_tower.file_names(part)
        name = self.text_name(name)
        if not self.config.is_text_tower:
            return [name]
        if name.startswith("lm_head."):
            return [head + name.removeprefix("lm_head.") for head in self.head_prefixes]
        return [tower + name.removeprefix("model.") for tower in self.tower_prefixes]

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        if not self.config.is_text_tower or self.config.vision is None or self.vision_tower is None:
            return self.carried_patterns if self.config.is_text_tower else ()
        built = [re.escape(prefix) for prefixes in self.vision_tower.file_prefixes.values() for prefix in prefixes]
        return (
            *(f"(?!{'|'.join(built)})(?:{pattern})" for pattern in self.carried_patterns),
            *self.vision_tower.carried_patterns,
        )

    def _vision_part(self, name: str) -> str | None:
        """Return the name within its vision tower of a parameter; None of the text's."""
        children = [child for tower in self.model.vision for child, _ in tower.named_children()]
        inner = name.removeprefix("model.")
        return inner if inner != name and inner.split(".")[0] in children else None
