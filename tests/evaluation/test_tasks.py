"""The harness's tasks on local files: request by request what the harness itself builds from the hub's format."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from efla.data import files
from efla.evaluation import tasks
from efla.evaluation.table import COLUMNS
from efla.evaluation.tasks import PAPER_TASKS
from tests.evaluation.models import data_folder
from tests.evaluation.small_data import HUB, write_small_data

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
datasets = pytest.importorskip("datasets")


def hub_task(name: str, records: list[dict[str, Any]], folder: Path) -> Any:
    """The task as the harness itself loads it, through ``datasets.load_dataset``, from files with the hub's columns and types."""
    from lm_eval.api.task import ConfigurableTask

    table = datasets.Dataset.from_list(records)
    if name == "boolq":
        table = table.cast_column("label", datasets.ClassLabel(names=["False", "True"]))
    if name == "piqa":
        table = table.cast_column("label", datasets.ClassLabel(names=["0", "1"]))
    split = tasks.SOURCES[name].split
    file = folder / f"{name}.parquet"
    table.to_parquet(str(file))
    config = tasks.definition(name)
    # The hub's files, on this disk; every other line of the definition stays.
    config |= {
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file)}, "cache_dir": str(folder / "cache")},
    }
    config |= {"training_split": None} | ({"validation_split": None} if split == "test" else {})
    with tasks.silence_lm_eval():
        task = ConfigurableTask(config=config)
        task.set_config(key="num_fewshot", value=0)
    return task


def requests_of(task: Any) -> list[tuple[Any, ...]]:
    """Requests with the right answer."""
    with tasks.silence_lm_eval():
        task.build_all_requests(rank=0, world_size=1)
        docs = task.eval_docs
    answer = task.doc_to_text if task.config.task == "winogrande" else task.doc_to_target
    targets = [answer(doc) for doc in docs]
    return [
        (r.request_type, r.doc_id, r.idx, r.args, targets[r.doc_id])
        for r in sorted(task.instances, key=lambda r: (r.doc_id, r.idx))
    ]


def check_task(name: str, data: Path, hub_records: list[dict[str, Any]], folder: Path, limit: int | None = None) -> int:
    local = requests_of(tasks.load_task(name, data, limit))
    assert local == requests_of(hub_task(name, hub_records, folder))
    return len(local)


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_requests_from_local_files_are_those_from_the_hub_format(name, tmp_path):
    data = write_small_data(tmp_path / "data")
    records = tasks.local_records(name, data)
    assert [{key: record[key] for key in HUB[name][i]} for i, record in enumerate(records)] == HUB[name]
    assert check_task(name, data, HUB[name], tmp_path) >= 2


def hub_format(name: str, data: Path, limit: int | None) -> list[dict[str, Any]]:
    """The real records in the hub's format, converted here on our own from the published files."""
    source = [data / file for file in tasks.SOURCES[name].files]
    text = tasks.read_text(tasks.task_file(data, tasks.SOURCES[name].files[0], name))
    if name == "wikitext":
        pages, lines = [], []
        for line in text.split("\n"):
            if line.startswith(" = ") and not line.startswith(" = =") and line.endswith(" = "):
                pages.append("\n".join(lines))
                lines = []
            lines.append(line)
        pages.append("\n".join(lines))
        return [{"page": page} for page in pages[1:]][:limit]
    records = [json.loads(line) for line in text.splitlines() if line]
    if name == "piqa":
        labels = source[1].read_text().split()
        records = [{**r, "label": int(label)} for r, label in zip(records, labels, strict=True)]
    if name.startswith("arc"):
        records = [
            {
                "question": r["question"]["stem"],
                "choices": {key: [c[key] for c in r["question"]["choices"]] for key in ("text", "label")},
                "answerKey": r["answerKey"],
            }
            for r in records
        ]
    if name == "boolq":
        records = [{**r, "label": ["false", "true"].index(r["label"])} for r in records]
    return records[:limit]


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_requests_of_the_real_sets(name, tmp_path):
    data = data_folder()
    assert check_task(name, data, hub_format(name, data, 25), tmp_path, 25) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER_TASKS)
def test_every_request_of_the_real_sets(name, tmp_path):
    data = data_folder()
    check_task(name, data, hub_format(name, data, None), tmp_path)
    assert len(tasks.local_records(name, data)) == tasks.SOURCES[name].num_records


