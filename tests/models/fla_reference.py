"""Builds or loads a small flash-linear-attention model and writes its logits; run by an interpreter that has fla.

    python fla_reference.py build FOLDER     saves a random model of each kind to FOLDER/KIND, then as load
    python fla_reference.py load FOLDER      writes FOLDER/NAME.logits.safetensors of each checkpoint FOLDER/NAME

The tokens are those of FOLDER/tokens.safetensors, at most 64 of them: so far fla runs its recurrent kernels, which take
float32. Its Triton kernels run on CPU tensors in Triton's interpreter with two
shims: autotuning takes the first configuration (it would time kernels on a GPU), and flash-attn, which needs one, is
torch's own attention.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional
from triton.runtime.autotuner import Autotuner

# Timing would need a GPU: every configuration "takes" the same, so that the first is chosen.
Autotuner._bench = lambda self, *args, config, **kwargs: [0.0, 0.0, 0.0]


def flash_attn_func(q, k, v, causal=True, window_size=(-1, -1)):
    """Stands for the flash-attn package, which needs a GPU. q, k, v: [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


CONFIGS = {
    "delta_net": dict(hidden_size=64, num_heads=2, num_hidden_layers=2, vocab_size=101, intermediate_size=96),
    "delta_net_gated": dict(
        hidden_size=64,
        num_heads=2,
        num_hidden_layers=2,
        vocab_size=101,
        intermediate_size=96,
        use_gate=True,
        expand_v=2,
    ),
    "delta_net_hybrid": dict(
        hidden_size=64,
        num_heads=2,
        num_hidden_layers=2,
        vocab_size=101,
        intermediate_size=96,
        attn={"layers": [1], "num_heads": 4, "num_kv_heads": 2},
    ),
    "gated_deltanet": dict(
        hidden_size=64, num_heads=2, head_dim=16, expand_v=2, num_hidden_layers=2, vocab_size=101, intermediate_size=96
    ),
    "gated_deltanet_grouped": dict(
        hidden_size=64, num_heads=2, num_v_heads=4, head_dim=16, expand_v=1, num_hidden_layers=2, vocab_size=101
    ),
    "mamba2": dict(hidden_size=32, head_dim=16, state_size=16, num_hidden_layers=2, vocab_size=101, chunk_size=16),
    "transformer": dict(hidden_size=64, num_heads=4, num_hidden_layers=2, vocab_size=101, intermediate_size=96),
}


def build(kind: str):
    from fla import models

    name = next(name for name in ("gated_deltanet", "delta_net", "mamba2", "transformer") if kind.startswith(name))
    config_class, model_class = {
        "delta_net": (models.DeltaNetConfig, models.DeltaNetForCausalLM),
        "gated_deltanet": (models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM),
        "mamba2": (models.Mamba2Config, models.Mamba2ForCausalLM),
        "transformer": (models.TransformerConfig, models.TransformerForCausalLM),
    }[name]
    plain = {"fuse_norm": False, "fuse_cross_entropy": False}
    if name not in ("mamba2",):
        plain["fuse_swiglu"] = False
    config = config_class(**{**plain, **CONFIGS[kind]})
    torch.manual_seed(0)
    return model_class(config)


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    import fla.layers.attn
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    fla.layers.attn.flash_attn_func = flash_attn_func
    torch.set_num_threads(1)
    if action == "build":
        for kind in CONFIGS:
            model = build(kind)
            with torch.no_grad():
                for p in model.parameters():  # larger than at the start of training, so that differences show
                    p.add_(torch.randn_like(p) * 0.05)
            model.save_pretrained(folder / kind)
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    for checkpoint in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        save_file({"logits": logits.float().contiguous()}, folder / f"{checkpoint.name}.logits.safetensors")


if __name__ == "__main__":
    main()
