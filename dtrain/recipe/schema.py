"""The recipe's reference page: every key, its type, its default and what it means.

A recipe is YAML over these dataclasses; what it leaves out has the default written here. `Recipe` is the root, its
sections stand here in the order in which a recipe is usually written. The section of a method stands in the method's
file, what sections share in rollouts.py. The text under a field is its documentation, and a
`Range` in its type says what its value must be beside that type. `null` turns a thing off where a field's type admits
None. key_aliases.toml lists what is not there yet. docs/recipe.md shows all of it as a page
(tools/recipe_reference.py).
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from dtrain.base.ranges import (
    AUTO,
    COUNT,
    FRACTION,
    SIZE,
    STOP,
    TIME,
    TOP_K,
    UP_TO_1,
    WEIGHT,
    Range,
    at_least,
    is_finite,
)
from dtrain.recipe.rollouts import Reward

Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "question", "text", "tokenized", "preference"
]

_NAMES: Range = (lambda v: "" not in list(v), "a list of names")
_POSITIVE: Range = (lambda v: 0 < v < math.inf, "a finite number above 0")
_WARMUP: Range = (
    lambda v: v >= 0 and (isinstance(v, int) or v < 1),
    "a share of the steps, from 0 to below 1, or their number as a whole number",
)


@dataclass
class Run:
    """`run`: where a run lives, and its seed."""

    name: str | None = None
    """The run's directory under `dir`. null: the recipe's file stem (`my.yaml` → `my`). Where the file names no model,
    the model's name comes before it: `sft` with Qwen/Qwen3-0.6B is `qwen3-0.6b-sft`, with `lora`
    `qwen3-0.6b-lora-sft`."""
    dir: str = "runs"
    """The directory that holds the runs."""
    seed: int = 0
    """It decides the initial weights, the order of the data and what is sampled, the same on every mesh."""
    deterministic: bool = False
    """true: on CUDA, runs of one recipe on one mesh give the same bits, a resumed one too. Attention's backward and
    some sums are slower. An operation without a deterministic kernel ends the run with an error that names it. On CPUs
    runs give the same bits in any case. What a server draws is its own."""

    lock: bool = True
    """A lock on the run's directory keeps a second run out. false: no lock, for file systems that have none. Nothing
    then keeps two runs from writing to one directory."""

    @property
    def directory(self) -> Path:
        """The run's own, of a loaded recipe."""
        return Path(self.dir) / str(self.name)


@dataclass
class Launch:
    """`launch`: processes on this machine. torchrun and SLURM start processes themselves; `nproc` is then not read."""

    nproc: Annotated[int | str, COUNT] = 1
    """Processes to start here, one per device. 1 runs in place. auto: one for each CUDA device of this machine, and one
    where it has none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one, else cpu. Processes talk over nccl on cuda and over gloo on cpu."""
    max_restarts: Annotated[int, at_least(0)] = 0
    """How many times all processes are started again after one died. They resume from the newest whole checkpoint.
    Under torchrun, its own --max-restarts counts."""
    collective_timeout: Annotated[
        float | None, (lambda v: 1 <= v <= 31_536_000, "from 1 second to a year of them, or null")
    ] = None
    """Seconds that a rank waits for the others in a collective before the run ends with an error. null: a day over
    gloo, where a rank may wait while another reads data, draws or judges a rollout, or writes a file; half an hour over
    nccl, where ranks wait for one another within a step. A process that died is noticed at once. A rank that hangs, and
    a host that falls silent, are noticed only by this."""

    @property
    def num_processes(self) -> int:
        """`nproc` as a number: 1 for `auto`, as long as nothing has looked at this machine's devices."""
        return self.nproc if isinstance(self.nproc, int) else 1


