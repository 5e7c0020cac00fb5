"""An evaluation: models times tasks into a folder of rows, each written when it is finished, resumable at any request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from efla.evaluation import harness_tasks
from efla.evaluation.columns import CARRIED
from efla.evaluation.harness_results import item_records, standard_errors
from efla.evaluation.items import metric_items, write_items
from efla.evaluation.local_data import SOURCES
from efla.evaluation.perplexity import why_not_carried
from efla.evaluation.progress import Display, Stopwatch
from efla.evaluation.responses import ResponseLog, remove_responses
from efla.evaluation.scorer import Scorer
from efla.evaluation.tasks import wikitext
from efla.models.loading import Loaded, load_model, names_of
from efla.runs.folder import RunFolder
from efla.runs.provenance import git_commit, machine, versions
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically

EXPERIMENT = "evaluation"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are evaluated. ``limit``: only the first so many items of each task."""

    tasks: tuple[str, ...] = ("paper",)
    data: Path | None = None
    limit: int | None = None
    max_length: int | None = None
    tokenizer: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    share: bool = True
    batch_tokens: int = 4096
    samples: bool = False

    def __post_init__(self) -> None:
        for name in ("limit", "max_length", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def protocol(self) -> Record:
        """What must be the same for all rows of a folder: everything a score depends on."""
        return {
            "limit": self.limit,
            "max_length": self.max_length,
            "tokenizer": self.tokenizer,
            "dtype": self.dtype,
            "num_fewshot": 0,
        }


def evaluate(models: Sequence[str], settings: Settings, output: Path, console: Console) -> list[Record]:
    """Evaluate every model on every task, skipping what the folder already holds; returns all rows of the folder."""
    harness_tasks.require_lm_eval()
    tasks = harness_tasks.expand(settings.tasks)
    names = names_of(list(dict.fromkeys(models)))
    planned = [*tasks, *([CARRIED] if "wikitext" in tasks else [])]
    with RunFolder.open(output, EXPERIMENT, settings.protocol) as folder:
        if folder.repaired:
            console.print(f"{folder.repaired} half-written lines were moved to rows.damaged.jsonl")
        display = Display(console, len(planned) * len(names))
        for source, name in names.items():
            _evaluate_model(source, name, planned, settings, folder, display, console)
        return folder.rows()


def _evaluate_model(
    source: str,
    name: str,
    tasks: Sequence[str],
    settings: Settings,
    folder: RunFolder,
    display: Display,
    console: Console,
) -> None:
    loaded = load_model(
        source,
        name=name,
        tokenizer=settings.tokenizer,
        max_length=settings.max_length,
        device=settings.device,
        dtype=settings.dtype,
    )
    earlier = {row["task"]: row for row in folder.rows() if row.get("row") == "cell" and row["model"] == name}
    _check_digest(loaded, list(earlier.values()), folder.path)
    for task in tasks:
        if task in earlier:
            display.finished(f"{name}/{task}", summary(earlier[task]), None)
            continue
        reason = why_not_carried(loaded.model) if task == CARRIED else None
        if reason is not None:
            display.finished(f"{name}/{task}", f"left out: {reason}", 0.0)
            continue
        watch = Stopwatch()
        with display.work(f"{name}/{task}"):
            result = (_carried if task == CARRIED else _harness)(loaded, task, settings, folder.path, display)
        row = {
            "cell": f"{name}/{task}",
            "row": "cell",
            "rows": 1,
            "model": name,
            "task": task,
            **result,
            "digest": loaded.digest,
            **loaded.facts,
            "max_length": loaded.max_length,
            "wall_seconds": round(watch.seconds, 3),
            "started": watch.started,
            "threads": torch.get_num_threads(),
            "versions": {**versions(), **_harness_version()},
            "commit": git_commit(),
            "machine": machine(),
            "config": {**settings.protocol, "batch_tokens": settings.batch_tokens, "share": settings.share},
        }
        folder.append([row])
        remove_responses(_responses_path(folder.path, name, task))
        display.finished(f"{name}/{task}", summary(row), watch.seconds)


def _harness(loaded: Loaded, name: str, settings: Settings, output: Path, display: Display) -> Record:
    """One task through lm-evaluation-harness; writes its items and its results in the harness's format."""
    from lm_eval.evaluator import evaluate as harness_evaluate

    from efla.evaluation.harness_model import HarnessModel

    task = harness_tasks.load_task(name, settings.data, settings.limit)
    model = HarnessModel(
        loaded.model,
        loaded.tokenizer,
        max_length=loaded.max_length,
        share=settings.share,
        batch_tokens=settings.batch_tokens,
        progress=display,
    )
    belongs_to = {"digest": loaded.digest, "task": name, "max_length": loaded.max_length, **settings.protocol}
    model.log = ResponseLog(_responses_path(output, loaded.name, name), belongs_to)
    with harness_tasks.quiet():
        results = harness_evaluate(
            model, {"tasks": {name: task}, "groups": {}}, limit=settings.limit, bootstrap_iters=0, log_samples=True
        )
        total = SOURCES[name].num_records if settings.data and name in SOURCES else len(task.eval_docs)
    samples = results.pop("samples")[name]
    items = item_records(name, samples)
    metrics = {key.split(",")[0]: v for key, v in results["results"][name].items() if isinstance(v, (int, float))}
    if name == "lambada_openai":
        metrics["bits_per_byte"] = metric_items(items, "bits_per_byte").metric()
    errors = standard_errors(items, [m for m in metrics if not m.endswith("_stderr") and m != "sample_len"])
    metrics = {key: value for key, value in metrics.items() if key in errors}
    for metric, error in errors.items():
        if f"{metric},none" in results["results"][name]:
            results["results"][name][f"{metric}_stderr,none"] = error
    write_items(items_path(output, loaded.name, name), items)
    _merge_results(output / "lm_eval" / safe(loaded.name) / "results.json", results, loaded, settings, total)
    if settings.samples:
        lines = "".join(json.dumps(sample, default=str, ensure_ascii=False) + "\n" for sample in samples)
        write_atomically(output / "lm_eval" / safe(loaded.name) / f"samples_{name}.jsonl", lines.encode())
    return {
        "metrics": metrics,
        "standard_errors": errors,
        "num_items": len(items),
        "num_items_in_set": total,
        "path": "shared prefill" if model.share else "plain",
        "data": "local files" if settings.data and name in SOURCES else "Hugging Face hub",
    }


def _carried(loaded: Loaded, name: str, settings: Settings, output: Path, display: Display) -> Record:
    """WikiText with the state carried through each article, on the harness's own documents."""
    task = harness_tasks.load_task("wikitext", settings.data, settings.limit)
    records = [{"page": doc["page"]} for doc in task.eval_docs][: settings.limit]
    scorer = Scorer(loaded.model, loaded.tokenizer, loaded.max_length, batch_tokens=settings.batch_tokens)
    display.begin(len(records))
    found = wikitext(scorer, records, carried=True, progress=display.advance)
    items = [
        {"doc_id": i, "log_prob": log_prob, "words": words, "bytes": len(record["page"].encode())}
        for i, (record, log_prob, words) in enumerate(zip(records, found.log_probs, found.words, strict=True))
    ]
    write_items(items_path(output, loaded.name, name), items)
    metrics = {key: getattr(found, key) for key in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
    return {
        "metrics": metrics,
        "standard_errors": standard_errors(items, list(metrics)),
        "num_items": len(items),
        "num_items_in_set": SOURCES["wikitext"].num_records,
        "path": "state carried",
        "data": "local files" if settings.data else "Hugging Face hub",
    }


def summary(row: Record) -> str:
    """The metrics of a row in a few words."""
    return "  ".join(f"{name} {float(value):.4g}" for name, value in row["metrics"].items())


def items_path(output: Path, model: str, task: str) -> Path:
    return output / "items" / safe(model) / f"{safe(task)}.jsonl"


def safe(name: str) -> str:
    """A name as a file name."""
    return re.sub(r"[^\w.-]+", "__", name).strip(".") or "model"


def _responses_path(output: Path, model: str, task: str) -> Path:
    return output / "responses" / f"{safe(model)}__{safe(task)}.jsonl"


def _check_digest(loaded: Loaded, earlier: Sequence[Record], output: Path) -> None:
    for row in earlier:
        if row["digest"] != loaded.digest:
            raise ValueError(
                f"{output} holds results of another model called {loaded.name!r} (digest {row['digest']} there, "
                f"{loaded.digest} now); nothing was changed. Choose another --output, or rename the model's folder"
            )


def _merge_results(file: Path, results: dict[str, Any], loaded: Loaded, settings: Settings, total: int) -> None:
    """The harness's results of one task put beside those of the others, in the layout of its results files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    merged: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for counts in results.get("n-samples", {}).values():
        counts["original"] = total
    for key, value in results.items():
        if isinstance(value, dict):
            merged[key] = {**merged.get(key, {}), **json.loads(json.dumps(value, default=str))}
        else:
            merged[key] = value
    merged["config"] = {
        "model": loaded.name,
        "model_num_parameters": loaded.facts["parameters"],
        "model_dtype": str(loaded.model.dtype),
        "limit": settings.limit,
        "batch_size": settings.batch_tokens,
        "device": settings.device,
        "digest": loaded.digest,
    }
    merged["model_name"] = loaded.name
    merged["max_length"] = loaded.max_length
    merged |= {f"{name.replace('-', '_')}_version": value for name, value in _harness_version().items()}
    write_atomically(file, (json.dumps(json.loads(dumps(merged)), indent=2) + "\n").encode())


def _harness_version() -> dict[str, str]:
    from importlib.metadata import version

    return {"lm-eval": version("lm-eval"), "transformers": version("transformers")}
