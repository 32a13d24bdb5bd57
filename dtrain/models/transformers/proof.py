"""The proof at a run's start that a model of transformers computes the same in dtrain as in transformers.

A model of transformers may scale logits by a field that dtrain does not know, have a mask of its own, or mix the tokens
of neighbouring documents in a convolution. None of these raises an error, and each gives wrong numbers. Therefore,
dtrain builds a small copy of the model (`shrinking`) with random weights in float64, and compares the loss and the
gradients of all parameters between these computations:

    expected   `...ForCausalLM` of transformers with its eager attention and its head, one document at a time
    packed     dtrain's model with the same weights, all documents in one row with padding at the end
    padded     the same model, each document in a row of its own with padding at the end

`Copy` has both models. Each computation returns a `Computed`, and `find_difference` compares two of them.

If only the packed row differs, some layer does not separate documents, and the model can be trained on padded rows with
parallel.cp=1. `find_leak` finds this layer. If both differ, dtrain cannot train the model.

`prove_on_mesh` compares a copy that is sharded over tensor- and context-parallel ranks with one that is not.

The norms and the softmax of transformers are computed in float32 even in a model in float64, so two correct results may
differ by 1e-6. `running.DoublePrecision` replaces float32 by float64 in these functions, and correct results agree to
1e-12.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.base.batch import PADDING_SEQ_ID
from dtrain.base.errors import UserError, first_line
from dtrain.losses.head.vocabulary import VocabShard
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from dtrain.models.building import build
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.models.transformers.config import (
    build_library_model,
    get_library_source,
    make_library_config,
    read_transformers_config,
)
from dtrain.models.transformers.running import DoublePrecision
from dtrain.models.transformers.shrinking import FIRST_TOKEN, SmallConfig, small_configs
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.context.batch import shard_streams
from dtrain.parallel.mesh import Mesh

TOLERANCE = 1e-6
"""Largest relative difference of the loss, and of each parameter's gradient. Rounding is about 1e-12."""
DOCUMENTS = (11, 6, 9)
"""Tokens of the documents. Two are longer than two windows (`shrinking.WINDOW`)."""
_PADDING = 6  # tokens at the end of the packed row
_SEED = 59
_NOISE = 0.5
# A gradient is compared with the largest one of the model if it is much smaller, because a gradient that is zero in
# exact arithmetic, such as that of a bias of keys, is only rounding.
_SMALLEST_GRADIENT = 1e-4
_MAX_PARAMETERS = 3 * 10**8


@dataclass(frozen=True)
class Proof:
    """Result of `prove` for a model of transformers.

    Attributes:
        problem: Why dtrain cannot train the model. Empty if it can.
        leak: The part of the model that mixes the tokens of different documents, such as "linear_attn
            (Qwen3NextGatedDeltaNet)". Empty if the model separates documents.
        kept: Sizes that the copy has in common with the model (`shrinking.SmallConfig.kept`).
        uncalled: Linear layers whose weight another module reads without calling the layer, by their names within a
            decoder layer, such as "mamba.dt_proj". An adapter on them would have no effect.
    """

    problem: str = ""
    leak: str = ""
    kept: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Computed:
    """A loss, and the gradient of each parameter by dtrain's name."""

    loss: float
    gradients: dict[str, Tensor]


class NotComputable(Exception):
    """A copy whose forward raised an error of torch, transformers or dtrain's attention."""


def prove(values: Mapping[str, Any]) -> Proof:
    """Prove that dtrain computes a model of transformers as that library does. No collective.

    Args:
        values: The fields of config.json.
    """
    failures = []
    for small in small_configs(values):
        try:
            copy = Copy.of(small)
            expected = copy.expected()
        except NotComputable as error:
            failures.append(str(error))
            continue
        return _prove_copy(copy, expected, small)
    # The smallest copy comes first, and larger ones may fail only because they are large.
    reason = failures[0] if failures else "no copy has the model's kinds of layers"
    return Proof(f"nothing can be compared: {reason}")


