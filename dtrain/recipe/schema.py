"""Schema of recipes: every key with its type, default, range and documentation.

A recipe is YAML over these dataclasses. Keys that it leaves out have the defaults given here. `Recipe` is the root, and
its sections follow in the order in which a recipe is usually written. The section of a method is defined in
`dtrain.methods.sections`, and the keys that the methods with rollouts share in rollouts.py.

The text below a field is its documentation, from which `tools/recipe_reference.py` makes docs/recipe.md. A `Range` in a
field's type says what its value must be in addition to the type. `null` in YAML is None here. key_aliases.toml lists
keys of other tools that dtrain does not have.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
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

_NAMES: Range = (lambda v: "" not in list(v), "a list of names")
_POSITIVE: Range = (lambda v: 0 < v < math.inf, "a finite number above 0")
_WARMUP: Range = (
    lambda v: v >= 0 and (isinstance(v, int) or v < 1),
    "a share of the steps, from 0 to below 1, or their number as a whole number",
)


class MethodSections(Mapping[str, type]):
    """The recipe sections of the methods, by the names of the methods.

    The methods are defined above this package, and `training.registry` has the subclass with their sections. The value
    of the key `method` is the name of a section, or the import path of a method, whose section has a shorter name. For
    example, `method: my_methods:PolyMethod` reads the section `poly`. This class has no sections.
    """

    def __getitem__(self, name: str) -> type:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of `method` that the sections belong to. The first one is the default."""
        return ()

    def name_of(self, method: str) -> str:
        """Return the name of a method's section.

        Args:
            method: A value of the key `method`.
        """
        return method

    def with_method(self, method: str) -> "MethodSections":
        """Return these sections, and that of a method that is given by its import path or by a plugin's name.

        Args:
            method: A value of the key `method`.

        Raises:
            UserError: If the method cannot be imported.
        """
        return self


@dataclass
class Run:
    """`run`: the run's name, directory and seed."""

    name: str | None = None
    """Name of the run, and of its directory under `dir`. null: the stem of the recipe's file (`my.yaml` gives `my`). If
    the file does not name a model, the model's name is put in front: `sft` with Qwen/Qwen3-0.6B is `qwen3-0.6b-sft`,
    and with `lora` it is `qwen3-0.6b-lora-sft`."""
    dir: str = "runs"
    """Directory that contains the runs' directories."""
    seed: int = 0
    """Seed for the initial weights, the order of the data, dropout and sampling. The same seed gives the same numbers
    on every mesh."""
    deterministic: bool = False
    """true: on CUDA, two runs of one recipe on one mesh give the same bits, also after a resume. The backward of
    attention and some sums become slower, and an operation without a deterministic kernel ends the run with an error
    that names it. On CPUs runs give the same bits in any case. Completions from external servers are not
    reproducible."""

    lock: bool = True
    """true: a lock on the run's directory prevents a second run from writing to it. false: no lock, for file systems
    that have none. Nothing then keeps two runs from writing to one directory."""

    @property
    def directory(self) -> Path:
        """Directory of the run. Only for a loaded recipe, in which `name` is set."""
        return Path(self.dir) / str(self.name)


@dataclass
class Launch:
    """`launch`: processes on this machine. torchrun and SLURM start processes themselves; `nproc` is then not read."""

    nproc: Annotated[int | str, COUNT] = 1
    """Number of processes to start on this machine, one per device. 1: the run is not started in another process. auto:
    one for each CUDA device of this machine, or one if there is none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Type of device. auto: cuda if there is a CUDA device, else cpu. The processes communicate over NCCL on cuda and
    over gloo on cpu."""
    max_restarts: Annotated[int, at_least(0)] = 0
    """How many times all processes are started again after one of them died. They resume from the newest complete
    checkpoint. Under torchrun, its own option --max-restarts counts."""
    collective_timeout: Annotated[
        float | None, (lambda v: 1 <= v <= 31_536_000, "from 1 second to a year of them, or null")
    ] = None
    """Seconds that a rank waits for the others in a collective before the run ends with an error. null: a day over
    gloo, where a rank may wait while another reads data, samples or judges a rollout, or writes a file; half an hour
    over NCCL, where ranks wait for one another within a step. A process that died is noticed at once. A rank that
    hangs, and a host that does not respond any more, are only noticed by this timeout."""

    @property
    def num_processes(self) -> int:
        """`nproc` as a number. 1 for `auto`, until this machine's devices have been counted."""
        return self.nproc if isinstance(self.nproc, int) else 1


