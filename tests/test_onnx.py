"""``efla.onnx.Runner``: the same tokens as torch without it, sampling, streaming, states, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from efla.models import export_onnx
from efla.models.tokenizer import ByteTokenizer
from efla.onnx import Runner, State, sample
from tests.models.tiny import HYBRID, tiny_model

BYTES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
PROMPT = "naïve: "

# Imports of what an environment of numpy and onnxruntime does not have fail.
WITHOUT_TORCH = """
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tokenizers", "safetensors", "tyro", "rich", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from efla.onnx import Runner
found = {}
for path in sys.argv[2:]:
    runner = Runner(path, num_threads=1)
    ids = [[int(step[0]) for step in runner.stream_ids([[0, *sys.argv[1].encode()]], temperature=0, max_new_tokens=40)]]
    found[path] = [ids, runner.generate(sys.argv[1], temperature=0, max_new_tokens=40)]
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def models():
    fields = {"efla": {}, "gated": {"rule": "gated_efla"}, "hybrid": HYBRID}
    return {name: tiny_model(3, **{**BYTES, **field}) for name, field in fields.items()}


@pytest.fixture(scope="module")
def paths(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onnx")
    for name, model in models.items():
        export_onnx(model, folder / f"{name}.onnx", tokenizer=ByteTokenizer())
    return {name: folder / f"{name}.onnx" for name in models}


@pytest.fixture(scope="module")
def runner(paths):
    return Runner(paths["efla"], num_threads=1)


def torch_greedy(model, ids, count):
    """In float64, where no two logits are so near that rounding decides which token comes next."""
    ids = torch.tensor(ids)
    out = model.double().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    model.float()
    return out[:, ids.shape[1] :].numpy()


def greedy(runner, ids, count, **options):
    return np.stack(list(runner.stream_ids(ids, temperature=0, max_new_tokens=count, **options)), axis=1)


def without_torch(executable, paths, **environment):
    command = [executable, "-c", WITHOUT_TORCH, PROMPT, *map(str, paths.values())]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_tokens(found, models, paths):
    prompt = [[0, *PROMPT.encode()]]
    for name, path in paths.items():
        ids, text = found[str(path)]
        np.testing.assert_array_equal(ids, torch_greedy(models[name], prompt, 40))
        assert text == bytes(i for i in ids[0] if i).decode(errors="replace")


def test_a_process_without_torch_generates_the_same_greedy_tokens(models, paths):
    check_tokens(without_torch(sys.executable, paths), models, paths)


@pytest.mark.skipif(
    "EFLA_ONNX_PYTHON" not in os.environ, reason="EFLA_ONNX_PYTHON names no Python with an old onnxruntime"
)
def test_the_oldest_onnxruntime_in_an_environment_of_its_own_generates_the_same_tokens(models, paths):
    source = str(Path(__file__).parents[1] / "src")
    check_tokens(without_torch(os.environ["EFLA_ONNX_PYTHON"], paths, PYTHONPATH=source), models, paths)


@pytest.mark.parametrize("name", ["efla", "hybrid"])
def test_a_batch_is_its_rows(name, models, paths):
    runner = Runner(paths[name], num_threads=1)
    ids = np.random.default_rng(0).integers(1, 256, (3, 700))  # longer than a piece of the prefill
    found = greedy(runner, ids, 12)
    for row in range(3):
        alone = greedy(runner, ids[row : row + 1], 12)[0]
        np.testing.assert_array_equal(found[row, : len(alone)], alone)
    np.testing.assert_array_equal(found, torch_greedy(models[name], ids, 12)[:, : found.shape[1]])


def test_a_sequence_that_has_ended_is_padded_and_generation_stops_with_the_last(paths, monkeypatch):
    runner = Runner(paths["efla"])
    ids = np.random.default_rng(0).integers(1, 256, (2, 9))
    free = greedy(runner, ids, 20)
    monkeypatch.setitem(runner.config, "eos_token_id", [int(free[0, 2]), int(free[1, 6])])
    found = greedy(runner, ids, 20)
    first = [next(i for i, token in enumerate(row) if token in runner.config["eos_token_id"]) for row in free]
    assert found.shape[1] == max(first) + 1
    for row, end in enumerate(first):
        np.testing.assert_array_equal(found[row, : end + 1], free[row, : end + 1])
        assert (found[row, end + 1 :] == 0).all()


def test_a_saved_state_continues_as_if_it_had_not_stopped(runner, tmp_path):
    state = runner.new_state()
    text = runner.generate("To be", temperature=0, max_new_tokens=10, state=state)
    state.save(tmp_path / "state.npz")
    loaded = runner.load_state(tmp_path / "state.npz")
    assert loaded.num_tokens == state.num_tokens
    more = greedy(runner, [list(b"!")], 15, state=loaded)
    ids = [0, *b"To be", *greedy(runner, [[0, *b"To be"]], 10)[0], *b"!"]
    np.testing.assert_array_equal(more, greedy(runner, [ids], 15))
    assert loaded.num_tokens == len(ids) + more.shape[1]
    assert text == runner.generate("To be", temperature=0, max_new_tokens=10)


def test_a_save_that_fails_leaves_the_old_state(runner, tmp_path, monkeypatch):
    runner.new_state().save(tmp_path / "state.npz")
    before = (tmp_path / "state.npz").read_bytes()

    def fail(file, **entries):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="No space left"):
        runner.new_state(2).save(tmp_path / "state.npz")
    assert (tmp_path / "state.npz").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


