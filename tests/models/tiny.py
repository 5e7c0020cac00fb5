"""Small models that the model tests share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from efla.models import EflaConfig, EflaForCausalLM

VOCABULARY = 97

# The two that every claim is held to, and the other mixers.
EFLA: dict[str, Any] = {}
HYBRID: dict[str, Any] = {"mixers": ["linear", "linear", "linear", "softmax"]}
OTHERS: dict[str, dict[str, Any]] = {
    "gated_efla": {"rule": "gated_efla", "value_head_dim": 24},
    "delta": {"rule": "delta"},
    "gated_delta-grouped": {"rule": "gated_delta", "num_key_heads": 1},
    "linear": {"rule": "linear"},
    "mamba2": {"mixers": ["mamba2"], "intermediate_size": 0},
    "softmax": {"mixers": ["softmax"], "num_key_value_heads": 2},
    "everything": {"mixers": ["mamba2", "softmax", "gated_efla_log", "rk4"]},
    "no-convolution": {"conv_size": 0},
}
MAIN = {"efla": EFLA, "hybrid": HYBRID}
ALL = {**MAIN, **OTHERS}


def tiny_config(**fields: Any) -> EflaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_heads": 2,
        "num_attention_heads": 4,
        "mamba_head_dim": 16,
        "mamba_state_size": 8,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return EflaConfig(**{**sizes, **fields})


def tiny_model(seed: int = 0, **fields: Any) -> EflaForCausalLM:
    """A model whose weights are larger than at the start of training, so that a difference anywhere shows in the logits."""
    torch.manual_seed(seed)
    model = EflaForCausalLM(tiny_config(**fields))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(5)
    return model.eval()


@torch.no_grad()
def logits_of(model: EflaForCausalLM, tokens: Tensor) -> Tensor:
    """Of a copy in torch's own memory: a matrix product may round by the alignment of its inputs, and a loaded file's differs."""
    return copy.deepcopy(model)(tokens).logits  # type: ignore[no-any-return]


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def exact_and_rounded(model: EflaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float64, and the farthest from them when weights and outputs of modules are rounded as float32 would.

    Each is moved at random by at most half a float32 ulp: what float32 means for this model, on any CPU. An output norm that
    enlarges a small answer of the memory enlarges its rounding too, up to a thousand times (gated_delta-grouped).
    """
    exact, random = copy.deepcopy(model).double(), torch.Generator().manual_seed(0)

    def rounded(x: Tensor) -> Tensor:
        return x * (1 + (2 * torch.rand(x.shape, generator=random, dtype=x.dtype) - 1) * 2**-24)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return rounded(output) if isinstance(output, Tensor) else output

    logits, found = exact(tokens).logits, []
    for _ in range(20):
        moved = copy.deepcopy(exact)
        for weight in moved.parameters():
            weight.copy_(rounded(weight))
        for module in moved.modules():
            module.register_forward_hook(hook)
        found.append(moved(tokens).logits)
    return logits, max(found, key=lambda other: float((other - logits).abs().max()))
