"""GGUF files in llama.cpp itself, compared with the model that they were written from: ids, logits and greedy answers.

    python -m tests.real.by_llama_cpp expect EXPORT EXPECTED.npz     # where dtrain is: what EXPORT, a directory, gives
    python tests/real/by_llama_cpp.py check EXPECTED.npz F.gguf ...  # where llama_cpp is: how far each file is from it
    python tests/real/by_llama_cpp.py check EXPECTED.npz F.gguf --lora A.gguf

`check` ends with status 1 where ids differ, where logits differ by more than the file's type rounds, or where a greedy
answer of an f32 file is another one.
"""

import argparse
import json
import sys
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
LARGEST = {"F32": 2e-3, "F16": 0.05, "BF16": 0.5, "Q8_0": 1.0}
"""The largest difference of a logit, by the type of the file's matrices."""
ANSWER = 24  # tokens


def expect(export: Path, out: Path) -> None:
    """Write the ids, the logits and the greedy answers of the model in `export`, computed by dtrain in float32."""
    import torch

    from dtrain import models
    from dtrain.data.text.tokenizer import Tokenizer

    tokenizer, model = Tokenizer.from_directory(export), models.from_pretrained(export).eval()
    added = [token.content for token in tokenizer.added_tokens.values()]
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
    model = llama_cpp.Llama(str(file), n_ctx=512, logits_all=True, verbose=False, n_threads=1, **more)
    wrong = []
    for text, ids, whole in zip(facts["texts"], facts["ids"], facts["whole"], strict=True):
        for wanted, add_bos in ((ids, False), (whole, True)):
            if (found := model.tokenize(text.encode(), add_bos=add_bos, special=True)) != wanted:
                wrong.append(f"  {text!r}, add_bos={add_bos}: {found}, and not {wanted}")
    largest = spread = 0.0
    changed = []
    for number, (prompt, answer) in enumerate(zip(facts["prompts"], facts["answers"], strict=True)):
        model.reset()
        model.eval(prompt)
        wanted = held[f"logits{number}"]
        largest = max(largest, float(np.abs(model.scores[: len(prompt)] - wanted).max()))
        spread = max(spread, float(wanted.std()))
        found = []
        while len(found) < len(answer):
            found.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(found[-1:])
        if found != answer:
            changed.append(number)
    kind = {0: "F32", 1: "F16", 7: "Q8_0", 32: "BF16"}[int(model.metadata["general.file_type"])]
    print(
        f"{file.name}: {kind}, {len(facts['texts'])} texts, {len(wrong)} with other ids; logits differ by at most "
        f"{largest:.3g} (their deviation is {spread:.3g}); {len(changed)} of {len(facts['prompts'])} answers differ"
    )
    print("\n".join(wrong), end="\n" if wrong else "")
    return not wrong and largest <= LARGEST[kind] and not (kind == "F32" and changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("expect", "check"))
    parser.add_argument("first", type=Path, help="EXPORT, or EXPECTED.npz")
    parser.add_argument("others", type=Path, nargs="+", help="EXPECTED.npz, or GGUF files")
    parser.add_argument("--lora", type=Path, help="an adapter's GGUF file, for each of the files")
    given = parser.parse_args()
    if given.action == "expect":
        expect(given.first, given.others[0])
        return 0
    return 0 if all([check(given.first, file, given.lora) for file in given.others]) else 1


if __name__ == "__main__":
    sys.exit(main())
