"""Whole evaluations on a few records: rows, the harness's results, resumption, comparison, errors, the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from efla import cli
from efla.evaluation import local_data
from efla.evaluation.columns import PAPER_TASKS
from efla.evaluation.loading import load_model, names_of
from efla.experiments.framework.rows import read_rows
from tests.evaluation.models import FAMILIES, data_folder, llama, trained
from tests.evaluation.small_data import write_small_data

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from efla.evaluation.run import Settings, evaluate


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A data folder and models as they are saved."""
    root = tmp_path_factory.mktemp("evaluation")
    write_small_data(root / "data")
    for name in ("efla", "softmax"):
        trained(name).save_pretrained(root / "models" / name)
    llama().save_pretrained(root / "models" / "llama")
    return root


def quiet_console() -> Console:
    return Console(quiet=True)


def models_of(root: Path, *names: str) -> list[str]:
    return [str(root / "models" / name) for name in names]


@pytest.fixture(scope="module")
def evaluated(folders) -> Path:
    """All ten tasks on a recurrent model, a softmax model of ours and one of transformers."""
    output = folders / "out"
    settings = Settings(data=folders / "data")
    evaluate(models_of(folders, "efla", "softmax", "llama"), settings, output, quiet_console())
    return output


def test_an_evaluation_gives_rows_items_and_the_harness_own_results(evaluated):
    cells = [row for row in read_rows(evaluated) if row["row"] == "cell"]
    done = {(row["model"], row["task"]) for row in cells}
    assert {task for model, task in done if model == "efla"} == {*PAPER_TASKS, "wikitext_carried"}
    assert ("softmax", "wikitext_carried") not in done and ("llama", "piqa") in done
    for row in cells:
        assert row["digest"] and row["versions"]["lm-eval"] and row["num_items"] == 2
        assert (row["path"] == "state carried") == (row["task"] == "wikitext_carried")
    results = json.loads((evaluated / "lm_eval/efla/results.json").read_text())
    assert set(results["results"]) == set(PAPER_TASKS)
    assert {"acc,none", "acc_stderr,none", "acc_norm,none"} <= set(results["results"]["hellaswag"])
    assert results["n-shot"]["piqa"] == 0 and results["versions"]["hellaswag"] == 1.0
    items = [json.loads(line) for line in (evaluated / "items/efla/arc_easy.jsonl").read_text().splitlines()]
    assert [len(item["log_probs"]) for item in items] == [3, 4]
    assert not (evaluated / "responses").exists()


def test_a_finished_evaluation_is_not_run_again(evaluated, folders, monkeypatch):
    before = (evaluated / "rows.jsonl").read_bytes()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is left to evaluate")

    monkeypatch.setattr("efla.evaluation.run._harness", refuse)
    monkeypatch.setattr("efla.evaluation.run._carried", refuse)
    evaluate(models_of(folders, "efla", "llama"), Settings(data=folders / "data"), evaluated, quiet_console())
    assert (evaluated / "rows.jsonl").read_bytes() == before


def test_an_interrupted_task_goes_on_and_gives_the_same_rows(evaluated, folders, tmp_path, monkeypatch):
    from efla.evaluation.responses import ResponseLog

    source = models_of(folders, "efla")
    settings = Settings(tasks=("hellaswag", "piqa"), data=folders / "data", batch_tokens=64)
    add, kept = ResponseLog.add, []

    def interrupted(self: ResponseLog, answers: Any) -> None:
        add(self, answers)
        kept.extend(answers)
        if len(kept) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResponseLog, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(source, settings, tmp_path, quiet_console())
    assert len(list((tmp_path / "responses").iterdir())) == 1
    monkeypatch.setattr(ResponseLog, "add", add)
    evaluate(source, settings, tmp_path, quiet_console())
    whole = {row["task"]: row["metrics"] for row in read_rows(evaluated) if row.get("model") == "efla"}
    for row in read_rows(tmp_path):
        assert row["metrics"] == pytest.approx(whole[row["task"]])
    assert not (tmp_path / "responses").exists()


def test_another_model_of_the_same_name_and_other_settings_are_refused(evaluated, folders, tmp_path):
    twin = tmp_path / "efla"
    trained("delta").save_pretrained(twin)
    with pytest.raises(ValueError, match="another model called 'efla'"):
        evaluate([str(twin)], Settings(data=folders / "data"), evaluated, quiet_console())
    with pytest.raises(ValueError, match="limit: None there, 1 now"):
        evaluate([str(twin)], Settings(data=folders / "data", limit=1), evaluated, quiet_console())
    with pytest.raises(ValueError, match="limit must be at least 1"):
        Settings(limit=0)