@dataclass
class Model:
    """`model`: the weights to start from, and how attention is computed."""

    path: str | None = None
    """Required. A local directory in Hugging Face's layout (config.json, *.safetensors, tokenizer.json), or the id of a
    model on the hub, such as `Qwen/Qwen3-0.6B`. A model of the hub is downloaded into the hub's own cache unless it is
    there already."""
    family: str | list[str] | None = None
    """Import path of the class of a model family outside of dtrain, such as `my_models:NormLlamaForCausalLM`. The name
    of the class is the architecture in config.json. It is also used for the recipe's teachers, references and reward
    models. A list has several families. null: the families of dtrain and of installed plugins (docs/plugins.md)."""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Whose modules compute the model. native: dtrain's own. transformers: those of the installed transformers library
    (`pip install 'dtrain[transformers]'`), which has nearly every architecture (docs/models.md). Code from a model's
    repository is never run. auto: native if dtrain has the architecture, else transformers."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """pretrained: read the weights from `path`. scratch: initialise the weights from `run.seed`, and read only
    config.json and the tokenizer from `path`."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Attention kernel. sdpa: torch's scaled_dot_product_attention. varlen: torch's variable-length flash attention for
    packed rows, windows and context parallel; it needs CUDA and bfloat16 or float16. auto: compare both on the device
    at the start, and use varlen if the numbers agree, else sdpa with a mask. The terminal shows which one is used."""
    linear_attention: Literal["auto", "torch", "fla"] = "auto"
    """Kernel for the linear attention of models such as Qwen3.5. torch: computes chunk by chunk, on every device. fla:
    kernels of flash-linear-attention (`pip install 'dtrain[fla]'`), on CUDA in bfloat16 or float16. auto: fla if it is
    installed and agrees with torch in a check at the start, else torch. The terminal shows which one is used."""

    @property
    def families(self) -> list[str]:
        """`family` as a list."""
        if self.family is None:
            return []
        return [self.family] if isinstance(self.family, str) else self.family

    @property
    def directory(self) -> Path:
        """`path` as a directory. Only for a checked recipe, in which the id of a model has become its directory."""
        return Path(str(self.path))


@dataclass
class Source:
    """Files with data, and the format of their rows."""

    path: str | list[str] | None = None
    """Required unless `sources` is set. One of: a file (JSONL, JSON, CSV, parquet), a glob, or a list of these; the id
    of a dataset on the Hugging Face hub, such as `trl-lib/Capybara`, which is downloaded into the hub's own cache
    unless it is there already; or a URL (`s3://`, `gs://`, `hf://`, `https://`) or a pattern of URLs, whose files are
    copied into `data.cache_dir` once."""
    split: str = "train"
    """For a dataset on the hub: its split."""
    subset: str | None = None
    """For a dataset on the hub: its subset (config). null: the default subset."""
    revision: str | None = None
    """For a dataset on the hub: a branch, a tag or a commit. null: the main branch, as the cache has it."""
    format: str = "auto"
    """Format of the rows: auto, messages, sharegpt, alpaca, prompt_completion, question, text, tokenized or preference.
    auto: decided by the first row of each file. The terminal shows the result. Or the import path of a function, such
    as `my_formats:forum`, that converts a row (a dict) to a row of one of these formats, after `columns` were
    applied."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of columns that differ from dtrain's, as a mapping from dtrain's name to the file's: `{messages:
    conversations, tools: functions}`. A dot selects a value in an object: `{answer: reward_model.ground_truth}`. A
    column that the format needs must be in every row; any other must be in the first row of each file."""


@dataclass
class WeightedSource(Source):
    """Entry of `data.train.sources`."""

    weight: Annotated[float, SIZE] = 1.0
    """How many times an epoch contains each sample. 2.5: all samples twice, and half of them a third time. 0: none."""


@dataclass
class DataSource(Source):
    """`data.train` and `data.val`: files with data, and the format of their rows."""

    sources: list[WeightedSource] | None = None
    """Several sources with weights, in place of `path`: `[{path: a.jsonl, weight: 2}, {path: b.jsonl}]`. Each entry
    takes the keys above."""


@dataclass
class Data:
    """`data`: the training and validation sets, and how samples become rows."""

    train: DataSource = field(default_factory=DataSource)
    """The training set."""
    val: Annotated[
        DataSource | float | int | None,
        (
            lambda v: isinstance(v, DataSource) or (v >= 1 if isinstance(v, int) else 0 < v < 1),
            "a section, a share between 0 and 1, or a number of rows",
        ),
    ] = None
    """The validation set, with the keys of `data.train`. Or a share of the training rows, such as 0.05, or a number of
    them, such as 200; these rows are then not trained on. A hash of its content and `run.seed` decides for each row, so
    a row stays in the same set if others are added. A share is met approximately. A number is met exactly, except that
    equal rows stay together. null: no validation."""
    max_length: Annotated[
        int, (lambda v: 2 <= v < 2**31, "at least 2, a token and the one after it, and below 2 ** 31")
    ] = 4096
    """Maximum number of tokens of a sequence, prompt and completion together. A packed row has this many tokens, or
    twice as many under dpo."""
    packing: Annotated[bool | str, AUTO] = True
    """true: several samples share a row and do not attend to one another. false: one sample per row, with padding.
    auto: true if a pass over the data then has at least 16 rows. The terminal shows which one is used."""
    loss_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Which tokens are trained. assistant: the assistant's turns. completion: everything after the prompt. last: only
    the last turn. all: every token."""
    shuffle: bool = True
    """true: each epoch has its own order of the samples, which follows from `run.seed`. false: the order of the
    files."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a sample of more than `max_length` tokens. truncate: it is cut. drop: it is left out. error: the
    run ends. The terminal shows how many samples are concerned."""
    num_workers: Annotated[int, (lambda v: 0 <= v <= 256, "at least 0, and at most 256")] = 0
    """Number of processes, for two tasks. Tokenising: 0 means one process per core. Preparing batches in advance, for
    each rank: 0 means no process."""
    cache_dir: str | None = None
    """Directory for tokenized data. All runs that use it share its content. null: `.cache` in `run.dir`."""
    image_max_pixels: Annotated[int | None, at_least(1)] = None
    """Maximum number of pixels of an image for the model; a larger image is scaled down. Fewer pixels give fewer
    tokens. null: the value of the model's image processor."""
    image_most_pixels: Annotated[int, (lambda v: 1 <= v <= 2**31, "at least 1, and at most 2 ** 31")] = 64_000_000
    """Maximum number of pixels of an image file. A larger image is refused before it is decoded."""
    chat_template: str | None = None
    """A file with a jinja chat template, or the text of one. null: the model's own template."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`."""
    special_tokens: Literal["structure", "all", "none"] = "structure"
    """Which special tokens of the tokenizer are read as plain characters if a user or a tool writes their text in a
    chat. structure: those that the chat template or the image processor writes itself, and the tokens for padding,
    begin and end of text. Others, such as Qwen-VL's `<|box_start|>` or reserved tokens, stay special. all: all special
    tokens. none: no special tokens, as in transformers; a user who writes `<|im_end|>` then ends the turn."""
    allow_dropped_text: bool = False
    """true: train although the chat template leaves out more than half of the text that should be trained. For example,
    some templates remove the reasoning up to `</think>`. false: this is an error."""
    prompts_as: Literal["text", "user"] | None = None
    """How prompts that are plain strings are read. text: as raw text, which the completion continues. user: the chat
    template formats the prompt as a user's message and the completion as an assistant's message. null: text in
    training. An evaluation then reads prompts as the training data's were read, or as user's messages if the training
    data has none. The terminal shows which one is used."""


@dataclass
class Parallel:
    """`parallel`: the mesh. The product of dp_replicate, dp_shard, cp and tp is the number of processes. Results do not
    depend on the mesh."""

    dp_replicate: Annotated[int, at_least(1)] = 1
    """Number of copies of the sharded model (HSDP)."""
    dp_shard: Annotated[int, (lambda v: v >= 1 or v == -1, "at least 1, or -1 to take the ranks that are left")] = -1
    """Fully sharded data parallel (FSDP2): number of ranks over which the parameters are sharded, each with different
    data. -1: all ranks that the other sizes leave."""
    cp: Annotated[int, at_least(1)] = 1
    """Context parallel: number of ranks over which each sequence is split."""
    tp: Annotated[int, at_least(1)] = 1
    """Tensor parallel: number of ranks over which the matrices of each layer are split."""
    ep: Annotated[int, at_least(1)] = 1
    """Expert parallel: number of ranks over which the experts of each layer are distributed. These ranks are part of
    dp_shard × cp, which ep must divide, so ep does not change the number of processes."""
    sequence_parallel: Annotated[bool | str, AUTO] = "auto"
    """With tp: split the activations between the matrices over the sequence as well. auto: true, but false for models
    of the transformers library, which cannot do this."""
    cp_rotate: Literal["allgather", "ring"] = "allgather"
    """How keys and values are exchanged under cp. allgather: each rank gathers all of them. ring: they pass from rank
    to rank, so that each rank has one part at a time."""
    custom_plan: Annotated[
        str | dict[str, str] | None,
        (lambda v: len(v) > 0, "a table of module pattern and style, an import path, or null"),
    ] = None
    """A tensor-parallel plan in place of the model's own. Either a mapping from module patterns to styles
    (dtrain/parallel/README.md), or the import path of such a mapping or of a function that returns one."""
    cpu_offload: bool = False
    """true: parameters and optimizer state are stored in host memory, and are copied to the device when they are
    needed. This has no effect on a CPU."""
    optimizer_offload: Annotated[bool | str, AUTO] = "auto"
    """true: the float32 weights and the moments of adamw and adam are stored in pinned host memory, and the device has
    copies of the weights in `train.dtype`. At the optimizer step, parts of both are copied to the device while other
    parts are computed. Gradients stay on the device. The numbers are the same. This has no effect on a CPU. auto: as
    for `train.micro_batch`."""
    reduce_each: Annotated[bool | str, AUTO] = "auto"
    """For more than one micro-batch per step. true: gradients are reduced after every micro-batch. Between
    micro-batches a rank then keeps only the gradients of its own shards, which saves up to 4 bytes for each parameter
    of its tensor-parallel part, and costs one more reduce-scatter per micro-batch. false: gradients are reduced once,
    after the last micro-batch. The all-reduce of HSDP happens once in both cases. auto: as for `train.micro_batch`."""
    reshard_after_forward: Annotated[
        bool | str, (lambda v: v in ("default", True, False), "default, true or false")
    ] = "default"
    """Whether gathered parameters are freed between forward and backward. default: yes for all layers but the last; no
    for the last layer, the head, and an embedding that is tied to the head."""

    def shards_sequence(self, is_supported: bool) -> bool:
        """Return the value of `sequence_parallel`.

        Args:
            is_supported: Whether the model has sequence parallel. `auto` means this.
        """
        return is_supported if self.sequence_parallel == "auto" else bool(self.sequence_parallel)


@dataclass
class Train:
    """`train`: the training loop."""

    steps: Annotated[int | None, (lambda v: 1 <= v <= 10**9, "at least 1, and at most a thousand million")] = None
    """Number of optimizer steps. Required unless `epochs` is set."""
    epochs: Annotated[int | float | None, (lambda v: 0 < v <= 10**6, "more than 0, and at most a million")] = None
    """Number of passes over the training set, such as 3 or 2.5. The last batch may be short. Excludes `steps`: an
    override of one unsets the other."""
    global_batch: Annotated[
        int | str,
        (
            lambda v: v == "auto" or (type(v) is int and 1 <= v <= 10**6),
            "a whole number, at least 1 and at most a million, or auto",
        ),
    ] = 64
    """Rows per optimizer step over all ranks. It is the product of micro_batch, the accumulation steps and the
    data-parallel ranks; the accumulation steps are derived. auto: the largest power of two up to 16 with which a pass
    over the data has at least 32 steps, or 1 if there is none; under grpo, all completions of a rollout. The terminal
    shows the number."""
    micro_batch: Annotated[int | str, COUNT] = "auto"
    """Rows per rank in one forward and backward. Under dpo without packing these are pairs, of two rows each. auto: as
    many as fit in the devices' memory and make a step fast. The run plans its memory at the start for rows of
    `data.max_length` tokens, and leaves a tenth of the memory free. The same plan decides the other keys that are auto:
    `activation_checkpointing`, `activation_offload`, `tile`, `parallel.reduce_each` and `parallel.optimizer_offload`.
    The terminal shows each choice with its reason. `dtrain plan` shows the same for other devices."""
    dynamic_batch: bool = False
    """For `data.packing: false`. true: a micro-batch contains rows of similar length, as many as fit, with their
    padding, into the tokens of micro_batch rows of max_length tokens. The ranks get about the same number of tokens.
    The numbers are the same."""
    share_prompts: Annotated[bool | str, AUTO] = "auto"
    """Compute a prompt once for all its completions, in the groups of grpo and of distill's student, in the pairs of
    dpo and reward models, and in replies to one prompt of kto. The numbers are the same. true: always. auto: for the
    prompts with which this saves a tenth of the tokens. Models with linear attention do not share."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """Data type of the model's computation. auto: bfloat16 on cuda, float32 on cpu. Trained weights are stored in
    float32, or as `masters` says; with float64 they are stored in float64."""
    masters: Literal["float32", "bfloat16"] = "float32"
    """Data type in which trained weights are stored. bfloat16: no float32 copy, and updates are rounded up or down at
    random (stochastic rounding) from `run.seed`. Gradients are stored in bfloat16 too, and summed over ranks and
    micro-batches in float32. With `parallel.reduce_each` the sum over micro-batches is rounded at random as well, so
    that there is never a full float32 copy of the gradients. Works with adamw, adam and muon, and with `dtype`
    bfloat16, which auto then means."""
    max_grad_norm: Annotated[float | None, (lambda v: v > 0, "more than 0, or null for no clipping")] = 1.0
    """Maximum norm of the full model's gradient. A larger gradient is scaled down to this norm. null: no clipping."""
    activation_checkpointing: Literal["auto", "none", "full", "mlp", "selective"] = "auto"
    """Which activations are computed again in the backward pass instead of being stored: less memory, more time. none:
    no activation. mlp: those of the MLPs. selective: all but the results of matrix products and attention. full: all
    within a layer. auto: as for `micro_batch`."""
    activation_offload: Annotated[bool | str, AUTO] = "auto"
    """true: the tensors that layers store for the backward pass are copied to pinned host memory, and are copied back
    ahead of the backward pass, in parallel with the computation. The numbers are the same. With
    `activation_checkpointing: full` that is one tensor per layer; with selective, the results of matrix products and
    attention stay on the device. On a CPU the tensors are copied as well. auto: as for `micro_batch`."""
    tile: Literal["auto", "none", "mlp", "all"] = "auto"
    """For long rows: compute parts of a layer in tiles to save memory. mlp: everything in a layer after attention,
    mostly its MLP, is computed in tiles of 4096 tokens, and again in the backward pass. all: so is everything before
    attention, and attention is computed by groups of heads, one key head with its query heads at a time. Mixtures of
    experts are not tiled. The numbers are the same. auto: as for `micro_batch`."""
    compile: Annotated[bool | str, AUTO] = False
    """true: compile each layer with torch.compile, except for its attention. auto: true on CUDA if Triton and a C
    compiler are installed."""
    vision: Literal["frozen", "projector", "all"] = "frozen"
    """Which part of a vision tower is trained. frozen: nothing. projector: the part that maps image features to the
    embeddings of the text model. all: everything. A frozen part keeps the weights of the model's files. `train_only`
    and `freeze` may exclude more."""
    train_only: list[str] = field(default_factory=list)
    """Patterns of the parameters to train, such as `model.layers.31.*`. All others are frozen. In a pattern, `*`
    matches any text, dots included, `?` one character, and `[01]` one of these characters. []: all parameters are
    trained."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of the parameters to freeze, as in `train_only`, over which they take precedence. A frozen parameter is
    stored in `dtype`, and has no gradient, optimizer state or master copy."""
    validate_every: Annotated[
        int | str | None, (COUNT[0], "a whole number, at least 1, auto, or null for no validation")
    ] = "auto"
    """Optimizer steps between validations on `data.val`. The last step is validated too. auto: a fifth of the steps, so
    that there are five validations; with `checkpoint.keep_best` of a validation metric, at every save. null: never."""
    skip_nonfinite: Annotated[int, at_least(0)] = 0
    """How many steps in a row may be skipped because a gradient is not finite. 0: the first such gradient ends the
    run."""
    patience: Annotated[int | None, at_least(1, ", or null to go on to the last step")] = None
    """Early stopping: the run ends after this many measurements of `checkpoint.keep_best` in a row that were not better
    than the best one before. null: never."""

    @property
    def num_batch_rows(self) -> int:
        """`global_batch` as a number. Only for a recipe whose `auto` has been resolved."""
        return int(self.global_batch)

    @property
    def num_micro_batch_rows(self) -> int:
        """`micro_batch` as a number. Only for a recipe whose `auto` has been resolved."""
        return int(self.micro_batch)

    @property
    def parameter_patterns(self) -> dict[str, list[str]]:
        """Patterns of parameter names, by the key that contains them."""
        return {"train.train_only": self.train_only, "train.freeze": self.freeze}


