"""What a scan computes (request, result, gradients), and the interface of a backend."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from efla.rules import UpdateRule
from efla.scans.keys import prepare_keys


@dataclass(frozen=True, kw_only=True)
class ScanRequest:
    """One validated call of the recurrence

        S_t = exp(log_decay_t) (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,    o_t = scale S_t^T q_t

    q, k: [B, T, Hk, K]; v: [B, T, Hv, V]; all scalars: [B, T, Hv] in the compute dtype. A request holds either the three
    scalars (``log_decay=None``: no decay, ``erase=None``: nothing is erased), or the rule and its inputs log_gate and beta,
    for a backend that computes the scalars itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None
    log_gate: Tensor | None = None
    beta: Tensor | None = None
    initial_state: Tensor | None = None  # [N, Hv, K, V]
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float
    chunk_size: int = 64
    rule: str = ""
    """Name of the rule, or empty if the scalars are given."""
    normalise: str = ""
    """Which of q and k the backend divides by their norm: "", "q", "k" or "qk"; only with a rule."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What can be differentiated, in the order of :class:`ScanGradients`."""
        return (
            self.q, self.k, self.v, self.log_decay, self.erase, self.write, self.log_gate, self.beta, self.initial_state,
        )  # fmt: skip

    @property
    def scalars(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """log_decay, erase, write of a request that holds them."""
        assert self.write is not None, "this backend takes the scalars, not a rule"
        return self.log_decay, self.erase, self.write

    @property
    def num_sequences(self) -> int:
        return self.k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_value_heads(self) -> int:
        return self.v.shape[2]

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.q, self.k, self.v, self.initial_state)

    def new_state(self, *leading: int) -> Tensor:
        """Uninitialised storage [*leading, Hv, K, V] in the compute dtype."""
        shape = (*leading, self.num_value_heads, self.k.shape[3], self.v.shape[3])
        return torch.empty(shape, dtype=self.compute_dtype, device=self.k.device)


class ScanResult(NamedTuple):
    """o: [B, T, Hv, V] in v's dtype; final_state: [N, Hv, K, V]; saved: flat, what the backend's backward wants kept."""

    o: Tensor
    final_state: Tensor
    saved: Tensor


class ScanGradients(NamedTuple):
    """One gradient per tensor of the request, ``None`` where the request had ``None``."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None
    log_gate: Tensor | None = None
    beta: Tensor | None = None
    initial_state: Tensor | None = None


FastPath = Callable[..., tuple[Tensor, Tensor | None] | None]
"""One call for plain inference, ``None`` where the general path must run it or report an error: decode(q, k, v, beta, log_gate,
rule, qk_l2norm, scale, initial_state, output_final_state, in_place, check_domain)."""


@dataclass
class Backend:
    """One implementation of the recurrence; see docs/explanation/backends.md for how to add one."""

    name: str
    forward: Callable[..., ScanResult]
    """forward(request, save, in_place=False). in_place: the final state may overwrite the initial one."""
    backward: Callable[[ScanRequest, Tensor, Tensor, Tensor | None], ScanGradients]
    own_autograd: bool = False
    """Whether autograd may record what ``forward`` does, instead of calling ``backward``."""
    decode: FastPath | None = None
    unavailable: Callable[[], str | None] = lambda: None
    """Why this backend cannot run on this machine at all, or ``None``."""
    supports: Callable[[Tensor, Tensor, torch.dtype], str | None] = lambda k, v, dtype: None
    """Why this backend cannot run a call with these keys and values, computed in ``dtype``, or ``None``."""
    fuses: Callable[[UpdateRule], bool] = lambda rule: False
    """Whether this backend takes the rule's inputs and computes its scalars and the norms of q and k itself."""
    prepare_keys: Callable[[Tensor, Tensor, str, torch.dtype], tuple[Tensor, Tensor, Tensor]] = prepare_keys
    """For rules that the backend does not fuse: q and k, normalised as asked, and lam = k.k, [B, T, Hk]."""
    saved_size: Callable[[Tensor, Tensor, int], int] = lambda k, v, chunk_size: 0
    """Elements of ``ScanResult.saved`` for an unpacked call that will be differentiated; sizes may be symbolic."""


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32: scans never accumulate in half precision."""
    for t in tensors:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def sequence_boundaries(batch: int, length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Positions in the flattened token axis [B * T] where sequences start, and the end: N + 1 numbers."""
    if cu_seqlens is None:
        return [n * length for n in range(batch + 1)]
    return [int(boundary) for boundary in cu_seqlens.tolist()]