def test_a_state_of_another_model_of_equal_shapes_is_refused(runner, models, paths, tmp_path):
    options = {
        "another": {"model": tiny_model(4, **BYTES)},
        "quantised": {"quantize": "int8"},
        "same": {"last_logits": True},
    }
    for name, option in options.items():
        export_onnx(**{"model": models["efla"], "path": tmp_path / f"{name}.onnx", **option})
    others = {name: Runner(tmp_path / f"{name}.onnx") for name in options} | {"rule": Runner(paths["gated"])}
    same = others.pop("same")
    for other in others.values():
        _, state = other([[1, 2]])
        state.save(tmp_path / "state.npz")
        with pytest.raises(
            ValueError, match="another model of the same shapes: another checkpoint, rule or quantisation"
        ):
            runner.load_state(tmp_path / "state.npz")
        with pytest.raises(ValueError, match="another model of the same shapes"):
            runner([[3]], other.new_state())
    same.new_state().save(tmp_path / "state.npz")
    runner.load_state(tmp_path / "state.npz")
    np.savez(tmp_path / "old.npz", num_tokens=3, **runner.new_state().arrays)  # as older versions wrote it
    old = runner.load_state(tmp_path / "old.npz")
    assert old.num_tokens == 3
    list(runner.stream_ids([[1, 2]], max_new_tokens=1, state=old))
    assert old.model == runner.new_state().model != ""


