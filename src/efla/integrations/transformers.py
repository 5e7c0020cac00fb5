"""Fast CPU kernels for the gated-delta-rule models inside transformers: Qwen3-Next, Qwen3.5, OLMo-hybrid and others.

    from efla.integrations.transformers import accelerate_cpu
    accelerate_cpu()                     # or: with accelerate_cpu(): ...

    from efla.integrations.transformers import register
    register()                           # needs the kernels package; then model.set_use_kernels(True) or use_kernels=True

On a CPU these models fall back to slow plain-torch functions. :func:`accelerate_cpu` replaces the functions, norms and
feed-forward layers in transformers' modules: CPU tensors run on ``native``, all others take the original. On CPUs where
oneDNN multiplies float32 faster than MKL (AMD's Zen 5), ``torch.nn.Linear`` takes it. :func:`register`
offers the same functions and norms to transformers' own kernel registry, which chooses them model by model.

Packed sequences (``DataCollatorWithFlattening``), which transformers rejects or mixes on a CPU, stay separate in every
layer. ``cu_seq_lens_q``, ``seq_idx`` or ``position_ids`` say where they start; the registry needs ``cu_seq_lens_q``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from efla.integrations.gated_delta import (
    FUNCTIONS,
    decode,
    decode_layer,
    linear,
    or_original,
    rms_norm,
    rms_norm_gated,
    rms_norm_zero_centered,
    runs_here,
    swiglu_mlp,
)
from efla.models.compat import OLDER_GATED_DELTA_NET
from efla.models.inputs import boundaries_of_positions, boundaries_of_starts, find_packing, positions_of_packed
from efla.native import rows
from efla.scans.validation import checks_values

_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")


class Acceleration:
    """The replaced functions; :meth:`restore`, or leaving the ``with`` block, puts the originals back."""

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType | type, str, Callable[..., Any]]] = []

    @property
    def models(self) -> list[str]:
        """Names of the model families whose layers now run on ``native``."""
        return sorted({owner.__name__.split(".")[-2] for owner, name, _ in self._originals if name in FUNCTIONS})

    def restore(self) -> None:
        """Put transformers' own functions back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _replace(
        self, owner: ModuleType | type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(owner, name, None)
        if not callable(original) or hasattr(original, "__efla_original__"):
            return
        replacement = functools.wraps(original)(make(original))
        replacement.__efla_original__ = original  # type: ignore[attr-defined]
        setattr(owner, name, replacement)
        self._originals.append((owner, name, original))


def accelerate_cpu() -> Acceleration:
    """Run transformers' gated-delta-rule models on efla's CPU kernels; warns if it finds no function to replace.

    Calling it twice changes nothing. ``restore()`` on the first call's result, or leaving its ``with`` block, undoes it.
    """
    acceleration = Acceleration()
    for owner, name, make in _replacements():
        acceleration._replace(owner, name, make)
    if _replacements() and rows.onednn_is_faster():
        acceleration._replace(nn.Linear, "forward", functools.partial(_call_on_cpu, linear))
    if not _replacements():
        warnings.warn(
            "efla found no gated-delta-rule model with a replaceable function in this transformers; nothing was changed",
            stacklevel=2,
        )
    return acceleration


def accelerate_model(model: nn.Module) -> Acceleration:
    """:func:`accelerate_cpu` if the model is one of transformers' gated-delta-rule models, else an empty acceleration."""
    module = sys.modules[type(model).__module__]
    return accelerate_cpu() if FUNCTIONS.keys() & vars(module).keys() else Acceleration()


def register() -> None:
    """Offer efla's CPU kernels to transformers' registry, for training and inference, with and without ``torch.compile``.

    ``model.set_use_kernels(True)``, or ``use_kernels=True`` in ``from_pretrained``, then takes them for a model on a CPU.
    """
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        raise ImportError(
            f"transformers' registry needs the kernels package, {import_utils.KERNELS_MIN_VERSION} <= version < "
            f"{import_utils.KERNELS_MAX_VERSION} for this transformers; install it, or use accelerate_cpu(), "
            "which needs no package"
        )
    from kernels import Mode, register_kernel_mapping

    modes = Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE
    register_kernel_mapping({name: {"cpu": dict.fromkeys(modes, repo)} for name, repo in _repositories().items()})


