"""The two public operations: validate, compute the rule's scalars, choose a backend, run."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from efla import rules
from efla.rules import UpdateRule
from efla.scans import validation
from efla.scans.backends import choose_backend, fast_path, log_choice
from efla.scans.operators import run, without_autocast
from efla.scans.request import ScanRequest, compute_dtype
from efla.scans.validation import CHUNK_SIZES


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    log_gate: Tensor | None = None,
    *,
    rule: str | UpdateRule = "efla",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool | Literal["q", "k"] = False,
    chunk_size: int = 64,
    backend: str = "auto",
    inplace_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention by any rule: turns (beta, k.k, log_gate) into a step's three scalars and scans the tokens.

        S_t = exp(log_decay_t) (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,      o_t = scale S_t^T q_t

    q, k: [B, T, Hk, K]; v: [B, T, Hv, V] with Hv a multiple of Hk; beta, log_gate: [B, T, Hv], as the rule needs them.
    Returns o: [B, T, Hv, V] in v's dtype, and the final state [N, Hv, K, V] (``None`` unless ``output_final_state``).

    scale: default K**-0.5. initial_state: [N, Hv, K, V], float32 or wider, zero if absent.
    cu_seqlens: [N + 1] boundaries of N sequences packed into one row (B = 1).
    qk_l2norm: q / sqrt(q.q + 1e-6) and k likewise, inside the call; "q" or "k" normalises one of them.
    backend: see :func:`efla.backends`.
    inplace_state: the final state may overwrite initial_state, which saves a copy per decoded token; not with gradients.
    """
    fast = fast_path(backend)
    if fast is not None and cu_seqlens is None and chunk_size in CHUNK_SIZES and not is_dynamo_compiling():
        name, decode = fast
        done = decode(
            q, k, v, beta, log_gate, rule if isinstance(rule, str) else rules.builtin_name(rule), qk_l2norm, scale,
            initial_state, output_final_state, inplace_state, validation.enabled,
        )  # fmt: skip
        if done is not None:
            if backend != name:
                log_choice(name, "cpu")
            return done
    update_rule = rules.get(rule)
    if validation.enabled:
        validation.check_qkv(q, k, v)
        validation.check_rule_inputs(update_rule, beta, log_gate, v)
        validation.check_call(k, v, initial_state, cu_seqlens, scale, chunk_size, qk_l2norm)
        validation.warn_about_layout(k)
    dtype = compute_dtype(q, k, v, initial_state)
    chosen = choose_backend(backend, k, v, dtype)
    normalise = _NORMALISED[qk_l2norm]
    inputs: dict[str, Any]
    if chosen.fuses(update_rule):
        inputs = {"rule": update_rule.name, "normalise": normalise, "q": q, "k": k}
        inputs |= {"beta": _convert(beta, dtype), "log_gate": _convert(log_gate, dtype)}
    else:
        validation.check_domain(beta, log_gate)
        with without_autocast(k):
            q, k, lam = chosen.prepare_keys(q, k, normalise, dtype)
            lam = lam.repeat_interleave(v.shape[2] // k.shape[2], 2)
            log_decay, erase, write = _step_coefficients(update_rule, lam, beta, log_gate, dtype)
        inputs = {"q": q, "k": k, "log_decay": log_decay, "erase": erase, "write": write}
    request = ScanRequest(
        v=v, scale=_default_scale(scale, k), initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        **inputs,
    )  # fmt: skip
    o, final_state = run(request, chosen, in_place=inplace_state)
    return o, final_state if output_final_state else None


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence with the three scalars given, each [B, T, Hv].

        S_t = exp(log_decay_t) (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,      o_t = scale S_t^T q_t

    ``log_decay=None`` means no decay and ``erase=None`` nothing erased. A padded token is a step that does nothing:
    log_decay = erase = write = 0. Other arguments are those of :func:`linear_attention`.
    """
    if validation.enabled:
        validation.check_qkv(q, k, v)
        for name, x in (("log_decay", log_decay), ("erase", erase), ("write", write)):
            if x is not None:
                validation.check_scalar(name, x, v)
        if log_decay is not None and validation.checks_values(log_decay) and bool((log_decay > 0).any()):
            raise ValueError(
                f"log_decay must be <= 0, got {float(log_decay.max()):.6g}; a memory may not grow by itself"
            )
        validation.check_call(k, v, initial_state, cu_seqlens, scale, chunk_size)
        validation.warn_about_layout(k)
    dtype = compute_dtype(q, k, v, initial_state)
    log_decay, erase, write = _convert_scalars(log_decay, erase, write, dtype)
    request = ScanRequest(
        q=q, k=k, v=v, log_decay=log_decay, erase=erase, write=write, scale=_default_scale(scale, k),
        initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip
    o, final_state = run(request, choose_backend(backend, k, v, dtype))
    return o, final_state if output_final_state else None


_NORMALISED: dict[bool | str, str] = {False: "", True: "qk", "q": "q", "k": "k"}


def _step_coefficients(
    rule: UpdateRule, lam: Tensor, beta: Tensor | None, log_gate: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The rule's scalars [B, T, Hv] in ``dtype``, computed in lam's dtype, the widest, which stiff keys need."""
    log_decay, erase, write = rule.coefficients(_convert(beta, lam.dtype), lam, _convert(log_gate, lam.dtype))
    return _convert_scalars(log_decay if rule.has_decay else None, erase if rule.has_erase else None, write, dtype)


def _convert_scalars(
    log_decay: Tensor | None, erase: Tensor | None, write: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The scalars in ``dtype``. If erase is write, it stays the same tensor: backends have a faster kernel for that."""
    converted = write.to(dtype)
    return _convert(log_decay, dtype), converted if erase is write else _convert(erase, dtype), converted


def _convert(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == dtype else x.to(dtype)


def _default_scale(scale: float | None, k: Tensor) -> float:
    return float(k.shape[3] ** -0.5 if scale is None else scale)