def test_words_are_counted_as_the_harness_counts_them():
    process = tasks.definition("wikitext")["process_results"]
    for record in HUB["wikitext"]:
        found = process(record, (-1.0,))
        pieces = re.split(r"\s+", record["page"])  # with the empty ones before the first space and after the last
        assert found["word_perplexity"] == (-1.0, len(pieces)) and pieces[0] == ""
        assert found["bits_per_byte"] == (-1.0, len(record["page"].encode()))


def test_an_article_is_read_as_running_text():
    read = tasks.definition("wikitext")["doc_to_target"]
    assert [read(record) for record in HUB["wikitext"]] == [
        " = First page =\n\nA line with words, and a hyphen-ated one (in brackets).\n\n== Section ==\n\n"
        'He said "yes" at 1,000°C.\n',
        " = Second page =\n\nThe players'game was lost 3.5 to 2; it's over.\n=== Deep ===\n",
    ]


def test_paper_stands_for_the_ten_tasks():
    assert tasks.expand(["paper"]) == list(PAPER_TASKS)
    assert len(PAPER_TASKS) == 10
    assert list(PAPER_TASKS) == list(dict.fromkeys(column.task for column in COLUMNS))
    assert tasks.expand(["sciq", "paper", "sciq"])[0] == "sciq"
    with pytest.raises(ValueError, match="at least one task"):
        tasks.expand([])


def test_without_a_folder_a_task_is_built_from_the_hub(monkeypatch, tmp_path):
    asked = []

    def hub(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        table = datasets.Dataset.from_list(HUB["piqa"]).cast_column("label", datasets.ClassLabel(names=["0", "1"]))
        return datasets.DatasetDict({"train": table, "validation": table})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    found = requests_of(tasks.load_task("piqa", None))
    assert found == requests_of(tasks.load_task("piqa", write_small_data(tmp_path)))
    assert [args for _, _, _, args, _ in found[:2]] == [
        ("Question: To boil an egg\nAnswer:", " put it in hot water"),
        ("Question: To boil an egg\nAnswer:", " put it in the sun"),
    ]
    assert "piqa" in str(asked[0])


def test_an_unknown_task_is_named_with_the_known_ones(monkeypatch):
    import lm_eval.tasks

    # The index of all the harness's tasks takes half a minute to build; its names are enough here.
    class Manager:
        all_tasks = ("hellaswag", "gsm8k")

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Manager)
    with pytest.raises(ValueError, match="unknown task 'helaswag'; did you mean 'hellaswag'"):
        tasks.load_task("helaswag", None)


def test_a_task_of_the_harness_is_loaded_by_name_and_a_group_is_not(monkeypatch):
    import lm_eval.tasks

    class Task:
        shots: int | None = None

        def get_config(self, key: str) -> Any:
            return {"num_fewshot": self.shots}[key]

        def set_config(self, key: str, value: Any) -> None:
            self.shots = {"num_fewshot": value}[key]

        def set_fewshot_seed(self, seed: int) -> None:
            self.seed = seed

    known = {"gsm8k": {"gsm8k": Task()}, "mmlu": {"a": Task(), "b": Task()}, "five": {"five": Task()}}
    known["five"]["five"].shots = 5

    class Manager:
        all_tasks = (*known, "broken")

        def load(self, names: list[str]) -> Any:
            (name,) = names
            return {"tasks": known[name]}

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Manager)
    task = tasks.load_task("gsm8k", None)
    assert task is known["gsm8k"]["gsm8k"]
    assert (task.shots, task.seed) == (0, 1234)
    assert tasks.load_task("five", None).shots == 5, "a task's own number of examples stays"
    with pytest.raises(ValueError, match="'mmlu' is a group of 2 tasks; name them one by one: a, b"):
        tasks.load_task("mmlu", None)
    with pytest.raises(
        RuntimeError, match=r"task 'broken' could not be loaded from .* hub: KeyError: 'broken'. It has no"
    ):
        tasks.load_task("broken", None)


def test_the_harness_is_quiet_only_inside():
    import logging

    import lm_eval.api.task
    from datasets.utils import tqdm as datasets_tqdm

    logger = logging.getLogger("lm-eval")
    level = logger.level
    with tasks.silence_lm_eval():
        assert logger.level == logging.ERROR
        assert list(lm_eval.api.task.tqdm([1, 2])) == [1, 2]
        assert lm_eval.api.task.tqdm([1]).disable
        assert lm_eval.api.task.tqdm([1], disable=False).disable
        assert datasets_tqdm([1]).disable
    assert logger.level == level
    assert not lm_eval.api.task.tqdm([1], file=io.StringIO()).disable


