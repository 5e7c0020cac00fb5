"""The linear-attention mixer: projections, short convolutions, one scan by any rule, output norm.

Shapes: B batch, T tokens, Hk and H key and value heads, K and V widths per head, N packed sequences.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import efla.scans.api as scans
from efla import rules
from efla.errors import unknown_name
from efla.layers.blocks import RMSNorm
from efla.layers.linear import apply_linear, apply_linears, is_plain
from efla.layers.short_conv import SequenceNeighbours, ShortConvolution
from efla.native import rows
from efla.scans.backends import fast_path, native

GATES = ("mamba", "logsigmoid")


class MixerState(NamedTuple):
    """State of a mixer after some tokens, of constant size.

    conv: [B, D, W - 1], the last inputs of the convolutions (``None`` without them).
    memory: [B, H, K, V], float32 or wider, S of the recurrence.
    """

    conv: Tensor | None
    memory: Tensor

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self if x is not None)


class DecodingStep(NamedTuple):
    """Arguments of the decoding kernels.

    tensors: the convolutions of q, k, v, their state, the memory, A_log, dt_bias, the weight of the output norm.
    settings: the rule's number, which of q and k are normalised, the scale, beta's factor, the norm's eps.
    """

    tensors: tuple[Tensor | None, ...]
    settings: tuple[Any, ...]

    @property
    def states(self) -> tuple[Tensor | None, ...]:
        return self.tensors[3:5]


Projected = tuple[Tensor | None, ...]
"""Outputs [B, T, D] of a mixer's input maps: with the state before T tokens, all that the state after them depends on."""


