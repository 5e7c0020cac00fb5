"""The paper's test sets from local files, as records in the format of their data sets on the Hugging Face hub.

The folder given by ``--data`` or ``EFLA_DATA`` holds ``eval/``, ``lambada/`` and ``wikitext-2/`` (docs/evaluation.md lists
the files). A file may be packed: NAME, NAME.xz or NAME.gz.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla.errors import unknown_name

Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a task's records are: files, the split they are on the hub, their published number, and how to read one."""

    files: tuple[str, ...]
    split: str
    num_records: int
    read: Callable[..., list[Record]]


def folder(data: str | Path | None) -> Path | None:
    """The data folder: the one given, else EFLA_DATA's, else ``None``. A folder that is not there is an error."""
    given = str(data) if data is not None else os.environ.get("EFLA_DATA") or None
    if given is None:
        return None
    path = Path(given)
    if not path.is_dir():
        name = "--data" if data is not None else "EFLA_DATA"
        raise FileNotFoundError(f"{name} is {given!r}, which is not a folder")
    return path


def records(task: str, data: Path, limit: int | None = None) -> list[Record]:
    """The records that the task is scored on, in the order of the published files; the first ``limit`` if given."""
    if task not in SOURCES:
        raise unknown_name("task with local data", task, SOURCES)
    source = SOURCES[task]
    paths = [find(data, name, task) for name in source.files]
    found = source.read(*paths)
    if not found:
        raise ValueError(f"{paths[0]} holds no records; expected {source.num_records:,} for task {task!r}")
    return found[:limit]


def find(data: Path, name: str, task: str) -> Path:
    """The file of that name, packed or not, or an error that names what is missing."""
    for suffix in ("", ".xz", ".gz"):
        path = data / (name + suffix)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"task {task!r} needs {name} (or {name}.xz, {name}.gz) in {data}, which has no such file; give another folder with "
        "--data, or leave --data out and unset EFLA_DATA: efla eval then downloads from the Hugging Face hub, and efla reproduce "
        "does without these sets"
    )


def read_text(path: Path) -> str:
    """The text of a file, unpacked by its suffix; damaged or non-UTF-8 files are named."""
    try:
        if path.suffix == ".xz":
            content = lzma.decompress(path.read_bytes())
        elif path.suffix == ".gz":
            content = gzip.decompress(path.read_bytes())
        else:
            content = path.read_bytes()
        return content.decode("utf-8")
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy or download it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); copy or download it again") from error


def _lines(path: Path, fields: Iterable[str]) -> list[Record]:
    """JSON objects, one a line, with at least these fields."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}); the file is cut off or damaged, copy or download it again"
            ) from error
        missing = [field for field in fields if not isinstance(record, dict) or field not in record]
        if missing:
            raise ValueError(f"{path}, line {number} lacks {', '.join(missing)}; is it the published file?")
        found.append(record)
    return found


def _hellaswag(path: Path) -> list[Record]:
    return _lines(path, ("ctx_a", "ctx_b", "activity_label", "endings", "label"))


def _piqa(path: Path, labels: Path) -> list[Record]:
    found = _lines(path, ("goal", "sol1", "sol2"))
    answers = read_text(labels).split()
    if len(answers) != len(found) or not set(answers) <= {"0", "1"}:
        raise ValueError(
            f"{labels} must hold one 0 or 1 for each of the {len(found)} lines of {path.name}, got {len(answers)} entries "
            f"{sorted(set(answers))[:4]}; the two files do not belong together"
        )
    return [
        {"goal": r["goal"], "sol1": r["sol1"], "sol2": r["sol2"], "label": int(answer)}
        for r, answer in zip(found, answers, strict=True)
    ]


def _winogrande(path: Path) -> list[Record]:
    found = _lines(path, ("sentence", "option1", "option2", "answer"))
    for number, record in enumerate(found, 1):
        if "_" not in record["sentence"] or record["answer"] not in ("1", "2"):
            raise ValueError(f"{path}, record {number}: expected a gap '_' in the sentence and an answer '1' or '2'")
    return found


def _arc(path: Path) -> list[Record]:
    found = []
    for number, record in enumerate(_lines(path, ("question", "answerKey")), 1):
        choices = record["question"]["choices"]
        labels = [choice["label"] for choice in choices]
        if record["answerKey"] not in labels:
            raise ValueError(f"{path}, record {number}: answerKey {record['answerKey']!r} is not among {labels}")
        found.append(
            {
                "id": record.get("id", str(number)),
                "question": record["question"]["stem"],
                "choices": {"text": [choice["text"] for choice in choices], "label": labels},
                "answerKey": record["answerKey"],
            }
        )
    return found


def _boolq(path: Path) -> list[Record]:
    found = []
    for number, record in enumerate(_lines(path, ("question", "passage", "label")), 1):
        label = str(record["label"]).lower()  # the file says "true", JSON true would do as well
        if label not in ("true", "false"):
            raise ValueError(f"{path}, record {number}: label must be true or false, got {record['label']!r}")
        fields = {"question": record["question"], "passage": record["passage"]}
        found.append({**fields, "idx": record.get("idx", number - 1), "label": int(label == "true")})
    return found


def _openbookqa(path: Path) -> list[Record]:
    return _lines(path, ("question_stem", "choices", "answerKey"))


def _sciq(path: Path) -> list[Record]:
    return _lines(path, ("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"))


def _lambada(path: Path) -> list[Record]:
    return _lines(path, ("text",))


def _wikitext(path: Path) -> list[Record]:
    return [{"page": page} for page in wikitext_pages(read_text(path))]


def wikitext_pages(text: str) -> list[str]:
    """The articles: a new one starts at each line of the form `` = Title = `` (two equals signs or more are sections)."""
    pages: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        stripped = line.replace("= = =", "===").replace("= =", "==").strip()
        if stripped.startswith("= ") and stripped.endswith(" ="):
            pages.append("\n".join(lines))
            lines = []
        lines.append(line)
    pages.append("\n".join(lines))
    return [page for page in pages if page.strip()]


SOURCES: dict[str, Source] = {
    "wikitext": Source(("wikitext-2/wiki.test.raw",), "test", 62, _wikitext),
    "lambada_openai": Source(("lambada/lambada_test.jsonl",), "test", 5153, _lambada),
    "piqa": Source(("eval/piqa_dev.jsonl", "eval/piqa_dev-labels.lst"), "validation", 1838, _piqa),
    "hellaswag": Source(("eval/hellaswag_val.jsonl",), "validation", 10042, _hellaswag),
    "winogrande": Source(("eval/winogrande_xl_dev.jsonl",), "validation", 1267, _winogrande),
    "arc_easy": Source(("eval/ARC-Easy-Test.jsonl",), "test", 2376, _arc),
    "arc_challenge": Source(("eval/ARC-Challenge-Test.jsonl",), "test", 1172, _arc),
    "boolq": Source(("eval/boolq_superglue_val.jsonl",), "validation", 3270, _boolq),
    "openbookqa": Source(("eval/openbookqa_test.jsonl",), "test", 500, _openbookqa),
    "sciq": Source(("eval/sciq_test.jsonl",), "test", 1000, _sciq),
}
