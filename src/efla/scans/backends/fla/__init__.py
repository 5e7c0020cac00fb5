"""flash-linear-attention's Triton kernels: each call by the cheapest of its public operations that is exact.

    erase = 0                     chunk_simple_gla              v' = write v
    erase = write, no decay       chunk_delta_rule
    erase = write, decay          chunk_gated_delta_rule
    erase != write                chunk_comba                   p = exp(log_decay) erase k,  v' = write v,  beta = 1

and, where nothing is differentiated and sequences are short, by the recurrent form of the same operation, which works in
float32 throughout. :mod:`.operations` chooses and calls, :mod:`.requirements` says what is needed; docs/gpu.md says what
has been verified. Neither triton nor flash-linear-attention is imported before the first call.

Outside torch.compile the operations' own autograd formulas do the backward pass. Under it the scan is one opaque
operator, which may not keep their intermediate results, so the backward pass runs the forward kernels again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from efla.scans.backends.fla.operations import is_one_tensor, prepare_keys, run
from efla.scans.backends.fla.requirements import supports, unavailable
from efla.scans.types import ScanGradients, ScanRequest, ScanResult

__all__ = ["backward", "forward", "name", "own_autograd", "prepare_keys", "saved_size", "supports", "unavailable"]

name = "fla"
own_autograd = True


def saved_size(k: Tensor, v: Tensor, chunk_size: int) -> int:
    return 0


def forward(request: ScanRequest, save: bool) -> ScanResult:
    o, final_state = run(request, differentiable=save)
    return ScanResult(o, final_state, final_state.new_empty(0))


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    """Runs the operation again, recorded by autograd, and goes back through it.

    The operator that calls this has switched recording off for its inside; the guard switches it on again.
    """
    names = ("q", "k", "v", "log_decay", "erase", "write", "initial_state")
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        leaves: dict[str, Tensor | None] = {}
        for field in names:
            x = getattr(request, field)
            leaves[field] = None if x is None else x.detach().requires_grad_()
        if is_one_tensor(request.erase, request.write):
            leaves["erase"] = leaves["write"]
        o, final_state = run(replace(request, **leaves), differentiable=True)  # type: ignore[arg-type]
        outputs, cotangents = [o], [grad_o]
        if grad_final_state is not None and final_state.requires_grad:
            outputs.append(final_state)
            cotangents.append(grad_final_state)
        wanted = {field: x for field, x in leaves.items() if x is not None}
        found = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    grads: dict[str, Tensor | None] = dict.fromkeys(names)
    for (field, x), grad in zip(wanted.items(), found, strict=True):
        grads[field] = torch.zeros_like(x) if grad is None else grad
    if leaves["erase"] is leaves["write"] and grads["write"] is not None:
        grads["erase"] = torch.zeros_like(grads["write"])  # counted once, with write
    return ScanGradients(**grads)  # type: ignore[arg-type]
