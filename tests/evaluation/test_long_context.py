"""``efla eval --length``: rows as the library measures them, figures, the report, and the choice of the text."""

from __future__ import annotations

import io
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from efla import cli
from efla.data import corpora
from efla.evaluation import bits_by_position, doubling_buckets, tasks
from efla.evaluation.long_context import LengthEvaluation, LengthSettings, load_text
from efla.evaluation.recall import finetune_on_recall, make_batch, recall, usable_tokens
from efla.evaluation.run import EvaluationSettings
from efla.models import EflaConfig, EflaForCausalLM
from efla.models.loading import Loaded
from efla.runs.progress import Counter, GridProgress
from efla.runs.rows import read_rows
from tests.evaluation.models import TEXT, byte_config, models_of, quiet_console, trained, word_tokenizer


def test_long_contexts_give_curves_figures_and_a_section(folders, tmp_path, capsys, monkeypatch):
    pytest.importorskip("altair")
    monkeypatch.setattr("efla.runs.vega.library", lambda: "")
    text = tmp_path / "text.txt"
    text.write_text("A line of text that goes on. " * 60)
    output = tmp_path / "length"
    options = ["--length", "--text", str(text), "--positions", "500", "--rows", "2", "--output", str(output)]
    options += ["--pairs", "2", "4", "--lengths", "16", "32"]
    assert cli.main(["eval", *models_of(folders, "efla", "softmax"), *options]) == 0
    shown = capsys.readouterr().out
    assert "257 to 500" in shown and "recall" in shown
    rows = read_rows(output)
    assert {row["row"] for row in rows} == {"position", "recall", "cell"}
    assert len([row for row in rows if row["row"] == "recall"]) == 2 * 4
    for name in ("bits_by_position", "recall_by_pairs", "recall_by_length"):
        assert (output / "figures" / f"{name}.svg").stat().st_size > 1000
    check_length_rows(rows, text.read_text())
    before = (output / "rows.jsonl").read_bytes()
    assert cli.main(["eval", *models_of(folders, "efla"), *options]) == 0  # finished cells stay
    assert (output / "rows.jsonl").read_bytes() == before
    pytest.importorskip("jinja2")
    page = tmp_path / "report.html"
    assert cli.main(["report", str(output), "--output", str(page)]) == 0
    assert "Loss by position" in page.read_text()
    short = ["--length", "--text", str(text), "--positions", "5000", "--output", str(tmp_path / "other")]
    assert cli.main(["eval", *models_of(folders, "efla"), *short]) == 1
    assert "fewer --positions" in capsys.readouterr().err


def check_length_rows(rows: list[dict[str, Any]], text: str) -> None:
    """Of the command's rows: positions and recall as the library measures them on the same text and batches."""
    model, tokens = trained("efla"), list(text.encode())
    starts = [0, len(tokens) - 501]
    curve = bits_by_position(model, [tokens[start : start + 501] for start in starts], doubling_buckets(500))
    own = [row for row in rows if row["model"] == "efla"]
    positions = [row for row in own if row["row"] == "position"]
    assert [(row["start"], row["end"], row["num_rows"]) for row in positions] == [
        (first, last, 2) for first, last in doubling_buckets(500)
    ]
    assert [row["bits_per_byte"] for row in positions] == pytest.approx(curve.bits, abs=1e-4)
    assert [row["bits_per_token"] for row in positions] == [row["bits_per_byte"] for row in positions]
    assert [row["standard_error"] for row in positions] == pytest.approx(curve.standard_errors, abs=1e-4)
    probes = [row for row in own if row["row"] == "recall"]
    assert [(row["num_pairs"], row["length"]) for row in probes] == [(2, 16), (4, 16), (2, 32), (4, 32)]
    for row in probes:
        n, length = row["num_pairs"], row["length"]
        batch = make_batch(usable_tokens(256, [0]), n, length, 16, 0, prefix=0)
        expected = asdict(recall(model, batch))
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        assert (row["chance"], row["steps"], row["cell"]) == (1 / n, 0, f"efla/recall-{n}-{length}")
    cell = next(row for row in own if row["row"] == "cell")
    assert (cell["cell"], cell["rows"], cell["trained_length"]) == ("efla/positions", len(positions) + 1, 256)
    config = {
        "text": "text.txt",
        "positions": 500,
        "rows": 2,
        "recall_steps": 0,
        "recall_grid": None,
        "dtype": "auto",
        "seed": 0,
    }
    assert cell["config"] == {**config, "batch_tokens": 4096}
    assert cell["wall_seconds"] > 0 and cell["digest"] and cell["versions"] and cell["threads"] >= 1


