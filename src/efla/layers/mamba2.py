"""Mamba-2 on the same scan: the ``ssd`` rule with k = B, q = C, v = x, beta = dt.

Shapes: B batch, T tokens, H heads of width P, G groups, N state size.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import efla.scans.api as scans
from efla.layers.attention import MixerState, Projected, draw_dt_bias, draw_log_rate
from efla.layers.blocks import RMSNorm
from efla.layers.linear import apply_linear, is_plain
from efla.layers.short_conv import SequenceNeighbours, ShortConvolution
from efla.native import rows
from efla.scans.backends import fast_path, native


class Mamba2(nn.Module):
    """State-space mixer of Mamba-2.

        z, x, B, C, dt = W u;     x, B, C = silu(conv(x, B, C));     dt = softplus(dt + dt_bias)
        S_t = exp(-exp(A_log) dt) S_{t-1} + dt B_t x_t^T,        y_t = S_t^T C_t + D x_t
        out = Wo RMSNorm( y * silu(z) )

    u, out: [B, T, hidden_size]. B and C [B, T, G, N] are shared by the heads of a group; S: [B, H, N, P].
    num_blocks: depth of the model; the initial ``out_proj`` is divided by its square root.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        expand: int = 2,
        head_dim: int = 64,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_init: str = "default",
        num_blocks: int = 1,
        eps: float = 1e-5,
        backend: str = "auto",
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        self.inner_size = expand * hidden_size
        if self.inner_size % head_dim:
            raise ValueError(f"expand * hidden_size = {self.inner_size} must be a multiple of head_dim, got {head_dim}")
        self.num_heads = self.inner_size // head_dim
        if self.num_heads % num_groups:
            raise ValueError(f"{self.num_heads} heads cannot be shared evenly by num_groups={num_groups}")
        self.head_dim = head_dim
        self.state_size = state_size
        self.num_groups = num_groups
        self.num_blocks = num_blocks
        self.backend = backend
        self.chunk_size = chunk_size
        self.sequence: SequenceNeighbours | None = None
        self.group_width = num_groups * state_size
        self.in_proj = nn.Linear(hidden_size, 2 * self.inner_size + 2 * self.group_width + self.num_heads, bias=False)
        self.conv = ShortConvolution(self.inner_size + 2 * self.group_width, conv_size, bias=True)
        self.conv.reset_parameters(conv_init)
        self.A_log = nn.Parameter(draw_log_rate(self.num_heads, 1.0))
        self.dt_bias = nn.Parameter(draw_dt_bias(self.num_heads))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.norm = RMSNorm(self.inner_size, eps)
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=False)
        with torch.no_grad():
            self.out_proj.weight.copy_(self.initial_values()["out_proj.weight"])

    def initial_values(self) -> dict[str, Tensor]:
        """New random values of the parameters that are not initialised as other linear maps and gains."""
        device = self.A_log.device
        bound = (self.inner_size * self.num_blocks) ** -0.5
        return {
            "A_log": draw_log_rate(self.num_heads, 1.0, device=device),
            "dt_bias": draw_dt_bias(self.num_heads, device=device),
            "D": torch.ones(self.num_heads, device=device),
            "out_proj.weight": torch.empty(self.out_proj.weight.shape, device=device).uniform_(-bound, bound),
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
        """Mix the tokens of x and, if asked, return the state after them; arguments as in ``LinearAttention``."""
        shape = x.shape
        if cu_seqlens is not None:
            x = x.reshape(1, -1, shape[-1])
        projected = apply_linear(x, self.in_proj)
        if record is not None:
            record((projected,))
        y, new_state = self._mix(projected, mask, cu_seqlens, state, output_state, inplace_state)
        out = apply_linear(y.to(x.dtype), self.out_proj)
        return out.view(shape), new_state

    def advance(self, projected: Projected, mask: Tensor | None, state: MixerState | None) -> MixerState:
        """The state after tokens that :meth:`forward` recorded, by the same kernels; may overwrite ``state``."""
        _, new_state = self._mix(cast(Tensor, projected[0]), mask, None, state, True, inplace_state=state is not None)
        return cast(MixerState, new_state)

    def _mix(
        self,
        projected: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState | None,
        output_state: bool,
        inplace_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Everything between the products: [B, T, H P], and the state after the tokens."""
        if inplace_state and output_state and mask is None and cu_seqlens is None:
            decoded = self._decode(projected, state)
            if decoded is not None:
                return decoded, state
        z, xbc, dt_raw = projected.split(
            [self.inner_size, self.inner_size + 2 * self.group_width, self.num_heads], dim=-1
        )
        xbc, conv_state = self.conv(
            xbc,
            state=None if state is None else state.conv,
            mask=mask,
            cu_seqlens=cu_seqlens,
            output_state=output_state,
        )
        value, b, c = xbc.split([self.inner_size, self.group_width, self.group_width], dim=-1)
        wide = torch.promote_types(projected.dtype, torch.float32)
        dt = functional.softplus(dt_raw.to(wide) + self.dt_bias.to(wide))  # [B, T, H]
        if mask is not None:
            dt = dt.masked_fill(~mask.bool()[..., None], 0)  # neither decay nor write
        leading = projected.shape[:2]
        value = value.reshape(*leading, self.num_heads, self.head_dim)
        attend = self.sequence.attend if self.sequence and self.sequence.active else scans.linear_attention
        y, memory = attend(
            c.reshape(*leading, self.num_groups, self.state_size),
            b.reshape(*leading, self.num_groups, self.state_size),
            value,
            dt,
            -self.A_log.to(wide).exp() * dt,
            rule="ssd",
            scale=1.0,
            initial_state=None if state is None else state.memory,
            output_final_state=output_state,
            cu_seqlens=cu_seqlens,
            chunk_size=self.chunk_size,
            backend=self.backend,
            **({"inplace_state": True} if inplace_state else {}),
        )
        y = y.to(wide) + self.D.to(wide)[:, None] * value
        y = self.norm(y.flatten(2) * functional.silu(z.to(wide)))
        if conv_state is None or memory is None:
            return y, None
        return y, MixerState(conv_state.contiguous(), memory)  # as the decoding kernel takes it

    def _decode(self, projected: Tensor, state: MixerState | None) -> Tensor | None:
        """:meth:`_mix` of one token after ``state``, updated in place, in one kernel; ``None`` where that does not apply."""
        if (
            state is None
            or projected.shape[1] != 1
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or fast_path(self.backend) is None
            or max(self.head_dim, self.state_size) > native.MAX_WIDTH
            or (self.sequence is not None and self.sequence.active)
            or not is_plain(self.norm, RMSNorm)
            or not is_plain(self.conv, ShortConvolution)
        ):
            return None
        states = state.conv, state.memory
        parameters = self.conv.weight, self.conv.bias, *states, self.A_log, self.dt_bias, self.D, self.norm.weight
        if not rows.kernels_take(projected, *parameters):
            return None
        y = torch.empty((*projected.shape[:2], self.inner_size), dtype=projected.dtype)
        done = native.step_in_place("mamba2_step", states, projected, *parameters, y, self.norm.eps)
        return y if done else None