def test_without_files_and_without_network_the_error_says_what_is_missing(monkeypatch):
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(RuntimeError, match=r"'piqa'.*baber/piqa.*piqa_dev.jsonl and eval/piqa_dev-labels.lst.*--data"):
        tasks.load_task("piqa", None)


def test_missing_and_damaged_files_are_named(tmp_path):
    data = write_small_data(tmp_path)
    (data / "eval/sciq_test.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"task 'sciq' needs eval/sciq_test.jsonl"):
        tasks.load_task("sciq", data)
    (data / "eval/openbookqa_test.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"openbookqa_test.jsonl holds no records"):
        tasks.load_task("openbookqa", data)
    file = data / "eval/winogrande_xl_dev.jsonl"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(ValueError, match=r"winogrande_xl_dev.jsonl, line 2 is not JSON"):
        tasks.load_task("winogrande", data)
    (data / "eval/piqa_dev-labels.lst").write_text("0\n")
    with pytest.raises(ValueError, match="do not belong together"):
        tasks.load_task("piqa", data)
    packed = data / "wikitext-2/wiki.test.raw.xz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is damaged"):
        tasks.load_task("wikitext", data)
    (data / "lambada/lambada_test.jsonl").write_text('{"words": 1}\n')
    with pytest.raises(ValueError, match="line 1 lacks text"):
        tasks.load_task("lambada_openai", data)


FIELDS = {
    "lambada_openai": "text", "piqa": "goal sol1 sol2", "hellaswag": "ctx_a ctx_b activity_label endings label",
    "winogrande": "sentence option1 option2 answer", "arc_easy": "question answerKey", "boolq": "question passage label",
    "openbookqa": "question_stem choices answerKey",
    "sciq": "question distractor1 distractor2 distractor3 correct_answer support",
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_record_that_lacks_a_field_is_refused_by_name(name, tmp_path):
    data = write_small_data(tmp_path)
    file = data / tasks.SOURCES[name].files[0]
    record = json.loads(tasks.read_text(tasks.task_file(data, tasks.SOURCES[name].files[0], name)).splitlines()[0])
    for field in FIELDS[name].split():
        file.write_text(json.dumps({key: value for key, value in record.items() if key != field}) + "\n")
        with pytest.raises(ValueError, match=rf"line 1 lacks {field}; is it the published file\?"):
            tasks.local_records(name, data)


def test_records_without_a_number_are_counted_and_impossible_answers_named(tmp_path):
    arc, boolq = tmp_path / "eval/ARC-Easy-Test.jsonl", tmp_path / "eval/boolq_superglue_val.jsonl"
    write_small_data(tmp_path)
    question = {"stem": "Why?", "choices": [{"text": "So.", "label": "A"}]}
    records = [{"question": question, "answerKey": key} for key in "AAB"]
    arc.write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    assert [record["id"] for record in tasks.local_records("arc_easy", tmp_path)] == ["1", "2"]
    arc.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ValueError, match="record 3: answerKey 'B' is not among its choices"):
        tasks.local_records("arc_easy", tmp_path)
    records = [{"question": "q", "passage": "p", "label": label} for label in (True, "False", 1)]
    boolq.write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    assert tasks.local_records("boolq", tmp_path) == [
        {"question": "q", "passage": "p", "idx": 0, "label": 1},
        {"question": "q", "passage": "p", "idx": 1, "label": 0},
    ]
    boolq.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ValueError, match="record 3: label must be true or false, got 1"):
        tasks.local_records("boolq", tmp_path)
    (tmp_path / "eval/piqa_dev-labels.lst").write_text("0\n2\n")
    with pytest.raises(ValueError, match=r"got 2 entries \['0', '2'\]; the two files do not belong together"):
        tasks.local_records("piqa", tmp_path)


def test_the_data_folder_is_the_one_given_or_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EFLA_DATA", str(tmp_path))
    assert files.data_folder(None) == tmp_path
    with pytest.raises(FileNotFoundError, match=r"^--data is '.*nowhere', which is not a folder"):
        files.data_folder(tmp_path / "nowhere")
    monkeypatch.setenv("EFLA_DATA", "nowhere")
    with pytest.raises(FileNotFoundError, match=r"^EFLA_DATA is 'nowhere', which is not a folder"):
        files.data_folder(None)
    assert files.data_folder(tmp_path) == tmp_path
    monkeypatch.setenv("EFLA_DATA", "")
    assert files.data_folder(None) is None
    with pytest.raises(ValueError, match="unknown task with local data 'piqqa'; did you mean 'piqa'"):
        tasks.local_records("piqqa", tmp_path)
