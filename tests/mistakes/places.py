"""Mistakes in files, weights, devices and directories, and sizes that train nothing: a look at the world tells them."""

import json

from tests.mistakes import Mistake


def _rows(*rows: dict) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


CHAT = {"messages": [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]}
PAIR = {"prompt": "w3", "chosen": "w4 w5", "rejected": "w6"}
VERL = _rows({"prompt_ids": [3, 4], "reward_model": {"style": "rule", "truth": "4"}})
REWARDS = """
def takes_gold(completions, gold, *, bonus=1.0):
    return [bonus for _ in completions]

def takes_truth(completions, truth):
    return [1.0 for _ in completions]

def takes_any(completions, **columns):
    return [0.0 for _ in completions]
"""


def _one(typed: str, *says: str, files=None, base: str = "sft") -> Mistake:
    return Mistake(tuple(typed.split("  ")), says, files or {}, base)


MIXED = """import functools, random
value = 5
short = lambda completions, gold: []
class Made:
    def __init__(self, word): ...
    def __call__(self, completions): ...
class Called:
    def __call__(self, completions, gold): ...
def kept(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapped
@kept
def decorated(completions, gold): ...
async def one(completions):
    if completions:
        return float(1)
    return 0.5
def none(completions):
    completions.sort()
def by_place(completions, /):
    return [1.0]
draws = random.random
wants = functools.partial(decorated)
"""
ROWS = (
    _one("data.train.path={root}/odd.jsonl", "odd.jsonl:1", "no known format",
         files={"odd.jsonl": _rows({"query": "a"})}),
    _one("data.train.path={root}/asked.jsonl", "asked.jsonl:1",
         "'data.train.columns={instruction: question, output: \"a b\"}'",
         files={"asked.jsonl": _rows({"id": "7", "question": "a", "a b": "c"})}),
    _one("data.train.path={root}/semi.csv", "semi.csv:2", "dtrain reads commas",
         files={"semi.csv": "Frage;Antwort\na;b\n"}),
    _one("data.train.path={root}/null.jsonl", "null.jsonl:1", "Give the row a value there",
         files={"null.jsonl": _rows({"text": None})}),
    _one("data.train.path={root}/chat.jsonl", "chat.jsonl:1", "no chat template", "data.chat_template",
         files={"chat.jsonl": _rows(CHAT)}),
    _one("data.train.path={root}/chats.jsonl", "chats.jsonl:1", "prompt, chosen and rejected",
         files={"chats.jsonl": _rows(CHAT)}, base="dpo"),
    _one("data.train.path={root}/pairs2.jsonl", "pairs2.jsonl", "method=dpo", files={"pairs2.jsonl": _rows(PAIR)}),
    _one("data.train.path={root}/void.jsonl  data.train.format=text", "void.jsonl", "empty", files={"void.jsonl": ""}),
    _one("data.train.path={root}/high.jsonl", "high.jsonl:2", "300", "vocabulary of 67",
         files={"high.jsonl": _rows({"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3, 300]})}),
    _one("data.train.path={root}/shifted.jsonl", "shifted.jsonl:1", "must not be shifted",
         files={"shifted.jsonl": _rows({"input_ids": [1, 2, 3], "labels": [2, 3, -100]})}),
    _one("data.max_length=8  data.too_long=error", "rows.jsonl", "data.max_length is 8", "truncate or drop"),
    _one("data.max_length=2  data.too_long=drop", "data.max_length", "rows.jsonl"),
    _one("data.train.path={root}/bare.jsonl", "bare.jsonl", "trained token",
         files={"bare.jsonl": _rows({"input_ids": [3, 4], "labels": [-100, -100]})}),
    _one("data.val.path={root}/valid.jsonl", "valid.jsonl:1", "no known format",
         files={"valid.jsonl": _rows({"query": "a"})}),
    _one("data.val.path={root}/novalid.jsonl", "novalid.jsonl", "no row", files={"novalid.jsonl": ""}),
    _one("data.train.path=[{root}/rows.jsonl,{root}/second.jsonl]", "second.jsonl:1",
         files={"second.jsonl": "{not json\n"}),
    _one("grpo.rewards=[{fn: math_exact}]", "reward math_exact", "'answer'",
         "it has wanted", base="grpo"),
    *(_one(f"grpo.rewards=[{{fn: {reward}}}]  data.train.path={{root}}/verl.jsonl", says, files={"verl.jsonl": VERL,
           "rewards_of_mine.py": REWARDS}, base="grpo")
      for reward, says in (
          ("math_exact", "no column 'answer' (it has reward_model, reward_model.style, reward_model.truth)"),
          ("math_exact, kwargs: {column: reward_model}", "holds an object (style, truth)"),
          ("rewards_of_mine.takes_truth", "map it with data.train.columns={truth: reward_model.truth}"))),
    _one("grpo.rewards=[{fn: numeric, kwargs: {column: gold}}]", "reward numeric", "'gold'", base="grpo"),
    _one("grpo.rewards=[{fn: rewards_of_mine.takes_gold}]", "reward takes_gold takes gold", "it has wanted",
         files={"rewards_of_mine.py": REWARDS}, base="grpo"),
    _one("grpo.rewards=[{fn: python_tests}]", "reward python_tests", "'tests'", "it has wanted", base="grpo"),
    _one("grpo.rewards=[{fn: os.system}]", "grpo.rewards[0].fn", "os.system comes from a C module", "a Python function",
         base="grpo"),
    _one("grpo.rewards=[{fn: random.random}]", "random.random accepts neither completions nor a column", base="grpo"),
    _one("grpo.rewards=[{fn: random.shuffle}]", "shuffle takes x, which is no column", base="grpo"),
    _one("grpo.rewards=[{fn: math.sqrt}]", "math.sqrt comes from a C module", base="grpo"),
    _one("grpo.rewards=[{fn: uncallable.Score}]", "uncallable.Score is a class without __call__",
         files={"uncallable.py": "class Score:\n    def score(self, completions): ...\n"}, base="grpo"),
    *(_one(f"grpo.rewards=[{{fn: mixed.{name}}}]", says, files={"mixed.py": MIXED}, base="grpo")
      for name, says in (("value", "a value that cannot be called"), ("short", "takes gold, which is no column"),
                         ("Made", "needs the options word. Set them in its kwargs"),
                         ("Called", "takes gold, which is no column"),
                         ("decorated", "takes gold, which is no column"), ("draws", "accepts neither completions"),
                         ("one", "returns one value, or nothing"), ("none", "returns one value, or nothing"),
                         ("by_place", "has the positional-only parameters completions"),
                         ("wants", "takes gold, which is no column"))),
    _one("grpo.rewards=[{fn: ./mixed.py:short}]", "Write module.function, without .py, such as mixed.short",
         base="grpo"),
    _one("data.train.path={root}/judged.jsonl", "judged.jsonl:2", "label is false", "method=kto",
         files={"judged.jsonl": _rows(*({"prompt": "w3", "completion": "w4", "label": one} for one in (True, False)))}),
)  # fmt: skip
"""What the first rows of the data tell."""

WORLD_OF_MANY = (
    _one(
        "launch.nproc=1000  train.global_batch=1000  launch.device=cpu", "1000 processes on a CPU", "set launch.nproc="
    ),
)
"""What would start more processes than a machine holds."""

WEIGHTS = (
    _one("model.path={root}/cut  model.init=pretrained", "cut/model.safetensors", "cut short", "download it again"),
    _one("model.path={root}/wide  model.init=pretrained", "shape: model.embed_tokens.weight", "config.json"),
    _one("model.path={root}/deep  model.init=pretrained", "missing: model.layers.2.", "config.json"),
    _one("model.path={root}/shallow  model.init=pretrained", "unexpected: model.layers.1."),
    _one("model.path={root}/sharded  model.init=pretrained", "sharded/one.safetensors", "lacks 1 tensors", "nowhere"),
    _one("model.path={root}/gone  model.init=pretrained", "gone", "two.safetensors", "do not exist"),
    _one("model.path={root}/damaged  model.init=pretrained", "damaged/model.safetensors", "download it again"),
    _one("dpo.reference={root}/cut", "cut/model.safetensors", "dpo.reference", base="dpo"),
)
"""What the headers of weights tell."""

WORLD = (
    _one("launch.device=cuda", "launch.device=cuda", "launch.device=cpu"),
    _one("metrics.wandb=mine", "metrics.wandb=mine", "pip install 'dtrain[wandb]'"),
    _one("model.path=runs/usd", "there is no directory 'runs/usd'", "did you mean runs/used?"),
    _one("run.dir={root}/file", "run.dir", "file", files={"file": "text"}),
    _one("run.dir=/proc/there", "run.dir", "/proc"),
    _one("run.name=used  checkpoint.resume=null", "runs/used", "earlier run", "checkpoint.resume=auto"),
    _one("checkpoint.resume={root}/runs", "checkpoint.resume=/", "no complete checkpoint"),
    _one("checkpoint.init_from={root}/runs", "checkpoint.init_from=/", "no complete checkpoint"),
    _one("checkpoint.resume=runs/usd", "checkpoint.resume=runs/usd: there is no such", "did you mean runs/used?"),
    _one("checkpoint.init_from=runs/usd", "checkpoint.init_from=runs/usd: there is no such", "did you mean runs/used?"),
    _one("checkpoint.init_from=~/no_run", "checkpoint.init_from=/", "no_run: there is no such directory"),
    _one("optimizer.kwargs={momentum: 1}", "optimizer.name=adamw", "momentum", "optimizer.kwargs"),
    _one("scheduler.kwargs={decay: 1}", "scheduler.kwargs", "decay"),
    _one("scheduler=[{steps: 99}]  scheduler.name=cosine", "scheduler is a list", "scheduler[0].name"),
    _one("optimizer.name=torch.optim.SparseAdam", "SparseAdam", "take adamw"),
    _one("optimizer.name=adafactor  train.dtype=bfloat16", "cannot step sharded parameters", "Take adamw"),
    _one("train.steps=null  train.epochs=1  train.global_batch=16", "train.epochs=1", "train.global_batch=auto"),
    _one("train.steps=1  scheduler.warmup_steps=5", "scheduler.warmup_steps=5", "nothing would be trained"),
    _one("train.steps=6  scheduler.warmup=100  scheduler.warmup_steps=null", "6 steps", "Set scheduler.warmup=0.03"),
    _one("grpo.engine=http  grpo.server.urls=[http://localhost:1]  grpo.server.api_key_file={root}/nokey", "nokey",
         "API key cannot be read", base="grpo"),
)  # fmt: skip
"""What devices, packages, directories, sizes and settings tell."""

METHODS = (
    _one("grpo.beta=0.1", "grpo.beta is read only by method=grpo", "method=sft", "Leave it out"),
    _one("dpo.beta=0.1", "dpo.beta is read only by method=dpo"),
    _one("dpo.loss=ipo", "dpo.loss is read only by method=dpo", base="grpo"),
    _one("distill.teacher={root}/qwen3-tied", "distill.teacher is read only by method=distill"),
    _one("grpo.sampling.temperature=0.5", "grpo.sampling.temperature is read only by method=grpo", base="dpo"),
)
"""Keys of another method."""

PLACES = ROWS + WORLD_OF_MANY + WEIGHTS + WORLD + METHODS
