"""The tasks of lm-evaluation-harness, with the paper's ten read from local files where a data folder is given.

Prompts, choices and metrics are the harness's; only the source of the records changes. The data folder (``--data`` or
``EFLA_DATA``) holds ``eval/``, ``lambada/`` and ``wikitext-2/``; docs/howto/evaluation.md lists the files. Each may be
compressed: NAME, NAME.xz or NAME.gz.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla.data.files import find_file, json_lines, named_damage, read_unpacked
from efla.errors import check_names, import_optional, unknown_name
from efla.runs.records import Record


@dataclass(frozen=True)
class TaskSource:
    """One of the paper's tasks: its definition in the harness, its local files, and how to read them.

    split: the name of the scored split on the hub. num_records: its published size.
    """

    definition: str
    files: tuple[str, ...]
    split: str
    num_records: int
    read: Callable[..., list[Record]]


def require_lm_eval() -> None:
    """Raise an error that says what to install if lm-evaluation-harness is missing."""
    import_optional("lm_eval", "evaluation needs lm-evaluation-harness: pip install 'efla[eval]'")


def expand(names: Sequence[str]) -> list[str]:
    """Task names without duplicates; "paper" expands to the paper's ten."""
    found = [task for name in names for task in (PAPER_TASKS if name == "paper" else (name,))]
    if not found:
        raise ValueError("give at least one task, such as --tasks paper or --tasks piqa lambada_openai")
    return list(dict.fromkeys(found))


def load_task(name: str, data: Path | None, limit: int | None = None, *, metrics: Sequence[str] = ()) -> Any:
    """A zero-shot task of the harness.

    The paper's tasks are read from ``data`` if it is given; others come from the Hugging Face hub or its local cache.
    metrics: mean metrics, such as "acc_norm", that the harness computes in addition to those of the task's definition.
    """
    require_lm_eval()
    with silence_lm_eval():
        task = _load_paper(name, data, limit, metrics) if name in SOURCES else _load_other(name)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return task


def definition(name: str) -> Record:
    """The harness's definition of one of the paper's tasks."""
    require_lm_eval()
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(Path(lm_eval.tasks.__file__).parent / SOURCES[name].definition, resolve_func=True))


def _load_paper(name: str, data: Path | None, limit: int | None, metrics: Sequence[str]) -> Any:
    """One of the paper's tasks. Local files hold only the scored split."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    config, split, files = definition(name), SOURCES[name].split, " and ".join(SOURCES[name].files)
    own = {metric["metric"] for metric in config["metric_list"]}
    added = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics if m not in own]
    config["metric_list"] = [*config["metric_list"], *added]
    if data is not None:
        table = Dataset.from_list(local_records(name, data, limit))
        config |= {"custom_dataset": lambda **_: {split: table}, "training_split": None}
        if split == "test":
            config["validation_split"] = None
        return ConfigurableTask(config=config)
    advice = f"Without a network, pass a folder that holds {files} with --data DIR or EFLA_DATA"
    with _from_hub(name, f" ({config['dataset_path']})", advice):
        return ConfigurableTask(config=config)


def _load_other(name: str) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_tasks:
        raise unknown_name("task", name, ["paper", *PAPER_TASKS]) from None
    with _from_hub(name, "", f"It has no local files (tasks that have: {', '.join(PAPER_TASKS)})"):
        tasks = manager.load([name])["tasks"]
    if len(tasks) != 1:
        raise ValueError(f"{name!r} is a group of {len(tasks)} tasks; name them one by one: {', '.join(tasks)}")
    return next(iter(tasks.values()))


@contextmanager
def _from_hub(name: str, where: str, advice: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets, huggingface_hub and their HTTP libraries each raise their own
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        message = f"task {name!r} could not be loaded from the Hugging Face hub{where}: {reason}. {advice}"
        raise RuntimeError(message) from error


@contextmanager
def silence_lm_eval() -> Iterator[None]:
    """Hide the progress bars of the harness and its log messages below errors."""
    from tqdm import tqdm

    start = tqdm.__init__
    loggers = {name: logging.getLogger(name).level for name in ("lm_eval", "lm-eval")}
    try:
        tqdm.__init__ = lambda self, *args, **kwargs: start(self, *args, **{**kwargs, "disable": True})
        for name in loggers:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        tqdm.__init__ = start
        for name, level in loggers.items():
            logging.getLogger(name).setLevel(level)


def local_records(task: str, data: Path, limit: int | None = None) -> list[Record]:
    """The scored records of a task in the hub's format and the published order; the first ``limit`` if given."""
    check_names("task with local data", [task], SOURCES)
    source = SOURCES[task]
    paths = [task_file(data, name, task) for name in source.files]
    found = source.read(*paths)
    if not found:
        raise ValueError(f"{paths[0]} holds no records; expected {source.num_records:,} for task {task!r}")
    return found[:limit]


def task_file(data: Path, name: str, task: str) -> Path:
    """The file of that name, compressed or not; raises an error that names the missing file."""
    file = find_file([data], name, f"{name}.xz", f"{name}.gz")
    if file is None:
        raise FileNotFoundError(
            f"task {task!r} needs {name} (or {name}.xz, {name}.gz) in {data}, which has no such file; pass another folder "
            "with --data, or omit --data and unset EFLA_DATA: efla eval then downloads from the Hugging Face hub, and efla "
            "reproduce skips these sets"
        )
    return file


