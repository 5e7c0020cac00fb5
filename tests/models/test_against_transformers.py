"""The same weights in transformers' own models give the same logits: Llama, Mamba-2, Qwen3-Next's gated delta rule."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from efla.layers import LinearAttention
from efla.models import EflaForCausalLM
from efla.models.convert import convert_folder
from tests.models.tiny import random_tokens, tiny_model


@torch.no_grad()
@pytest.mark.parametrize("num_key_value_heads", [4, 2])
def test_the_softmax_model_is_llama(num_key_value_heads):
    ours = tiny_model(mixers=["softmax"], num_key_value_heads=num_key_value_heads)
    config = ours.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=num_key_value_heads,
            rms_norm_eps=1e-6,
        )
    ).eval()
    names = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mixer": "self_attn"}
    state = {".".join(names.get(part, part) for part in key.split(".")): p for key, p in ours.state_dict().items()}
    theirs.load_state_dict(state)
    tokens = random_tokens(2, 40)
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_transformers_mamba2_checkpoints_convert(tmp_path):
    config = Mamba2Config(
        hidden_size=32,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        num_hidden_layers=3,
        vocab_size=97,
        chunk_size=16,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    theirs = Mamba2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = EflaForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = random_tokens(2, 40)
    logits = theirs(tokens).logits
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(ours(tokens).logits, logits, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_the_gated_delta_mixer_is_qwen3_next_s():
    Hk, H, K, V = 2, 4, 8, 12
    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=Hk,
        linear_num_value_heads=H,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=4,
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    ours = LinearAttention(32, num_heads=H, num_key_heads=Hk, head_dim=K, value_head_dim=V, rule="gated_delta")
    # in_proj_qkvz holds, per key head, its q, k, and the v and z of its value heads; the convolution q, k, v in turn.
    group = H // Hk
    qkvz = theirs.in_proj_qkvz.weight.view(Hk, 2 * K + 2 * group * V, 32)
    q, k, v, z = qkvz.split([K, K, group * V, group * V], dim=1)
    b, a = theirs.in_proj_ba.weight.view(Hk, 2 * group, 32).split([group, group], dim=1)
    parts = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "b_proj": b, "a_proj": a}
    for name, value in parts.items():
        ours.get_submodule(name).weight.copy_(value.reshape(-1, 32))
    convs = theirs.conv1d.weight.split([Hk * K, Hk * K, H * V])
    for name, value in zip(("q_conv", "k_conv", "v_conv"), convs, strict=True):
        ours.get_submodule(name).weight.copy_(value)
    ours.A_log.copy_(theirs.A_log)
    ours.dt_bias.copy_(theirs.dt_bias)
    ours.o_proj.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, 70, 32)
    torch.testing.assert_close(ours(x)[0], theirs(x), atol=1e-5, rtol=1e-4)