def test_rows_are_what_the_library_measures(folders, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A line of text that goes on. " * 60)
    asked = LengthSettings(text=str(text), positions=500, rows=2, pairs=(2, 4), lengths=(16, 32))
    evaluation = LengthEvaluation(EvaluationSettings(), asked)
    check_length_rows(evaluation.evaluate(models_of(folders, "efla"), tmp_path, quiet_console()), text.read_text())


def test_tokens_of_several_bytes_and_special_ones(tmp_path, monkeypatch):
    """A tokenizer that puts a bos first: not in the text, but before sequences to recall, and in none of them."""
    tokenizer, text = word_tokenizer(), tmp_path / "text.txt"
    text.write_text(TEXT + "Wörter.")
    tokens, size = tokenizer.encode(text.read_text(), add_special_tokens=False), len(text.read_bytes())
    torch.manual_seed(0)
    model = EflaForCausalLM(byte_config(vocab_size=len(tokenizer), pad_token_id=5)).eval()
    loaded = Loaded("words", model, tokenizer, 64, "nowhere")
    last, counter = len(tokens) // 3 - 1, GridProgress(None, 1).start("")
    asked = LengthSettings(text=str(text), positions=last, rows=8, pairs=(4,), lengths=(16,), seed=3)
    evaluation = LengthEvaluation(EvaluationSettings(batch_tokens=40), asked)
    *rows, about = evaluation.run(loaded, "positions", tmp_path, counter)
    starts = [0, (len(tokens) - last - 1) // 2, len(tokens) - last - 1]
    curve = bits_by_position(model, [tokens[s : s + last + 1] for s in starts], doubling_buckets(last))
    assert [row["bits_per_token"] for row in rows] == pytest.approx(curve.bits, rel=1e-5)
    assert [row["bits_per_byte"] for row in rows] == pytest.approx(
        [b * len(tokens) / size for b in curve.bits], rel=1e-5
    )
    assert {row["num_rows"] for row in rows} == {3}, "three stretches fit"
    assert about == {"trained_length": 256}
    found, _ = evaluation.run(loaded, "recall-4-16", tmp_path, counter)
    batch = make_batch(usable_tokens(len(tokenizer), [0, 1, 2, 5]), 4, 16, 64, 3, prefix=1)
    about = {"row": "recall", "num_pairs": 4, "length": 16}
    assert found == {**about, **asdict(recall(model, batch)), "chance": 0.25, "steps": 0}
    del model.config.max_position_embeddings
    monkeypatch.delattr(EflaConfig, "max_position_embeddings")  # as a Mamba of transformers has none
    whole = LengthSettings(text=str(text), positions=len(tokens) - 1)
    *rows, about = LengthEvaluation(EvaluationSettings(), whole).run(loaded, "positions", tmp_path, counter)
    assert (rows[-1]["end"], rows[-1]["num_rows"], about) == (len(tokens) - 1, 1, {"trained_length": 0})
    longer = LengthSettings(text=str(text), positions=len(tokens))
    with pytest.raises(ValueError, match="give a longer --text or fewer --positions"):
        LengthEvaluation(EvaluationSettings(), longer).run(loaded, "positions", tmp_path, counter)


def test_recall_after_training_on_it_is_that_of_the_trained_copy(folders, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 20)
    asked = LengthSettings(text=str(text), positions=100, rows=1, pairs=(2, 8), lengths=(16,), recall_steps=3, seed=5)
    assert asked.grid == [(2, 16)], "eight pairs do not fit into 16 tokens"
    settings = EvaluationSettings(batch_tokens=64)
    out, told = io.StringIO(), []
    monkeypatch.setattr(Counter, "begin", lambda self, total: told.append(-total))
    monkeypatch.setattr(Counter, "advance", lambda self, count: told.append(count))
    rows = LengthEvaluation(settings, asked).evaluate(models_of(folders, "efla"), tmp_path / "out", Console(file=out))
    assert told == [-100, 64, 36, -3, 1, 1, 1, -8, 3, 3, 2], "positions, steps of training, sequences"
    bits = [row["bits_per_byte"] for row in rows if row["row"] == "position"]
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(f"1/2  efla/positions  bits per byte {bits[0]:.3f} at 64, {bits[1]:.3f} at 100  ")
    (found,) = [row for row in rows if row["row"] == "recall"]
    usable = usable_tokens(256, [0])
    copied = finetune_on_recall(trained("efla"), usable, [(2, 16)], steps=3, seed=5, prefix=0, batch_tokens=64)
    expected = asdict(recall(copied, make_batch(usable, 2, 16, 8, 5, prefix=0)))
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["steps"] == 3
    recalled = f"accuracy {found['accuracy']:.3f}, among the values {found['among_values']:.3f}  "
    assert lines[1].startswith(f"2/2  efla/recall-2-16  {recalled}")
    assert rows[-1]["config"]["recall_grid"] == [[2, 16]]
    twin = tmp_path / "efla"
    trained("delta").save_pretrained(twin)
    with pytest.raises(ValueError, match=r"results of another model called 'efla' .*Choose another --output"):
        LengthEvaluation(settings, asked).evaluate([str(twin)], tmp_path / "out", quiet_console())
    assert LengthEvaluation(settings, asked).evaluate([], tmp_path / "out", quiet_console()) == rows
    with pytest.raises(ValueError, match="give at least one model"):
        LengthEvaluation(settings, asked).evaluate([], tmp_path / "none", quiet_console())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": 0}, "positions must be at least 1, got 0"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"recall_steps": -1}, "recall_steps must be at least 0, got -1"),
        ({"pairs": (1, 0)}, "pairs must be at least 1, got 0"),
        ({"lengths": (0,)}, "lengths must be at least 1, got 0"),
    ],
)
def test_impossible_lengths_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LengthSettings(**changes)
    assert LengthSettings(positions=1, rows=1, pairs=(1,), lengths=(4,)).grid == [(1, 4)]


