"""Whole evaluations on a few records: rows, the harness's results, resumption, comparison, errors, the report."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from efla import cli
from efla.evaluation import ByteTokenizer, Request, score, tasks
from efla.evaluation.items import read_items
from efla.evaluation.responses import ResponseLog
from efla.evaluation.tasks import PAPER_TASKS
from efla.models import loading
from efla.models.loading import load_model, names_of
from efla.runs.rows import read_rows
from tests.evaluation.models import FAMILIES, data_folder, evaluate, llama, models_of, quiet_console, trained
from tests.evaluation.small_data import HUB

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from efla.evaluation.run import EvaluationSettings, TaskEvaluation


@pytest.fixture(scope="module")
def evaluated(folders) -> Path:
    """All ten tasks on a recurrent model, a softmax model of ours and one of transformers."""
    output = folders / "out"
    settings = EvaluationSettings(data=folders / "data")
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


def test_a_row_says_all_about_how_it_was_made(evaluated, folders):
    """Every field, so that none is lost or renamed without notice."""
    rows = {(row["model"], row["task"]): row for row in read_rows(evaluated) if row["row"] == "cell"}
    model = trained("efla")
    parameters = sum(p.numel() for p in model.parameters())
    protocol = {"limit": None, "max_length": None, "tokenizer": None, "dtype": "auto", "num_fewshot": 0}
    common = {
        "row": "cell", "rows": 1, "model": "efla", "num_items": 2, "data": "local files", "model_type": "efla",
        "mixers": "efla x 2", "parameters": parameters, "vocabulary": 256, "tokens": "bytes", "max_length": 256,
        "threads": torch.get_num_threads(), "config": {**protocol, "batch_tokens": 4096, "share": True},
        "digest": load_model(models_of(folders, "efla")[0]).digest,
    }  # fmt: skip
    for task, path, size, metrics in (
        ("piqa", "shared prefill", 1838, {"acc", "acc_norm"}),
        ("lambada_openai", "shared prefill", 5153, {"perplexity", "acc", "bits_per_byte"}),
        ("wikitext_carried", "state carried", 62, {"word_perplexity", "byte_perplexity", "bits_per_byte"}),
    ):
        row = rows["efla", task]
        own = {"cell": f"efla/{task}", "task": task, "path": path, "num_items_in_set": size}
        assert {key: row[key] for key in {**common, **own}} == {**common, **own}
        assert set(row["metrics"]) == set(row["standard_errors"]) == metrics
        assert set(row) - set(common) - set(own) == {
            "metrics", "standard_errors", "wall_seconds", "started", "versions", "commit", "machine",
        }  # fmt: skip
        assert 0 < row["wall_seconds"] == round(row["wall_seconds"], 3) < 600
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["started"])
        assert {"lm-eval", "transformers", "torch"} <= set(row["versions"])
    assert rows["llama", "piqa"]["mixers"] == rows["llama", "piqa"]["model_type"] == "llama"
    results = json.loads((evaluated / "lm_eval/efla/results.json").read_text())
    assert results["config"] == {
        "model": "efla", "model_num_parameters": parameters, "model_dtype": "torch.float32", "limit": None,
        "batch_size": 4096, "device": "cpu", "digest": common["digest"],
    }  # fmt: skip
    assert (results["model_name"], results["max_length"]) == ("efla", 256)
    assert results["n-samples"]["piqa"] == {"original": 1838, "effective": 2}
    assert {"lm_eval_version", "transformers_version"} <= set(results)
    assert results["results"]["piqa"]["acc_stderr,none"] == rows["efla", "piqa"]["standard_errors"]["acc"]


def test_int8_weights_are_evaluated_as_int8(folders, tmp_path):
    scores = {}
    for dtype in ("auto", "int8"):
        settings = EvaluationSettings(data=folders / "data", tasks=("wikitext",), limit=1, dtype=dtype)
        row = evaluate(models_of(folders, "efla"), settings, tmp_path / dtype, quiet_console())[0]
        assert row["parameters"] == sum(p.numel() for p in trained("efla").parameters())
        scores[dtype] = row["metrics"]["bits_per_byte"]
        results = json.loads((tmp_path / dtype / "lm_eval/efla/results.json").read_text())
        stored = "int8" if dtype == "int8" else "torch.float32"
        assert results["config"]["model_dtype"] == stored
    assert scores["int8"] != scores["auto"] == pytest.approx(scores["int8"], rel=0.01)


def test_a_carried_state_gives_the_likelihood_of_whole_articles(folders, tmp_path):
    """In windows of 32 bytes, which would see little of an article, and as the sum over its items."""
    settings = EvaluationSettings(
        data=folders / "data", tasks=("wikitext",), max_length=32, limit=1, share=False, samples=True
    )
    evaluate(models_of(folders, "efla"), settings, tmp_path, quiet_console())
    rows = {row["task"]: row for row in read_rows(tmp_path)}
    (record,) = tasks.local_records("wikitext", folders / "data", 1)
    text = ByteTokenizer().encode(tasks.definition("wikitext")["doc_to_target"](record), add_special_tokens=False)
    whole = score(trained("efla"), [Request([0, *text], len(text))])[0].log_prob
    (item,) = read_items(tmp_path / "items/efla/wikitext_carried.jsonl")
    size = len(record["page"].encode())
    words = len(re.split(r"\s+", record["page"]))
    assert item == {"doc_id": 0, "log_prob": pytest.approx(whole, abs=1e-3), "words": words, "bytes": size}
    carried, windows = rows["wikitext_carried"], rows["wikitext"]
    assert carried["metrics"] == {
        "word_perplexity": pytest.approx(math.exp(-whole / words), rel=1e-4),
        "byte_perplexity": pytest.approx(math.exp(-whole / size), rel=1e-4),
        "bits_per_byte": pytest.approx(-whole / size / math.log(2), rel=1e-4),
    }
    assert (carried["num_items"], windows["num_items"], windows["max_length"]) == (1, 1, 32)
    assert windows["path"] == "plain"
    assert windows["metrics"]["bits_per_byte"] != pytest.approx(carried["metrics"]["bits_per_byte"], rel=1e-3)
    assert carried["config"]["limit"] == 1
    (sample,) = (tmp_path / "lm_eval/efla/samples_wikitext.jsonl").read_text().splitlines()
    assert json.loads(sample)["doc"] == record and "000 ° C" in sample, "readable as it is"


def test_a_task_from_the_hub_is_called_that(folders, tmp_path, monkeypatch):
    import datasets

    table = datasets.Dataset.from_list(HUB["piqa"]).cast_column("label", datasets.ClassLabel(names=["0", "1"]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.DatasetDict(train=table, validation=table))
    (row,) = evaluate(
        models_of(folders, "efla"), EvaluationSettings(tasks=("piqa",), limit=1), tmp_path, quiet_console()
    )
    assert (row["data"], row["num_items"], row["num_items_in_set"]) == ("Hugging Face hub", 1, 2)


def test_answers_are_kept_for_one_model_one_task_and_one_protocol(folders, tmp_path, monkeypatch):
    seen = []

    class Log(ResponseLog):
        def __init__(self, path: Path, belongs_to: dict[str, Any]) -> None:
            seen.append((path, belongs_to))
            super().__init__(path, belongs_to)

    monkeypatch.setattr("efla.evaluation.run.ResponseLog", Log)
    settings = EvaluationSettings(tasks=("piqa",), data=folders / "data", limit=1, max_length=100, tokenizer="bytes")
    evaluate(models_of(folders, "efla"), settings, tmp_path, quiet_console())
    ((path, belongs_to),) = seen
    assert path == tmp_path / "responses" / "efla__piqa.jsonl"
    digest = load_model(models_of(folders, "efla")[0]).digest
    assert belongs_to == {"digest": digest, "task": "piqa", **TaskEvaluation(settings).protocol}
    assert belongs_to["max_length"] == 100


def test_lines_on_the_console_tell_what_is_done_and_what_is_left_out(folders, tmp_path):
    settings = EvaluationSettings(tasks=("wikitext",), data=folders / "data", limit=1)
    for when in (r"\d+\.\ds  about \S+ left", "from an earlier run"):
        out = io.StringIO()
        evaluate(models_of(folders, "softmax"), settings, tmp_path, Console(file=out))
        first, second = out.getvalue().splitlines()
        assert re.fullmatch(
            r"1/2  softmax/wikitext  word_perplexity \S+  byte_perplexity \S+  bits_per_byte \S+  " + when, first
        )
        assert second.startswith("2/2  softmax/wikitext_carried  left out: its layers are softmax attention")


def test_a_finished_evaluation_is_not_run_again(evaluated, folders, monkeypatch):
    before = (evaluated / "rows.jsonl").read_bytes()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is left to evaluate")

    monkeypatch.setattr("efla.evaluation.run.load_task", refuse)
    evaluate(models_of(folders, "efla", "llama"), EvaluationSettings(data=folders / "data"), evaluated, quiet_console())
    assert (evaluated / "rows.jsonl").read_bytes() == before


def test_an_interrupted_task_goes_on_and_gives_the_same_rows(evaluated, folders, tmp_path, monkeypatch):
    source = models_of(folders, "efla")
    settings = EvaluationSettings(tasks=("hellaswag", "piqa"), data=folders / "data", batch_tokens=64)
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
        evaluate([str(twin)], EvaluationSettings(data=folders / "data"), evaluated, quiet_console())
    with pytest.raises(ValueError, match="limit: None there, 1 now"):
        evaluate([str(twin)], EvaluationSettings(data=folders / "data", limit=1), evaluated, quiet_console())
    with pytest.raises(ValueError, match="limit must be at least 1"):
        EvaluationSettings(limit=0)


def test_the_command_prints_the_table_and_compares(evaluated, folders, capsys):
    data = ["--data", str(folders / "data"), "--output", str(evaluated)]
    efla, softmax = models_of(folders, "efla", "softmax")
    assert cli.main(["eval", "--compare", efla, softmax, *data]) == 0
    shown = capsys.readouterr().out
    assert "Hella." in shown and "DeltaNet" in shown and "95 % interval" in shown
    assert shown.splitlines()[-1] == f"next:  efla report {evaluated}"
    assert "chance" in (evaluated / "table.md").read_text()
    found = json.loads((evaluated / "comparison.json").read_text())
    assert found["a"] == "efla" and "mean" in found["differences"]
    wiki = found["differences"]["wikitext"]
    assert wiki["low"] <= wiki["b_minus_a"] <= wiki["high"]
    assert cli.main(["eval", "--output", str(evaluated), "--paper", "none"]) == 0  # what is there already
    assert "DeltaNet" not in capsys.readouterr().out
    assert cli.main(["eval", "--output", str(evaluated), "--json", "--quiet"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == read_rows(evaluated)
    assert cli.main(["eval", "--compare", efla, softmax, "--json", *data]) == 1
    assert "--compare would do nothing with --json" in capsys.readouterr().err


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
    assert re.search(r"could not be read: \w+Error: \S", capsys.readouterr().err)


def test_a_training_run_goes_by_its_own_name(folders, tmp_path):
    for run in ("one", "two"):
        shutil.copytree(folders / "models/efla", tmp_path / run / "model")
        (tmp_path / run / "config.json").write_text('{"steps": 10}')  # the training's, not the model's
    sources = [str(tmp_path / "one"), str(tmp_path / "two/model"), str(folders / "models/efla")]
    assert list(names_of(sources).values()) == ["one", "two", "efla"]
    digests = {load_model(source).digest for source in sources}
    assert len(digests) == 1
    weights = tmp_path / "two/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert load_model(sources[1]).digest not in digests, "one byte of the weights differs"
    (tmp_path / "one/model/config.json").write_text((tmp_path / "two/model/config.json").read_text() + " ")
    assert load_model(sources[0]).digest not in digests
    assert loading._digest(Path("owner/name"), SimpleNamespace(_commit_hash="abc")) == "abc"
    assert loading._digest(Path("owner/name"), SimpleNamespace()) == "unknown"
    assert load_model(sources[2]).name == sources[2]
    assert (load_model(sources[2]).max_length, load_model(sources[2], max_length=7).max_length) == (256, 7)
    twins = names_of(["a/x/model", "b/x"])
    assert twins == {"a/x/model": "a/x", "b/x": "b/x"}


def test_pickled_weights_are_never_asked_for(folders, monkeypatch):
    import transformers

    asked: dict[str, Any] = {}

    def from_pretrained(source: str, **options: Any) -> Any:
        asked.update(options)
        return trained("efla")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_model(models_of(folders, "efla")[0], dtype="bfloat16")
    assert asked == {"dtype": "bfloat16", "use_safetensors": True}


def test_a_vocabulary_without_a_tokenizer_is_named(folders, tmp_path, capsys):
    llama(300).save_pretrained(tmp_path / "model")
    data = ["--data", str(folders / "data"), "--output", str(tmp_path / "out")]
    assert cli.main(["eval", str(tmp_path / "model"), *data]) == 1
    assert "has no tokenizer and its vocabulary of 300 is not bytes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "llama"])
def test_all_ten_tasks_run_offline_on_real_data(name, tmp_path):
    """Each rule family and a transformers architecture, the first ten items of every real set."""
    data = data_folder()
    model = llama() if name == "llama" else trained(name)
    model.save_pretrained(tmp_path / name)
    rows = evaluate([str(tmp_path / name)], EvaluationSettings(data=data, limit=10), tmp_path / "out", quiet_console())
    done = {row["task"]: row for row in rows}
    assert set(PAPER_TASKS) <= set(done)
    for task in PAPER_TASKS:
        assert done[task]["num_items"] == 10
        assert done[task]["num_items_in_set"] == tasks.SOURCES[task].num_records