@dataclass
class Model:
    """`model`: the weights to start from."""

    path: str | None = None
    """Required. A local directory in Hugging Face's layout (config.json, *.safetensors, tokenizer.json), or a model's
    id on the hub (`Qwen/Qwen3-0.6B`), which is downloaded into the hub's own cache unless it is there."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """pretrained reads the weights; scratch draws them from `run.seed` and reads config.json and the tokenizer only."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """sdpa: torch's scaled_dot_product_attention. varlen: torch's variable-length flash attention for packed rows,
    windows and context parallel, on CUDA in bfloat16 or float16. auto: a check at the start compares varlen with sdpa
    on the device. If the numbers agree, varlen is taken, else sdpa, which needs a mask. The terminal says which."""
    linear_attention: Literal["auto", "torch", "fla"] = "auto"
    """Of models with linear attention (Qwen3.5). torch: by chunks, on every device. fla: flash-linear-attention's
    kernels (`pip install 'dtrain[fla]'`), on CUDA in bfloat16 or float16. auto: fla where it is installed and a check
    at the start finds torch's numbers, else torch. The terminal says which."""

    @property
    def directory(self) -> Path:
        """`path`, of a checked recipe."""
        return Path(str(self.path))


@dataclass
class Source:
    """Files, and what their rows look like."""

    path: str | list[str] | None = None
    """A file (JSONL, JSON, CSV, parquet), a glob, or a list of them; or a dataset's id on the Hugging Face hub
    (`trl-lib/Capybara`), which is downloaded into the hub's own cache unless it is there; or a URL
    (`s3://`, `gs://`, `hf://`, `https://`) or a pattern of one, whose files are copied into `data.cache_dir` once.
    Required, or `sources`."""
    split: str = "train"
    """Of a dataset of the hub: which of its splits."""
    subset: str | None = None
    """Of a dataset of the hub: which of its subsets (configs). null: its default."""
    revision: str | None = None
    """Of a dataset of the hub: a branch, a tag or a commit. null: its main branch, as the cache has it."""
    format: Format = "auto"
    """What the rows are. auto looks at the first row of each file, and says what it found."""
    columns: dict[str, str] = field(default_factory=dict)
    """dtrain's name of a column, and the file's own: `{messages: conversations, tools: functions}`. A dot leads into an
    object: `{answer: reward_model.ground_truth}`. A column that the format needs must be in every row; another must be
    at least in the first row of each file."""


@dataclass
class WeightedSource(Source):
    """Entry of `data.train.sources`."""

    weight: Annotated[float, SIZE] = 1.0
    """How many times an epoch holds each sample: 2.5 takes all twice and half of them once more, 0 takes none."""


@dataclass
class DataSource(Source):
    """`data.train` and `data.val`: files, and what their rows look like."""

    sources: list[WeightedSource] | None = None
    """Several weighted sources, `[{path, format, weight}]`, each with the keys above; replaces `path`."""