@dataclass
class Lora:
    """`lora`: train an adapter, and keep the model's own weights as they are. null: full fine-tuning."""

    rank: Annotated[int, at_least(1, ", or lora=null for full fine-tuning")] = 16
    """Rank r of the adapter: the rows of A and the columns of B."""
    alpha: Annotated[float, _POSITIVE] = 32.0
    """The product B·A is scaled by alpha ÷ rank."""
    dropout: Annotated[float, (lambda v: 0 <= v < 1, "from 0 up to 1, and below it")] = 0.0
    """Dropout probability of the inputs of A."""
    target: Annotated[
        str | list[str], (lambda v: len(v) > 0 and _NAMES[0](v), "all-linear, a list of names, or a regular expression")
    ] = "all-linear"
    """The layers with an adapter. all-linear: every linear layer of the text model except for the head. Or a list of
    names, such as `[q_proj, v_proj]`. Or a regular expression for full names, such as `.*self_attn.*`. Lists and
    regular expressions may match layers of a vision tower too. In a list, `experts` stands for the matrices of a
    mixture's experts, which are not linear layers, and `gate.weight` for its routers: `[all-linear, experts]`,
    `[q_proj, experts.down_proj, gate.weight]`."""
    exclude: Annotated[
        str | list[str],
        (lambda v: v not in ("", "all-linear") and _NAMES[0](v), "a list of names, or a regular expression"),
    ] = field(default_factory=list)
    """Layers that get no adapter although `target` matches them: a list of names, or a regular expression."""
    rslora: bool = False
    """true: scale by alpha ÷ √rank (rsLoRA, arXiv:2312.03732)."""
    dora: bool = False
    """true: train the norm of each weight's rows separately from their direction (DoRA, arXiv:2402.09353)."""
    rank_pattern: Annotated[
        dict[str, int], (lambda v: all(rank >= 1 for rank in v.values()), "a mapping to ranks of at least 1")
    ] = field(default_factory=dict)
    """Other ranks for some layers, by a regular expression for the end of their names: `{down_proj: 32}`."""
    alpha_pattern: Annotated[
        dict[str, float], (lambda v: all(map(_POSITIVE[0], v.values())), "a mapping to finite numbers above 0")
    ] = field(default_factory=dict)
    """Other values of alpha for some layers, in the same way."""
    modules_to_save: Annotated[list[str], _NAMES] = field(default_factory=list)
    """Modules that are fully trained and saved with the adapter, by the ends of their names: `[embed_tokens, lm_head]`.
    In a vision tower with all modules inside: `[visual.merger]`, `[multi_modal_projector]`."""
    path: str | None = None
    """Directory of an adapter in PEFT's layout whose training is continued. Its own settings replace the keys above,
    except for a dropout above 0."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: store the model's own weights of linear layers and experts in 4 bits (QLoRA, arXiv:2305.14314). Routers and
    vision towers are not quantized. A checkpoint that bitsandbytes quantized stays as it is."""


