"""The ONNX graph against the model in float64: every rule and option, split anywhere, extreme gates and keys, quantised."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional

import efla
import efla.scans.api as scans
from efla import rules
from efla.data import corpora
from efla.layers import LinearAttention
from efla.models import EflaForSequenceClassification, export_onnx, onnx_export
from efla.models.onnx_graph import DOMAIN, OPSET, Graph, pack
from efla.models.onnx_rules import RULES, Coefficients, Step
from efla.models.tokenizer import ByteTokenizer
from efla.onnx import Runner
from efla.testing import assert_close
from tests.models.tiny import exact_and_rounded, random_tokens, tiny_config, tiny_model

EPS = float(np.finfo(np.float32).eps)
MODELS = {
    **{rule: {"rule": rule} for rule in rules.names()},
    "grouped-heads": {"rule": "gated_efla", "num_heads": 4, "num_key_heads": 2, "value_head_dim": 12},
    "one-key-head": {"rule": "delta", "num_heads": 4, "num_key_heads": 1},
    "allow-neg-eigval": {"rule": "gated_delta", "allow_neg_eigval": True},
    "no-convolution": {"conv_size": 0},
    "wide-convolution": {"conv_size": 7},
    "logsigmoid-gate": {"rule": "gated_efla_log", "gate": "logsigmoid"},
    "tied": {"tie_word_embeddings": True},
    "with-output-gate": {"output_gate": True},
    "without-output-gate": {"rule": "gated_efla", "output_gate": False},
    "normalised-keys": {"key_norm": True, "query_norm": False},
    "no-mlp": {"intermediate_size": 0},
    "hybrid": {"mixers": ["linear", "softmax"], "num_key_value_heads": 2},
    "softmax": {"mixers": ["softmax"], "rope_theta": 500.0},
    "mamba2": {"mixers": ["mamba2"], "intermediate_size": 0},
    "mamba2-groups": {"mixers": ["mamba2"], "mamba_num_groups": 2},
    "everything": {"mixers": ["mamba2", "softmax", "gated_efla_log", "rk4"]},
}


def run_in_pieces(runner, tokens, pieces):
    state, logits = None, []
    for piece in tokens.split(pieces, dim=1):
        out, state = runner(piece.numpy(), state)
        logits.append(out)
    return torch.from_numpy(np.concatenate(logits, axis=1))


def assert_matches_float64(model, path, tokens, splits):
    """Not farther from float64 than twice what float32 means for the model, however the tokens are split."""
    expected, honest = exact_and_rounded(model, tokens)
    runner = Runner(path, num_threads=1)
    for pieces in splits:
        assert_close({"logits": run_in_pieces(runner, tokens, pieces)}, {"logits": expected}, {"logits": honest})


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_float64_in_one_pass_and_in_pieces_shorter_than_the_convolution(name, tmp_path):
    model = tiny_model(**MODELS[name])
    export_onnx(model, tmp_path / "model.onnx")
    splits = [[23], [1, 2, 17, 3], [16, *[1] * 7]]
    assert_matches_float64(model, tmp_path / "model.onnx", random_tokens(3, 23), splits)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("rule", ["efla", "gated_efla", "gated_efla_log", "implicit_euler", "crank_nicolson"])
def test_keys_of_extreme_norm_and_gates_down_to_e_minus_200_match_float64(rule, scale, tmp_path, monkeypatch):
    model = tiny_model(rule=rule, num_hidden_layers=1)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.k_proj.weight.mul_(scale)
        if rule.startswith("gated"):
            mixer.A_log.fill_(np.log(20.0))
            mixer.dt_bias.copy_(torch.tensor([10.0, -20.0]))  # gates of e^-200 and of 1
    tokens, seen = random_tokens(2, 23), []
    with monkeypatch.context() as patched, torch.no_grad():
        scan = scans.linear_attention
        patched.setattr(scans, "linear_attention", lambda *args, **kwargs: seen.append(args) or scan(*args, **kwargs))
        model(tokens)
    _, k, _, _, log_gate = seen[0]
    assert 0.3 < float(k.norm(dim=-1).mean()) / scale < 3
    if rule.startswith("gated"):
        assert float(log_gate.min()) < -190
    export_onnx(model, tmp_path / "model.onnx")
    assert_matches_float64(model, tmp_path / "model.onnx", tokens, [[23], [5] * 4 + [3]])


def evaluate_rule(rule, k, beta, log_gate):
    """(log_decay, erase, write) as onnxruntime computes them; constants where the rule has none."""
    g = Graph()
    named = Coefficients._fields
    found = RULES[rule](Step(g, "k", "beta", "log_gate"))
    outputs = [name for name, value in zip(named, found, strict=True) if value is not None]
    for name in outputs:
        g.nodes.append(helper.make_node("Identity", [getattr(found, name)], [name]))
    feeds = {"k": k.numpy(), "beta": beta.numpy(), "log_gate": log_gate.numpy()}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, beta.shape) for name in outputs]
    graph = helper.make_graph(g.nodes, "rule", infos, results, g.weights)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    values = {}
    if outputs:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = dict(zip(outputs, session.run(outputs, feeds), strict=True))
    constants = {"log_decay": 0.0, "erase": 0.0, "write": 1.0}
    return {name: values.get(name, np.full(beta.shape, constants[name])) for name in named}


@pytest.mark.parametrize("rule", rules.names())
def test_a_rules_scalars_match_float64_over_the_whole_range(rule):
    generator = torch.Generator().manual_seed(0)
    shape = (4, 500, 3)
    direction = functional.normalize(torch.randn(*shape, 8, generator=generator), dim=-1)
    k = direction * 10 ** torch.empty(*shape, 1).uniform_(-3, 3, generator=generator)
    beta = 10 ** torch.empty(shape).uniform_(-12, 0.3, generator=generator)
    log_gate = -(10 ** torch.empty(shape).uniform_(-9, 2.3, generator=generator))
    k[0, 0], log_gate[0, 1], beta[0, 2] = 0, 0, 0
    lam = k.double().square().sum(-1)
    found = evaluate_rule(rule, k, beta, log_gate)
    expected = rules.get(rule).coefficients(beta.double(), lam, log_gate.double())
    x = beta.double() * lam
    # Runge-Kutta polynomials cancel; their rounding is that of their largest term.
    size = beta.double() * (1 + x / 2 + (x**2 / 6 + x**3 / 24 if rule == "rk4" else 0))
    for name in Coefficients._fields:
        truth = getattr(expected, name)
        scale = size if rule in ("rk2", "rk4") else truth.abs()
        error = (torch.from_numpy(found[name]).double() - truth).abs()
        assert bool((error <= 8 * EPS * scale + 1e-38).all()), (
            f"{name}: {float((error / scale.clamp(min=1e-38)).max())}"
        )


def test_every_rule_of_the_library_has_a_graph():
    assert list(RULES) == rules.names()


def test_tied_embeddings_are_stored_once_and_last_logits_are_the_last(tmp_path):
    model, tokens = tiny_model(tie_word_embeddings=True), random_tokens(2, 9)
    done = export_onnx(model, tmp_path / "tied.onnx")
    untied = export_onnx(tiny_model(), tmp_path / "untied.onnx")
    assert untied.num_bytes - done.num_bytes == pytest.approx(4 * model.lm_head.weight.numel(), abs=500)
    export_onnx(model, tmp_path / "last.onnx", last_logits=True)
    whole, last = (Runner(tmp_path / name)(tokens.numpy())[0] for name in ("tied.onnx", "last.onnx"))
    assert last.shape == (2, 1, model.config.vocab_size)
    np.testing.assert_allclose(last, whole[:, -1:], atol=20 * EPS * np.abs(whole).max())


def test_weights_above_the_limit_go_to_a_second_file(tmp_path, monkeypatch):
    model, tokens = tiny_model(), random_tokens(1, 5).numpy()
    one = export_onnx(model, tmp_path / "one.onnx")
    monkeypatch.setattr(onnx_export, "_LARGEST_FILE", 1000)
    two = export_onnx(model, tmp_path / "two.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.onnx", "two.onnx", "two.onnx.data"]
    assert two.num_bytes == pytest.approx(one.num_bytes, rel=0.1)
    assert (tmp_path / "two.onnx").stat().st_size < one.num_bytes / 3
    np.testing.assert_array_equal(Runner(tmp_path / "one.onnx")(tokens)[0], Runner(tmp_path / "two.onnx")(tokens)[0])
    monkeypatch.undo()
    export_onnx(model, tmp_path / "two.onnx")
    assert not (tmp_path / "two.onnx.data").exists()


def test_the_file_describes_itself(tmp_path):
    model = tiny_model(mixers=["efla", "softmax"], vocab_size=256)
    done = export_onnx(model, tmp_path / "model.onnx", tokenizer=ByteTokenizer())
    assert done.num_bytes == (tmp_path / "model.onnx").stat().st_size
    proto = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(proto)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata["efla.version"] == efla.__version__
    assert metadata["efla.tokenizer"] == "bytes"
    assert json.loads(metadata["efla.config"])["mixers"] == model.config.mixers
    shapes = {state["input"]: state["shape"] for state in json.loads(metadata["efla.states"])}
    assert shapes["past_recurrent.0"] == ["batch", 2, 16, 16]
    assert shapes["past_conv.0"] == ["batch", 96, 3]
    assert shapes["past_key_values.1.key"] == ["batch", 4, "past", 8]
    inputs = {value.name for value in proto.graph.input}
    assert inputs == {"input_ids", *shapes}


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_within_half_a_step(bits):
    matrix = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32)
    matrix[0, :32] = 0
    packed, scales = pack(matrix, bits)
    integers = packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(5, 3, 32)
    restored = (integers.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
    steps = np.abs(restored.reshape(5, 96)[:, :70] - matrix) / np.repeat(np.abs(scales), 32, 1)[:, :70].clip(1e-30)
    # The number opposite to a block's largest is clipped by up to one step.
    assert steps.max() <= 1
    assert np.quantile(steps, 0.95) <= 0.5


@pytest.fixture(scope="module")
def trained():
    """A byte model after some training, and held-out rows."""
    torch.manual_seed(0)
    corpus = corpora.load("python-docs")
    model = efla.EflaForCausalLM(
        tiny_config(vocab_size=256, hidden_size=64, num_hidden_layers=2, intermediate_size=128, head_dim=32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    text = torch.from_numpy(corpus.train.astype(np.int64))
    for _ in range(120):
        starts = torch.randint(len(text) - 128, (16,))
        rows = torch.stack([text[start : start + 128] for start in starts])
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    held_out = torch.from_numpy(corpus.validation[: 40 * 256].astype(np.int64)).view(40, 256)
    return model.eval(), held_out


def loss_of(logits, rows):
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), rows[:, 1:].flatten()))


def test_quantised_models_keep_the_held_out_loss(trained, tmp_path):
    model, rows = trained
    with torch.no_grad():
        expected = loss_of(model(rows).logits, rows)
    assert expected < 2.9, "the model has learnt something to lose"
    sizes, losses = {}, {}
    for quantize in (None, "int8", "int4"):
        path = tmp_path / f"{quantize}.onnx"
        sizes[quantize] = export_onnx(model, path, quantize=quantize).num_bytes
        losses[quantize] = loss_of(torch.from_numpy(Runner(path)(rows.numpy())[0]), rows)
    assert losses[None] == pytest.approx(expected, abs=1e-5)
    assert losses["int8"] == pytest.approx(expected, abs=2e-3)
    assert losses["int4"] == pytest.approx(expected, abs=3e-2)
    assert sizes["int4"] < sizes["int8"] < 0.45 * sizes[None]


class Mine(rules.get("efla").__class__):
    name = "mine"


class OtherEfla(rules.get("delta").__class__):
    name = "efla"


@pytest.mark.parametrize("rule", [Mine(), OtherEfla()])
def test_a_rule_of_the_users_own_is_refused_by_name(rule, tmp_path):
    model = tiny_model()
    model.model.layers[2].mixer.rule = rule
    with pytest.raises(ValueError, match=f"rule '{rule.name}' of layer 2 has no ONNX graph; known rules: linear, ssd"):
        export_onnx(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_expressed_is_refused_by_name(tmp_path):
    path = tmp_path / "model.onnx"
    model = tiny_model()
    model.model.layers[1].mixer = type("OwnMixer", (LinearAttention,), {})(32, num_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="unknown mixer to export 'OwnMixer'"):
        export_onnx(model, path)
    model = tiny_model()
    model.model.layers[0].mixer.o_proj = nn.Sequential(model.model.layers[0].mixer.o_proj)
    with pytest.raises(ValueError, match=r"has a Sequential in its place; merge adapters"):
        export_onnx(model, path)
    with pytest.raises(ValueError, match="expected an EflaForCausalLM, got EflaForSequenceClassification"):
        export_onnx(EflaForSequenceClassification(tiny_config()), path)
    with pytest.raises(ValueError, match="unknown quantisation 'int3'; did you mean 'int8' or 'int4'"):
        export_onnx(tiny_model(), path, quantize="int3")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_does_not_compute_the_model_is_not_written(tmp_path):
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(RuntimeError, match=r"logits differ from the model's by .*; nothing was written"):
        export_onnx(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_half_precision_model_in_training_mode_is_exported_and_stays_as_it_is(tmp_path):
    model = tiny_model().to(torch.bfloat16).train()
    done = export_onnx(model, tmp_path / "model.onnx")
    assert done.difference < 1e-4 * done.scale
    assert model.training
    assert model.dtype == torch.bfloat16
