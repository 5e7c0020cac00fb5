"""``efla info``, ``efla generate`` and ``efla convert``, and the documentation's first run."""

from __future__ import annotations

import errno
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import tyro

from efla import cli
from efla.cli.models import convert, generate, info
from efla.models.tokenizer import ByteTokenizer, TimedStreamer
from tests.fresh import run_fresh
from tests.models.tiny import HYBRID, tiny_model

ROOT = Path(__file__).parents[2]


def run(command, *arguments):
    return tyro.cli(command, args=[str(a) for a in arguments])


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bytes"
    tiny_model(vocab_size=256, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return folder


def test_info_prints_the_facts_of_a_preset(capsys):
    assert run(info, "efla-340m") == 0
    out = capsys.readouterr().out
    for fact in ("efla x 24", "374,362,112", "308,826,112", "13,467,648", "701,956,096", "keys 128, values 128"):
        assert fact in out


def test_info_of_a_folder_is_json_when_asked(tmp_path, capsys):
    model = tiny_model(**HYBRID)
    model.save_pretrained(tmp_path)
    run(info, tmp_path, "--json", "--context", "10")
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["mixers"] == "efla x 3, softmax x 1"
    assert facts["cache_bytes_per_token"] == 2 * 32 * 4


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a folder, a hub name .* nor a preset; presets: efla-tiny"):
        run(info, "no-such-thing")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        run(info, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "delta_net"}')
    with pytest.raises(ValueError, match="is a 'delta_net' model; `efla convert` makes an efla model of it"):
        run(info, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    with pytest.raises(ValueError, match="is a 'qwen3_5' model; only efla models can be described"):
        run(info, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="a training run without a model; finish it with the same efla train"):
        run(info, tmp_path)
    with pytest.raises(ValueError, match="is a preset without weights"):
        run(generate, "efla-tiny", "--prompt", "x")


def test_generate_streams_what_the_model_says_and_its_speed(byte_model, capsys):
    run(generate, byte_model, "--prompt", "Hello", "--max-new-tokens", 12, "--temperature", 0)
    out, err = capsys.readouterr()
    model = tiny_model(vocab_size=256, bos_token_id=0, eos_token_id=0)
    prompt = torch.tensor([[0, *b"Hello"]])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert out == "Hello" + ByteTokenizer().decode(tokens[0, 6:].tolist(), skip_special_tokens=True) + "\n"
    assert re.search(r"prompt: 6 tokens, [\d,]+ tokens/s; new: \d+ tokens, [\d,.]+ tokens/s", err)


def test_a_conversation_goes_on_from_a_file(byte_model, tmp_path, capsys):
    options = ("--max-new-tokens", 6, "--temperature", 0)
    tokens = torch.zeros(1, 1, dtype=torch.long)
    model = tiny_model(vocab_size=256, bos_token_id=0, eos_token_id=0)
    for said in ("Hello", " again"):
        run(generate, byte_model, "--prompt", said, *options, "--state", tmp_path / "state")
        start = tokens.shape[1] + len(said)
        tokens = torch.cat([tokens, torch.tensor([list(said.encode())])], dim=1)
        tokens = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        answer = ByteTokenizer().decode(tokens[0, start:].tolist(), skip_special_tokens=True)
        assert capsys.readouterr().out == said + answer + "\n"
    other = tiny_model(seed=1, vocab_size=256)
    other.save_pretrained(tmp_path / "other")
    before = (tmp_path / "state").read_bytes()
    with pytest.raises(ValueError, match="other weights"):
        run(generate, tmp_path / "other", "--prompt", "x", *options, "--state", tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == before


@pytest.mark.parametrize("model", ["bytes", "model.onnx"])
def test_a_state_that_could_not_be_written_is_refused_before_anything_is_generated(
    model, byte_model, tmp_path, capsys, monkeypatch
):
    options = (byte_model.with_name(model), "--prompt", "x", "--state")
    with pytest.raises(ValueError, match=r"--state .* is a folder; name a file, such as"):
        run(generate, *options, tmp_path)
    with pytest.raises(
        ValueError, match=r"--state .*: there is no folder .*missing; create it, or name a file in another"
    ):
        run(generate, *options, tmp_path / "missing/state")

    def refuse(**options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write where the mode forbids it
    with pytest.raises(ValueError, match=r"cannot write there \(Read-only file system\); name a file elsewhere"):
        run(generate, *options, tmp_path / "state")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_generate_with_smaller_weights_keeps_a_state_of_its_own(byte_model, tmp_path, capsys, weights):
    options = ("--prompt", "Hello", "--max-new-tokens", 6, "--temperature", 0, "--state", tmp_path / "state")
    for _ in range(2):
        assert run(generate, byte_model, *options, "--weights", weights) == 0
        assert capsys.readouterr().out.startswith("Hello")
    with pytest.raises(ValueError, match="other weights"):
        run(generate, byte_model, *options)
    with pytest.raises(ValueError, match="--dtype would do nothing with --weights"):
        run(generate, byte_model, *options, "--weights", weights, "--dtype", "float32")


def test_sampling_follows_the_seed(byte_model, capsys):
    texts = []
    for seed in (1, 1, 2):
        run(generate, byte_model, "--prompt", "Hello", "--max-new-tokens", 12, "--temperature", 1.0, "--seed", seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_model_without_a_tokenizer_says_so(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="no tokenizer and its vocabulary of 97 is not bytes; name one with --tokenizer"
    ):
        run(generate, tmp_path, "--prompt", "x")


@pytest.mark.parametrize("options", [("--top-p", 3), ("--top-p", 0), ("--top-k", -1), ("--temperature", -1)])
def test_sampling_options_out_of_range_are_refused(byte_model, options):
    with pytest.raises(ValueError, match="--top-p above 0 and at most 1"):
        run(generate, byte_model, "--prompt", "x", *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu"])
def test_a_device_that_is_not_there_is_named(byte_model, device, tmp_path, capsys):
    with pytest.raises(ValueError, match=f"--device {device} cannot be used here .*; use --device cpu or auto"):
        run(generate, byte_model, "--prompt", "x", "--device", device)
    assert cli.main(["train", "--device", device, "--output", str(tmp_path)]) == 1
    assert f"efla train: --device {device} cannot be used here" in capsys.readouterr().err


def test_a_training_run_is_a_model_for_every_command(byte_model, tmp_path, capsys):
    shutil.copytree(byte_model, tmp_path / "run/model")
    (tmp_path / "run/config.json").write_text("{}")
    assert run(info, tmp_path / "run") == 0
    assert run(generate, tmp_path / "run", "--prompt", "x", "--max-new-tokens", 1) == 0
    assert f"next: efla generate {tmp_path / 'run'} --prompt" in capsys.readouterr().out
    tiny_model(rule="delta").save_pretrained(tmp_path / "delta/model")
    assert run(convert, tmp_path / "delta", tmp_path / "fla") == 0


def test_streamed_text_never_breaks_a_character():
    pieces: list[str] = []
    streamer = TimedStreamer(ByteTokenizer(), pieces.append)
    streamer.put(torch.tensor([[0, 65]]))  # the prompt
    for byte in "aé漢b".encode():
        streamer.put(torch.tensor([byte]))
    streamer.end()
    assert "".join(pieces) == "aé漢b"
    assert not any("�" in piece for piece in pieces)


def test_convert_says_what_it_made(tmp_path, capsys):
    tiny_model(rule="delta").save_pretrained(tmp_path / "ours")
    assert run(convert, tmp_path / "ours", tmp_path / "fla") == 0
    assert "model_type delta_net" in capsys.readouterr().out
    assert run(convert, tmp_path / "fla", tmp_path / "back") == 0
    assert "model_type efla, layers delta" in capsys.readouterr().out


def test_the_first_run_of_the_docs_trains_saves_and_loads_in_a_new_process(tmp_path):
    page = (ROOT / "docs" / "tutorials" / "first-language-model.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[:2]
    outputs = []
    for block in (first, second):
        result = run_fresh(block, cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]
        outputs.append(result.stdout)
    loss = float(re.search(r"loss ([\d.]+)", outputs[0]).group(1))
    assert loss < 3.2  # 5.55 at the start, about 3.1 for the frequencies of single bytes
    assert outputs[1].startswith("The ")
    assert len(outputs[1]) > 30