@dataclass
class Optimizer:
    """`optimizer`: the optimizer and its settings."""

    name: str = "adamw"
    """adamw, adam, sgd, adafactor, muon, or the import path of a torch Optimizer. muon updates matrices with Muon, each
    as a whole on every mesh, and embeddings, heads and vectors with AdamW. Its `kwargs` are momentum (0.95), nesterov
    (true), ns_steps (5), ns_coefficients, and adjust_lr_fn: match_rms_adamw, for learning rates as with AdamW, or
    original."""
    lr: Annotated[float, SIZE] = 1e-5
    """Maximum learning rate. `scheduler` says how it changes over the steps."""
    adam_lr: Annotated[float | None, (SIZE[0], "a finite number, at least 0, or null for optimizer.lr")] = None
    """With muon: maximum learning rate of the parameters that AdamW updates. null: `lr`."""
    betas: Annotated[
        list[float], (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers from 0 up to 1")
    ] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[float, SIZE] = 1e-8
    """Adam's epsilon, which is added to the denominator."""
    weight_decay: Annotated[float, SIZE] = 0.1
    """Weight decay of tensors with two or more dimensions, embeddings included."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments for the optimizer's class. They take precedence over the keys above. dtrain's own adamw and adam,
    which `state`, `train.masters` and `parallel.optimizer_offload` use, take only lr, betas, eps and weight_decay."""
    state: Literal["float32", "bfloat16", "int8"] = "float32"
    """Data type of the moments of adamw and adam: 8, 4 or about 2 bytes per trained parameter. Vectors, tensors of less
    than 4096 elements and embeddings keep float32."""


@dataclass
class Scheduler:
    """`scheduler`: the learning rate over the steps. It changes once per optimizer step."""

    name: str = "cosine"
    """constant, cosine, linear, wsd, or the import path of a torch LRScheduler. The first four begin with a linear
    warm-up from 0. wsd (warmup-stable-decay) then stays at lr, and decays in its last `decay_steps`."""
    warmup: Annotated[int | float, _WARMUP] = 0.03
    """Length of the warm-up: below 1 a share of all steps (rounded down), as a whole number a number of steps. Step s
    of w, counted from 0, uses lr·s ÷ w. For an import path there is no warm-up; set the arguments of its class in
    `kwargs`."""
    warmup_steps: Annotated[int | None, at_least(0, ", or null")] = None
    """Length of the warm-up in steps. Takes precedence over `warmup`. null: `warmup` counts."""
    min_lr_ratio: Annotated[float, FRACTION] = 0.1
    """Final learning rate as a share of lr: the schedule reaches lr·min_lr_ratio at step `train.steps`. constant stays
    at lr."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments: those of an import path's class, or `decay_steps` of wsd (default: a fifth of the steps)."""

    def num_warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps in a schedule of `steps` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if isinstance(self.warmup, int):
            return self.warmup
        return int(self.warmup * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996, and means 29 steps


@dataclass
class Stage(Scheduler):
    """Stage of a `scheduler` that is a list: `[{name: linear, steps: 100}, {name: constant}]`.

    Each stage counts its own steps from 0 (torch's SequentialLR), and warms up only where it says so."""

    warmup: Annotated[int | float, _WARMUP] = 0
    """As `scheduler.warmup`, relative to the steps of this stage."""
    steps: Annotated[int | None, at_least(1)] = None
    """Optimizer steps of the stage. Only the last stage may leave it out, and takes the remaining steps."""


@dataclass
class Checkpoint:
    """`checkpoint`: what is saved, and how a run resumes."""

    every: Annotated[int | None, at_least(1, ", or null for no checkpoints")] = 100
    """Optimizer steps between checkpoints. The last step is saved too. null: nothing is saved."""
    keep_last: Annotated[int | None, at_least(1, ", or null to keep all")] = 3
    """Number of newest checkpoints to keep. null: keep all."""
    keep_every: Annotated[int | None, at_least(1, ", or null")] = None
    """Also keep checkpoints at multiples of this many steps. null: none for this reason."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this metric. val_loss, or under grpo val_reward_mean: `every`
    must then be a multiple of `train.validate_every`. A metric of an evaluation, such as `eval_reward_mean` or
    `eval_math_pass@1`: `every` must be a multiple of the evaluation's. loss: the loss of the step's own batch. null:
    none for this reason."""
    resume: str | None = "auto"
    """auto: resume from the run's newest complete checkpoint, if there is one. Damaged checkpoints are reported,
    skipped, and renamed to damaged-step-N. null: start from the beginning; the run's directory must not contain
    metrics. Or a `step-N` directory from which this run begins; later it resumes from its own checkpoints."""
    async_save: bool = True
    """true: training continues while a checkpoint is written, after the model and the optimizer state were copied to
    host memory. The run waits for its last save, and for the save after a stop signal. With
    `parallel.optimizer_offload` it waits for every save, since state that is in host memory already is not copied
    again."""
    export: Literal["final", "every", "none"] = "final"
    """When `export/`, a Hugging Face directory, is written. final: at the end. every: with every checkpoint. none (or
    null): never."""
    init_from: str | None = None
    """A run's directory (its newest checkpoint) or a `step-N` directory. The run starts with these weights in place of
    those of `model.path`; optimizer state, step and data position start anew. Later it resumes from its own
    checkpoints, and that step stays its start."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys or sections of model, data and optimizer that may change on a resume, such as `[optimizer.lr]`. Not allowed
    are `method`, and keys that decide which tensors are saved and with which data type: `optimizer.name`,
    `optimizer.state`, `train.masters`, and for example `lora.rank`. A change of these needs a new run."""


@dataclass
class MetricSinkEntry:
    """Entry of `metrics.sinks`."""

    name: str | None = None
    """Required. tensorboard, wandb, trackio, mlflow or swanlab, whose package must be installed; the import path of a
    class, such as `my_package.sinks:CsvSink`; or a name that an installed package registers. docs/trackers.md shows a
    class."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the tracker, such as `{project: my-project}`. For tensorboard those of torch's SummaryWriter. For
    wandb, trackio and swanlab those of the package's `init`. For mlflow tracking_uri, experiment, run_name and tags.
    The name of the run is `run.name` unless an option sets it."""


@dataclass
class Metrics:
    """`metrics`: what is logged, and where. `metrics.jsonl` is always written."""

    every: Annotated[int, at_least(1)] = 1
    """Optimizer steps between updates of the progress bar and the trackers. metrics.jsonl has every step."""
    tensorboard: Annotated[bool | str | None, AUTO] = "auto"
    """Whether TensorBoard events are written. auto: true if the package is installed. The terminal shows which one."""
    wandb: str | None = None
    """Name of a Weights & Biases project: short for `sinks: [{name: wandb, kwargs: {project: NAME}}]`. null: no W&B."""
    sinks: list[MetricSinkEntry] = field(default_factory=list)
    """Trackers that show the metrics, such as `[{name: trackio, kwargs: {project: my-project}}]`. A tracker without
    options may be written as its name, as in `[trackio]`. Only rank 0 writes. A tracker that fails is left out with a
    warning, and the run goes on. A resumed run continues the same run of the tracker."""
    plan: Annotated[bool | str, AUTO] = "auto"
    """Whether a process of lower priority plans the memory of the run, so that the terminal shows the planned peak next
    to the measured one. auto: true on GPUs. The run then reads no weights before the plan is done. If the planned peak
    does not fit into the memory, the run ends and names the smallest change that helps."""


@dataclass
class EvalSampling:
    """`eval.sampling`: how answers are sampled."""

    temperature: Annotated[float, (WEIGHT[0], "a finite number, at least 0; 0 takes the likeliest token")] = 0.0
    """Divisor of the logits. 0: greedy decoding, which takes the token with the highest probability."""
    top_k: Annotated[int | None, TOP_K] = None
    """Sample from the k tokens with the highest probabilities. null: from all."""
    top_p: Annotated[float, UP_TO_1] = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least top_p (nucleus sampling). 1: from
    all."""
    max_new_tokens: Annotated[int | None, at_least(1, ", or null")] = None
    """Maximum number of tokens of an answer. null: 512, or half of the model's positions if that is less."""
    stop: Annotated[list[str], STOP] = field(default_factory=list)
    """Texts that end an answer, in addition to the model's end-of-sequence tokens."""


@dataclass
class Eval(Source):
    """`eval`: sample answers to a set of prompts during training and judge them, as `dtrain eval` does. Or several sets
    by name, each with these keys: `{math: {path: ..}, chat: {path: ..}}`. Training is the same with and without
    evaluations."""

    every: Annotated[int | None, at_least(1, ", or null")] = None
    """Optimizer steps between evaluations. The last step is evaluated too. null: only the last step, and the start if
    `at_start` is true."""
    at_start: bool = True
    """Evaluate before the first step, as step 0."""
    limit: Annotated[int | None, at_least(1, ", or null for all")] = None
    """Use only the first N prompts. null: all."""
    rewards: list[Reward] = field(default_factory=list)
    """Rewards that judge an answer, as in `grpo.rewards`. []: math_exact, or text_exact if most of the data's answers
    contain no number."""
    samples: Annotated[int, (lambda v: 1 <= v <= 10_000, "at least 1, and at most 10000")] = 1
    """Number of answers to each prompt. More than 1 needs a `sampling.temperature` above 0."""
    sampling: EvalSampling = field(default_factory=EvalSampling)
    """How answers are sampled. The random numbers follow from `run.seed`."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    pass_reward: Annotated[float, (is_finite, "a finite number")] = 1.0
    """Minimum reward of an answer that passes, for pass@k."""
    reward_timeout: Annotated[float, TIME] = 60.0
    """Seconds that one reward may take for 512 answers. After that its values are unknown. A judge has its own
    timeout."""
    show: Annotated[int, at_least(0)] = 2
    """Number of answers that the terminal shows for each evaluation. evals.jsonl has all of them."""


@dataclass
class Moe:
    """`moe`: losses for mixtures of experts, in addition to the method's loss."""

    balance: Annotated[float, SIZE] = 0.0
    """Weight of a loss that keeps the experts of each document evenly used (DeepSeek-V3, arXiv:2412.19437). The loss is
    1 × this weight if they are. 0.0: no such loss. The value in the model's own config.json is not read."""


@dataclass
class Recipe:
    """The root of a recipe."""

    method: str = ""
    """The training method. sft: examples. dpo: preferences. kto: replies marked as wanted or not. grpo: rewards of
    sampled completions. distill: a teacher model. reward: train a reward model that rates texts. Or a method of your
    own, by its import path (`my_methods:PolyMethod`) or the name of a plugin (docs/plugins.md)."""
    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    eval: Eval | dict[str, Eval] | None = None
    """null: no evaluation during training."""
    parallel: Parallel = field(default_factory=Parallel)
    train: Train = field(default_factory=Train)
    lora: Lora | None = None
    """null: all weights are trained, or those that `train.vision`, `train.train_only` and `train.freeze` select."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler | list[Stage] = field(default_factory=Scheduler)
    """One schedule, or a list of stages."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    moe: Moe = field(default_factory=Moe)

    # Not a key: the type of each method's section, by the name of the method.
    method_sections = MethodSections()

    @property
    def method_name(self) -> str:
        """The name of the method's section. `method` itself is an import path for a method outside of dtrain."""
        return self.method_sections.name_of(self.method)

    @property
    def section(self) -> Any:
        """The section of the recipe's method."""
        return getattr(self, self.method_name)

    @property
    def evals(self) -> dict[str, Eval]:
        """The evaluations by name. A single evaluation has the name "eval"."""
        if self.eval is None:
            return {}
        return self.eval if isinstance(self.eval, dict) else {"eval": self.eval}

    @property
    def cache(self) -> Path:
        """Directory for tokenized data, and for copies of remote files."""
        return Path(self.data.cache_dir or Path(self.run.dir) / ".cache")


def make_recipe_type(sections: MethodSections, names: Container[Any]) -> Any:
    """Make the class of recipes for a set of methods.

    The methods' sections are defined above this package, so they are added to `Recipe` at run time. A recipe without a
    method gets the first choice.

    Args:
        sections: The sections of all methods, by the name of the method.
        names: Names of the sections that the class has. The others are not imported.
    """
    choices = sections.choices
    keys: list[Any] = [("method", Literal[choices], field(default=choices[0]))]
    for name in sections:
        if name in names:
            keys.append((name, sections[name], field(default_factory=sections[name])))
    namespace = {"method_sections": sections, "__doc__": Recipe.__doc__}
    return make_dataclass("Recipe", keys, bases=(Recipe,), eq=False, namespace=namespace)


OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "muon")
"""Values of `optimizer.name` that are no import path. `dtrain.policy.optimizer` has their classes."""
SCHEDULES = ("constant", "cosine", "linear", "wsd")
"""Values of `scheduler.name` that are no import path. `dtrain.optim.update` has their formulas."""
BEST_METRICS = {"val_loss": min, "loss": min, "val_reward_mean": max}
"""Metrics for `checkpoint.keep_best`, with the function that returns the better of two values."""
