#!/usr/bin/env python3
"""Write the data and model directory of tools/quickstart-images: pictures of shapes with their names, a tiny model.

    python tools/make_shapes.py build/shapes

gives, the same bytes every time with one version of Pillow,

    train.jsonl val.jsonl heldout.jsonl    rows {"messages": [user: picture and question, assistant: "two red circles"]}
    train/ val/ heldout/                   the pictures, PNG files of 48 × 48 pixels
    model/                                 config.json (Qwen3-VL, 1.3 million parameters), tokenizer.json,
                                           tokenizer_config.json with a chat template, generation_config.json,
                                           preprocessor_config.json

Each split is drawn with a seed of its own. No picture is in two splits.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

from make_arithmetic import MAX_LENGTH, VOCAB_SIZE, write_json, write_tokenizer
from PIL import Image, ImageDraw

SIDE = 48  # pixels of a picture's side
PATCH, MERGE, FRAMES = 8, 2, 2  # pixels of a patch's side, patches of a token's side, frames of a patch
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 70), "blue": (40, 90, 214), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square", "triangle")
COUNTS = ("one", "two", "three", "four")
SIZES = (6, 9)  # half a shape's side, from and to
QUESTION = "What do you see?"
VISION_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", *VISION_TOKENS]
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def draw(rng: random.Random) -> tuple[str, Image.Image]:
    """A name such as "two red circles", and a picture of it: sizes, places and the grey of the ground by chance."""
    count, colour, shape = rng.randrange(len(COUNTS)), rng.choice(list(COLOURS)), rng.choice(SHAPES)
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(225, 255),) * 3)
    pencil = ImageDraw.Draw(image)
    for x, y, half in places(count + 1, rng):
        box = (x - half, y - half, x + half, y + half)
        if shape == "circle":
            pencil.ellipse(box, COLOURS[colour])
        elif shape == "square":
            pencil.rectangle(box, COLOURS[colour])
        else:
            pencil.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], COLOURS[colour])
    return f"{COUNTS[count]} {colour} {shape}{'s' if count else ''}", image


def places(count: int, rng: random.Random) -> list[tuple[int, int, int]]:
    """Centres and half sides of `count` shapes, each in a quarter of the picture of its own."""
    chosen = []
    for quarter in rng.sample(range(4), count):
        half = rng.randint(*SIZES)
        x, y = (start * SIDE // 2 + rng.randint(half + 1, SIDE // 2 - half - 2) for start in divmod(quarter, 2))
        chosen.append((x, y, half))
    return chosen


def write_split(out: Path, name: str, count: int, seed: int, drawn: set[bytes]) -> list[str]:
    """The pictures and rows of a split, none of whose pixels are in `drawn`; returns the answers."""
    rng = random.Random(f"{name} {seed}")
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).mkdir(parents=True)
    rows, answers = [], []
    while len(rows) < count:
        answer, image = draw(rng)
        if image.tobytes() in drawn:
            continue
        drawn.add(image.tobytes())
        file = f"{name}/{len(rows):04d}.png"
        image.save(out / file)
        question = [{"type": "image", "image": file}, {"type": "text", "text": QUESTION}]
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        answers.append(answer)
    (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return answers


def write_model(directory: Path, texts: list[str]) -> None:
    """A model directory as a real one is laid out, less the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(directory, texts, SPECIAL_TOKENS, CHAT_TEMPLATE, image_token="<|image_pad|>")
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|end|>"],
    }
    vision = {
        "model_type": "qwen3_vl_vision",
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 128,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    write_json(directory / "preprocessor_config.json", processor)
    write_json(directory / "config.json", config)  # last: tools/quickstart-images looks for it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--train", type=int, default=6000, help="pictures in train.jsonl (default 6000)")
    parser.add_argument("--val", type=int, default=100, help="pictures in val.jsonl (default 100)")
    parser.add_argument("--heldout", type=int, default=200, help="pictures in heldout.jsonl (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures (default 0)")
    args = parser.parse_args()

    drawn: set[bytes] = set()
    counts = {"heldout": args.heldout, "val": args.val, "train": args.train}
    answers = [write_split(args.out, name, count, args.seed, drawn) for name, count in counts.items()][-1]
    write_model(args.out / "model", [QUESTION, *answers])
    written = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{args.out}: {written} pictures; model/ holds a tokenizer and the config of a model from scratch")


if __name__ == "__main__":
    main()
