"""transformers' gated-delta-rule models on efla's kernels: the same logits, the same tokens, and back again."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from efla.integrations import transformers as integration
from efla.integrations.transformers import FUNCTIONS, accelerate_cpu

FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
}

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXTRA = {
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {"linear_num_key_heads": 4},
}  # fmt: skip


def small_model(family: str):
    config_name, model_name = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, config_name)(**(SMALL | EXTRA.get(family, {})))
    torch.manual_seed(0)
    return getattr(module, model_name)(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_same_tokens(family):
    model = small_model(family)
    ids = torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=12, do_sample=False)
        with accelerate_cpu() as acceleration:
            assert family in acceleration.models
            got = model(ids).logits
            fast_tokens = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert float((got - expected).abs().max()) <= 1e-4
    assert torch.equal(fast_tokens, tokens)


def test_gradients_are_the_same():
    model = small_model("qwen3_next")
    ids = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    gradients = []
    for accelerated in (False, True):
        model.zero_grad()
        with accelerate_cpu() if accelerated else warnings.catch_warnings():
            model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    scale = max(float(g.abs().max()) for g in gradients[0])
    for plain, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-5 * scale)


def test_it_can_be_undone_and_done_twice():
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    originals = [getattr(module, name) for name in FUNCTIONS]
    first = accelerate_cpu()
    assert all(getattr(module, name) is not f for name, f in zip(FUNCTIONS, originals, strict=True))
    second = accelerate_cpu()
    assert second.models == []
    first.restore()
    assert [getattr(module, name) for name in FUNCTIONS] == originals


def test_a_transformers_without_the_hook_is_left_alone_with_a_warning(monkeypatch):
    monkeypatch.setattr(integration, "_gated_delta_modules", list)
    with pytest.warns(UserWarning, match="nothing was changed"):
        assert accelerate_cpu().models == []
