"""What the operators of :mod:`efla.scans.torch_ops` and :mod:`efla.scans.fused_ops` have in common.

    operator            (*tensors, cu_seqlens, *settings, save) -> (o, final_state, saved)
    backward operator   (*tensors, cu_seqlens, saved, grad_o, grad_final_state, *settings) -> one gradient per tensor

with q, k, v first among the tensors, each of which may be absent but these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from efla.scans.types import FusedRequest, ScanRequest

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def fake_result(
    request: ScanRequest | FusedRequest, save: bool, saved_size: Callable[[], int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (o, final_state, saved) of the right sizes; ``saved_size`` is asked for an unpacked call only."""
    size: int | torch.SymInt = 0
    if save and (request.cu_seqlens is not None or isinstance(request.k.shape[1], torch.SymInt)):
        # How many chunks a packed batch has depends on its borders, which a fake tensor does not hold; and an exact size
        # that may be zero would split torch.export's dynamic length into cases.
        size = torch.library.get_ctx().new_dynamic_size()
    elif save:
        size = saved_size()
    saved = request.k.new_empty(size, dtype=request.compute_dtype)
    return request.v.new_empty(request.v.shape), request.new_state(request.num_sequences), saved


def register_gradients(operator: CustomOpDef, backward_operator: CustomOpDef, num_tensors: int) -> None:
    """Give an operator the autograd formula that calls its backward operator, and that one its fake kernel."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.settings = inputs[num_tensors + 1 : -1]
        ctx.save_for_backward(*inputs[: num_tensors + 1], output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    def backward(
        ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, _grad_saved: None
    ) -> tuple[Any, ...]:
        *tensors, cu_seqlens, saved = ctx.saved_tensors
        if grad_o is None:
            grad_o = torch.zeros_like(tensors[2])
        grads = backward_operator(*tensors, cu_seqlens, saved, grad_o, grad_final_state, *ctx.settings)
        kept = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
        return (*kept, None, *(None for _ in ctx.settings), None)

    def fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
        tensors = arguments[:num_tensors]
        return tuple(tensors[1].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)

    operator.register_autograd(backward, setup_context=setup_context)
    backward_operator.register_fake(fake_gradients)


def present(grads: Iterable[Tensor | None], like: Tensor) -> tuple[Any, ...]:
    """Operators return tensors only: an absent gradient is an empty one."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
