"""Mistakes in a recipe, its overrides and its files: `validate` and `run` answer each before anything is trained."""

from tests.mistakes import Mistake


def _one(typed: str | tuple[str, ...], *says: str, files=None, base: str = "sft", links=None) -> Mistake:
    return Mistake((typed,) if isinstance(typed, str) else typed, says, files or {}, base, links=links or {})


TOOLS = "tests.environments.toolbox"
ADAPTER = '{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Q", "r": 8, "lora_alpha": 16}'
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-0.6B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine.jsonl
template: qwen3
cutoff_len: 2048
output_dir: saves/x
overwrite_output_dir: true
plot_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
load_in_4bit: true
datasets:
  - path: mine.jsonl
    type: alpaca
val_set_size: 0.05
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
gradient_checkpointing: true
flash_attention: true
special_tokens:
  pad_token: "<|end_of_text|>"
"""
TORCHTUNE = """\
model:
  _component_: torchtune.models.qwen2.qwen2_0_5b
tokenizer:
  _component_: torchtune.models.qwen2.qwen2_tokenizer
  path: /tmp/vocab.json
dataset:
  _component_: torchtune.datasets.alpaca_dataset
batch_size: 2
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
optimizer:
  _component_: torch.optim.AdamW
  lr: 2.0e-05
