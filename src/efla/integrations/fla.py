"""efla's CPU kernels as a backend of flash-linear-attention's functions and layers.

    from efla.integrations.fla import register
    register()
    fla.layers.GatedDeltaNet(hidden_size=256, head_dim=64, num_heads=3)(x)     # CPU tensors run on efla, others as before

flash-linear-attention 0.6 asks a registry for each call of these functions, and CPU tensors then run on efla:

    chunk_gated_delta_rule
    causal_conv1d_fwd, causal_conv1d_bwd, causal_conv1d_update, causal_conv1d_update_states
    layer_norm_fwd, layer_norm_bwd, layer_norm_gated_fwd, layer_norm_gated_bwd, l2norm_fwd, l2norm_bwd
    swiglu_fwd, swiglu_fwdbwd

``GatedDeltaNet`` and models of it therefore train on a CPU, and evaluate inputs of more than 64 tokens. Up to 64 tokens,
``GatedDeltaNet`` in eval mode and without gradients calls ``fused_recurrent_gated_delta_rule``. That function and both
functions of ``DeltaNet``, ``chunk_delta_rule`` and ``fused_recurrent_delta_rule``, ask no registry and need a GPU; for
those :mod:`efla.ops` is the drop-in.

Shapes: B batch, T tokens, D channels, W kernel width, N sequences; R rows of a norm, G groups of channels.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from efla import ops
from efla.native import rows


def register() -> None:
    """Add the backend to flash-linear-attention's registry; ``FLA_EFLA=0`` in the environment switches it off."""
    from fla.backends import BaseBackend
    from fla.backends import register as register_backend

    class EflaBackend(BaseBackend):  # type: ignore[misc]
        backend_type = "efla"
        env_var = "FLA_EFLA"
        priority = 1

        def get_implementation(self, function_name: str) -> Callable[..., Any] | None:
            return _IMPLEMENTATIONS.get(function_name)

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            devices = {str(x.device) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
            return devices == {"cpu"}, f"efla's kernels run on the CPU, the tensors are on {', '.join(sorted(devices))}"

    register_backend("gated_delta_rule")(EflaBackend)
    for module, functions in _FUNCTIONS.items():
        for function in functions:
            register_backend(getattr(importlib.import_module(module), function.__name__))(EflaBackend)


# The functions have the signatures of flash-linear-attention's own. Their callers are autograd functions, so forward and
# backward passes are apart, and both are given all inputs.


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor | None]:
    """act(convolution of x) + residual, and the last W inputs of each sequence.

    x: [B, T, D] or [B, T, H, D / H]; weight: [D, W]; states: [N, D, W].
    """
    flat, width = x.flatten(2), weight.shape[1]
    # A window of W holds the token itself.
    past = None if initial_state is None or width == 1 else initial_state[..., 1:]
    arguments = flat, weight, bias, past, cu_seqlens, activation in ("silu", "swish")
    y = rows.causal_conv(*arguments)
    y = (rows.torch_conv(*arguments) if y is None else y).view(x.shape)
    y = y if residual is None else (y + residual).to(x.dtype)
    return y, causal_conv1d_update_states(flat, width, initial_state, cu_seqlens) if output_final_state else None


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, residual and initial_state; dht: [N, D, W], the gradient of the final state."""

    def forward(*inputs: Any) -> tuple[Tensor, Tensor | None]:
        return causal_conv1d_fwd(*inputs, dht is not None, activation, cu_seqlens)

    return _gradients(forward, (x, weight, bias, residual, initial_state), (dy, dht))


def causal_conv1d_update_states(
    x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The last W inputs of each sequence, preceded by those of initial_state or by zeros: [N, D, W]."""
    if cu_seqlens is None:
        shape = x.shape[0], x.shape[2], state_len
        past = x.new_zeros(shape) if initial_state is None else initial_state.to(x.dtype)
        return torch.cat([past, x[:, -state_len:].transpose(1, 2)], dim=2)[..., -state_len:].contiguous()
    sequences = x.flatten(0, -2)[None].split(cu_seqlens.diff().tolist(), dim=1)
    states = [None] * len(sequences) if initial_state is None else initial_state.split(1)
    pairs = zip(sequences, states, strict=True)
    return torch.cat([causal_conv1d_update_states(sequence, state_len, state) for sequence, state in pairs])


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence; cache [N, D, W] takes it in place. x: [N, D], [1, N, D] or [N, 1, D]."""
    if weight is None:
        raise ValueError("causal_conv1d_update needs a weight [D, W], got None")
    tokens = x.reshape(-1, 1, weight.shape[0])
    added = None if residual is None else residual.reshape(tokens.shape)
    y, _ = causal_conv1d_fwd(tokens, weight, bias, added, cache, False, activation)
    cache.copy_(causal_conv1d_update_states(tokens, cache.shape[2], cache))
    return y.view(x.shape), cache


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The norm of x + residual, the mean and 1 / deviation of each row, and x + residual; x: [R, D], weight: [G D]."""
    total, kept = _add(x, residual, residual_dtype)
    wide = total.to(rows.wider(total))
    mean = None if is_rms_norm else wide.mean(-1)
    centred = wide if mean is None else wide - mean[:, None]
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    y = _norm(total, None, weight, bias, None, eps, is_rms_norm)
    return y.to(x.dtype if out_dtype is None else out_dtype), mean, rstd, kept


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and residual, and the output again if it is asked for. x: what the forward pass kept.

    In torch's operations, because ``eps`` is not among the arguments and the kernel computes each row's deviation again.
    """
    wide = x.to(rows.wider(x))
    unit = (wide if mean is None else wide - mean[:, None]) * rstd[:, None]
    grad = dy.to(unit.dtype)
    d_unit = _scale(grad, weight, None)
    d_x = d_unit - unit * (unit * d_unit).mean(-1, keepdim=True)
    d_x = (d_x if mean is None else d_x - d_unit.mean(-1, keepdim=True)) * rstd[:, None]
    d_weight = None if weight is None else _sum_rows(grad * unit, weight)
    d_bias = None if bias is None else _sum_rows(grad, bias)
    d_x, d_residual = _share(d_x, dres, has_residual, x.dtype, x_dtype)
    y = (_scale(unit, weight, bias).to(dy.dtype),) if recompute_output else ()
    return (d_x, d_weight, d_bias, d_residual, *y)


def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[Tensor, None, None, Tensor]:
    """The norm of x + residual times act(g), and x + residual; x, g: [R, D], weight: [D].

    In place of mean and 1 / deviation it returns ``None``: the backward pass computes them again.
    """
    total, kept = _add(x, residual, residual_dtype)
    y = _norm(total, g, weight, bias, activation, eps, is_rms_norm)
    return y.to(x.dtype if out_dtype is None else out_dtype), None, None, kept


def layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, g, weight, bias and residual, and the output again if it is asked for. x: what the forward pass kept."""

    def forward(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
        return (_norm(x, g, weight, bias, activation, eps, is_rms_norm),)

    d_x, d_gate, d_weight, d_bias = _gradients(forward, (x, g, weight, bias), (dy,))
    assert d_x is not None
    d_x, d_residual = _share(d_x, dresidual, has_residual, x.dtype, x_dtype)
    y = (forward(x, g, weight, bias)[0].to(dy.dtype),) if recompute_output else ()
    return (d_x, d_gate, d_weight, d_bias, d_residual, *y)


def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """x / sqrt(x.x + eps) over the last axis, and the factor of each row; x: [..., D]."""
    wide = x.to(rows.wider(x))
    rstd = (wide.square().sum(-1) + eps).rsqrt()
    return (wide * rstd[..., None]).to(x.dtype if output_dtype is None else output_dtype), rstd


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """The gradient of x, from y and the factors."""
    unit, grad = y.to(rstd.dtype), dy.to(rstd.dtype)
    return ((grad - unit * (unit * grad).sum(-1, keepdim=True)) * rstd[..., None]).to(y.dtype)


def swiglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    """silu(x) * y."""
    return rows.swiglu(x, y)


def swiglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of x and y from the output's gradient g, and with ``use_weight`` the output again."""
    gradients = _gradients(lambda x, y: (rows.swiglu(x, y),), (x, y), (g,))
    return (*gradients, rows.swiglu(x, y)) if use_weight else gradients


_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "fla.modules.causal_conv1d.ops": (
        causal_conv1d_fwd,
        causal_conv1d_bwd,
        causal_conv1d_update,
        causal_conv1d_update_states,
    ),
    "fla.modules.norm.layernorm": (layer_norm_fwd, layer_norm_bwd),
    "fla.modules.norm.fused_norm_gate": (layer_norm_gated_fwd, layer_norm_gated_bwd),
    "fla.modules.norm.l2norm": (l2norm_fwd, l2norm_bwd),
    "fla.modules.activations.ops": (swiglu_fwd, swiglu_fwdbwd),
}
_IMPLEMENTATIONS = {function.__name__: function for functions in _FUNCTIONS.values() for function in functions} | {
    "chunk_gated_delta_rule": ops.chunk_gated_delta_rule
}


