"""What a scan computes (requests and results), and the interface of a backend."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What every call has: q, k: [B, T, Hk, K]; v: [B, T, Hv, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    initial_state: Tensor | None  # [N, Hv, K, V]
    cu_seqlens: Tensor | None  # [N + 1]

    @property
    def num_sequences(self) -> int:
        return self.k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_value_heads(self) -> int:
        return self.v.shape[2]

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.q, self.k, self.v, self.initial_state)

    def new_state(self, *leading: int) -> Tensor:
        """Uninitialised storage [*leading, Hv, K, V] in the compute dtype."""
        shape = (*leading, self.num_value_heads, self.k.shape[3], self.v.shape[3])
        return torch.empty(shape, dtype=self.compute_dtype, device=self.k.device)


@dataclass(frozen=True, kw_only=True)
class ScanRequest(_Request):
    """One validated call of the recurrence

        S_t = exp(log_decay_t) (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,    o_t = scale S_t^T q_t

    with log_decay, erase, write: [B, T, Hv] in the compute dtype.
    ``log_decay=None`` means no decay, ``erase=None`` means nothing is erased.
    """

    log_decay: Tensor | None
    erase: Tensor | None
    write: Tensor
    chunk_size: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """What can be differentiated: q, k, v, log_decay, erase, write, initial_state."""
        return self.q, self.k, self.v, self.log_decay, self.erase, self.write, self.initial_state


@dataclass(frozen=True, kw_only=True)
class FusedRequest(_Request):
    """The same call before its scalars are computed, for backends that compute them: beta, log_gate: [B, T, Hv]."""

    rule: str
    beta: Tensor | None
    log_gate: Tensor | None
    normalise: str  # of q and k, those divided by their norm: "", "q", "k" or "qk"


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
    log_decay: Tensor | None
    erase: Tensor | None
    write: Tensor
    initial_state: Tensor | None


class FusedGradients(NamedTuple):
    """One gradient per tensor of a fused request, ``None`` where the request had ``None``."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_gate: Tensor | None
    initial_state: Tensor | None


class Backend(Protocol):
    """One implementation of the recurrence; see docs/backends.md for how to add one."""

    name: str
    own_autograd: bool
    """Whether autograd may record what ``forward`` does, instead of calling ``backward``."""

    def unavailable(self) -> str | None:
        """Why this backend cannot run on this machine at all, or ``None``."""

    def supports(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> str | None:
        """Why this backend cannot run a call with these keys and values, computed in ``dtype``, or ``None``."""

    def saved_size(self, k: Tensor, v: Tensor, chunk_size: int) -> int:
        """Elements of ``ScanResult.saved`` for an unpacked call that will be differentiated; sizes may be symbolic."""

    def forward(self, request: ScanRequest, save: bool) -> ScanResult: ...

    def backward(
        self, request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None
    ) -> ScanGradients: ...


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32: scans never accumulate in half precision."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def sequence_boundaries(batch: int, length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Positions in the flattened token axis [B * T] where sequences start, and the end: N + 1 numbers."""
    if cu_seqlens is None:
        return [n * length for n in range(batch + 1)]
    return [int(boundary) for boundary in cu_seqlens.tolist()]
