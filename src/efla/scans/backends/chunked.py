"""The chunk form of the recurrence in plain torch: any device, no loop over tokens.

Inside a chunk of C tokens, with G the cumulative log_decay and D_ij = exp(G_i - G_j) for i >= j,

    M = I + StrictTril(diag(erase) K K^T . D)             unit lower triangular: solved, never inverted
    [U W] = M^-1 [diag(write) V, diag(erase e^G) K]       one solve per chunk, all chunks at once
    X = U - W S0                                          what each token writes
    O = scale (diag(e^G) Q S0 + (Q K^T . D . Tril) X)
    S1 = e^{G_C} S0 + (diag(e^{G_C - G}) K)^T X           the only loop, over chunks

The backward pass keeps S0 of every chunk and recomputes the rest. Chunks are processed in groups of bounded size, so
no temporary grows with the length. Derivation: docs/explanation/derivations.md, sections 5 and 6.

Shapes: M chunks of a group, H value heads, C tokens, K and V widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from efla.scans.keys import widest
from efla.scans.request import Backend, ScanGradients, ScanRequest, ScanResult, sequence_boundaries

# exp of it is zero in every precision. A log_decay of -inf is raised to it, since -inf - -inf is NaN.
_CLOSED = -1e4
# Largest [M, H, C, C] temporary, in elements.
_GROUP_ELEMENTS = 1 << 21
# For narrow keys a long chunk is slower and rounds more than a token-by-token run.
_NARROW, _SHORT_CHUNK = 8, 8


def saved_size(k: Tensor, v: Tensor, chunk_size: int) -> int:
    """States before each chunk: [num_chunks, Hv, K, V], flat."""
    batch, length, _, key_dim = k.shape
    chunk_size = _chunk_length(k, chunk_size)
    return batch * -(-length // chunk_size) * v.shape[2] * key_dim * v.shape[3]


def _chunk_length(k: Tensor, chunk_size: int) -> int:
    return _SHORT_CHUNK if k.shape[3] <= _NARROW else chunk_size


def forward(request: ScanRequest, save: bool, in_place: bool = False) -> ScanResult:
    """Run the groups of chunks in order, each from the states of the last."""
    plan = _ChunkPlan(request)
    o = torch.empty_like(request.v, memory_format=torch.contiguous_format)
    state = plan.ordered(request.initial_state)
    boundaries = request.new_state(plan.num_chunks() if save else 0)
    for group in plan.groups():
        chunks = _Chunks(request, group)
        updates, weights = chunks.solve()
        written = torch.empty_like(updates)
        before = request.new_state(group.tokens.shape[0])
        for now in group.steps:
            active = state[: now.stop - now.start]
            before[now] = active
            written[now] = updates[now] if weights is None else updates[now] - weights[now] @ active
            active.mul_(chunks.decay_all[now]).add_(chunks.k_to_end[now].mT @ written[now])
        # 0 * inf is NaN, so the product below would let a non-finite write reach earlier tokens: mask those rows.
        is_spoiled = (~written.isfinite()).any(-1, keepdim=True).cummax(2).values
        read = chunks.attention() @ written.masked_fill_(is_spoiled, 0)
        chunks.store(o, (request.scale * (chunks.q_from_start @ before + read)).masked_fill_(is_spoiled, torch.nan))
        if save:
            boundaries[group.first_chunk : group.first_chunk + len(before)] = before
    return ScanResult(o, plan.in_given_order(state), boundaries.flatten())


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    """Adjoint of :func:`forward`, groups in reverse (docs/explanation/derivations.md, section 6)."""
    plan = _ChunkPlan(request)
    scanned = request.tensors()[:6]
    buffers = (None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in scanned)
    grads = ScanGradients(*buffers)  # type: ignore[arg-type]
    states = saved.view(-1, request.num_value_heads, request.k.shape[3], request.v.shape[3])
    d_state = plan.ordered(grad_final_state)
    for group in reversed(list(plan.groups())):
        chunks = _Chunks(request, group)
        before = states[group.first_chunk : group.first_chunk + group.tokens.shape[0]]
        d_o = request.scale * chunks.gather(grad_o)
        updates, weights = chunks.solve()
        written = updates if weights is None else updates - weights @ before

        # The loop: adjoints of the written values and of the states, last chunk first.
        attention = chunks.attention()
        d_written = attention.mT @ d_o
        d_before = chunks.q_from_start.mT @ d_o
        d_after = torch.empty_like(d_before)
        for now in reversed(group.steps):
            active = d_state[: now.stop - now.start]
            d_after[now] = active
            d_written[now] += chunks.k_to_end[now] @ active
            d_before[now] += chunks.decay_all[now] * active
            if weights is not None:
                d_before[now] -= weights[now].mT @ d_written[now]
            active.copy_(d_before[now])

        d_rhs = d_written
        read = d_o @ written.mT  # [M, H, C, C]: how much token i's gradient reads of token j's writing
        d_attention = read * chunks.causal_decay()
        d_q = (d_o @ before.mT).mul_(chunks.decay_from_start) + d_attention @ chunks.k
        d_k_kept = (written @ d_after.mT).mul_(chunks.decay_to_end)
        d_k = d_k_kept + d_attention.mT @ chunks.q
        d_erase = mixing = mixed = None
        if chunks.erase is not None:
            mixing = chunks.mixing()
            d_rhs = torch.linalg.solve_triangular(mixing.mT, d_written, upper=True, unitriangular=True)
            mixed = d_rhs @ written.mT
            d_mixing = -(mixed * chunks.causal_decay()).tril_(-1)
            d_erased_k = d_mixing @ chunks.k - (d_rhs @ before.mT).mul_(chunks.decay_from_start)
            d_k += d_mixing.mT @ chunks.erased_k + chunks.erase * d_erased_k
            d_erase = (d_erased_k * chunks.k).sum(-1)
        d_write = (d_rhs * chunks.v).sum(-1)
        d_log_decay = None
        if request.log_decay is not None:
            started = ((chunks.q_from_start @ before) * d_o).sum(-1)
            crossing = attention * read
            if mixing is not None and mixed is not None:
                started -= ((chunks.decay_from_start * chunks.erased_k @ before) * d_rhs).sum(-1)
                crossing -= mixing * mixed
            kept = (d_k_kept * chunks.k).sum(-1)
            passed = (chunks.decay_all * d_after * before).sum((-1, -2))
            d_log_decay = _crossing_sums(passed, started, kept, crossing)
        d_q, d_k = (x.unflatten(1, (request.k.shape[2], -1)).sum(2) for x in (d_q, d_k))  # of grouped heads
        found = (d_q, d_k, chunks.write * d_rhs, d_log_decay, d_erase, d_write)
        for buffer, grad in zip(grads, found, strict=False):
            if buffer is not None and grad is not None:
                chunks.store(*(x if x.dim() == 4 else x[..., None] for x in (buffer, grad)))
    return grads._replace(initial_state=None if request.initial_state is None else plan.in_given_order(d_state))


def _crossing_sums(passed: Tensor, started: Tensor, kept: Tensor, crossing: Tensor) -> Tensor:
    """Gradient of each token's log_decay: all that its decay multiplies, summed without subtracting (derivations, 6.3).

    Token t's decay lies between what was before it and what reads from it on:

        passed + sum_{r >= t} started_r + sum_{s < t} kept_s + sum_{r >= t > s} crossing_rs

    passed [M, H]: from the chunk's first state to its last; started [M, H, C]: from the first state to token r;
    kept [M, H, C]: from token s to the last state; crossing [M, H, C, C]: from token s to token r.
    """
    from_here = started.flip(-1).cumsum(-1).flip(-1)
    until_here = torch.nn.functional.pad(kept.cumsum(-1)[..., :-1], (1, 0))
    between = torch.nn.functional.pad(crossing.cumsum(-1)[..., :-1], (1, 0)).tril_().sum(-2)
    return passed[..., None] + from_here + until_here + between


@dataclass(frozen=True)
class _ChunkGroup:
    """Some consecutive steps of a plan: chunks in step-major order, those of step i in ``steps[i]``.

    ``tokens`` [M, C] indexes the flattened token axis; entries where ``is_padding`` [M, C] are meaningless, and
    ``real`` lists the others' places in it, flattened (both ``None`` if there is no padding).
    A step's chunks are those of the first sequences of the plan's order.
    """

    first_chunk: int
    steps: list[slice]
    tokens: Tensor
    is_padding: Tensor | None
    real: Tensor | None


class _ChunkPlan:
    """A cut of N sequences into chunks of C tokens, ordered by (chunk number within the sequence, sequence).

    Sequences are taken longest first, so that those still running at any step are a prefix of ``order``.
    """

    def __init__(self, request: ScanRequest) -> None:
        self.request = request
        batch, length = request.k.shape[:2]
        sequences = list(pairwise(sequence_boundaries(batch, length, request.cu_seqlens)))
        self.order = sorted(range(len(sequences)), key=lambda n: sequences[n][0] - sequences[n][1])
        self.starts = [sequences[n][0] for n in self.order]
        self.lengths = [sequences[n][1] - sequences[n][0] for n in self.order]
        self.longest = max(self.lengths, default=0)
        # A short sequence is one chunk either way.
        enough = max(16, 1 << max(self.longest - 1, 0).bit_length())
        self.chunk_size = min(_chunk_length(request.k, request.chunk_size), enough)

    def num_chunks(self) -> int:
        return sum(-(-length // self.chunk_size) for length in self.lengths)

    def ordered(self, states: Tensor | None) -> Tensor:
        """A copy of the states given, or zeros, in the order of the plan: [N, H, K, V]."""
        new = self.request.new_state(len(self.order))
        return new.zero_() if states is None else new.copy_(states[self.order])

    def in_given_order(self, states: Tensor) -> Tensor:
        given = torch.empty_like(states)
        given[self.order] = states
        return given

    def groups(self) -> Iterator[_ChunkGroup]:
        """Groups of consecutive steps whose temporaries are of bounded size (at least one step each)."""
        device = self.request.k.device
        max_chunks = _GROUP_ELEMENTS // (self.request.num_value_heads * self.chunk_size**2)
        offsets = torch.arange(self.chunk_size)
        first_chunk, running, position = 0, len(self.lengths), 0
        while position < self.longest:
            steps: list[slice] = []
            starts: list[int] = []
            counts: list[int] = []
            while position < self.longest:
                while self.lengths[running - 1] <= position:
                    running -= 1
                if steps and len(starts) + running > max_chunks:
                    break
                steps.append(slice(len(starts), len(starts) + running))
                starts += [start + position for start in self.starts[:running]]
                counts += [min(length - position, self.chunk_size) for length in self.lengths[:running]]
                position += self.chunk_size
            # Built on the host, so nothing waits for the device.
            tokens = torch.tensor(starts)[:, None] + offsets
            is_padding = real = None
            if min(counts) < self.chunk_size:
                is_padding = offsets >= torch.tensor(counts)[:, None]
                tokens = torch.where(is_padding, tokens[:, :1], tokens)
                real = torch.nonzero(~is_padding.flatten()).flatten().to(device)
                is_padding = is_padding.to(device)
            yield _ChunkGroup(first_chunk, steps, tokens.to(device), is_padding, real)
            first_chunk += len(starts)


class _Chunks:
    """The inputs of one group of chunks, head-major and in the compute dtype, and what is derived from them."""

    def __init__(self, request: ScanRequest, group: _ChunkGroup) -> None:
        self.dtype, self.group = request.compute_dtype, group
        repeats = request.num_value_heads // request.k.shape[2]
        self.q = self.gather(request.q).repeat_interleave(repeats, 1)  # [M, H, C, K]
        self.k = self.gather(request.k).repeat_interleave(repeats, 1)  # [M, H, C, K]
        self.v = self.gather(request.v)  # [M, H, C, V]
        log_decay, erase, write = request.scalars
        self.write = self.gather(write[..., None])  # [M, H, C, 1]
        self.erase = None if erase is None else self.gather(erase[..., None])  # [M, H, C, 1]
        self.pair_decay: Tensor | None = None  # [M, H, C, C], D, zero above the diagonal
        if log_decay is None:
            one = torch.ones((), dtype=self.dtype, device=request.k.device)
            self.decay_from_start = self.decay_to_end = one
            self.decay_all = one.expand(group.tokens.shape[0], 1, 1, 1)
            return
        # float64 where the device has it: float32 sums, and exponents near -80, lose digits after strong forgetting.
        total = self.gather(log_decay[..., None]).to(widest(log_decay)).clamp_(min=_CLOSED).cumsum(2)
        causal = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=total.device).tril_()
        difference = (total - total.mT).masked_fill_(~causal, -torch.inf)
        self.pair_decay = difference.exp_().to(self.dtype)
        self.decay_from_start = total.exp().to(self.dtype)  # [M, H, C, 1], e^G
        self.decay_to_end = (total[:, :, -1:] - total).exp().to(self.dtype)  # [M, H, C, 1], e^{G_C - G}
        self.decay_all = self.decay_from_start[:, :, -1:]  # [M, H, 1, 1], e^{G_C}

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, H, D] to [M, H, C, D] in the compute dtype, padding as zeros."""
        chunks = x.flatten(0, 1)[self.group.tokens].to(self.dtype)
        if self.group.is_padding is not None:
            chunks.masked_fill_(self.group.is_padding[..., None, None], 0)
        return chunks.transpose(1, 2).contiguous()

    def store(self, out: Tensor, chunks: Tensor) -> None:
        """Write [M, H, C, D] to its tokens of out [B, T, H, D], leaving padding out."""
        tokens, values = self.group.tokens.flatten(), chunks.transpose(1, 2).flatten(0, 1).to(out.dtype)
        if self.group.real is not None:
            tokens, values = tokens[self.group.real], values[self.group.real]
        out.view(-1, *out.shape[2:])[tokens] = values

    def causal_decay(self) -> Tensor:
        """D with zeros above the diagonal: [M, H, C, C], or [C, C] without decay."""
        if self.pair_decay is not None:
            return self.pair_decay
        size = self.k.shape[2]
        return torch.ones(size, size, dtype=self.k.dtype, device=self.k.device).tril_()

    def attention(self) -> Tensor:
        """Q K^T . D . Tril: [M, H, C, C]."""
        return (self.q @ self.k.mT).mul_(self.causal_decay()).tril_()

    @property
    def erased_k(self) -> Tensor:
        assert self.erase is not None
        return self.erase * self.k

    def mixing(self) -> Tensor:
        """M without its unit diagonal: StrictTril(diag(erase) K K^T . D)."""
        return (self.erased_k @ self.k.mT).mul_(self.causal_decay()).tril_(-1)

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """U = M^-1 diag(write) V and W = M^-1 diag(erase e^G) K (``None`` if nothing is erased)."""
        written = self.write * self.v
        if self.erase is None:
            return written, None
        rhs = torch.cat([written, self.decay_from_start * self.erased_k], -1)
        solution = torch.linalg.solve_triangular(self.mixing(), rhs, upper=False, unitriangular=True)
        return solution[..., : self.v.shape[-1]], solution[..., self.v.shape[-1] :]

    @property
    def q_from_start(self) -> Tensor:
        return self.decay_from_start * self.q

    @property
    def k_to_end(self) -> Tensor:
        return self.decay_to_end * self.k


BACKEND = Backend("chunked", forward, backward, saved_size=saved_size)
