"""Modules of transformers that read sharded parameters, as dtrain's own modules do.

Tensor parallelism makes parameters DTensors, and dtrain's modules compute with plain tensors, which they read by
`LocalParameters.local`. A module of transformers reads `self.weight`. `adopt_modules` changes the class of each module
that has parameters, as FSDP2 does, so that it behaves like dtrain's:

    nn.Linear                          TransformersLinear: dtrain's `Linear`, so it may have an adapter
    nn.Embedding of the tokens         `VocabEmbedding`
    others (norms, routers, experts)   a class with a property for each parameter that returns `local(name)`
    decoder layers                     also `TransformersLayer`, which passes on the running forward

A class that transformers derives from nn.Embedding, such as Gemma's scaled embedding, keeps its forward: the new class
is derived from both, so that the `super().forward` of transformers' class is dtrain's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from dtrain.models.common.config import KVHeads
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.models.transformers.running import RunningForward, get_running, running
from dtrain.parallel.experts import Experts
from dtrain.parallel.tensor import LocalParameters, VocabEmbedding

_KEY_PROJECTIONS = ("k_proj", "v_proj")

ChangeTensor = Callable[[Tensor], Tensor]


class TransformersLinear(Linear):
    """A linear layer that reads the adapters' context from the running forward, since transformers does not pass it.

    Attributes:
        enter: Function of the input, for example an all-reduce in the backward. None: unchanged. Set by `plan`.
        leave: Function of the output, for example an all-reduce in the forward. None: unchanged. Set by `plan`.
    """

    enter: ChangeTensor | None = None
    leave: ChangeTensor | None = None

    def local(self, name: str) -> Tensor:
        """Override `LocalParameters.local`: the property `weight` calls it."""
        return _local(self, name)

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Override `Linear.forward`, [..., in] -> [..., out]."""
        forward = get_running()
        if adapters is None and forward is not None:
            adapters = forward.adapters
        if self.enter is not None:
            x = self.enter(x)
        output = super().forward(x, adapters)
        return output if self.leave is None else self.leave(output)


class TransformersLayer(nn.Module):
    """A decoder layer that has the running forward as an argument (`running`).

    Activation checkpointing stores the arguments, and calls the layer with them again in the backward.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer. Its hooks, such as that of activation checkpointing, see the running forward."""
        kwargs.setdefault("running_forward", get_running())
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, running_forward: RunningForward | None = None, **kwargs: Any) -> Any:
        """Compute the layer with a running forward."""
        with running(running_forward):
            output = super().forward(*args, **kwargs)
        if running_forward is not None:
            running_forward.shared_input.clear()
        return output


