"""The text tower of a multimodal checkpoint: what the files call its tensors, and what an export carries beside it."""

from dtrain.models.common.decoder import CausalLM


class TextTower(CausalLM):
    """A model that may be one part of a multimodal checkpoint (config.is_text_tower).

    tower_names: what files call `model.` then, the likeliest first; head_names: what they call `lm_head.`;
    carried: patterns (re.fullmatch) of the other parts' tensors. is_tied: the default of tie_word_embeddings in such
    files; may_be_flat: whether they may have the fields of `text_config` beside the others.
    """

    tower_names: tuple[str, ...]
    head_names: tuple[str, ...] = ("lm_head.",)
    carried: tuple[str, ...]
    is_tied = False
    may_be_flat = False

    def text_name(self, name: str) -> str:
        """Return what the files of the text model alone call parameter `name`."""
        return name

    def checkpoint_names(self, name: str) -> list[str]:
        name = self.text_name(name)
        if not self.config.is_text_tower:
            return [name]
        if name.startswith("lm_head."):
            return [head + name.removeprefix("lm_head.") for head in self.head_names]
        return [tower + name.removeprefix("model.") for tower in self.tower_names]

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        return self.carried if self.config.is_text_tower else ()