def test_the_command_prints_the_table_and_compares(evaluated, folders, capsys):
    data = ["--data", str(folders / "data"), "--output", str(evaluated)]
    efla, softmax = models_of(folders, "efla", "softmax")
    assert cli.main(["eval", "--compare", efla, softmax, *data]) == 0
    shown = capsys.readouterr().out
    assert "Hella." in shown and "paper:" in shown and "95 % interval" in shown
    assert "chance" in (evaluated / "table.md").read_text()
    found = json.loads((evaluated / "comparison.json").read_text())
    assert found["a"] == "efla" and "mean" in found["differences"]
    wiki = found["differences"]["wikitext"]
    assert wiki["low"] <= wiki["b_minus_a"] <= wiki["high"]
    assert cli.main(["eval", "--output", str(evaluated), "--paper", "none"]) == 0  # what is there already
    assert "paper:" not in capsys.readouterr().out


def test_the_report_has_a_section_on_the_evaluation(evaluated, tmp_path):
    pytest.importorskip("jinja2")
    page = tmp_path / "report.html"
    assert cli.main(["report", str(evaluated), "--output", str(page)]) == 0
    text = page.read_text()
    assert "the paper&#39;s table" in text or "the paper's table" in text
    assert "<b>" in text and "62.2" in text and "43.11" in text
    assert "At such a size accuracies are at chance" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "neither a folder with a model nor a name on the hub"),
        (["efla-340m"], "preset without weights"),
        ([], "give at least one model"),
    ],
)
def test_a_model_that_is_not_there_is_named(arguments, message, folders, tmp_path, capsys):
    options = ["--data", str(folders / "data"), "--output", str(tmp_path / "out")]
    assert cli.main(["eval", *arguments, *options]) == 1
    assert message in capsys.readouterr().err


def test_bad_checkpoints_are_named(folders, tmp_path, capsys):
    data = ["--data", str(folders / "data"), "--output", str(tmp_path / "out")]
    folder = tmp_path / "model"
    folder.mkdir()
    assert cli.main(["eval", str(folder), *data]) == 1
    assert "has no config.json" in capsys.readouterr().err
    shutil.copytree(folders / "models/efla", folder, dirs_exist_ok=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert cli.main(["eval", str(folder), *data]) == 1
    assert "model.safetensors is damaged" in capsys.readouterr().err
    weights.unlink()
    assert cli.main(["eval", str(folder), *data]) == 1
    assert "holds no weights" in capsys.readouterr().err
    (folder / "config.json").write_text("{")
    weights.write_bytes(b"")
    assert cli.main(["eval", str(folder), *data]) == 1
    assert "could not be read" in capsys.readouterr().err


def test_a_training_run_goes_by_its_own_name(folders, tmp_path):
    for run in ("one", "two"):
        shutil.copytree(folders / "models/efla", tmp_path / run / "model")
        (tmp_path / run / "config.json").write_text('{"steps": 10}')  # the training's, not the model's
    sources = [str(tmp_path / "one"), str(tmp_path / "two/model"), str(folders / "models/efla")]
    assert list(names_of(sources).values()) == ["one", "two", "efla"]
    digests = {load_model(source).digest for source in sources}
    assert len(digests) == 1
    twins = names_of(["a/x/model", "b/x"])
    assert twins == {"a/x/model": "a/x", "b/x": "b/x"}


def test_a_vocabulary_without_a_tokenizer_is_named(folders, tmp_path, capsys):
    llama(300).save_pretrained(tmp_path / "model")
    data = ["--data", str(folders / "data"), "--output", str(tmp_path / "out")]
    assert cli.main(["eval", str(tmp_path / "model"), *data]) == 1
    assert "has no tokenizer and its vocabulary of 300 is not bytes" in capsys.readouterr().err


def test_long_contexts_give_curves_figures_and_a_section(folders, tmp_path, capsys):
    pytest.importorskip("matplotlib")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "llama"])
def test_all_ten_tasks_run_offline_on_real_data(name, tmp_path):
    """Each rule family and a transformers architecture, the first ten items of every real set."""
    data = data_folder()
    model = llama() if name == "llama" else trained(name)
    model.save_pretrained(tmp_path / name)
    rows = evaluate([str(tmp_path / name)], Settings(data=data, limit=10), tmp_path / "out", quiet_console())
    done = {row["task"]: row for row in rows}
    assert set(PAPER_TASKS) <= set(done)
    for task in PAPER_TASKS:
        assert done[task]["num_items"] == 10
        assert done[task]["num_items_in_set"] == local_data.SOURCES[task].num_records