def read_text(path: Path) -> str:
    """The text of a file, decompressed by its suffix; raises ``ValueError`` if it is damaged or not UTF-8."""
    with named_damage(path):
        return read_unpacked(path).decode("utf-8")


def _json_lines(path: Path, *fields: str) -> list[Record]:
    """JSON objects, one per line, that have at least these fields."""
    found = []
    for label, record in json_lines(str(path), read_unpacked(path).split(b"\n")):
        missing = [field for field in fields if not isinstance(record, dict) or field not in record]
        if missing:
            raise ValueError(f"{label} lacks {', '.join(missing)}; is it the published file?")
        found.append(record)
    return found


def _reader(*fields: str) -> Callable[[Path], list[Record]]:
    """For files that already are in the hub's format."""
    return lambda path: _json_lines(path, *fields)


def _piqa(path: Path, labels: Path) -> list[Record]:
    found = _json_lines(path, "goal", "sol1", "sol2")
    answers = read_text(labels).split()
    if len(answers) != len(found) or not set(answers) <= {"0", "1"}:
        raise ValueError(
            f"{labels} must hold one 0 or 1 for each of the {len(found)} lines of {path.name}, got {len(answers)} entries "
            f"{sorted(set(answers))[:4]}; the two files do not belong together"
        )
    fields = ("goal", "sol1", "sol2")
    return [{**{f: r[f] for f in fields}, "label": int(answer)} for r, answer in zip(found, answers, strict=True)]


def _arc(path: Path) -> list[Record]:
    found = []
    for number, record in enumerate(_json_lines(path, "question", "answerKey"), 1):
        choices = {key: [choice[key] for choice in record["question"]["choices"]] for key in ("text", "label")}
        if record["answerKey"] not in choices["label"]:
            raise ValueError(f"{path}, record {number}: answerKey {record['answerKey']!r} is not among its choices")
        about = {"id": record.get("id", str(number)), "question": record["question"]["stem"]}
        found.append({**about, "choices": choices, "answerKey": record["answerKey"]})
    return found


def _boolq(path: Path) -> list[Record]:
    found = []
    for number, record in enumerate(_json_lines(path, "question", "passage", "label"), 1):
        label = str(record["label"]).lower()  # the published file has the string "true", not JSON's true
        if label not in ("true", "false"):
            raise ValueError(f"{path}, record {number}: label must be true or false, got {record['label']!r}")
        fields = {"question": record["question"], "passage": record["passage"]}
        found.append({**fields, "idx": record.get("idx", number - 1), "label": int(label == "true")})
    return found


def _wikitext(path: Path) -> list[Record]:
    """One record per article. An article starts at a line `` = Title = ``; more equals signs start a section."""
    pages: list[str] = []
    lines: list[str] = []
    for line in read_text(path).split("\n"):
        stripped = line.replace("= = =", "===").replace("= =", "==").strip()
        if stripped.startswith("= ") and stripped.endswith(" ="):
            pages.append("\n".join(lines))
            lines = []
        lines.append(line)
    pages.append("\n".join(lines))
    return [{"page": page} for page in pages if page.strip()]


_HELLASWAG = _reader("ctx_a", "ctx_b", "activity_label", "endings", "label")
_OPENBOOKQA = _reader("question_stem", "choices", "answerKey")
_WINOGRANDE = _reader("sentence", "option1", "option2", "answer")
_SCIQ = _reader("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support")

SOURCES = {
    name: TaskSource(definition, tuple(files.split()), split, num_records, read)
    for name, definition, files, split, num_records, read in (
        ("wikitext", "wikitext/wikitext.yaml", "wikitext-2/wiki.test.raw", "test", 62, _wikitext),
        ("lambada_openai", "lambada/lambada_openai.yaml", "lambada/lambada_test.jsonl", "test", 5153, _reader("text")),
        ("piqa", "piqa/piqa.yaml", "eval/piqa_dev.jsonl eval/piqa_dev-labels.lst", "validation", 1838, _piqa),
        ("hellaswag", "hellaswag/hellaswag.yaml", "eval/hellaswag_val.jsonl", "validation", 10042, _HELLASWAG),
        ("winogrande", "winogrande/default.yaml", "eval/winogrande_xl_dev.jsonl", "validation", 1267, _WINOGRANDE),
        ("arc_easy", "arc/arc_easy.yaml", "eval/ARC-Easy-Test.jsonl", "test", 2376, _arc),
        ("arc_challenge", "arc/arc_challenge.yaml", "eval/ARC-Challenge-Test.jsonl", "test", 1172, _arc),
        ("boolq", "super_glue/boolq/default.yaml", "eval/boolq_superglue_val.jsonl", "validation", 3270, _boolq),
        ("openbookqa", "openbookqa/openbookqa.yaml", "eval/openbookqa_test.jsonl", "test", 500, _OPENBOOKQA),
        ("sciq", "sciq/sciq.yaml", "eval/sciq_test.jsonl", "test", 1000, _SCIQ),
    )
}
PAPER_TASKS = tuple(SOURCES)
