"""How energetic keys are inside a model: lam = k.k and the step size beta * lam, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from efla.layers import LinearAttention
from efla.runs.records import Record
from efla.scans.keys import l2_normalize

QUANTILES = (0.5, 0.99, 1.0)


@torch.no_grad()
def key_energies(model: nn.Module, rows: Tensor) -> list[Record]:
    """Quantiles (50, 99, 100 %) of lam and of beta * lam over all tokens and heads of rows [B, T], one record a layer."""
    found: list[Record] = []

    def look(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(mixer, LinearAttention)
        x = arguments[0]
        _, k, _, _ = mixer._queries_keys_values(x, None, None, None, False)
        beta, _ = mixer._step_inputs(x)
        assert beta is not None
        k = k.float()
        lam = (l2_normalize(k) if mixer.key_norm else k).square().sum(-1)  # [B, T, Hk]
        lam = lam.repeat_interleave(mixer.num_heads // mixer.num_key_heads, dim=2)
        found.append({"layer": len(found), "lam": _quantiles(lam), "step_size": _quantiles(beta * lam)})

    mixers = [module for module in model.modules() if isinstance(module, LinearAttention) and module.rule.needs_beta]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    was_training = model.training
    model.eval()
    try:
        model(input_ids=rows, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return found


def _quantiles(values: Tensor) -> list[float]:
    flat = values.double().flatten()
    return [float(f"{q:.6g}") for q in torch.quantile(flat, flat.new_tensor(QUANTILES)).tolist()]