class LinearAttention(nn.Module):
    """Token mixer whose memory is updated by a rule (paper: section on the EFLA layer).

        q, k, v = silu(conv(W x)),  beta = sigmoid(Wb x),  log_gate = -exp(A_log) softplus(Wa x + dt_bias)
        S_t = exp(log_decay) (I - erase k k^T) S_{t-1} + write k v^T,      o_t = K^-1/2 S_t^T q_t
        y = Wo( RMSNorm_V(o) * silu(Wg x) )          (the factor silu(Wg x) with ``output_gate`` only)

    x, y: [B, T, hidden_size]. The rule takes beta and log_gate as it needs them and gives (log_decay, erase, write).

    rule: a name of :func:`efla.rules.names`, or a rule object. value_head_dim: V, default K.
    num_key_heads: fewer key than value heads, default as many. conv_size: 0 leaves the convolutions out.
    key_norm: L2-normalise keys; default only where the rule is not contractive for every key (delta, gated_delta).
    query_norm: L2-normalise queries. output_gate: default for rules with a forget gate.
    gate: "mamba" as above, or "logsigmoid" for log_gate = logsigmoid(Wa x) / 16.
    allow_neg_eigval: doubles beta, as flash-linear-attention's option of that name.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        num_key_heads: int | None = None,
        rule: str | rules.UpdateRule = "efla",
        conv_size: int = 4,
        conv_init: str = "default",
        key_norm: bool | None = None,
        query_norm: bool = True,
        output_gate: bool | None = None,
        gate: str = "mamba",
        allow_neg_eigval: bool = False,
        eps: float = 1e-6,
        backend: str = "auto",
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        self.rule = rules.get(rule)
        self.num_heads = num_heads
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_key_heads = {self.num_key_heads}, got {num_heads}; "
                "each key head serves the same number of value heads"
            )
        if gate not in GATES:
            raise unknown_name("gate", gate, GATES)
        self.head_dim = head_dim
        self.value_head_dim = head_dim if value_head_dim is None else value_head_dim
        self.key_norm = not self.rule.contractive if key_norm is None else key_norm
        self.query_norm = query_norm
        self._normalised: bool | Literal["q", "k"] = (
            query_norm if query_norm == self.key_norm else "q" if query_norm else "k"
        )
        self.gate = gate
        self.allow_neg_eigval = allow_neg_eigval
        self.backend = backend
        self.chunk_size = chunk_size
        self.sequence: SequenceNeighbours | None = None
        key_size = self.num_key_heads * head_dim
        value_size = num_heads * self.value_head_dim

        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.q_conv = ShortConvolution(key_size, conv_size) if conv_size else None
        self.k_conv = ShortConvolution(key_size, conv_size) if conv_size else None
        self.v_conv = ShortConvolution(value_size, conv_size) if conv_size else None
        for conv in (self.q_conv, self.k_conv, self.v_conv):
            if conv is not None:
                conv.reset_parameters(conv_init)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False) if self.rule.needs_beta else None
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False) if self.rule.needs_gate else None
        has_rate = self.rule.needs_gate and gate == "mamba"
        self.A_log = nn.Parameter(draw_log_rate(num_heads)) if has_rate else None
        self.dt_bias = nn.Parameter(draw_dt_bias(num_heads)) if has_rate else None
        has_output_gate = self.rule.needs_gate if output_gate is None else output_gate
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False) if has_output_gate else None
        self.o_norm = RMSNorm(self.value_head_dim, eps)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)

    def initial_values(self) -> dict[str, Tensor]:
        """New random values of the gate's parameters."""
        if self.A_log is None:
            return {}
        device = self.A_log.device
        return {
            "A_log": draw_log_rate(self.num_heads, device=device),
            "dt_bias": draw_dt_bias(self.num_heads, device=device),
        }

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_state: bool = False,
        inplace_state: bool = False,
        record: Callable[[Projected], None] | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix the tokens of x and, if asked, return the state after them.

        mask: [B, T], false at padding, which never changes real tokens.
        cu_seqlens: [N + 1] boundaries of sequences in the flattened [B * T] axis, including each row's start.
        inplace_state: the new state may overwrite ``state``, which saves copies in decoding; not with gradients.
        record: called, before the state changes, with what :meth:`advance` needs to repeat the change.
        """
        shape = x.shape
        if cu_seqlens is not None:
            x = x.reshape(1, -1, shape[-1])
        projected = self.project(x)
        if record is not None:
            record(projected)
        o, new_state = self._mix(projected, mask, cu_seqlens, state, output_state, inplace_state)
        return apply_linear(o, self.o_proj).view(shape), new_state

    def project(self, x: Tensor) -> Projected:
        """The input maps of q, k, v, beta, the gate and the output gate; ``None`` for those that the layer has not."""
        return apply_linears(x, self.projections())

    def projections(self) -> tuple[nn.Module | None, ...]:
        """The modules behind :meth:`project`."""
        return self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.a_proj, self.g_proj

    def advance(self, projected: Projected, mask: Tensor | None, state: MixerState | None) -> MixerState:
        """The state after tokens that :meth:`forward` recorded, by the same kernels; may overwrite ``state``."""
        _, new_state = self._mix(projected, mask, None, state, True, inplace_state=state is not None)
        return cast(MixerState, new_state)

    def _mix(
        self,
        projected: Projected,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState | None,
        output_state: bool,
        inplace_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Everything between the products: o [B, T, H V], normalised and gated, and the state after the tokens."""
        if inplace_state and output_state and mask is None and cu_seqlens is None:
            decoded = self._decode(projected, state)
            if decoded is not None:
                return decoded, state
        q, k, v, conv_state = self._queries_keys_values(projected, mask, cu_seqlens, state, output_state)
        beta, log_gate = self._step_inputs(projected)
        if mask is not None:
            # A step that does nothing: no key, no beta, no decay.
            padding = ~mask.bool()
            k = k.masked_fill(padding[..., None, None], 0)
            beta, log_gate = (None if s is None else s.masked_fill(padding[..., None], 0) for s in (beta, log_gate))
        attend = self.sequence.attend if self.sequence and self.sequence.active else scans.linear_attention
        o, memory = attend(
            q,
            k,
            v,
            beta,
            log_gate,
            rule=self.rule,
            initial_state=None if state is None else state.memory,
            output_final_state=output_state,
            cu_seqlens=cu_seqlens,
            qk_l2norm=self._normalised,
            chunk_size=self.chunk_size,
            backend=self.backend,
            **({"inplace_state": True} if inplace_state else {}),
        )
        o = self._normalise_output(o, projected[5]).flatten(2)
        return o, MixerState(conv_state, cast(Tensor, memory)) if output_state else None

    def _normalise_output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """RMSNorm(o) * silu(gate), in one kernel unless the norm was replaced or has hooks; gate: [B, T, H V]."""
        if gate is None:
            return cast(Tensor, self.o_norm(o))
        gate = gate.view_as(o)
        if is_plain(self.o_norm, RMSNorm):
            return rows.rms_norm(o, self.o_norm.weight, self.o_norm.eps, gate)
        return cast(Tensor, self.o_norm(o) * functional.silu(gate))

    def _decode(self, projected: Projected, state: MixerState | None) -> Tensor | None:
        """o of one token after ``state``, which is updated in place, with one kernel between the products.

        ``None`` where the kernel does not apply.
        """
        x = cast(Tensor, projected[0])
        step = None if x.shape[1] != 1 else self.decoding_step(x, state)
        if step is None:
            return None
        o = torch.empty((*x.shape[:2], self.num_heads * self.value_head_dim), dtype=x.dtype)
        inputs = (None if p is None else p.to(x.dtype) for p in projected)
        return o if native.step_in_place("mixer_step", step.states, *inputs, *step.tensors, o, *step.settings) else None

    def decoding_step(self, x: Tensor, state: MixerState | None) -> DecodingStep | None:
        """What the decoding kernels take beside x [B, 1, D] and the products' weights.

        ``None`` where they do not apply: with gradients or autocast, on other devices, or if a module between the products was
        replaced or has hooks.
        """
        convs = (self.q_conv, self.k_conv, self.v_conv)
        rule = native.rule_code(self.rule)
        if (
            state is None
            or rule is None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or fast_path(self.backend) is None
            or max(self.head_dim, self.value_head_dim) > native.MAX_WIDTH
            or (self.sequence is not None and self.sequence.active)
            or not is_plain(self.o_norm, RMSNorm)
            or any(conv is not None and not is_plain(conv, ShortConvolution) for conv in convs)
        ):
            return None
        weights = (None if conv is None else conv.weight for conv in convs)
        conv_state = None if self.q_conv is None else state.conv
        tensors = (*weights, conv_state, state.memory, self.A_log, self.dt_bias, self.o_norm.weight)
        if not rows.kernels_take(x, *tensors):
            return None
        factor = 2.0 if self.allow_neg_eigval else 1.0
        return DecodingStep(tensors, (rule, self._normalised, self.head_dim**-0.5, factor, self.o_norm.eps))

    def _queries_keys_values(
        self,
        projected: Projected,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState | None,
        output_state: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k: [B, T, Hk, K], v: [B, T, H, V], and the convolutions' state [B, 2 Hk K + H V, W - 1]."""
        inputs = cast(tuple[Tensor, ...], projected[:3])
        convs = (self.q_conv, self.k_conv, self.v_conv)
        past: Sequence[Tensor | None] = [None] * 3
        if state is not None and state.conv is not None and self.q_conv is not None:
            past = torch.split(state.conv, [p.shape[-1] for p in inputs], dim=1)
        states: list[Tensor] = []
        mixed = []
        for p, conv, conv_past in zip(inputs, convs, past, strict=True):
            if conv is None:
                mixed.append(functional.silu(p))
                continue
            y, new = conv(p, state=conv_past, mask=mask, cu_seqlens=cu_seqlens, output_state=output_state)
            mixed.append(y)
            if new is not None:
                states.append(new)
        q, k, v = mixed
        leading = q.shape[:2]
        return (
            q.reshape(*leading, self.num_key_heads, self.head_dim),
            k.reshape(*leading, self.num_key_heads, self.head_dim),
            v.reshape(*leading, self.num_heads, self.value_head_dim),
            torch.cat(states, dim=1) if states else None,
        )

    def _step_inputs(self, projected: Projected) -> tuple[Tensor | None, Tensor | None]:
        """beta and log_gate, each [B, T, H] in float32 or wider, or ``None`` where the rule takes none."""
        q, _, _, raw_beta, raw_gate, _ = projected
        wide = torch.promote_types(cast(Tensor, q).dtype, torch.float32)
        beta = log_gate = None
        if raw_beta is not None:
            beta = raw_beta.to(wide).sigmoid()
            if self.allow_neg_eigval:
                beta = beta * 2
        if raw_gate is not None:
            if self.A_log is not None and self.dt_bias is not None:
                log_gate = mamba_log_gate(raw_gate, self.A_log, self.dt_bias)
            else:
                log_gate = functional.logsigmoid(raw_gate.to(wide)) / 16
        return beta, log_gate

    def extra_repr(self) -> str:
        return f"rule={self.rule.name!r}, key_norm={self.key_norm}, query_norm={self.query_norm}"


def mamba_log_gate(x: Tensor, log_rate: Tensor, dt_bias: Tensor) -> Tensor:
    """log_gate = -exp(log_rate) * softplus(x + dt_bias), at most 0, in float32 or wider. x: [B, T, H]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return -log_rate.to(wide).exp() * functional.softplus(x.to(wide) + dt_bias.to(wide))


def draw_log_rate(num_heads: int, low: float = 0.0, high: float = 16.0, device: torch.device | None = None) -> Tensor:
    """log(A) with A uniform on (low, high), kept above 1e-4 so that the logarithm is finite. [H]"""
    return torch.empty(num_heads, device=device).uniform_(low, high).clamp_(min=1e-4).log_()


def draw_dt_bias(num_heads: int, low: float = 1e-3, high: float = 0.1, device: torch.device | None = None) -> Tensor:
    """softplus^-1(dt) = dt + log(-expm1(-dt)) with dt log-uniform on [low, high], at least 1e-4. [H]"""
    dt = torch.empty(num_heads, device=device).uniform_(math.log(low), math.log(high)).exp_().clamp_(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))