enable_activation_checkpointing: true
"""
TRL = """\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: mine.jsonl
learning_rate: 1.0e-6
per_device_train_batch_size: 8
num_generations: 8
max_completion_length: 256
max_prompt_length: 512
reward_funcs: [accuracy]
use_vllm: true
beta: 0.04
"""

NUMBERS = (
    _one("launch.nproc=0", "launch.nproc=0 must be at least 1"),
    _one("launch.nproc=-1", "launch.nproc=-1 must be at least 1"),
    _one("launch.nproc=two", "launch.nproc=two must be a whole number"),
    _one("train.steps=0", "train.steps=0 must be at least 1"),
    _one("train.steps=1.5", "train.steps=1.5 must be a whole number"),
    _one("train.steps=many", "train.steps=many must be a whole number"),
    _one(("train.steps=null", "train.epochs=null"), "train.steps or train.epochs is missing", "set one of them"),
    _one("train.epochs=1", "train.steps=10 and train.epochs=1 exclude each other", "set one of them to null"),
    _one("train.global_batch=0", "train.global_batch=0 must be", "at least 1"),
    _one("train.global_batch=7", "train.global_batch=7", "train.global_batch=8"),
    _one("train.global_batch=big", "train.global_batch=big must be a whole number"),
    _one("train.micro_batch=0", "train.micro_batch=0 must be at least 1"),
    _one("train.max_grad_norm=0", "train.max_grad_norm=0", "more than 0, or null"),
    _one("optimizer.lr=-1", "optimizer.lr=-1", "at least 0"),
    _one("data.val=10%", "data.val=10% must be a number", "write 0.1"),
    _one("scheduler.warmup=10%", "scheduler.warmup=10% must be", "write 0.1"),
    _one(("lora={rank:", "8}"), "lora={rank:: the value is not YAML", "quote all: 'lora={rank: ...'"),
    _one("data.train.path={root}/one.jsonl,{root}/two.jsonl", "several are written [", files={"one.jsonl": "{}"}),
    _one("optimizer.lr=1,5e-5", "optimizer.lr=1,5e-5 must be a number: write 1.5e-5"),
    _one("train.steps=1,000", "train.steps=1,000 must be a whole number or null: leave out the comma"),
    _one("data.num_workers=1000000", "data.num_workers=1000000 must be at least 0, and at most 256"),
    _one("optimizer.lr=fast", "optimizer.lr=fast must be a number"),
    _one("optimizer.lr=.inf", "optimizer.lr=inf must be a finite number"),
    _one("optimizer.betas=0.9", "optimizer.betas=0.9 must be a list of numbers"),
    _one("optimizer.betas=[0.9,1.5]", "optimizer.betas", "two numbers from 0 up to 1"),
    _one("scheduler.warmup=1.5", "scheduler.warmup=1.5 must be a share of the steps"),
    _one("scheduler.warmup_steps=-3", "scheduler.warmup_steps=-3 must be at least 0"),
    _one("scheduler.min_lr_ratio=2", "scheduler.min_lr_ratio=2", "from 0 to 1"),
    _one("data.max_length=1", "data.max_length=1 must be at least 2"),
    _one("parallel.tp=0", "parallel.tp=0 must be at least 1"),
    _one("parallel.tp=2", "tp 2 = 2 does not divide 1 process", "set launch.nproc to a multiple of 2"),
    _one("parallel.tp=3", "parallel.tp=3"),
    _one("parallel.dp_shard=0", "parallel.dp_shard=0 must be at least 1, or -1"),
    _one("checkpoint.every=0", "checkpoint.every=0 must be at least 1, or null"),
    _one("checkpoint.keep_last=0", "checkpoint.keep_last=0 must be at least 1, or null"),
    _one("metrics.every=0", "metrics.every=0 must be at least 1"),
    _one("train.validate_every=5", "train.validate_every=5 needs a validation set", "data.val.path"),
    _one(("lora={}", "lora.rank=0"), "lora.rank=0"),
    _one(("lora={}", "lora.dropout=1.5"), "lora.dropout=1.5"),
    _one("dpo.beta=-1", "dpo.beta=-1", base="dpo"),
    _one("grpo.group_size=0", "grpo.group_size=0", base="grpo"),
    _one("grpo.sampling.temperature=-1", "grpo.sampling.temperature=-1", base="grpo"),
    _one("grpo.sampling.top_p=2", "grpo.sampling.top_p=2", base="grpo"),
    _one("grpo.prompts_per_step=3", "train.global_batch", base="grpo"),
)
SLIPS = (
    _one("train.stpes=3", "train.stpes is no key of a recipe; did you mean train.steps?"),
    _one("trian.steps=3", "trian is no key of a recipe; did you mean train?"),
    _one("shuffle=true", "shuffle is no key of a recipe; did you mean data.shuffle?"),
    _one("global_batch=8", "did you mean train.global_batch?"),
    _one("train.microbatch=2", "did you mean train.micro_batch?"),
    _one("optimiser.lr=1", "did you mean optimizer?"),
    _one("train.weight_decay=0", "did you mean optimizer.weight_decay?"),
    _one("weight_decay=0", "did you mean optimizer.weight_decay?"),
    _one("packing=true", "did you mean data.packing?"),
    _one("temperature=1", "or grpo.sampling.temperature or distill.temperature or"),
    _one("steps=10", "did you mean train.steps?"),
    _one("data.train.fromat=text", "did you mean data.train.format?"),
    _one("checkpoints.every=3", "did you mean checkpoint?"),
    _one("verbose=true", "verbose is no key of a recipe; the keys of a recipe are method, run,"),
    _one("Optimizer.lr=1", "did you mean optimizer?"),
    _one("train.Steps=1", "did you mean train.steps?"),
    _one("lora.rnk=8", "lora.rnk is no key of a recipe; did you mean lora.rank?"),
    _one("grpo.rewards=[{fn:accuracy}]", "write a blank after the colon, fn: accuracy", base="grpo"),
    _one("grpo.rewards=[{fnn: math_exact}]", "did you mean grpo.rewards[0].fn?", base="grpo"),
    _one("grpo.rewards=[{}]", "grpo.rewards[0].fn is missing", base="grpo"),
    _one("grpo.rewards=[math_exact]", "grpo.rewards[0]=math_exact", "fn, weight, kwargs", base="grpo"),
    _one("grpo.rewards=math_exact", "grpo.rewards=math_exact", "a list of mappings", base="grpo"),
    _one("data.train.columns={prompt:question}", "prompt:question as one word: write a blank after the colon"),
    _one(("lora={}", "lora.target=all"), "lora.target: all matches no linear layer", "lora.target=all-linear"),
    _one("optimizer=adamw", "optimizer=adamw: optimizer is a mapping", "write optimizer.name=adamw"),
    _one("optimizer=adamw_8bit", "write optimizer.name=adamw, with optimizer.state=int8"),
    _one("scheduler=cosine", "scheduler=cosine", "write scheduler.name=cosine"),
    _one("model=Qwen/Qwen3-0.6B", "model is a mapping", "write model.path=Qwen/Qwen3-0.6B"),
    _one("data.train=rows.jsonl", "data.train is a mapping", "write data.train.path=rows.jsonl"),
    _one("data=rows.jsonl", "data is a mapping", "write data.train.path=rows.jsonl"),
    _one("lora=true", "write lora={} for their defaults, or null"),
    _one("lora=16", "write lora={} for their defaults"),
    _one("train.steps", "an override is written key=value"),
    _one("=3", "an override is written key=value"),
    _one("train.steps:5", "an override is written key=value"),
    _one("data.train.path=*.jsonl", "the value is not YAML", "quote it for YAML"),
    _one("optimizer.betas=[0.9,", "the value is not YAML"),
    _one("model.path=${oc.env:DTRAIN_NO_SUCH}", "the environment has no DTRAIN_NO_SUCH: export it"),
    _one("model.path=???", "model.path is missing: set it to"),
    _one("run.name=a/b", "run.name=a/b must be the name of one directory"),
    _one("checkpoint.allow_changes=[optimzer]", "optimzer is no key of a recipe; did you mean optimizer?"),
)
VALUES = (
    _one("dpo.loss=dpo", "dpo.loss=dpo is no preference loss; did you mean sigmoid, which is DPO's own?", base="dpo"),
    _one("dpo.loss=sigmiod", "did you mean sigmoid?", base="dpo"),
    _one("dpo.loss=kto", "dpo.loss=kto is no preference loss; there are sigmoid,", base="dpo"),
    _one("dpo.loss=[sigmoid,rpo]", "did you mean sigmoid, with dpo.sft_weight=1?", base="dpo"),
    _one("dpo.reference=reference", "dpo.reference=reference", "start, base, none", base="dpo"),
    _one("dpo.f_divergence=kl", "dpo.f_divergence=kl", "reverse_kl", base="dpo"),
    _one("grpo.loss=rloo", "did you mean reinforce, with grpo.advantage=leave_one_out?", base="grpo"),
    _one("grpo.loss=gsop", "did you mean gspo?", base="grpo"),
    _one("grpo.engine=vllm", "did you mean http?", base="grpo"),
    _one("grpo.engine=http", "grpo.server.urls", base="grpo"),
    _one("grpo.advantage=rloo", "did you mean leave_one_out?", base="grpo"),
    _one("grpo.scale=true", "did you mean group?", base="grpo"),
    _one("grpo.rewards=[{fn: accuracy}]", "did you mean math_exact?", base="grpo"),
    _one("grpo.rewards=[{fn: no.such.reward}]", "grpo.rewards[0].fn", "no.such", base="grpo"),
    _one("grpo.rewards=[]", "grpo.rewards", base="grpo"),
    _one("grpo.tools=[{}]", "grpo.tools[0].fn is missing", base="grpo"),
    _one("grpo.tools=[{fn: add}]", "grpo.tools[0].fn=add must be an import path", base="grpo"),
    _one(f"grpo.tools=[{{fn: {TOOLS}.bare}}]", "grpo.tools[0].fn: tool", "text has no type hint", base="grpo"),
    _one(f"grpo.tools=[{{fn: {TOOLS}.sai}}]", f"{TOOLS}.sai", "defines no sai", base="grpo"),
    _one(f"grpo.tools=[{{fn: {TOOLS}.say}}]", "grpo.tools needs a chat template", base="grpo"),
    _one(
        (f"grpo.tools=[{{fn: {TOOLS}.say}}]", "grpo.reward_model.path=a"),
        "grpo.verifiers and grpo.tools make several",
        base="grpo",
    ),
    _one("grpo.tools=[{mcp: serve}]", "grpo.tools[0].schema is required", 'mcp "serve" > tools.json', base="grpo"),
    _one("grpo.tools=[{mcp: no-such-program a, schema: b}]", "there is no program no-such-program", base="grpo"),
    _one((f"grpo.tools=[{{fn: {TOOLS}.say}}]", "grpo.max_turns=1"), "grpo.max_turns=1 ends before", base="grpo"),
    _one((f"grpo.tools=[{{fn: {TOOLS}.say}}]", "grpo.environment=a.b"), "leave one of them out", base="grpo"),
    _one("method=qlora", "method=qlora is none of", "did you mean sft, and the section lora={}?"),
    _one("method=ppo", "method=ppo is none of", "did you mean grpo, which needs no critic?"),
    _one("method=orpo", "did you mean dpo, with dpo.loss=orpo?"),
    _one("method=sfft", "did you mean sft?"),
    _one("method=distill", "distill.teacher is missing"),
    _one("train.dtype=fp16", "did you mean float16?"),
    _one("train.dtype=int8", "train.dtype=int8 is none of"),
    _one("train.activation_checkpointing=true", "did you mean full?"),
    _one("train.activation_checkpointing=unsloth", "did you mean full?"),
    _one("optimizer.name=adamw_torch", "did you mean adamw?"),
    _one("optimizer.name=paged_adamw_8bit", "optimizer.state=int8 and parallel.optimizer_offload=true"),
    _one("optimizer.name=lion", "optimizer.name=lion is none of adamw,", "nor an import path"),
    _one("optimizer.name=torch.optim.NoSuch", "optimizer.name", "NoSuch"),
    _one("scheduler.name=constant_with_warmup", "did you mean constant, with scheduler.warmup?"),
    _one("scheduler.name=cosin", "did you mean cosine?"),
    _one("scheduler.name=inverse_sqrt", "scheduler.name=inverse_sqrt is none of constant,"),
    _one("scheduler=[]", "scheduler=[] has no stages"),
    _one("model.attention=flash_attention_2", "did you mean varlen?"),
    _one("model.init=random", "did you mean scratch?"),
    _one("data.train.format=chatml", "did you mean messages?"),
    _one("data.train.format=preference", "data.train.format=preference"),
    _one("data.loss_on=completions", "did you mean completion?"),
    _one("data.too_long=skip", "did you mean drop?"),
    _one("launch.device=gpu", "did you mean cuda?"),
    _one("launch.device=cuda:0", "did you mean cuda?"),
    _one("launch.device=tpu", "launch.device=tpu is none of auto, cpu, cuda"),
    _one("checkpoint.export=true", "did you mean final?"),
    _one(("lora={}", "lora.quantize=4bit"), "did you mean nf4?"),
    _one(("lora={}", "lora.quantize=int8"), "did you mean nf4, in 4 bits; none has 8?"),
    _one(("lora={}", "lora.target=[q_prj]"), "lora.target: q_prj", "did you mean q_proj?"),
    _one("parallel.cp_rotate=alltoall", "parallel.cp_rotate=alltoall is none of allgather, ring"),
    _one("metrics.wandb=true", "metrics.wandb=true must be text or null", "such as metrics.wandb=my-project"),
    _one("run.name=yes", "run.name=true must be text or null", "write a name, such as run.name=first"),
    _one("checkpoint.init_from=true", "checkpoint.init_from=true must be", "write a run's directory"),
    _one("train.dynamic_batch=true", "train.dynamic_batch=true is for padded rows: set data.packing=false"),
    _one("data.packing=maybe", "data.packing=maybe must be auto, true or false"),
    _one("train.freeze=[nothing.*]", "train.freeze", "nothing.*"),
)
FILES = (
    _one("model.path=gone", "model.path: there is no directory 'gone'"),
    _one("model.path={root}/m.gguf", "model.path=", "m.gguf: dtrain reads no GGUF", files={"m.gguf": "GGUF"}),
    _one("model.path={root}/gguf", "reads no GGUF", "*.safetensors", files={"gguf/model-q4.gguf": "GGUF"}),
    _one("model.path={root}/w.safetensors", "is a file: give the directory", files={"w.safetensors": ""}),
    _one("model.path={root}/none", "has no config.json", "model's directory", files={"none/": ""}),
    _one("model.path={root}/outer", "has no config.json", "there is one in", files={"outer/a/config.json": "{}"}),
    _one("model.path={root}/a-run", "this is a run's", "dtrain export", files={"a-run/checkpoints/": ""}),
    _one("model.path={root}/done", "this is a run's", "done/export", files={"done/export/config.json": "{}"}),
    _one("model.path={root}/peft", "is an adapter in PEFT's layout", "lora.path=", "model.path=",
         files={"peft/adapter_config.json": ADAPTER, "peft/adapter_model.safetensors": ""}),
    _one("model.path={root}/odd", "odd/config.json", files={"odd/config.json": "{not json"}),
    _one("model.path={root}/bert", "architecture BertModel is not supported; there are:",
         files={"bert/config.json": '{"architectures": ["BertModel"], "model_type": "bert"}'}),
    _one("model.init=pretrained", "has neither model.safetensors nor", "or model.init=scratch"),
    _one("model.path=no-such-org/no-such-model", "model.path=no-such-org/no-such-model", "dtrain download"),
    _one("data.train.path=gone.jsonl", "data.train.path: there is no file gone.jsonl"),
    _one("data.train.path={root}", "is a directory; name its files"),
    _one("data.train.path={root}/x.txt", "x.txt is none of the files that dtrain reads", files={"x.txt": "hello"}),
    _one("data.train.path={root}/x.arrow", "x.arrow is none of the files that dtrain reads", files={"x.arrow": "x"}),
    _one('data.train.path="{root}/none-*.jsonl"', "data.train.path: no file matches"),
    _one("data.train.path=[]", "data.train.path"),
    _one("data.train.path=null", "data.train.path is missing"),
    _one("data.train.sources=[]", "data.train.sources is empty"),
    _one("data.train.sources=[{path: a.jsonl}]", "data.train.path and data.train.sources are both set"),
    _one("data.val={}", "data.val.path is missing"),
    _one("data.val.path=gone.jsonl", "data.val.path: there is no file gone.jsonl"),
    _one("data.chat_template={root}/gone.jinja", "gone.jinja"),
    _one("checkpoint.init_from=gone", "checkpoint.init_from=gone: there is no such directory"),
    _one("checkpoint.resume=gone", "checkpoint.resume=gone: there is no such directory; auto takes"),
    _one(("lora={}", "lora.path=gone"), "lora.path", "gone"),
    _one("dpo.reference=gone", "dpo.reference=gone", "there is no such directory", base="dpo"),
    _one(("method=distill", "distill.teacher=gone"), "distill.teacher=gone", "there is no such directory"),
    _one((), "broken.yaml:2 is not YAML", files={"broken.yaml": "train: [1\n"}, base="broken.yaml"),
    _one((), "train: YAML reads steps:5 as one word: write a blank after the colon",
         files={"blank.yaml": "train:\n  steps:5\n"}, base="blank.yaml"),
    _one((), "indent.yaml:5 is not YAML", "begin in the same column",
         files={"indent.yaml": "train:\n  steps: 5\nrun:\n   name: a\n  dir: b\n"}, base="indent.yaml"),
    _one((), "two.yaml:2 is not YAML", "leave out the line ---",
         files={"two.yaml": "method: sft\n---\nmethod: sft\n"}, base="two.yaml"),
    _one((), "list.yaml is not a recipe", "mapping", files={"list.yaml": "- a\n"}, base="list.yaml"),
    _one((), "tab.yaml:2 is not YAML", files={"tab.yaml": "train:\n\tsteps: 3\n"}, base="tab.yaml"),
    _one((), "twice.yaml:3", "duplicate key steps", files={"twice.yaml": "train:\n  steps: 3\n  steps: 4\n"},
         base="twice.yaml"),
    _one((), "model.path is missing", "data.train.path is missing", files={"empty.yaml": ""}, base="empty.yaml"),
)  # fmt: skip
PASTED = (
    _one("optimizer.lr=1e\u20135", "optimizer.lr=1e\u20135 must be a number", "U+2013, en dash", "type -"),
    _one("optimizer.lr=1e\u22125", "U+2212, minus sign", "type -"),
    _one("train.steps=\u201c10\u201d", "U+201C, left double quotation mark", 'type "'),
    _one("optimizer\u2024lr=1e-5", "U+2024, one dot leader", "type ."),
    _one("\u043eptimizer.lr=1e-5", "U+043E, cyrillic small letter o", "did you mean optimizer?"),
    _one("\u2013train.steps=3", "U+2013, en dash", "type -"),
    _one("train.steps==3", "train.steps==3 must be a whole number or null: write one ="),
    _one("train.=5", "train. is no key of a recipe; the keys of train are steps"),
    _one("train..steps=5", "train. is no key of a recipe"),
    _one(".steps=5", "is no key of a recipe"),
    _one("data.max_length=1e30", "data.max_length=", "below 2 ** 31"),
    _one("optimizer.lr=" + "9" * 400, "optimizer.lr=inf must be a finite number"),
    _one("train.steps=1e400", "train.steps=inf must be a whole number"),
    _one("scheduler.warmup=nan", "scheduler.warmup=nan must be a share of the steps"),
    _one('run.name="a\\nb"', "run.name='a\\nb' must have at most 200 bytes"),
    _one("run.name=" + "x" * 300, "must have at most 200 bytes"),
    _one("model.path=" + "x" * 300, "xxx", "File name too long: let this user read it, or name another place"),
    _one("checkpoint.init_from=" + "x" * 300, "xxx", "File name too long"),
    _one(("lora={}", "lora.path=" + "x" * 300), "xxx", "File name too long"),
    _one("data.train.path=" + "x" * 300, "xxx", "File name too long"),
    _one("run.name=${HOME}", "run.name: the recipe has no key HOME", "${oc.env:HOME}"),
    _one("model.path=$HOME/model", "model.path=$HOME/model: no shell reads this", "${oc.env:HOME}"),
    _one("optimizer.betas='0.9,0.95'", "must be a list of numbers: write [0.9, 0.95]"),
    _one("train.freeze=layers.0", "train.freeze=layers.0 must be a list of texts: write [layers.0]"),
    _one("data.train.sources[0].path=x", "data.train.sources is no list yet", "data.train.sources=[{...}]"),
    _one("launch.nproc=gpu", "launch.nproc=gpu must be a whole number: write how many"),
    _one("parallel.dp_shard=auto", "parallel.dp_shard=auto must be a whole number: write -1"),
    _one("train.compile=reduce-overhead", "must be true or false: write true"),
    _one("data.train.path={root}/ROWS.JSONL", "there is no file", "did you mean", "rows.jsonl?"),
    _one("run.dir={root}/loop", "loop", "ymlink", links={"loop": "loop"}),
    _one("data.train.path={root}/away.jsonl", "away.jsonl: it is a link to gone.jsonl, which is no file",
         links={"away.jsonl": "gone.jsonl"}),
    _one("data.train.path={root}/pasted.jsonl", "pasted.jsonl:1: this line is not JSON", "quotes are of a page, \u201c",
         files={"pasted.jsonl": "{\u201ctext\u201d: 1}\n"}),
    _one((), "steps is no key of a recipe", "U+00A0, no-break space", "type a blank",
         files={"nbsp.yaml": "train:\n\u00a0 steps: 3\n\u00a0 epochs: null\n"}, base="nbsp.yaml"),
    _one((), "method=\u201csft\u201d is none of", "U+201C",
         files={"curly.yaml": "method: \u201csft\u201d\n"}, base="curly.yaml"),
    _one((), "wide.yaml is not UTF-8 text", "convert it to UTF-8",
         files={"wide.yaml": "method: sft\n".encode("utf-16")}, base="wide.yaml"),
    _one((), "at.yaml:2 is not YAML", "quote a text that begins so", files={"at.yaml": "run:\n  name: @a\n"},
         base="at.yaml"),
    _one((), "star.yaml:1 is not YAML", "quote a text that begins so", files={"star.yaml": "run: {name: *.a}\n"},
         base="star.yaml"),
    _one((), "quote.yaml:2 is not YAML", "a quote is not closed", files={"quote.yaml": "run: {name: 'a}\n"},
         base="quote.yaml"),
    _one((), "open.yaml:2 is not YAML", "a bracket is not closed",
         files={"open.yaml": "run: {name: a\n"}, base="open.yaml"),
    _one((), "colons.yaml:2 is not YAML", "a text with a colon is quoted",
         files={"colons.yaml": "run:\n  name: a: b\n"}, base="colons.yaml"),
    _one((), "tag.yaml:1 is not YAML", "leave out the word that begins with !",
         files={"tag.yaml": "run: !!python/object:os.system {}\n"}, base="tag.yaml"),
    _one((), "number.yaml is not a recipe: its top level must be a mapping", files={"number.yaml": "5\n"},
         base="number.yaml"),
    _one((), "dollar.yaml is not YAML", "${ is closed by }", files={"dollar.yaml": "run:\n  name: ${a\n"},
         base="dollar.yaml"),
    _one((), "indented.yaml:3 is not YAML", "indent with blanks, not with a tab",
         files={"indented.yaml": "run:\n  name: a\n\tdir: b\n"}, base="indented.yaml"),
    _one((), "listkey.yaml:1 is not YAML", "a key is one word", files={"listkey.yaml": "? [a, b]\n: 1\n"},
         base="listkey.yaml"),
    _one((), "no list yet", files={"json.yaml": '{"data": {"train": {"sources": {"0": {"path": "x"}}}}}'},
         base="json.yaml"),
)  # fmt: skip
"""Characters of web pages, slips of YAML, and places that lead nowhere."""

ROWS = (
    _one("data.train.path={root}/none.json", "none.json", "no row", files={"none.json": "[]"}),
    _one("data.train.path={root}/none.jsonl", "none.jsonl", "no row", files={"none.jsonl": ""}),
    _one("data.train.path={root}/half.json", "half.json:1", files={"half.json": '[{"text": "a"},'}),
    _one("data.train.path={root}/bad.jsonl", "bad.jsonl:1", files={"bad.jsonl": '{"text": a}\n'}),
    _one("data.train.path={root}/odd.jsonl", "odd.jsonl:1", files={"odd.jsonl": '{"foo": 1}\n'}),
    _one("data.train.path={root}/nums.jsonl", "nums.jsonl:1: a row must be a JSON object", files={"nums.jsonl": "1\n"}),
    _one(
        "data.train.path={root}/latin.jsonl", "latin.jsonl", "not UTF-8", files={"latin.jsonl": b'{"text": "\xe9"}\n'}
    ),
    _one("data.train.path={root}/fake.jsonl.gz", "fake.jsonl.gz", "gzip", files={"fake.jsonl.gz": "text"}),
)
"""What a look at the first rows of the files tells."""


def _word(typed: str, *says: str) -> Mistake:
    """Another tool's key on top of a recipe."""
    return _one(typed, f"{typed.partition('=')[0]}: ", *says)