def _gradients(
    function: Callable[..., tuple[Tensor | None, ...]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradient of each input that is there, from the gradients of the outputs."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = function(*leaves)
    pairs = [(y, dy.to(y.dtype)) for y, dy in zip(outputs, cotangents, strict=True) if y is not None and dy is not None]
    wanted = [x for x in leaves if x is not None]
    results, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, grads, materialize_grads=True))
    return tuple(None if x is None else next(found) for x in leaves)


def _norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    eps: float,
    is_rms_norm: bool,
) -> Tensor:
    """The norm of rows x [R, D], times act(gate) if given. weight, bias: [G D], for G rows after another."""
    is_silu = activation in ("swish", "silu")
    is_plain = is_rms_norm and bias is None and (gate is None or is_silu)
    if is_plain and weight is not None and weight.shape == x.shape[-1:]:
        return rows.rms_norm(x, weight, eps, gate)
    norm = functional.rms_norm if is_rms_norm else functional.layer_norm
    y = _scale(norm(x.to(rows.wider(x)), x.shape[-1:], eps=eps), weight, bias)
    if gate is not None:
        gate = gate.to(y.dtype)
        y = y * (functional.silu(gate) if is_silu else gate.sigmoid())
    return y.to(x.dtype)


def _scale(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x * weight + bias for rows x [R, D] and weight, bias [G D]."""
    y = x if weight is None else (x.reshape(-1, weight.shape[0]) * weight.to(x.dtype)).view(x.shape)
    return y if bias is None else (y.reshape(-1, bias.shape[0]) + bias.to(x.dtype)).view(x.shape)


def _sum_rows(x: Tensor, parameter: Tensor) -> Tensor:
    """The sum of rows x [R, D] that belong to each entry of a parameter [G D]."""
    return x.reshape(-1, parameter.shape[0]).sum(0).to(parameter.dtype)


def _add(x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """x + residual in float32 or wider, and as it is kept for the backward pass."""
    if residual is None:
        return x, x if residual_dtype is None else x.to(residual_dtype)
    total = x.to(rows.wider(x)) + residual
    return total, total.to(residual.dtype)


def _share(
    d_x: Tensor, dres: Tensor | None, has_residual: bool, kept: torch.dtype, x_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the residual that was added to it, from that of their sum and of its other use."""
    total = d_x if dres is None else d_x + dres
    return total.to(kept if x_dtype is None else x_dtype), total.to(kept) if has_residual else None
