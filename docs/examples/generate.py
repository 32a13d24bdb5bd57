"""Generation from Python: text from a directory, and token ids from a model in memory.

python generate.py runs/my-run
"""

import sys
from pathlib import Path

import torch

import dtrain

PROMPTS = ["What is 3 + 4?", "Name a colour."]


def main(directory):
    # A model, a run, a checkpoint or an adapter. The prompts are messages of a user, and are decoded together.
    for text in dtrain.generate_text(Path(directory), PROMPTS, max_new_tokens=20, temperature=0.7, seed=1):
        print("text:", text)

    # The same for token ids and a model that you have changed, for example. Greedy decoding ends at a token of eos_ids.
    model_directory = next(path for path in (Path(directory) / "export", Path(directory)) if path.is_dir())
    model = dtrain.from_pretrained(model_directory, dtype=torch.float32)
    completions = dtrain.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=8, eos_ids=[0])
    print("ids:", completions)

    # A model is a torch module that returns logits, [B, S, V].
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]]))
    print("logits:", tuple(logits.shape))


if __name__ == "__main__":
    main(sys.argv[1])