WORDS = (
    _word("learning_rate=1e-5", "dtrain's word for it is optimizer.lr"),
    _word("training_args.learning_rate=1e-5", "optimizer.lr"),
    _word("num_train_epochs=3", "train.epochs"),
    _word("per_device_train_batch_size=2", "train.micro_batch"),
    _word("gradient_accumulation_steps=8", "train.global_batch: it is micro_batch × accumulation × dp"),
    _word("warmup_ratio=0.1", "scheduler.warmup, a share of the steps"),
    _word("val_set_size=0.1", "data.val, a share such as 0.05"),
    _word("val_size=0.1", "data.val, a share such as 0.05"),
    _word("finetuning_type=lora", "lora={} for lora, lora.quantize=nf4 for qlora"),
    _word("stage=sft", "method, sft | dpo | kto | grpo | distill"),
    _word("rl=dpo", "method, sft | dpo | kto | grpo | distill"),
    _word("use_unsloth=true", "dtrain needs no key for it"),
    _word("enable_liger_kernel=true", "dtrain needs no key for it"),
    _word("trust_remote_code=true", "no code of a model's repository is run"),
    _word("cutoff_len=2048", "data.max_length"),
    _word("max_seq_length=2048", "data.max_length"),
    _word("template=qwen", "data.chat_template"),
    _word("dataset_dir=data", "data.train.path", "no dataset_info.json is read"),
    _word("dataset=mine", "data.train.path"),
    _word("datasets=[{path: a.jsonl, type: alpaca}]", "data.train.sources", "the format is found by itself"),
    _word("pretraining_dataset=c4", "data.train.format=text"),
    _word("train_on_prompt=true", "data.loss_on"),
    _word("mask_history=true", "data.loss_on=last"),
    _word("neat_packing=true", "data.packing"),
    _word("pref_beta=0.1", "dpo.beta"),
    _word("pref_loss=sigmoid", "dpo.loss"),
    _word("pref_ftx=1", "dpo.sft_weight"),
    _word("max_samples=100", "dtrain does not have this yet", "write a shorter file"),
    _word("plot_loss=true", "metrics.jsonl"),
    _word("overwrite_output_dir=true", "checkpoint.resume: null starts over"),
    _word("flash_attn=fa2", "model.attention"),
    _word("ddp_timeout=1800", "launch.collective_timeout"),
    _word("pure_bf16=true", "train.masters=bfloat16"),
    _word("use_galore=true", "does not have this yet", "optimizer.state=int8"),
    _word("use_badam=true", "does not have this yet"),
    _word("neftune_noise_alpha=5", "does not have this yet: NEFTune"),
    _word("deepspeed=ds_z3.json", "does not have this yet: DeepSpeed", "parallel.dp_shard"),
    _word("export_dir=out", "`dtrain export RUN OUT`"),
    _word("push_to_hub=true", "`dtrain push RUN OWNER/NAME`"),
    _word("adapter=qlora", "lora.quantize=nf4"),
    _word("sequence_len=2048", "data.max_length"),
    _word("evals_per_epoch=4", "train.validate_every"),
    _word("saves_per_epoch=1", "checkpoint.every"),
    _word("wandb_project=x", "metrics.wandb"),
    _word("use_swanlab=true", "does not have this yet: other trackers"),
    _word("special_tokens={pad_token: x}", "tokens come from the model's tokenizer files"),
    _word("pad_to_sequence_len=true", "dtrain needs no key for it"),
    _word("sequence_parallel_degree=2", "parallel.cp"),
    _word("unfrozen_parameters=[a]", "train.train_only"),
    _word("early_stopping_patience=3", "train.patience, with checkpoint.keep_best"),
    _word("r=16", "lora.rank"),
    _word("load_in_4bit=true", "lora.quantize=nf4"),
    _word("load_in_8bit=true", "does not have this yet: weights in 8 bits"),
    _word("full_finetuning=true", "lora=null"),
    _word("use_gradient_checkpointing=unsloth", "train.activation_checkpointing"),
    _word("fast_inference=true", "grpo.engine=http"),
    _word("random_state=3407", "run.seed"),
    _word("assistant_only_loss=true", "data.loss_on=assistant"),
    _word("padding_free=true", "data.packing"),
    _word("use_dynamic_bsz=true", "train.dynamic_batch"),
    _word("num_generations=8", "grpo.group_size"),
    _word("max_completion_length=256", "grpo.sampling.max_new_tokens"),
    _word("sampling.max_tokens=256", "grpo.sampling.max_new_tokens"),
    _word("use_vllm=true", "grpo.engine=http"),
    _word("vllm_gpu_memory_utilization=0.3", "the server is yours to start"),
    _word("loss_type=dapo", "dpo.loss, grpo.loss or sft.loss"),
    _word("epsilon_high=0.28", "grpo.clip, [below, above]"),
    _word("tools=[a]", "grpo.tools, [{fn: package.module.function}]"),
    _word("reward_funcs=[a]", "grpo.rewards, [{fn, weight, kwargs}]"),
    _word("device_map=auto", "launch.device"),
    _word("model.name=x", "model.path, a directory or an id of the hub"),
    _word("init_lora_weights=pissa", "does not have this yet", "PiSSA"),
    _word("fp8=true", "does not have this yet: computing in 8 bits"),
    _word("streaming=true", "does not have this yet: streamed datasets"),
    _word("learning-rate=1e-5", "optimizer.lr"),
    _word("galore_update_interval=5", "does not have this yet", "optimizer.state=int8"),
    _word("swanlab_logdir=x", "does not have this yet: other trackers"),
    _word("field_system=x", "data.train.columns"),
    _word("dataset_config=main", "data.train.subset"),
    _word("torch_compile_mode=max-autotune", "train.compile"),
    _word("model_revision=main", "does not have this yet: revisions of a model"),
)
WHOLE = (
    _one((), "model_name_or_path: dtrain's word for it is model.path", "plot_loss: dtrain needs no key for it",
         "it is written for LLaMA-Factory", "path: Qwen/Qwen3-0.6B\n", "target: all-linear",
         "epochs: 3\n", "global_batch: 16", "warmup: 0.1", "weight_decay: 0.0  # LLaMA-Factory 0.9.5's default",
         files={"llama_factory.yaml": LLAMA_FACTORY}, base="llama_factory.yaml"),
    _one((), "base_model: dtrain's word for it is model.path", "optimizer.state=int8", "path: mine.jsonl",
         "it is written for axolotl", "quantize: nf4", "lr: 0.0002\n", "state: int8\n", "format: alpaca",
         "activation_checkpointing: full", "global_batch: 8", "max_length: 2048",
         files={"axolotl.yaml": AXOLOTL}, base="axolotl.yaml"),
    _one((), "model._component_", "it is written for torchtune", "max_grad_norm: null",
         "batch_size: dtrain's word for it is train.global_batch",
         "enable_activation_checkpointing: dtrain's word for it is train.activation_checkpointing",
         files={"torchtune.yaml": TORCHTUNE}, base="torchtune.yaml"),
    _one((), "num_generations: dtrain's word for it is grpo.group_size", "beta is no key",
         "dpo.beta or kto.beta or grpo.beta", "it is written for TRL", "group_size: 8", "fn: math_exact",
         files={"trl.yaml": TRL}, base="trl.yaml"),
)  # fmt: skip

RECIPES: tuple[Mistake, ...] = (*NUMBERS, *SLIPS, *VALUES, *FILES, *PASTED, *ROWS, *WORDS, *WHOLE)
