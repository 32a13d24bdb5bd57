"""The ranks of a run as a picture (SVG), grouped by the dimensions of the mesh."""

import math
from collections.abc import Mapping
from itertools import product

SIDE, GAP, FRAME = 46, 6, 10  # of a rank's box, between boxes, around a group of them
MOST = 4  # boxes drawn of a dimension with more of them than MOST + 1
WORDS = {
    "dp_replicate": "copies of the sharded model (HSDP), a frame each",
    "dp_shard": "data-parallel ranks that share out the weights (FSDP2), a row each",
    "cp": "context-parallel ranks that share a sequence, a grey group each",
    "tp": "tensor-parallel ranks that share each matrix, the boxes of a group",
}


def picture(sizes: Mapping[str, int], title: str) -> str:
    """Return a picture of the mesh, its sizes by name (dp_replicate, dp_shard, cp, tp): a frame for each replica, in it
    a row for each data-parallel rank, in that a group for each context-parallel rank, in that a box for each
    tensor-parallel one. title: safe text of HTML."""
    shown = {
        name: list(range(size)) if size <= MOST + 1 else [*range(MOST - 1), None, size - 1]
        for name, size in sizes.items()
    }
    boxes = len(shown["tp"]) * (SIDE + GAP) - GAP
    group = boxes + 2 * GAP
    width = len(shown["cp"]) * (group + GAP) - GAP + 2 * FRAME
    high = SIDE + 2 * GAP
    replica = len(shown["dp_shard"]) * (high + GAP) - GAP + 2 * FRAME
    height = len(shown["dp_replicate"]) * (replica + FRAME) - FRAME
    parts = [
        f'<svg class="mesh" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{title}</title>"
    ]
    for place, copy in enumerate(shown["dp_replicate"]):
        top = place * (replica + FRAME)
        if copy is None:
            parts.append(_dots(width / 2, top + replica / 2))
            continue
        if sizes["dp_replicate"] > 1:
            parts.append(_box("copy", 1, top + 1, width - 2, replica - 2))
        for (row, shard), (column, part), (at, slice_) in product(
            enumerate(shown["dp_shard"]), enumerate(shown["cp"]), enumerate(shown["tp"])
        ):
            left, above = FRAME + column * (group + GAP), top + FRAME + row * (high + GAP)
            if at == 0 and shard is not None and part is not None and sizes["tp"] * sizes["cp"] > 1:
                parts.append(_box("group", left, above, group, high))
            x, y = left + GAP + at * (SIDE + GAP), above + GAP
            if shard is None or part is None or slice_ is None:
                parts.append(_dots(x + SIDE / 2, y + SIDE / 2))
                continue
            rank = ((copy * sizes["dp_shard"] + shard) * sizes["cp"] + part) * sizes["tp"] + slice_
            parts.append(_box("rank", x, y, SIDE, SIDE))
            parts.append(f'<text x="{x + SIDE / 2}" y="{y + SIDE / 2}">{rank}</text>')
    return "".join([*parts, "</svg>"])


def legend(sizes: Mapping[str, int]) -> list[str]:
    """Return the legend of the picture's groups, from the outermost."""
    if math.prod(sizes.values()) == 1:
        return ["one process holds everything"]
    return [f"{name} {size}: {WORDS[name]}" for name, size in sizes.items() if size > 1]


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def _dots(x: float, y: float) -> str:
    return f'<text class="more" x="{x}" y="{y}">⋯</text>'