class LocalModule(LocalParameters):
    """Base of a module of transformers whose parameters are read through properties.

    Attributes:
        enter: Function of each floating-point argument: hidden states and routing weights of a mixture's experts.
            None: unchanged. Set by `plan`.
        leave: Function of the output. None: unchanged. Set by `plan`.
    """

    enter: ChangeTensor | None = None
    leave: ChangeTensor | None = None

    def local(self, name: str) -> Tensor:
        """Override `LocalParameters.local`: the properties of parameters call it."""
        return _local(self, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        if self.enter is not None:
            entered = []
            for arg in args:
                has_gradient = isinstance(arg, Tensor) and arg.is_floating_point()  # not so the indices of experts
                entered.append(self.enter(arg) if has_gradient else arg)
            args = tuple(entered)
        output = super().forward(*args, **kwargs)
        return output if self.leave is None else self.leave(output)


class TransformersExperts(LocalModule, Experts):
    """The experts of a layer in stacks, [E, ..] each, which `experts.compute_experts` computes."""


def has_stacked_experts(module: nn.Module) -> bool:
    """Check whether a module of transformers has the experts of a layer in stacks, and no other parameters.

    Such a module has these attributes from transformers' decorator `use_experts_implementation`.
    """
    if not (hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")):
        return False
    count = getattr(module, "num_experts", None)
    return all(parameter.dim() > 1 and parameter.shape[0] == count for parameter in module.parameters())


class Float32Module(LocalModule):
    """`LocalModule` whose parameters and buffers are stored in float32 at least, such as a rotary embedding's."""

    keeps_full_precision = True


@cache
def _class_of(base: type[nn.Module], mixin: type[nn.Module], parameters: tuple[str, ...]) -> type[nn.Module]:
    """Return a class derived from `mixin` and `base`, with a property for each of the parameters.

    For example, `_class_of(LlamaRMSNorm, LocalModule, ("weight",))` is what these lines would define:

        class LlamaRMSNorm(LocalModule, LlamaRMSNorm):
            weight = property(_reader("weight"))
    """
    attributes: dict[str, Any] = {}
    for name in parameters:
        attributes[name] = property(_reader(name))
    # A scaled embedding of transformers calls `super().forward`, which must be VocabEmbedding's, so that is the last.
    bases = (base, mixin) if issubclass(mixin, VocabEmbedding) else (mixin, base)
    return type(base.__name__, bases, attributes)


def _local(module: LocalParameters, name: str) -> Tensor:
    """Return the plain tensor with which this rank computes, as `LocalParameters.local` does, without properties."""
    parameter = module._parameters[name]
    view = module.local_views.get(name)
    return parameter if view is None else view(parameter)  # type: ignore[arg-type, return-value]


def _reader(name: str) -> Callable[[LocalParameters], Tensor | None]:
    """Return the getter of a parameter: inside of a forward the local tensor, otherwise the parameter as it is stored.

    FSDP and others read parameters outside of a forward.
    """

    def read(module: LocalParameters) -> Tensor | None:
        return module._parameters[name] if get_running() is None else module.local(name)

    return read


def adopt_modules(
    decoder: nn.Module, embedding: nn.Module, layers: nn.ModuleList, is_float32: Callable[[str], bool]
) -> None:
    """Change the classes of a decoder's modules in place, as the module's docstring describes.

    Args:
        decoder: The decoder of transformers.
        embedding: Its embedding of the tokens.
        layers: Its layers.
        is_float32: Whether a parameter of a name is stored in float32 at least.
    """
    for name, module in list(decoder.named_modules()):
        if module is decoder:
            continue
        own_parameters = tuple(key for key, value in module._parameters.items() if value is not None)
        if module is embedding:
            _change_class(module, VocabEmbedding, ())
        elif type(module) is nn.Linear:
            # With properties, because some modules read the weight of a linear layer: Gemma 3n, and Mamba in Jamba.
            _change_class(module, TransformersLinear, own_parameters)
        elif own_parameters or module._buffers:
            own_names = [f"{name}.{key}" for key in (*own_parameters, *module._buffers)]
            has_only_tables = not own_parameters and not _has_persistent_buffers(module)  # as rotary embeddings do
            stays_float32 = has_only_tables or any(is_float32(own_name) for own_name in own_names)
            if has_stacked_experts(module):
                _change_class(module, TransformersExperts, own_parameters)
                module.count = module.num_experts
            else:
                _change_class(module, Float32Module if stays_float32 else LocalModule, own_parameters)
    for layer in layers:
        _change_class(layer, TransformersLayer, ())


def set_key_heads(layer: nn.Module, heads: KVHeads) -> None:
    """Set `key_heads` of a layer's projections to keys and values, which tensor parallelism shards by heads.

    Projections of other sizes, such as those to the latent of multi-head latent attention, do not have heads.
    """
    sizes = (heads.count * heads.head_dim, heads.count * heads.value_dim)
    for name, module in layer.named_modules():
        is_projection = name.rpartition(".")[2] in _KEY_PROJECTIONS
        if is_projection and isinstance(module, TransformersLinear) and module.out_features in sizes:
            module.key_heads = heads.count


def _has_persistent_buffers(module: nn.Module) -> bool:
    return any(name not in module._non_persistent_buffers_set for name in module._buffers)


def _change_class(module: nn.Module, mixin: type[nn.Module], parameters: tuple[str, ...]) -> None:
    """Change the class of a module to one that is derived from it and `mixin` (`_class_of`)."""
    if type(module) is nn.Embedding:
        module.__class__ = VocabEmbedding
    else:
        module.__class__ = _class_of(type(module), mixin, parameters)  # type: ignore[arg-type]  # classes are hashable