@dataclass
class Data:
    """`data`: samples and rows."""

    train: DataSource = field(default_factory=DataSource)
    """The training set."""
    val: Annotated[
        DataSource | float | int | None,
        (
            lambda v: isinstance(v, DataSource) or (v >= 1 if isinstance(v, int) else 0 < v < 1),
            "a section, a share between 0 and 1, or a number of rows",
        ),
    ] = None
    """The validation set; null: none. Or a share of the training rows, such as 0.05, or a number of them, such as 200;
    these rows then do not train. A hash of its content and `run.seed` decides for each row. A share is about this
    large, and a row stays where it is when others join it. A number is exact unless equal rows would be parted: they
    stay together."""
    max_length: Annotated[
        int, (lambda v: 2 <= v < 2**31, "at least 2, a token and the one after it, and below 2 ** 31")
    ] = 4096
    """Tokens of the longest sequence, prompt and completion together. A packed row has this many tokens, under dpo
    twice as many."""
    packing: Annotated[bool | str, AUTO] = True
    """auto | true | false. true: several samples share a row and do not see one another. false: one sample a row,
    padded. auto: true, where that leaves 16 rows or more of a pass over the data; the terminal says which."""
    loss_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Trained tokens: the assistant's turns, what follows the prompt, the last turn alone, or every token."""
    shuffle: bool = True
    """Each epoch has its own order of the samples, drawn from `run.seed`."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a sample longer than `max_length`. Counts are printed."""
    num_workers: Annotated[int, (lambda v: 0 <= v <= 256, "at least 0, and at most 256")] = 0
    """Counts two things. Processes that tokenise: 0 means one per core. Processes of each rank that prepare batches
    ahead: 0 means none."""
    cache_dir: str | None = None
    """Where tokenized sets are kept, shared by all runs that name it. null: `.cache` in `run.dir`."""
    image_max_pixels: Annotated[int | None, at_least(1)] = None
    """Pixels of the largest image as the model takes it; a larger one is made smaller. null: as the model's image
    processor says. Fewer pixels are fewer tokens."""
    image_most_pixels: Annotated[int, (lambda v: 1 <= v <= 2**31, "at least 1, and at most 2 ** 31")] = 64_000_000
    """Pixels of the largest image as it is stored; a larger one is refused before it is decoded."""
    chat_template: str | None = None
    """A file with a jinja chat template. null: the model's own."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`."""
    special_tokens: Literal["structure", "all", "none"] = "structure"
    """structure | all | none: which special tokens of the tokenizer are read as plain characters where a user or a tool
    writes their text in a chat. structure: those that the chat template or the image processor writes itself, and
    padding, begin and end of text. Others, such as Qwen-VL's `<|box_start|>` or reserved tokens, stay tokens. all: all
    of them. none: none, as in transformers; a user who writes `<|im_end|>` then ends the turn."""
    allow_dropped_text: bool = False
    """Train although the chat template leaves out more than half of the text that should be trained, such as the
    reasoning of a template that removes everything up to `</think>`."""
    prompts_as: Literal["text", "user"] | None = None
    """text | user | null: how prompts that are plain strings are read. text: they are continued as raw text. user: the
    chat template writes the prompt as a user's message, and its completions as an assistant's. null: text in training.
    An evaluation reads such prompts as the training data's were read, and where that had none as a user's messages. The
    terminal says what is done."""


@dataclass
class Parallel:
    """`parallel`: the mesh. The product of its four sizes is the number of processes. Results do not depend on it."""

    dp_replicate: Annotated[int, at_least(1)] = 1
    """Copies of the sharded model (HSDP)."""
    dp_shard: Annotated[int, (lambda v: v >= 1 or v == -1, "at least 1, or -1 to take the ranks that are left")] = -1
    """Ranks that share the parameters and see different data (FSDP2). -1 takes what the others leave."""
    cp: Annotated[int, at_least(1)] = 1
    """Context parallel: ranks that share each sequence."""
    tp: Annotated[int, at_least(1)] = 1
    """Tensor parallel: ranks that share each layer's matrices."""
    ep: Annotated[int, at_least(1)] = 1
    """Expert parallel: ranks that share the experts of each layer, among those of dp_shard × cp, which it must divide.
    The number of processes stays the product of the other four."""
    sequence_parallel: bool = True
    """Under tp: the activations between the matrices are split over the sequence."""
    cp_rotate: Literal["allgather", "ring"] = "allgather"
    """How keys and values travel under cp."""
    custom_plan: Annotated[
        str | dict[str, str] | None,
        (lambda v: len(v) > 0, "a table of module pattern and style, an import path, or null"),
    ] = None
    """A tensor-parallel plan in place of the model's own: a table, module pattern → style
    (dtrain/parallel/README.md), or the import path of a table or of a function that gives one."""
    cpu_offload: bool = False
    """Parameters and optimizer state live in host memory and visit the device. On a CPU this changes nothing."""
    optimizer_offload: Annotated[bool | str, AUTO] = "auto"
    """auto | true | false. true: the moments of adamw and adam and the float32 weights live in pinned host memory. The
    device holds copies of the weights in `train.dtype`. Parts of both visit the device at the step, copied while others
    are computed. Gradients stay on the device; the numbers are the same. On a CPU this changes nothing. auto: as
    `train.micro_batch`."""
    reduce_each: Annotated[bool | str, AUTO] = "auto"
    """auto | true | false, for accumulation above 1. true: gradients are reduced after every micro-batch. Between two
    micro-batches a rank then keeps the gradients of its own shards only, which saves up to 4 bytes for each parameter
    that tp leaves it, for one more reduce-scatter per micro-batch. false: once, after the last. HSDP's all-reduce comes
    once in both cases. auto: as `train.micro_batch`."""
    reshard_after_forward: Annotated[
        bool | str, (lambda v: v in ("default", True, False), "default, true or false")
    ] = "default"
    """default | true | false: whether gathered parameters are freed between forward and backward. default: yes for
    all layers but the last; no for the last one, the head and an embedding tied to it."""


