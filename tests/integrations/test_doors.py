"""Both ways into transformers, accelerate_cpu and the kernel registry, in everything that one does with a model."""

from __future__ import annotations

import copy
import importlib
from contextlib import contextmanager

import pytest
import torch
from transformers.utils.import_utils import is_kernels_available

from efla.integrations import gated_delta
from efla.integrations.transformers import FUNCTIONS, accelerate_cpu, register
from tests.fresh import run_fresh
from tests.integrations.test_transformers import (
    SEQUENCES,
    assert_same,
    greedy_tokens,
    logits_and_gradients,
    packed,
    random_ids,
    small_model,
)

NO_REGISTRY = "this transformers accepts no kernels package that is installed; make test-floor has one"
DOORS = [
    "accelerate_cpu",
    pytest.param("register", marks=pytest.mark.skipif(not is_kernels_available(), reason=NO_REGISTRY)),
]
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(params=DOORS)
def door(request):
    """A context in which a model runs on efla's kernels."""
    return opened_by_accelerate_cpu if request.param == "accelerate_cpu" else opened_by_registry


@contextmanager
def opened_by_accelerate_cpu(model):
    with accelerate_cpu():
        yield


@contextmanager
def opened_by_registry(model):
    from kernels import use_kernel_mapping

    with use_kernel_mapping({}):
        register()
        model.set_use_kernels(True)
        try:
            yield
        finally:  # transformers has no way back; a kernelized function stays so in its module, for all models
            model.set_use_kernels(False)
            module = importlib.import_module(type(model).__module__)
            for replaced in (*model.modules(), *(getattr(module, name) for name in FUNCTIONS)):
                vars(replaced).pop("forward", None)


@pytest.fixture(params=["qwen3_5", "olmo_hybrid"])
def model(request):
    return small_model(request.param, **HYBRID)


@pytest.fixture
def ids():
    return torch.tensor([random_ids(140), random_ids(141)[:140]])


def count_calls(monkeypatch, owner, *names):
    """Counts of the calls of the owner's functions of these names from now on."""
    counts = dict.fromkeys(names, 0)

    def counted(name, original):
        def call(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return counts


def test_every_kernel_is_reached(door, model, ids, monkeypatch):
    layers = count_calls(monkeypatch, gated_delta.rows, "causal_conv", "rms_norm", "swiglu")
    scans = count_calls(monkeypatch, gated_delta, "linear_attention")
    steps = count_calls(monkeypatch, gated_delta.native, "step_in_place")  # a whole layer of Qwen3.5
    with door(model), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        assert layers["causal_conv"] == scans["linear_attention"] == 1
        assert layers["rms_norm"] == len([m for m in model.modules() if "RMSNorm" in type(m).__name__])
        # The registry has no feed-forward layer.
        assert layers["swiglu"] == (model.config.num_hidden_layers if door is opened_by_accelerate_cpu else 0)
        model(ids[:, :1], past_key_values=cache)
        assert scans["linear_attention"] + steps["step_in_place"] == 2


def test_logits_tokens_and_gradients_are_the_same(door, model, ids):
    expected = logits_and_gradients(model, [{"input_ids": ids}])
    tokens = greedy_tokens(model, ids, 8)
    with door(model):
        got = logits_and_gradients(model, [{"input_ids": ids}])
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), tokens)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5 * max(1.0, float(y.abs().max())))


def test_bfloat16_is_as_exact_as_transformers_own(door, model, ids):
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).logits
        rounded = model.bfloat16()
        own = (rounded(ids).logits - exact).abs().max()
        with door(rounded):
            ours = (model(ids).logits - exact).abs().max()
    assert ours <= 2 * own


def test_packed_sequences_are_separate_sequences(door, model):
    model = model.double().train()
    with door(model):
        alone = logits_and_gradients(model, [{"input_ids": torch.tensor([ids])} for ids in SEQUENCES])
        together = logits_and_gradients(model, [packed(return_flash_attn_kwargs=True) | {"use_cache": False}])
    assert_same(together, alone)


def test_left_padding_leaves_the_real_tokens_alone(door, model):
    short, long = random_ids(20), random_ids(30)
    batch = torch.tensor([[0] * 10 + short, long])
    mask = torch.tensor([[0] * 10 + [1] * 20, [1] * 30])
    model = model.double()
    with door(model), torch.no_grad():
        logits = model(batch, attention_mask=mask).logits
        assert_same([logits[0, 10:], logits[1]], [model(torch.tensor([x])).logits[0] for x in (short, long)])
        tokens = model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False))


def test_cached_decoding_is_one_pass(door, model, ids):
    model = model.double()
    with door(model), torch.no_grad():
        whole = model(ids[:, :40]).logits
        cache, pieces = None, []
        for piece in (ids[:, :20], ids[:, 20:33], *ids[:, 33:40].split(1, dim=1)):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
    assert_same([torch.cat(pieces, dim=1)], [whole])


def test_gradient_checkpointing_gives_the_same_gradients(door, model, ids):
    model = model.double().train()
    with door(model):
        expected = logits_and_gradients(model, [{"input_ids": ids, "use_cache": False}])
        model.gradient_checkpointing_enable()
        assert_same(logits_and_gradients(model, [{"input_ids": ids, "use_cache": False}]), expected)


@pytest.mark.parametrize("model", ["qwen3_5"], indirect=True)
def test_a_compiled_model_gives_the_same_logits(door, model, ids):
    torch._dynamo.reset()
    with door(model), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")
        assert_same([compiled(ids, use_cache=False).logits], [expected])
    torch._dynamo.reset()


def test_leaving_the_context_gives_the_plain_model_back(model, ids):
    with torch.no_grad():
        plain = model(ids).logits
        with accelerate_cpu():
            model(ids)
        assert torch.equal(model(ids).logits, plain)


@pytest.mark.skipif(is_kernels_available(), reason="the registry is there")
def test_a_registry_that_is_missing_is_named():
    with pytest.raises(ImportError, match=r"kernels package, .* <= version < .*accelerate_cpu"):
        register()


def test_no_cpu_tensor_reaches_an_installed_flash_linear_attention(door, tmp_path):
    """A stand-in for fla whose functions refuse everything, as Triton refuses CPU tensors."""
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True)
    for path in (folder.parent.parent, folder.parent):
        (path / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(
        "def chunk_gated_delta_rule(*args, **kwargs): raise RuntimeError('no CPU tensors')\n"
        "fused_recurrent_gated_delta_rule = recurrent_gated_delta_rule = chunk_gated_delta_rule\n"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import pytest, torch\n"
        f"from tests.integrations.test_doors import HYBRID, {door.__name__}, random_ids, small_model\n"
        "model, ids = small_model('qwen3_5', **HYBRID), torch.tensor([random_ids(20)])\n"
        "with pytest.raises(RuntimeError, match='no CPU tensors'): model(ids)\n"
        f"with {door.__name__}(model): model.generate(ids, max_new_tokens=3); model(ids, labels=ids).loss.backward()\n"
    )
    result = run_fresh(script)
    assert result.returncode == 0, result.stderr
