"""GGUF files in llama.cpp itself, compared with the model that they were written from: ids, logits, greedy answers.

Where dtrain is, the first writes what EXPORT, a directory, gives; the second tiny models of every kind, with files:

    python -m tests.real.by_llama_cpp expect EXPORT EXPECTED.npz
    python -m tests.real.by_llama_cpp tiny DIR

Where llama_cpp is, these say how far each file, or each of `tiny`, is from that:

    python tests/real/by_llama_cpp.py check EXPECTED.npz F.gguf ... [--lora A.gguf]
    python tests/real/by_llama_cpp.py check DIR

Where both are, no argument does `tiny` and `check` in a temporary directory.
`check` ends with status 1 where ids differ, where logits differ by more than the file's type rounds, or where a greedy
answer of an f32 file is another one.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

TEXTS = (
    "Hello, world!",
    " a  few   spaces, and\ta tab\n\nand lines \n",
    "L'été à la plage: ÉCOLE, naïve façade, Ångström, ÀÉÎÕÜ, señor",
    "1 22 333 4444 55555 3.14159 1,000,000 ½ ² ٣٤",
    "I'm you're WE'LL they'd it's DON'T",
    "emoji 🙂👍🏽 👩‍👩‍👧 and 漢字かな 한국어 русский עברית हिन्दी",
    "def f(x):\n    return x**2  # comment\n\r\n",
    "",
    "x",
    "   ",
    "\n\n\n\n",
    "<b>html</b> &amp; {json: [1, 2]} \\ $x^2$ … – — « »",
)
LARGEST = {"F32": 1e-4, "F16": 0.02, "BF16": 0.1, "Q8_0": 0.5}
"""The largest difference of a logit, over the logits' standard deviation, by the type of the file's matrices: llama.cpp
rounds what it multiplies them with to this type too."""
GELU = 5e-3  # the least of Gemma's: llama.cpp looks up GELU in a table of float16
ANSWER = 24  # tokens


def expect(export: Path, out: Path) -> None:
    """Write the ids, the logits and the greedy answers of the model in `export`, computed by dtrain in float32."""
    import torch

    from dtrain import models
    from dtrain.data.text.tokenizer import Tokenizer

    tokenizer, model = Tokenizer.from_directory(export), models.from_pretrained(export).eval()
    added = [token.content for token in tokenizer.added_tokens().values()]
    texts = [*TEXTS, *(f"a {token}b{token} c" for token in added[:40]), "".join(added[:40])]
    ids = {text: tokenizer.encode(text) for text in texts}
    whole = {text: tokenizer.encode(text, add_special_tokens=True) for text in texts}
    prompts = [ids[text][:24] for text in TEXTS if len(ids[text]) > 3]
    held = {}
    answers = []
    with torch.no_grad():
        for number, prompt in enumerate(prompts):
            held[f"logits{number}"] = model(torch.tensor([prompt]))[0].float().numpy()
            answer = list(prompt)
            for _ in range(ANSWER):
                answer.append(int(model(torch.tensor([answer]))[0, -1].argmax()))
            answers.append(answer[len(prompt) :])
    facts = {"texts": texts, "ids": [ids[text] for text in texts], "whole": [whole[text] for text in texts]}
    np.savez(out, facts=json.dumps({**facts, "prompts": prompts, "answers": answers}), **held)


def check(expected: Path, file: Path, lora: Path | None) -> bool:
    """Print how far `file` is from what was expected; returns whether it is near enough."""
    import llama_cpp

    held = np.load(expected)
    facts = json.loads(str(held["facts"]))
    more = {} if lora is None else {"lora_path": str(lora)}
    more |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # by default float16
    model = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1, **more)
    wrong = []
    for text, ids, whole in zip(facts["texts"], facts["ids"], facts["whole"], strict=True):
        for wanted, add_bos in ((ids, False), (whole, True)):
            if (tokens := model.tokenize(text.encode(), add_bos=add_bos, special=True)) != wanted:
                wrong.append(f"  {text!r}, add_bos={add_bos}: {tokens}, and not {wanted}")
    largest = spread = 0.0
    changed = []
    for number, (prompt, answer) in enumerate(zip(facts["prompts"], facts["answers"], strict=True)):
        model.reset()
        model.eval(prompt)
        wanted = held[f"logits{number}"]
        largest = max(largest, float(np.abs(model.scores[: len(prompt)] - wanted).max()))
        spread = max(spread, float(wanted.std()))
        drawn = []
        while len(drawn) < len(answer):
            drawn.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(drawn[-1:])
        if drawn != answer:
            changed.append(number)
    kind = {0: "F32", 1: "F16", 7: "Q8_0", 32: "BF16"}[int(model.metadata["general.file_type"])]
    print(
        f"{file.name}: {kind}, {len(facts['texts'])} texts, {len(wrong)} with other ids; logits differ by at most "
        f"{largest:.3g} (their deviation is {spread:.3g}); {len(changed)} of {len(facts['prompts'])} answers differ"
    )
    print("\n".join(wrong), end="\n" if wrong else "")
    most = max(LARGEST[kind], GELU if model.metadata["general.architecture"] == "gemma3" else 0)
    return not wrong and largest <= most * spread and not (kind == "F32" and changed)


def write_tiny(directory: Path) -> None:
    """Write a directory for each family, tokenizer, rotary scaling and form of an adapter: files of every type, and
    what is expected of them."""
    from dtrain.checkpoint.gguf.export import export_gguf
    from dtrain.checkpoint.huggingface.export import export
    from tests.adapters.by_peft import save_adapter
    from tests.checkpoint.gguf import models as tiny

    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 16}
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    long = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
    phi = {"rope_parameters": {**long, "partial_rotary_factor": 0.5}, "max_position_embeddings": 1024}
    phi["original_max_position_embeddings"] = 256  # llama.cpp's least context, beyond which it takes long_factor
    pattern = ["sliding_attention", "full_attention", "sliding_attention"]
    untied = {"tie_word_embeddings": False}
    kinds = {
        **{family: (family, tiny.byte_level(), untied) for family in tiny.SHAPES},
        "llama-bpe": ("llama", tiny.byte_level(tiny.LLAMA3, ignore_merges=True), {}),
        "smaug-bpe": ("llama", tiny.byte_level(tiny.LLAMA3), {}),
        "qwen2-pre": ("qwen2", tiny.byte_level(tiny.QWEN2), {}),
        "spm": ("llama", tiny.sentencepiece(adds_space=True), {}),
        "spm-gemma": ("gemma3", tiny.sentencepiece(adds_space=False), {}),
        "gemma3-pattern": ("gemma3", tiny.byte_level(), {"layer_types": pattern, "final_logit_softcapping": 3.0}),
        "qwen3-yarn": ("qwen3", tiny.byte_level(), {"rope_parameters": {**yarn, "attention_factor": 1.3}}),
        "llama-linear": ("llama", tiny.byte_level(), {"rope_parameters": linear}),
        "phi3-longrope": ("phi3", tiny.byte_level(), phi),
    }
    for name, (family, tokenizer, fields) in kinds.items():
        made = tiny.make(directory / name / "export", family, tiny.add_tokens(tokenizer), **fields)
        for kind in ("f32", "f16", "bf16", "q8_0"):
            export_gguf(made, directory / name / f"{kind}.gguf", kind)
        expect(made, directory / name / "expected.npz")
    for family in ("llama", "phi3"):
        for form, options in (("adapter", {"rank_pattern": {"k_proj": 2}}), ("folded", {"use_rslora": True})):
            place, base = directory / f"{family}-{form}", directory / family
            save_adapter(base / "export", place / "peft", **options)
            export_gguf(place / "peft", place / "lora.gguf", "f32", form)
            (place / "f32.gguf").symlink_to((base / "f32.gguf").resolve())
            export(place / "peft", place / "merged")
            expect(place / "merged", place / "expected.npz")


def check_tiny(directory: Path) -> bool:
    """`check` every file of `write_tiny`; returns whether all are near enough."""
    near = True
    for place in sorted(path.parent for path in directory.glob("*/expected.npz")):
        print(f"{place.name}:")
        lora = place / "lora.gguf"
        for file in sorted(place.glob("*.gguf")):
            if file != lora:
                near &= check(place / "expected.npz", file, lora if lora.exists() else None)
    return near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("expect", "tiny", "check"), nargs="?")
    parser.add_argument("first", type=Path, nargs="?", help="EXPORT, DIR or EXPECTED.npz")
    parser.add_argument("others", type=Path, nargs="*", help="EXPECTED.npz, or GGUF files")
    parser.add_argument("--lora", type=Path, help="an adapter's GGUF file, for each of the files")
    given = parser.parse_args()
    if given.action is None:
        from tests.real.common import need

        need("llama-cpp-python", "llama_cpp")
        with tempfile.TemporaryDirectory() as directory:
            write_tiny(Path(directory))
            return 0 if check_tiny(Path(directory)) else 1
    if given.first is None:
        parser.error("name EXPORT, DIR or EXPECTED.npz")
    if given.action == "check":
        if given.first.is_dir():
            return 0 if check_tiny(given.first) else 1
        return 0 if all([check(given.first, file, given.lora) for file in given.others]) else 1
    if given.action == "tiny":
        write_tiny(given.first)
    else:
        expect(given.first, given.others[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
