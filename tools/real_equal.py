"""Logits and greedy answers of a model in dtrain beside those of the same weights in transformers, as JSON.

    .venv/bin/python tools/real_equal.py runs/real-lora build/real/lora build/real/heldout.jsonl --limit 20

The first directory is read by dtrain (a run's, a checkpoint's, a model's), the second by transformers. Prompts are the
first messages of the rows. Both compute in float32 on one thread. `logits` is the largest difference of any logit over
prompt and answer, relative to the largest logit of that row.
"""

import argparse
import json
from pathlib import Path

import torch

from dtrain.base.json_files import split_lines
from dtrain.inference.generate import generate, load


def iterate_prompts(path: Path, limit: int) -> list[list[dict]]:
    """Return the messages before the answer of the first `limit` rows."""
    rows = [json.loads(line)["messages"] for line in split_lines(path.read_text(encoding="utf-8"))[:limit]]
    return [messages[:1] for messages in rows]


class Greedy:
    """Greedy answers of a model in dtrain to messages, in float32. prompts, answers: token ids."""

    def __init__(self, directory: Path, messages: list[list[dict]], max_new_tokens: int):
        loaded = load(directory, torch.float32, torch.device("cpu"))
        self.model, self.tokenizer, template = loaded.model, loaded.tokenizer, loaded.template()
        self.prompts = [self.tokenizer.encode(template.render(row, add_generation_prompt=True)) for row in messages]
        self.answers = generate(self.model, self.prompts, max_new_tokens=max_new_tokens, eos_ids=self.tokenizer.eos_ids)


@torch.no_grad()
def compare(ours: Path, theirs: Path, prompts: list[list[dict]], max_new_tokens: int) -> dict:
    """Return the largest difference of logits, and how many answers are equal token for token."""
    import transformers

    mine = Greedy(ours, prompts, max_new_tokens)
    eos_ids = list(mine.tokenizer.eos_ids)
    peer = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32).eval()
    peer_tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    equal_ids = equal = 0
    largest = 0.0
    for prompt, ids, answer in zip(prompts, mine.prompts, mine.answers, strict=True):
        given = peer_tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        equal_ids += ids == given
        row = torch.tensor([given])
        text = peer.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eos_ids,
            pad_token_id=eos_ids[0],
        )[0, len(given) :]
        equal += text.tolist() == list(answer)
        whole = torch.tensor([[*ids, *answer]])
        right = peer(whole).logits
        largest = max(largest, ((mine.model(whole) - right).abs().max() / right.abs().max()).item())
    return {"logits": largest, "prompts": len(prompts), "equal_ids": equal_ids, "equal_answers": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="the first N prompts (default 20)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="default 32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = iterate_prompts(options.rows, options.limit)
    print(json.dumps(compare(options.ours, options.theirs, prompts, options.max_new_tokens)))


if __name__ == "__main__":
    main()
