"""The oracle: the recurrence token by token, in plain torch, differentiated by autograd.

It follows the equation line by line and is slow. float64 stays float64.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from efla.scans.request import Backend, ScanGradients, ScanRequest, ScanResult, sequence_boundaries


def forward(request: ScanRequest, save: bool = False, in_place: bool = False) -> ScanResult:
    """Run the recurrence; differentiable by autograd through everything, so nothing needs saving.

    All sequences take a step together. Packed ones are padded with zeros, which is the step that does nothing; each final
    state is the one after the sequence's own last token.
    """
    batch, length = request.v.shape[:2]
    lengths = [end - start for start, end in pairwise(sequence_boundaries(batch, length, request.cu_seqlens))]
    tokens = _widen(request)
    if request.cu_seqlens is not None:
        tokens = tuple(pad_sequence(list(x[0].split(lengths)), batch_first=True) for x in tokens)
    dtype = request.compute_dtype
    state = request.new_state(len(lengths)).zero_()
    if request.initial_state is not None:
        state = request.initial_state.to(dtype, copy=True)
    states, outputs = [state], []
    # unbind, not x[:, t]: the gradient of an index is a tensor of zeros as large as x, for every token.
    for q_t, *token in zip(*(x.unbind(1) for x in tokens), strict=True):
        states.append(step(states[-1], *token))
        outputs.append(request.scale * _recall(states[-1], q_t))
    o = torch.stack(outputs, 1) if outputs else tokens[2].clone()
    final_state = states[-1]
    if request.cu_seqlens is not None:
        o = torch.cat([x[:end] for x, end in zip(o, lengths, strict=True)])[None]
        final_state = torch.stack([states[end][n] for n, end in enumerate(lengths)])
    return ScanResult(o.to(request.v.dtype), final_state, o.new_empty(0))


def step(state: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """One token: S = exp(log_decay) (I - erase k k^T) S + write k v^T.

    state [..., K, V], k [..., K], v [..., V], scalars [...].
    """
    recalled = _recall(state, k)
    state = log_decay.exp()[..., None, None] * (state - k[..., None] * (erase[..., None] * recalled)[..., None, :])
    return state + k[..., None] * (write[..., None] * v)[..., None, :]


def _recall(state: Tensor, k: Tensor) -> Tensor:
    """S^T k: state [..., K, V], k [..., K] -> [..., V]."""
    return (k[..., None, :] @ state).squeeze(-2)


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    """The adjoint recurrence (docs/explanation/derivations.md, section 6), for torch.compile, where autograd cannot be used."""
    q, k, v, log_decay, erase, write = _widen(request)
    grad_o = request.scale * grad_o.to(v.dtype)
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_log_decay, d_erase, d_write = (torch.zeros_like(x) for x in (log_decay, erase, write))
    d_initial = request.new_state(request.num_sequences)
    batch, length, num_heads, _ = v.shape
    boundaries = sequence_boundaries(batch, length, request.cu_seqlens)
    for n, (start, end) in enumerate(pairwise(boundaries)):
        zero = request.new_state().zero_()
        state = zero if request.initial_state is None else request.initial_state[n].to(v.dtype)
        before = []
        for position in range(start, end):
            t = divmod(position, length)
            before.append(state)
            state = step(state, k[t], v[t], log_decay[t], erase[t], write[t])
        d_state = zero if grad_final_state is None else grad_final_state[n].to(v.dtype)
        for position in range(end - 1, start - 1, -1):
            t = divmod(position, length)
            previous, decay = before.pop(), log_decay[t].exp()[:, None]
            d_q[t] = torch.einsum("hkv,hv->hk", state, grad_o[t])
            d_state = d_state + q[t][:, :, None] * grad_o[t][:, None, :]
            recalled = torch.einsum("hkv,hk->hv", previous, k[t])
            d_update = torch.einsum("hkv,hk->hv", d_state, k[t])  # gradient of write v - exp(log_decay) erase recalled
            update = write[t][:, None] * v[t] - decay * erase[t][:, None] * recalled
            d_recalled = -decay * erase[t][:, None] * d_update
            d_k[t] = torch.einsum("hkv,hv->hk", d_state, update) + torch.einsum("hkv,hv->hk", previous, d_recalled)
            d_v[t] = write[t][:, None] * d_update
            d_write[t] = (v[t] * d_update).sum(-1)
            d_erase[t] = -(decay * recalled * d_update).sum(-1)
            d_state = decay[:, :, None] * d_state + k[t][:, :, None] * d_recalled[:, None, :]
            d_log_decay[t] = (d_state * previous).sum((-1, -2))
            state = previous
        d_initial[n] = d_state
    group = num_heads // request.k.shape[2]
    return ScanGradients(
        q=d_q.unflatten(2, (-1, group)).sum(3).to(request.q.dtype),
        k=d_k.unflatten(2, (-1, group)).sum(3).to(request.k.dtype),
        v=d_v.to(request.v.dtype),
        log_decay=None if request.log_decay is None else d_log_decay,
        erase=None if request.erase is None else d_erase,
        write=d_write,
        initial_state=None if request.initial_state is None else d_initial,
    )


def _widen(request: ScanRequest) -> tuple[Tensor, ...]:
    """All inputs in the compute dtype, keys and queries repeated for every value head, absent scalars as zeros."""
    dtype = request.compute_dtype
    group = request.num_value_heads // request.k.shape[2]
    q, k = (x.to(dtype).repeat_interleave(group, 2) for x in (request.q, request.k))
    log_decay, erase, write = request.scalars
    write = write.to(dtype)
    zeros = torch.zeros_like(write)
    log_decay = zeros if log_decay is None else log_decay.to(dtype)
    erase = zeros if erase is None else erase.to(dtype)
    return q, k, request.v.to(dtype), log_decay, erase, write


BACKEND = Backend("reference", forward, backward, own_autograd=True)
