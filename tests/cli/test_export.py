"""``efla export onnx`` and ``efla generate`` of the file it writes."""

from __future__ import annotations

import re

import pytest
import tyro

from efla.cli import main
from efla.cli.export import export
from efla.cli.models import generate
from efla.models.tokenizer import ByteTokenizer
from tests.models.tiny import tiny_model


def run(command, *arguments):
    return tyro.cli(command, args=[str(a) for a in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "bytes"
    tiny_model(vocab_size=256, bos_token_id=0, eos_token_id=0).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


def test_the_exported_file_continues_a_prompt_as_the_model_does(folder, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    assert run(export, "onnx", folder, path, "--last-logits") == 0
    printed = capsys.readouterr().out
    assert f"{path}: {path.stat().st_size:,} bytes" in printed
    difference, largest = map(float, re.findall(r"([\d.e+-]+) \(the largest logit is ([\d.e+-]+)\)", printed)[0])
    assert 0 < difference < 1e-4 * largest
    texts = []
    for model in (folder, path):
        run(generate, model, "--prompt", "Ab", "--temperature", 0, "--max-new-tokens", 20)
        found = capsys.readouterr()
        texts.append(found.out)
        assert re.match(r"prompt: 3 tokens, [\d,]+ tokens/s; new: 20 tokens, [\d,.]+ tokens/s", found.err)
    assert texts[0] == texts[1]


def test_a_state_file_carries_the_text_from_one_call_to_the_next(folder, tmp_path, capsys):
    path, state = tmp_path / "model.onnx", tmp_path / "state"
    run(export, "onnx", folder, path)
    greedy = ["--temperature", 0, "--max-new-tokens", 12]
    capsys.readouterr()
    for model, file in ((path, state), (folder, tmp_path / "torch-state")):
        run(generate, model, "--prompt", "Ab", *greedy, "--state", file)
        run(generate, model, "--prompt", "cd", *greedy, "--state", file)
    found = capsys.readouterr()
    lines = found.out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    assert re.findall(r"prompt: (\d) tokens", found.err) == ["3", "2", "3", "2"]


def test_options_that_an_exported_file_cannot_follow_are_refused(tmp_path, capsys):
    command = ["generate", str(tmp_path / "no.onnx"), "--prompt", "x"]
    assert main([*command, "--dtype", "bfloat16"]) == 1
    assert "--dtype would do nothing with an ONNX file" in capsys.readouterr().err
    assert main(command) == 1
    assert "write it with `efla export onnx MODEL no.onnx`" in capsys.readouterr().err