def test_a_state_is_saved_through_a_link_and_by_several_threads(runner, tmp_path):
    target, link = tmp_path / "target.npz", tmp_path / "link.npz"
    runner.new_state().save(target)
    link.symlink_to(target)
    states = [replace(runner.new_state(), num_tokens=n) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda state: [state.save(link) for _ in range(20)], states))
    assert link.is_symlink()
    assert runner.load_state(target).num_tokens in range(4)
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_streamed_text_is_whole_characters_and_together_the_generated_text(runner, monkeypatch):
    tokens = iter([*"é€".encode(), 0xE2, 0x82])  # the last character is not complete
    monkeypatch.setattr(Runner, "stream_ids", lambda *_, **__: (np.array([token]) for token in tokens))
    pieces = list(runner.stream("x"))
    assert pieces == ["", "é", "", "", "€", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_sampling_follows_the_probabilities_within_top_k_and_top_p():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    drawn = {"top_k": 0, "top_p": 1.0, "temperature": 1.0}

    def frequencies(**options):
        random = np.random.default_rng(0)
        rows = np.repeat(logits, 20_000, axis=0)
        return np.bincount(sample(rows, random=random, **{**drawn, **options}), minlength=4) / 20_000

    np.testing.assert_allclose(frequencies(), [0.1, 0.4, 0.2, 0.3], atol=0.02)
    np.testing.assert_allclose(frequencies(top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.02)
    np.testing.assert_allclose(frequencies(top_p=0.8), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.02)
    np.testing.assert_allclose(frequencies(top_p=1e-9), [0, 1, 0, 0])
    np.testing.assert_allclose(frequencies(temperature=0), [0, 1, 0, 0])
    colder = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    np.testing.assert_allclose(frequencies(temperature=0.5), colder / colder.sum(), atol=0.02)


def test_settings_reach_the_session(paths):
    runner = Runner(paths["efla"], settings={"session.force_spinning_stop": "1"})
    assert runner.session.get_session_options().get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_seed_repeats_a_sample(runner):
    texts = [runner.generate("a", seed=seed, max_new_tokens=30) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": -1}, {"top_k": -1}, {"top_p": 3}, {"top_p": 0}]
)
def test_sampling_options_that_cannot_be_are_refused(runner, options):
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, temperature and top_k at least 0"):
        runner.generate("x", **options)


def test_a_state_of_another_shape_or_model_is_refused(runner, paths, tmp_path):
    state = runner.new_state(2)
    with pytest.raises(ValueError, match=r"past_conv\.0 of the state must have shape \[1, 96, 3\], got \[2, 96, 3\]"):
        runner([[1]], state)
    state.arrays["past_recurrent.1"] = np.zeros((2, 2, 8, 16), np.float32)
    with pytest.raises(ValueError, match=r"past_recurrent\.1 of the state must have shape \[2, 2, 16, 16\]"):
        runner([[1], [2]], state)
    with pytest.raises(ValueError, match="it belongs to another model"):
        runner([[1]], Runner(paths["hybrid"]).new_state())
    for other in ({"num_tokens": np.zeros(2)}, {"x": np.zeros(3)}):
        np.savez(tmp_path / "other.npz", **other)
        with pytest.raises(ValueError, match=r"has no number 'num_tokens'; write it with State\.save"):
            runner.load_state(tmp_path / "other.npz")
    flat = {**runner.new_state().arrays, "past_conv.0": np.float32(0)}
    np.savez(tmp_path / "flat.npz", num_tokens=1, **flat)
    with pytest.raises(ValueError, match=r"past_conv\.0 of the state must have shape"):
        runner.load_state(tmp_path / "flat.npz")
    for content in (b"", b"no state", (tmp_path / "other.npz").read_bytes()[:100]):
        (tmp_path / "broken.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a state of an exported model \(.*\); write it with State\.save"):
            runner.load_state(tmp_path / "broken.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match="is not a state of an exported model"):
        runner.load_state(tmp_path / "array.npy")
    State({}).save(tmp_path / "empty.npz")
    with pytest.raises(ValueError, match="the state must have the arrays past_conv"):
        runner.load_state(tmp_path / "empty.npz")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 256]], r"must be in \[0, 256\), got 1 to 256"),
        ([1, 2], r"integers \[B, T\] with T >= 1, got int64 \[2\]"),
        ([[0.5]], r"integers \[B, T\] with T >= 1, got float64"),
        (np.zeros((1, 0), int), r"T >= 1, got int64 \[1, 0\]"),
        ([[1, 2], [3]], "prompts of different lengths one at a time"),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(runner, ids, message):
    with pytest.raises(ValueError, match=message):
        runner(ids)


def test_files_that_cannot_be_used_say_why(paths, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist; write it with `efla export onnx MODEL no\.onnx`"):
        Runner(tmp_path / "no.onnx")
    short = tmp_path / "short.onnx"
    short.write_bytes(paths["efla"].read_bytes()[:100_000])
    with pytest.raises(
        ValueError, match=r"short\.onnx \(100,000 bytes\) could not be loaded: .* copied or exported again"
    ):
        Runner(short)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [out])
    other = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "other.onnx").write_bytes(other.SerializeToString())
    with pytest.raises(ValueError, match="expected a file written by `efla export onnx`"):
        Runner(tmp_path / "other.onnx")


def test_an_onnxruntime_that_is_too_old_is_named(paths, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.3")
    with pytest.raises(RuntimeError, match=r"onnxruntime 1\.24\.3 lacks .* pip install 'onnxruntime>=1\.25\.1'"):
        Runner(paths["efla"])


def test_a_model_without_a_tokenizer_takes_ids_only(models, tmp_path):
    export_onnx(models["efla"], tmp_path / "model.onnx")
    runner = Runner(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="exported without a tokenizer; pass token ids"):
        runner.generate("x")
    assert len(greedy(runner, [[1, 2]], 3)[0]) <= 3


def test_a_tokenizer_of_transformers_travels_with_the_model(models, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 5, "cat": 6, "?": 7}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    export_onnx(models["efla"], tmp_path / "model.onnx", tokenizer=fast)
    runner = Runner(tmp_path / "model.onnx")
    assert runner._tokenizer.encode("the cat sat", starts=True) == fast.encode("the cat sat")
    assert runner._tokenizer.decode([5, 6]) == "the cat"
