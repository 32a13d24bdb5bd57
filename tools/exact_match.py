#!/usr/bin/env python3
"""Exact match of a model's greedy answers with those of a file of chat messages.

    python tools/exact_match.py runs/quickstart build/arithmetic/heldout.jsonl
    python tools/exact_match.py build/arithmetic/model build/arithmetic/heldout.jsonl --scratch 0    # before training

The model is a directory in Hugging Face's layout, a run's or a checkpoint's; with --scratch SEED it has random weights,
those that `model.init: scratch` with that run.seed starts from. Every row's first user message is the prompt, its last
assistant message the answer. Prints `exact match: NN.N%`; with --at-least it fails below that.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.json_files import split_lines
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.generate import LoadedModel, encode_prompt, generate, load


def read_problems(path: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of each row."""
    problems = []
    for line in split_lines(path.read_text(encoding="utf-8")):
        messages = json.loads(line)["messages"]
        prompt = next(message["content"] for message in messages if message["role"] == "user")
        problems.append((prompt, messages[-1]["content"]))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--scratch", type=int, metavar="SEED", help="random weights of this seed")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--show", type=int, default=3, metavar="N", help="how many wrong answers to print (default 3)")
    args = parser.parse_args()

    try:
        if args.scratch is None:
            loaded = load(args.model, torch.float32, torch.device("cpu"))
        else:
            model = models.build(models.read_config(args.model))
            loaded = LoadedModel(model, Tokenizer.from_directory(args.model))
            models.init_weights(model, args.scratch)
        model, tokenizer = loaded
        template = loaded.template()
        problems = read_problems(args.problems)
        prompts = [encode_prompt(tokenizer, prompt, template) for prompt, _ in problems]
        completions = generate(model, prompts, max_new_tokens=args.max_new_tokens, eos_ids=tokenizer.eos_ids)
    except (UserError, OSError) as error:
        print(f"exact_match: {error}", file=sys.stderr)
        return 1
    answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
    wrong = [(*problem, given) for problem, given in zip(problems, answers, strict=True) if given != problem[1]]
    for prompt, answer, given in wrong[: args.show]:
        print(f"  wrong: {prompt!r} -> {given!r}, not {answer!r}")
    percent = 100 * (1 - len(wrong) / len(problems))
    print(f"exact match: {percent:.1f}% ({len(problems) - len(wrong)} of {len(problems)} problems)")
    return 0 if percent >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