def _prove_copy(copy: "Copy", expected: Computed, small: SmallConfig) -> Proof:
    try:
        with _record_calls(copy.model) as is_called:
            packed = copy.packed()
        uncalled = tuple(kind for kind, called in is_called.items() if not called)
        difference = find_difference(packed, expected)
        if difference is None:
            return Proof(kept=small.kept, uncalled=uncalled)
        difference = find_difference(copy.padded(), expected)
        if difference is not None:
            return Proof(f"{difference}, compared with transformers", kept=small.kept)
        return Proof(leak=copy.find_leak(), kept=small.kept, uncalled=uncalled)
    except NotComputable as error:
        return Proof(str(error), kept=small.kept)


def find_difference(computed: Computed, expected: Computed) -> str | None:
    """Return a description of the largest difference in loss or gradients. None if it is within TOLERANCE."""
    error = abs(computed.loss - expected.loss) / abs(expected.loss)
    if not error <= TOLERANCE:
        return f"the loss is {computed.loss:.8g} in place of {expected.loss:.8g}"
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    worst, worst_name = 0.0, ""
    for name, gradient in expected.gradients.items():
        scale = max(float(gradient.abs().max()), _SMALLEST_GRADIENT * largest)
        error = float((computed.gradients[name].to(gradient.device) - gradient).abs().max()) / scale
        if not error <= worst:
            worst, worst_name = error, name
    if worst <= TOLERANCE:
        return None
    return f"the loss is right and the gradient of {worst_name} differs by {worst:.1e}"