def test_a_copy_with_int8_weights_cannot_be_trained_on_recall():
    with pytest.raises(
        ValueError, match="--recall-steps trains a copy of the model, and int8 weights cannot be trained"
    ):
        LengthEvaluation(EvaluationSettings(dtype="int8"), LengthSettings(recall_steps=2))


def test_a_corpus_is_read_as_text(tmp_path, monkeypatch):
    asked = []

    def load(*arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(test=np.frombuffer(" a\0ö".encode() + b"\xc3 ", np.uint8))  # cut inside of a letter

    monkeypatch.setattr(corpora, "load", load)
    monkeypatch.setattr(corpora, "find_in", lambda name, folder: asked.append((name, folder)) or folder)
    assert load_text(None, None) == ("python-docs", "a\n\nö")
    assert load_text(None, tmp_path) == ("novels", "a\n\nö")
    assert load_text("enwik8", tmp_path) == ("enwik8", "a\n\nö")
    assert asked == [("python-docs", None), ("novels", tmp_path), ("novels", tmp_path), ("enwik8", tmp_path)]


def test_the_text_of_long_contexts_is_the_best_there_is(folders, tmp_path):
    pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
    name, text = load_text(None, folders / "data")
    pages = tasks.local_records("wikitext", folders / "data")
    assert (name, text) == (
        "wikitext",
        "\n".join(tasks.definition("wikitext")["doc_to_target"](page) for page in pages),
    )
    name, text = load_text(None, None)
    test = corpora.load("python-docs", None).test.tobytes().decode()
    assert (name, text) == ("python-docs", test.replace("\0", "\n\n").strip())
    for sub in ("", "corpus"):
        (tmp_path / sub / sub).mkdir(parents=True, exist_ok=True)
        (tmp_path / sub / sub / "english_novels_98.tar.xz").write_bytes(b"")
        with pytest.raises(Exception, match="novels"):  # it is chosen, and is not one
            load_text(None, tmp_path / sub)
    with pytest.raises(FileNotFoundError, match="give --data DIR or set EFLA_DATA"):
        load_text("wikitext", None)
    with pytest.raises(FileNotFoundError, match="'nothing' is neither a file nor one of: wikitext, python-docs"):
        load_text("nothing", None)