@dataclass
class Train:
    """`train`: the loop."""

    steps: Annotated[int | None, (lambda v: 1 <= v <= 10**9, "at least 1, and at most a thousand million")] = None
    """Optimizer steps. Required, or `epochs`."""
    epochs: Annotated[int | float | None, (lambda v: 0 < v <= 10**6, "more than 0, and at most a million")] = None
    """Passes over the training set, such as 3 or 2.5; the last batch may be short. Stands in for `steps`; an override
    of one unsets the other."""
    global_batch: Annotated[
        int | str,
        (
            lambda v: v == "auto" or (type(v) is int and 1 <= v <= 10**6),
            "a whole number, at least 1 and at most a million, or auto",
        ),
    ] = 64
    """Rows per optimizer step over all ranks: micro_batch × accumulation × dp. Accumulation is derived. auto: the
    largest power of two up to 16 that makes 32 steps or more of a pass over the data (1 where none does), and under
    grpo all completions of a rollout; the terminal says which."""
    micro_batch: Annotated[int | str, COUNT] = "auto"
    """Rows that a rank holds in memory at once. Under dpo without packing: pairs, which are two rows each. auto: as
    many as the devices hold and as make a step fast. A plan of the run decides it at the start, by the memory of the
    devices and rows of `data.max_length` tokens; a tenth of the memory stays free. With it the plan decides what else
    is auto: `activation_checkpointing`, `activation_offload`, `tile`, `parallel.reduce_each` and
    `parallel.optimizer_offload`. The terminal says what and why. `dtrain plan` shows the same for other devices."""
    dynamic_batch: bool = False
    """For `data.packing: false`. A micro-batch holds rows of similar length: as many as fit, with their padding, where
    micro_batch rows of max_length tokens would; the ranks' shares of a batch are alike in tokens. No number changes."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """What the model computes in. auto: bfloat16 on cuda, float32 on cpu. Trained weights are kept in float32, or as
    `masters` says; under float64 in float64."""
    masters: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: trained weights have no float32 copy, and updates are rounded up or down at random, by `run.seed`.
    Gradients are kept in bfloat16 too, and added up over ranks and micro-batches in float32. Under
    `parallel.reduce_each` no float32 copy of them is ever whole: the sum over micro-batches is rounded at random too.
    Works with adamw, adam and muon, and with `dtype` bfloat16, which auto then means."""
    max_grad_norm: Annotated[float | None, (lambda v: v > 0, "more than 0, or null for no clipping")] = 1.0
    """Where the norm of the whole model's gradient is larger, the gradient is scaled down to it. null: never."""
    activation_checkpointing: Literal["auto", "none", "full", "mlp", "selective"] = "auto"
    """Activations that are not kept but computed again in the backward pass: less memory, more time. auto: as
    `micro_batch`."""
    activation_offload: Annotated[bool | str, AUTO] = "auto"
    """auto | true | false. true: what layers keep for the backward pass goes to pinned host memory and comes back ahead
    of it, beside the computing. The numbers are the same. With `activation_checkpointing: full` that is one tensor a
    layer; under selective, the results of products and attention stay on the device. On a CPU it is copied all the
    same. auto: as `micro_batch`."""
    tile: Literal["auto", "none", "mlp", "all"] = "auto"
    """For long rows. mlp: what lies in a layer after attention, its MLP most of all, is computed over tiles of 4096
    tokens, and again in the backward pass. all: so is what lies before attention, and attention goes by groups of
    heads, one key head with its query heads at a time. Mixtures of experts are not tiled. The numbers are the same.
    auto: as `micro_batch`."""
    compile: Annotated[bool | str, AUTO] = False
    """auto | true | false. torch.compile for each layer, without its attention. auto: on CUDA, where Triton and a
    C compiler are installed."""
    vision: Literal["frozen", "projector", "all"] = "frozen"
    """Trained part of a vision tower. projector: the part that maps its features to the text's embeddings. A frozen
    part stays as the model's files have it. `train_only` and `freeze` leave out more."""
    train_only: list[str] = field(default_factory=list)
    """Patterns of the parameters to train, such as `model.layers.31.*`. All others are frozen. []: all are trained.
    `*` stands for any text, dots too; `?` for one character; `[01]` for one of these."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of the parameters to freeze; they win over `train_only`. A frozen parameter is kept in `dtype`, and has
    no gradient, optimizer state or master copy."""
    validate_every: Annotated[
        int | str | None, (COUNT[0], "a whole number, at least 1, auto, or null for no validation")
    ] = "auto"
    """Steps between validations on `data.val`; the last step is validated too. auto: with `data.val`, a fifth of the
    steps, so four times on the way and at the end; with `checkpoint.keep_best` of a validation's field, at every save.
    null: never."""
    skip_nonfinite: Annotated[int, at_least(0)] = 0
    """How many steps in a row may be skipped because a gradient is not finite. 0: the first one ends the run."""
    patience: Annotated[int | None, at_least(1, ", or null to go on to the last step")] = None
    """The run ends, as at its last step, once so many measures of `checkpoint.keep_best` in a row were not better than
    the best before them. null: never."""

    @property
    def num_batch_rows(self) -> int:
        """`global_batch` as a number, of a recipe whose `auto` has been resolved."""
        return int(self.global_batch)

    @property
    def num_micro_batch_rows(self) -> int:
        """`micro_batch` as a number, of a recipe whose `auto` has been resolved."""
        return int(self.micro_batch)

    @property
    def parameter_patterns(self) -> dict[str, list[str]]:
        """Patterns of parameter names by the key that holds them."""
        return {"train.train_only": self.train_only, "train.freeze": self.freeze}


