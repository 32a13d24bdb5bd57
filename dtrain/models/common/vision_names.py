"""Names of the modules and parameters of a vision tower. Imports no torch."""

VISION_PARTS = ("visual", "vision_tower", "multi_modal_projector", "embed_vision")
"""Children of a multimodal model's `model` that belong to its vision tower, over all families."""


def is_in_vision_tower(name: str) -> bool:
    """Return whether a module or parameter belongs to the vision tower.

    Example:
        >>> is_in_vision_tower("model.visual.blocks.0.attn.qkv.weight")
        True
        >>> is_in_vision_tower("model.layers.0.mlp.up_proj")
        False
    """
    first, _, rest = name.partition(".")
    child = rest.partition(".")[0]
    return first == "model" and child in VISION_PARTS