class _Repository:
    """What the registry asks for a kernel: ``load`` returns the module class whose forward is taken."""

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self._layer = type(name, (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})

    def load(self) -> type[nn.Module]:
        return self._layer


@functools.cache
def _repositories() -> dict[str, _Repository]:
    """By the names that transformers' layers ask for."""
    forwards: dict[str, Callable[..., Any]] = {
        "RMSNorm": rms_norm,
        "RMSNormZeroCentered": rms_norm_zero_centered,
        "RMSNormGated": rms_norm_gated,
    }
    for name, function in FUNCTIONS.items():
        forwards[_REGISTERED.get(name, name)] = _as_forward(function)
    return {name: _Repository(name, forward) for name, forward in forwards.items()}


def _as_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that stands for a function; the original is the forward of the module's class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return or_original(function, functools.partial(type(self).forward, self))(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    parameters = [own, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


@functools.cache
def _replacements() -> list[tuple[ModuleType | type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
    """What :func:`accelerate_cpu` replaces: the owner, the name, and what makes the new function of the original."""
    found: list[tuple[ModuleType | type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
    for module in _gated_delta_modules():
        found += [(module, name, functools.partial(or_original, f)) for name, f in FUNCTIONS.items()]
        for owner in [value for value in vars(module).values() if inspect.isclass(value)]:
            if method := _LAYERS.get(_names_used(owner)):
                found.append((owner, "forward", functools.partial(_call_on_cpu, method)))
            elif {"in_proj_qkv", "causal_conv1d_update"} <= _names_used(owner) <= _GATED_DELTA_NET:
                found.append((owner, "forward", functools.partial(or_original, decode)))
            elif _names_used(owner) == _DECODER_LAYER:
                found.append((owner, "forward", functools.partial(or_original, decode_layer)))
        found += [(model, "forward", _with_packing) for model in _text_models(module)]
    return found


def _gated_delta_modules() -> list[ModuleType]:
    """Modelling modules of transformers that define the functions, found by reading their source, then imported."""
    import transformers.models

    modules = []
    for folder in transformers.models.__path__:
        for path in sorted(Path(folder).glob("*/modeling_*.py")):
            if "\ndef torch_chunk_gated_delta_rule(" in path.read_text(encoding="utf-8"):
                modules.append(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"))
    return modules


def _text_models(module: ModuleType) -> list[type]:
    """The classes that run a family's layers: those that make the mask of its recurrent layers."""
    found = []
    for value in vars(module).values():
        forward = vars(value).get("forward") if inspect.isclass(value) and value.__module__ == module.__name__ else None
        if forward is None or tuple(inspect.signature(forward).parameters)[1:7] != _INPUTS:
            continue
        if "create_recurrent_attention_mask" in inspect.unwrap(forward).__code__.co_names:
            found.append(value)
    return found


def _call_on_cpu(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Any:
        return (method if runs_here(x) else original)(self, x, *args, **kwargs)

    forward.__efla_kernel__ = method  # type: ignore[attr-defined]
    return forward


_REGISTERED = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}
_PLAIN = frozenset(["dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"])
# By all names that the code of a layer's forward uses: a forward that does more than these is left alone.
_LAYERS: dict[frozenset[str], Callable[..., Any]] = {
    _PLAIN: rms_norm,
    _PLAIN | {"ACT2FN", "activation"}: rms_norm_gated,
    frozenset(["_norm", "float", "weight", "type_as", "torch", "rsqrt", "pow", "mean", "eps"]): rms_norm_zero_centered,
    frozenset(["gate_proj", "up_proj", "down_proj", "act_fn"]): swiglu_mlp,
}
_DECODER_LAYER = frozenset([
    "block_type", "input_layernorm", "linear_attn", "mlp", "post_attention_layernorm", "self_attn",
])  # fmt: skip
_GATED_DELTA_NET = frozenset({
    "A_log", "F", "activation", "apply_mask_to_padding_states", "bias", "causal_conv1d_fn", "causal_conv1d_update",
    "conv1d", "conv_kernel_size", "dt_bias", "exp", "float", "get_conv_state", "get_recurrent_state", "head_k_dim",
    "head_v_dim", "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "is_recording_past", "key_dim", "layer_idx",
    "norm", "out_proj", "pop", "reshape", "shape", "sigmoid", "softplus", "split", "squeeze", "torch",
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "transpose", "update_conv_state",
    "update_recurrent_state", "value_dim", "weight",
}) | OLDER_GATED_DELTA_NET  # fmt: skip


def _names_used(owner: type) -> frozenset[str]:
    """The names in a class's own ``forward`` and in the ``_norm`` of a norm."""
    methods = [vars(owner).get(name) for name in ("forward", "_norm")]
    codes = [inspect.unwrap(method).__code__ for method in methods if inspect.isfunction(method)]
    return frozenset(name for code in codes for name in code.co_names)


# Packed sequences.


def _with_packing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the recurrent layers where packed sequences start, and the softmax layers by positions."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(_INPUTS, args, strict=False))
        embeddings = kwargs.get("inputs_embeds")
        tokens = kwargs.get("input_ids") if embeddings is None else embeddings
        if tokens is not None and runs_here(tokens):
            B, T = tokens.shape[:2]
            cu_seqlens = _packing_of(B, T, kwargs)
            if cu_seqlens is not None:
                _check_layers_keep_apart(self.config)
                # With a cache, transformers does not keep the sequences apart in softmax layers.
                kwargs.update(cu_seq_lens_q=cu_seqlens, use_cache=False)
                kwargs.pop("seq_idx", None)
                if kwargs.get("position_ids") is None:
                    kwargs["position_ids"] = positions_of_packed(cu_seqlens, B, T)
        return original(self, *args[len(_INPUTS) :], **kwargs)

    return forward


def _check_layers_keep_apart(config: Any) -> None:
    """Refuse a model with layers that mix the tokens of neighbouring sequences and cannot be told where one starts."""
    mixing = set(config.layer_types) - {"linear_attention", "full_attention", "sliding_attention"}
    if getattr(config, "ple_layer_ids", None):
        mixing.add("per-layer embedding (ple_layer_ids)")
    if mixing:
        raise ValueError(
            f"layers of type {', '.join(sorted(mixing))} run over the boundaries of packed sequences; "
            "pad the sequences or pass them one at a time"
        )


def _packing_of(batch_size: int, length: int, kwargs: dict[str, Any]) -> Tensor | None:
    """Boundaries [N + 1] in the flattened [B * T] axis, from the arguments of a model's forward; ``None`` without packing."""
    seq_idx, given, position_ids = (kwargs.get(name) for name in ("seq_idx", "cu_seq_lens_q", "position_ids"))
    if given is None and seq_idx is not None:
        is_start = torch.ones_like(seq_idx, dtype=torch.bool)
        is_start[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        given = boundaries_of_starts(is_start)
    text_positions = position_ids
    if position_ids is not None and position_ids.dim() == 3:  # text, time, height and width, or the last three alone
        text_positions = position_ids[0] if position_ids.shape[0] == 4 else None
    if given is not None and position_ids is not None and checks_values(given):
        said = None if text_positions is None else boundaries_of_positions(text_positions, batch_size, length)
        if said is None or not torch.equal(given.unique(), said):
            raise ValueError(
                "position_ids must restart at each boundary of packed sequences that cu_seq_lens_q or seq_idx gives, and "
                "nowhere else, because the mask of the softmax layers is made from them; leave position_ids out to have them "
                "counted"
            )
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    return find_packing(mask, text_positions, cache, given, batch_size, length, kwargs)