@dataclass
class Lora:
    """`lora`: an adapter is trained, and the model's own weights stay as they are. null: full fine-tuning."""

    rank: Annotated[int, at_least(1, ", or lora=null for full fine-tuning")] = 16
    """Rows of A and columns of B, the two small matrices beside each layer's own."""
    alpha: Annotated[float, _POSITIVE] = 32.0
    """B·A is scaled by alpha ÷ rank."""
    dropout: Annotated[float, (lambda v: 0 <= v < 1, "from 0 up to 1, and below it")] = 0.0
    """The share of a layer's inputs that the adapter does not see."""
    target: Annotated[
        str | list[str], (lambda v: len(v) > 0 and _NAMES[0](v), "all-linear, a list of names, or a regular expression")
    ] = "all-linear"
    """The layers with an adapter. all-linear: every linear layer but the head, of a vision tower none; a list of names
    (`[q_proj, v_proj]`); or a regular expression for whole names (`.*self_attn.*`); both may mean a tower's too. In a
    list `experts` means the matrices of a mixture's experts, which are no linear layers, and `gate.weight` its routers:
    `[all-linear, experts]`, `[q_proj, experts.down_proj, gate.weight]`."""
    exclude: Annotated[
        str | list[str],
        (lambda v: v not in ("", "all-linear") and _NAMES[0](v), "a list of names, or a regular expression"),
    ] = field(default_factory=list)
    """Layers that get no adapter although `target` names them: names, or a regular expression."""
    rslora: bool = False
    """The scale is alpha ÷ √rank (arXiv:2312.03732)."""
    dora: bool = False
    """DoRA: the length of each weight's rows is trained apart from their direction (arXiv:2402.09353)."""
    rank_pattern: Annotated[
        dict[str, int], (lambda v: all(rank >= 1 for rank in v.values()), "a mapping to ranks of at least 1")
    ] = field(default_factory=dict)
    """Other ranks for some layers: a regular expression for the end of a name, and a rank: `{down_proj: 32}`."""
    alpha_pattern: Annotated[
        dict[str, float], (lambda v: all(map(_POSITIVE[0], v.values())), "a mapping to finite numbers above 0")
    ] = field(default_factory=dict)
    """Other alphas, in the same way."""
    modules_to_save: Annotated[list[str], _NAMES] = field(default_factory=list)
    """Modules that are trained whole beside the adapter, by the ends of their names: `[embed_tokens, lm_head]`. Of a
    vision tower with all that is within them: `[visual.merger]`, `[multi_modal_projector]`."""
    path: str | None = None
    """The directory of an adapter in PEFT's layout to go on from. Its own settings then count for the keys above. Only
    a dropout above 0 replaces the adapter's."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: the linear layers' and experts' own weights are held in 4 bits (QLoRA, arXiv:2305.14314), those of routers
    and of a vision tower not. A checkpoint that bitsandbytes quantized stays as it is."""