@dataclass(frozen=True)
class Copy:
    """A small copy of a model, in transformers and in dtrain, with the same weights.

    Attributes:
        config: Its config.
        library_model: The model of transformers with eager attention.
        model: dtrain's model.
        documents: Token ids of the documents, [length] each.
    """

    config: ModelConfig
    library_model: PreTrainedModel
    model: CausalLM
    documents: list[Tensor]

    @classmethod
    def of(cls, small: SmallConfig, device: torch.device | None = None) -> "Copy":
        """Build a copy. The same config has the same weights in every process.

        Args:
            small: The copy's config.
            device: Device of dtrain's model. None: the CPU.

        Raises:
            NotComputable: If the copy cannot be built.
        """
        try:
            config = read_transformers_config(small.values, "config.json")
        except UserError as error:
            raise NotComputable(str(error)) from error
        if config.num_parameters > _MAX_PARAMETERS:
            raise NotComputable(f"its smallest copy has {config.num_parameters:,} parameters")
        generator = torch.Generator().manual_seed(_SEED)
        with _errors_of_library("be built"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            library_model = build_library_model(make_library_config(small.values, "config.json"), "eager", "cpu")
            library_model.double()
            _add_noise(library_model, generator)
            model = build(config, torch.float64)
            _copy_weights(model, library_model)
        documents = [torch.randint(FIRST_TOKEN, config.vocab_size, (n,), generator=generator) for n in DOCUMENTS]
        return cls(config, library_model, model.train().to(device or "cpu"), documents)

    def expected(self) -> Computed:
        """Compute the documents one at a time in transformers."""
        total = torch.zeros((), dtype=torch.float64)
        with _errors_of_library("run in transformers"), DoublePrecision():
            for document in self.documents:
                logits = self.library_model(input_ids=document[None], use_cache=False).logits[0, :-1]
                total = total - logits.double().log_softmax(-1).gather(1, document[1:, None]).sum()
            total.backward()
        gradients = {}
        parameters = dict(self.library_model.named_parameters())
        for name, parameter in self.model.named_parameters():
            gradient = parameters[get_library_source(self.config).library_name(name)].grad
            gradients[name] = torch.zeros(parameter.shape, dtype=torch.float64) if gradient is None else gradient
        return Computed(float(total.detach()), gradients)

    def packed(self) -> Computed:
        """Compute the documents in one row."""
        return compute(self.model, self.config, self._packed_streams())

    def _packed_streams(self) -> dict[str, Tensor]:
        rows = [_row_of(document, number, 0) for number, document in enumerate(self.documents)]
        rows.append(_row_of(torch.zeros(0, dtype=torch.int64), 0, _PADDING))
        return {name: torch.cat([row[name] for row in rows], dim=1) for name in rows[0]}

    def padded(self) -> Computed:
        """Compute the documents in a row each."""
        longest = max(DOCUMENTS)
        rows = [_row_of(document, 0, longest - len(document)) for document in self.documents]
        streams = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return compute(self.model, self.config, streams, has_one_document=True)

    def find_leak(self) -> str:
        """Return the first part of a layer whose output for a document depends on the documents before it.

        The outputs for the last document of the packed row are compared with those for a row of this document only. For
        example, the last of the documents of 11, 6 and 9 tokens has the positions 17 to 25 of the packed row.
        """
        packed_row = self._packed_streams()
        packed_outputs: dict[str, Tensor] = {}
        with torch.no_grad(), _record_outputs(self.model, packed_outputs):
            compute(self.model, self.config, packed_row, has_gradients=False)
        last = self.documents[-1]
        single_outputs: dict[str, Tensor] = {}
        with torch.no_grad(), _record_outputs(self.model, single_outputs):
            compute(self.model, self.config, _row_of(last, 0, 0), has_gradients=False, has_one_document=True)

        start = sum(len(document) for document in self.documents[:-1])
        packed_length = packed_row["input_ids"].shape[1]
        for name, packed in packed_outputs.items():
            single = single_outputs.get(name)
            # Only outputs [B, S, D] can be cut into documents. Routers, for example, return [tokens, experts].
            if single is None or packed.dim() != 3 or packed.shape[1] != packed_length:
                continue
            of_last = packed[:, start : start + len(last)]
            if of_last.shape != single.shape:
                continue
            if float((of_last - single).abs().max()) > TOLERANCE * float(of_last.abs().max()):
                module = self.model.get_submodule(name)
                return f"{name.rpartition('.')[2]} ({type(module).__name__})"
        return f"a layer of {self.config.architecture}"

    def on_mesh(self, tp: DeviceMesh, cp: DeviceMesh, rotate: str) -> Computed:
        """Compute the documents in one row over tensor- and context-parallel ranks. The model is sharded in place.

        Collectives:
            Over tp and cp.
        """
        model = self.model
        if tp.size() > 1:
            apply_plan(model, tp, model.plan, sequence_parallel=False)
        streams = self._packed_streams()
        if cp.size() > 1:
            exchange = RingKernel if rotate == "ring" else GatherKernel
            model.use_kernel(exchange(SdpaKernel(), cp))
            streams = shard_streams(streams, cp)
        computed = compute(model, self.config, streams, tp=tp)
        loss = torch.tensor(computed.loss, dtype=torch.float64)
        if cp.size() > 1:
            device = next(model.parameters()).device
            loss = loss.to(device)
            dist.all_reduce(loss, group=cp.get_group())
            for gradient in computed.gradients.values():
                dist.all_reduce(gradient, group=cp.get_group())
        return Computed(float(loss), computed.gradients)


def prove_on_mesh(values: Mapping[str, Any], mesh: Mesh, rotate: str, device: torch.device) -> str | None:
    """Prove that a model computes the same numbers on this mesh and in one process.

    Args:
        values: The fields of config.json, of a model with a `prove` that found no problem.
        mesh: The mesh.
        rotate: `parallel.cp_rotate`.
        device: Device of this rank.

    Returns:
        The difference on this rank. None if there is none.

    Collectives:
        Over tp and cp.
    """
    for small in small_configs(values, mesh.tp.size()):
        # All ranks continue with the same copy, because it only depends on the config.
        try:
            copy = Copy.of(small, device)
            expected = copy.packed()
        except NotComputable:
            continue
        try:
            return find_difference(copy.on_mesh(mesh.tp, mesh.cp, rotate), expected)
        except NotComputable as error:
            return str(error)
    return "no small copy of it can be built"


@contextmanager
def _errors_of_library(what: str) -> Iterator[None]:
    """Context in which any error but UserError becomes NotComputable, whose text starts with "it cannot {what}: "."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - any class of transformers may raise anything here
        raise NotComputable(f"it cannot {what}: {first_line(error)}") from error


def _row_of(document: Tensor, number: int, padding: int) -> dict[str, Tensor]:
    """Return the streams of a row with one document and padding after it, [1, S] each.

    Args:
        document: Token ids.
        number: Number of the document in its row.
        padding: Tokens of padding.
    """
    length = len(document)
    ids, positions = document.new_zeros(1, length + padding), document.new_zeros(1, length + padding)
    documents = document.new_full((1, length + padding), PADDING_SEQ_ID)
    labels = document.new_full((1, length + padding), -100)
    ids[0, :length] = document
    positions[0] = torch.arange(length + padding)
    documents[0, :length] = number
    labels[0, : max(length - 1, 0)] = document[1:]
    return {"input_ids": ids, "position_ids": positions, "seq_ids": documents, "labels": labels}


def compute(
    model: CausalLM,
    config: ModelConfig,
    streams: Mapping[str, Tensor],
    *,
    has_one_document: bool = False,
    has_gradients: bool = True,
    tp: DeviceMesh | None = None,
) -> Computed:
    """Compute the loss of rows as training does, and its gradients.

    Args:
        model: dtrain's model.
        config: Its config.
        streams: This rank's part of each stream, [B, S].
        has_one_document: Whether each row has one document and padding, for which training makes no mask.
        has_gradients: Whether to compute gradients.
        tp: The tensor-parallel ranks.

    Raises:
        NotComputable: For any error.

    Collectives:
        Those of the model, and those of gathering gradients over tp.
    """
    device = next(model.parameters()).device
    local = {name: stream.to(device) for name, stream in streams.items()}
    context = MicroBatchContext()
    if not has_one_document:
        context = MicroBatchContext(position_ids=local["position_ids"], seq_ids=local["seq_ids"])
    labels = local["labels"].flatten()
    index = (labels >= 0).nonzero()[:, 0]
    shard = None
    if tp is not None and model.head.vocab_start is not None:
        shard = VocabShard(model.head.vocab_start, tp.get_group(), -(-config.vocab_size // tp.size()))

    def loss(hidden: Tensor, head_weight: Tensor) -> Tensor:
        weights = torch.ones(index.shape, dtype=torch.float64, device=device)
        softcap = config.final_logit_softcapping
        hidden = hidden.flatten(0, 1)
        return -weighted_logprob_sum(hidden, head_weight, labels[index], weights, index, softcap=softcap, shard=shard)

    model.zero_grad()
    with _errors_of_library("run on dtrain's attention"):
        total = model.with_head(loss, local["input_ids"], context)
        if has_gradients:
            total.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradients[name] = torch.zeros(parameter.shape, dtype=torch.float64, device=device)
        if gradient is not None:
            gradients[name] += gradient
    return Computed(float(total.detach()), gradients)


@contextmanager
def _record_outputs(model: CausalLM, outputs: dict[str, Tensor]) -> Iterator[None]:
    """Context in which the outputs of the layers' children are added to `outputs`, in the order of computation."""
    layers = model.model.layers
    prefixes = {id(layer) for layer in layers}
    handles = []
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if parent and id(model.get_submodule(parent)) in prefixes:
            handles.append(module.register_forward_hook(_recorder(name, outputs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _record_calls(model: CausalLM) -> Iterator[dict[str, bool]]:
    """Context with a dict of the decoder's linear layers, in which layers that are called get True.

    The names are those within a decoder layer, with `*` in place of an expert's number. So an expert that gets no token
    does not count as uncalled if another one is called.
    """
    is_called: dict[str, bool] = {}
    handles = []
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            if isinstance(module, Linear):
                kind = re.sub(r"\b\d+\b", "*", name)
                is_called[kind] = False
                handles.append(module.register_forward_pre_hook(_call_recorder(kind, is_called)))
    try:
        yield is_called
    finally:
        for handle in handles:
            handle.remove()


def _call_recorder(kind: str, is_called: dict[str, bool]) -> Any:
    def record(module: nn.Module, inputs: Any) -> None:
        is_called[kind] = True

    return record


def _recorder(name: str, outputs: dict[str, Tensor]) -> Any:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs[name] = first.detach()

    return record


@torch.no_grad()
def _add_noise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Add noise to parameters and the biases of routers, so that no norm is 1 and no bias 0.

    Other buffers, such as the masks of MiniMax's linear attention, are not weights.
    """
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("bias")}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            width = tensor.shape[-1] if tensor.dim() > 1 else 16
            tensor.add_(noise * (_NOISE / width**0.5))


@torch.no_grad()
def _copy_weights(model: CausalLM, library_model: PreTrainedModel) -> None:
    """Copy parameters and the buffers that are in files. Other buffers were computed by dtrain."""
    library_tensors = library_model.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(library_tensors[get_library_source(model.config).library_name(name)])