@dataclass
class Optimizer:
    """`optimizer`: how a gradient changes the weights."""

    name: str = "adamw"
    """adamw | adam | sgd | adafactor | muon, or the import path of a torch Optimizer. muon steps matrices by Muon, each
    whole on every mesh, and embeddings, heads and vectors by AdamW; its `kwargs`: momentum (0.95), nesterov (true),
    ns_steps (5), ns_coefficients, adjust_lr_fn (match_rms_adamw, for rates as AdamW's; or original)."""
    lr: Annotated[float, SIZE] = 1e-5
    """The peak learning rate."""
    adam_lr: Annotated[float | None, (SIZE[0], "a finite number, at least 0, or null for optimizer.lr")] = None
    """The peak learning rate of what muon leaves to AdamW. null: `lr`."""
    betas: Annotated[
        list[float], (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers from 0 up to 1")
    ] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay of the first and second moment."""
    eps: Annotated[float, SIZE] = 1e-8
    """Adam's term in the denominator."""
    weight_decay: Annotated[float, SIZE] = 0.1
    """Applies to tensors of two or more dimensions, embeddings included."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer's class; they win over the keys above. `state`, `train.masters` and
    `parallel.optimizer_offload` bring dtrain's own adamw and adam, which take lr, betas, eps and weight_decay."""
    state: Literal["float32", "bfloat16", "int8"] = "float32"
    """The type of adamw's and adam's moments: 8, 4 or about 2 bytes for each trained parameter. Vectors, tensors of
    less than 4096 elements and embeddings keep float32."""


@dataclass
class Scheduler:
    """`scheduler`: the learning rate over the steps. It moves once per optimizer step."""

    name: str = "cosine"
    """constant | cosine | linear | wsd, or the import path of a torch LRScheduler. All four begin with the warm-up,
    from a rate of 0. wsd then stays at lr, and falls over its last `decay_steps`."""
    warmup: Annotated[int | float, _WARMUP] = 0.03
    """The learning rate rises over so many steps first: a share of all steps where it is below 1 (rounded down), a
    count where it is a whole number. Step s of w, from 0, uses lr·s ÷ w. An import path's class is made without it: its
    own arguments stand in `kwargs`."""
    warmup_steps: Annotated[int | None, at_least(0, ", or null")] = None
    """The same as a count. It wins over `warmup` where it is given."""
    min_lr_ratio: Annotated[float, FRACTION] = 0.1
    """The schedule would reach lr·min_lr_ratio at s = `train.steps`. constant stays at lr."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments: of an import path's class, or `decay_steps` of wsd (default: a fifth of the steps)."""

    def num_warmup_steps(self, steps: int) -> int:
        """Steps of warm-up in a schedule of `steps`."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return self.warmup if isinstance(self.warmup, int) else int(self.warmup * steps + 1e-9)


@dataclass
class Stage(Scheduler):
    """Stage of a `scheduler` that is a list: `[{name: linear, steps: 100}, {name: constant}]`.

    Each stage counts its own steps from 0 (torch's SequentialLR), and warms up only where it says so."""

    warmup: Annotated[int | float, _WARMUP] = 0
    """As above, of the stage's own steps."""
    steps: Annotated[int | None, at_least(1)] = None
    """Optimizer steps of the stage; the last stage may leave it out and take the rest."""


@dataclass
class Checkpoint:
    """`checkpoint`: what is saved, and from where a run goes on."""

    every: Annotated[int | None, at_least(1, ", or null for no checkpoints")] = 100
    """Steps between saves; the last step is saved too. null: nothing is saved."""
    keep_last: Annotated[int | None, at_least(1, ", or null to keep all")] = 3
    """How many of the newest saves stay. null: all."""
    keep_every: Annotated[int | None, at_least(1, ", or null")] = None
    """Saves at multiples of this many steps stay too. null: no save stays for this reason."""
    keep_best: str | None = None
    """val_loss, or under grpo val_reward_mean: the save with the best value stays too; `every` is then a multiple of
    `train.validate_every`. Or a field of an evaluation, such as `eval_reward_mean` or `eval_math_pass@1`, and `every` a
    multiple of that one's. loss: the step's own batch decides. null: no save stays for this reason."""
    resume: str | None = "auto"
    """auto: go on from the run's newest whole save, if there is one. Damaged saves are named, left out, and kept as
    damaged-step-N. null: start over; the directory may hold no metrics. Or a `step-N` directory that this run begins
    from; later it goes on from its own saves."""
    async_save: bool = True
    """Training goes on while a save is written. It waits only for a copy of model and optimizer in host memory. A run
    waits for its last save, and for the save when it was told to stop. With `parallel.optimizer_offload` it waits for
    every save: what is on the host already is not copied there again."""
    export: Literal["final", "every", "none"] = "final"
    """When `export/`, a Hugging Face directory, is written: at the end, again with every save, or never (also null)."""
    init_from: str | None = None
    """A run's directory (its newest checkpoint) or a `step-N`. This run starts with its weights, and nothing else of
    it, in place of those of `model.path`. Later it resumes from its own checkpoints, and that step stays its start."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys or sections of model, data and optimizer that may differ from what a resumed run started with. Never
    `method`, and never what decides which tensors are saved and of which type: `optimizer.name`, `optimizer.state`,
    `train.masters`, and for example `lora.rank`. A change of these is a new run."""


@dataclass
class Metrics:
    """`metrics`: what a run tells. `metrics.jsonl` is always written."""

    every: Annotated[int, at_least(1)] = 1
    """Steps between updates of the progress bar and of TensorBoard and W&B. metrics.jsonl has every step."""
    tensorboard: Annotated[bool | str | None, AUTO] = "auto"
    """auto | true | false: auto writes where the package is installed, and says which."""
    wandb: str | None = None
    """A Weights & Biases project's name. null: no W&B."""
    plan: Annotated[bool | str, AUTO] = "auto"
    """auto | true | false: whether a process of lower priority plans the run's memory; the terminal then shows the
    planned peak beside the measured one. auto: on GPUs only. There the run reads no weights before the plan is done. If
    the memory cannot hold the planned peak, the run ends and names the smallest change that helps."""


@dataclass
class EvalSampling:
    """`eval.sampling`: how answers are drawn."""

    temperature: Annotated[float, (WEIGHT[0], "a finite number, at least 0; 0 takes the likeliest token")] = 0.0
    """Divides the logits. 0: the likeliest token."""
    top_k: Annotated[int | None, TOP_K] = None
    """Draw from the k likeliest tokens only. null: all."""
    top_p: Annotated[float, UP_TO_1] = 1.0
    """Draw from the likeliest tokens of this much probability."""
    max_new_tokens: Annotated[int | None, at_least(1, ", or null")] = None
    """Tokens of the longest answer. null: 512, or half of the model's positions where that is less."""
    stop: Annotated[list[str], STOP] = field(default_factory=list)
    """Texts that end an answer, beside the model's end-of-sequence tokens."""


@dataclass
class Eval(Source):
    """`eval`: the model's answers to a set of prompts, judged while it trains, as `dtrain eval` does. Or several sets
    by name: `{math: {path: ..}, chat: {path: ..}}`, each with these keys. Training is the same with and without it."""

    every: Annotated[int | None, at_least(1, ", or null")] = None
    """Optimizer steps between evaluations. The last step is evaluated too. null: only that, and `at_start`."""
    at_start: bool = True
    """Evaluate before the first step, as step 0."""
    limit: Annotated[int | None, at_least(1, ", or null for all")] = None
    """The first so many prompts only. null: all."""
    rewards: list[Reward] = field(default_factory=list)
    """What judges an answer, as `grpo.rewards`. []: math_exact, or text_exact where most answers hold no number."""
    samples: Annotated[int, (lambda v: 1 <= v <= 10_000, "at least 1, and at most 10000")] = 1
    """Answers to each prompt. More than 1 needs a `sampling.temperature` above 0."""
    sampling: EvalSampling = field(default_factory=EvalSampling)
    """How answers are drawn, from `run.seed`."""
    system_prompt: str | None = None
    """The system message of conversations that have none."""
    pass_reward: Annotated[float, (is_finite, "a finite number")] = 1.0
    """The reward from which an answer passes, for pass@k."""
    reward_timeout: Annotated[float, TIME] = 60.0
    """Seconds that one reward may take over 512 answers; after that its values are unknown. A judge has its own."""
    show: Annotated[int, at_least(0)] = 2
    """Answers of each evaluation that the terminal shows; evals.jsonl has all."""


@dataclass
class Moe:
    """`moe`: what a mixture of experts trains with beside its method's loss."""

    balance: Annotated[float, SIZE] = 0.0
    """The weight of a loss that keeps experts evenly used, each document's own (DeepSeek-V3, arXiv:2412.19437). It is
    1 × this where they are. 0.0: none, as the files' own value for training on is not read."""


@dataclass
class Recipe:
    """The root of a recipe."""

    method: str = ""
    """What is learned from: examples, preferences, replies that are wanted or not, rewards, or a teacher. reward
    trains a model that rates texts."""
    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    eval: Eval | dict[str, Eval] | None = None
    """null: no answers are judged during training."""
    parallel: Parallel = field(default_factory=Parallel)
    train: Train = field(default_factory=Train)
    lora: Lora | None = None
    """null: all weights are trained, or what `train.vision`, `train.train_only` and `train.freeze` leave."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler | list[Stage] = field(default_factory=Scheduler)
    """One schedule, or a list of stages."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    moe: Moe = field(default_factory=Moe)

    method_sections = MappingProxyType[str, type]({})  # no key: the section of each method by the method's name

    @property
    def section(self) -> Any:
        """The section of the recipe's method."""
        return getattr(self, self.method)

    @property
    def evals(self) -> dict[str, Eval]:
        """The sets of `eval` by name; one that has none is called eval."""
        return self.eval if isinstance(self.eval, dict) else {"eval": self.eval} if self.eval else {}

    @property
    def cache(self) -> Path:
        """Directory of tokenized sets, and of copies of files from elsewhere."""
        return Path(self.data.cache_dir or Path(self.run.dir) / ".cache")


def make_recipe_type(sections: Mapping[str, type], names: Container[Any]) -> Any:
    """Return the class of recipes for methods with these `sections`: a `Recipe` with those of `names`, and with the
    first method as the default, which a recipe without a method gets when it is loaded."""
    choices = tuple(sections)
    keys: list[Any] = [("method", Literal[choices], field(default=choices[0]))]
    keys += [(name, sections[name], field(default_factory=sections[name])) for name in choices if name in names]
    more = {"method_sections": sections, "__doc__": Recipe.__doc__}
    return make_dataclass("Recipe", keys, bases=(Recipe,), eq=False, namespace=more)


OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "muon")
"""`optimizer.name` without a dot. `dtrain.policy.optimizer` has their classes."""
SCHEDULES = ("constant", "cosine", "linear", "wsd")
"""`scheduler.name` without a dot. `dtrain.optim.update` has their formulas."""
BEST_METRICS = {"val_loss": min, "loss": min, "val_reward_mean": max}
"""`checkpoint.keep_best`: the fields of the metrics by which a save can be the best, and which of two values is."""
