"""``efla eval``: models times tasks into a folder of rows. Every request that was answered survives an interruption."""

from __future__ import annotations

import datetime
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import Console

from efla.evaluation.items import file_name, items_path, metric_items, standard_errors, write_items
from efla.evaluation.responses import ResponseLog, remove_responses
from efla.evaluation.table import CARRIED
from efla.evaluation.tasks import SOURCES, expand, load_task
from efla.models.loading import Loaded, load_model, names_of
from efla.runs.folder import RunFolder
from efla.runs.progress import Counter, GridProgress, format_values
from efla.runs.records import Count, Record, check_fields, dumps
from efla.runs.rows import read_rows, write_atomically

if TYPE_CHECKING:
    from efla.evaluation.harness import TaskRun


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How models are evaluated."""

    tasks: tuple[str, ...] = ("paper",)
    """Names of lm-evaluation-harness tasks; "paper" stands for the paper's ten."""
    data: Path | None = None
    """Folder with eval/, lambada/ and wikitext-2/ (default: EFLA_DATA, else the hub)."""
    limit: Count | None = None
    """Score only the first LIMIT items of each task; the table says so."""
    max_length: Count | None = None
    """Tokens the model sees at once (default: the config's max_position_embeddings)."""
    tokenizer: str | None = None
    """Tokenizer folder or name if the model's folder has none; "bytes" for bytes, the default for a vocabulary of 256."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64", "int8"] = "auto"
    """Precision of the weights; auto is the checkpoint's own, int8 that of efla generate --weights int8."""
    share: bool = True
    """Score the choices of a question from one pass over their common prefix; --no-share uses the harness's own path."""
    batch_tokens: Count = 4096
    """Tokens in one forward pass."""
    samples: bool = False
    """Also write the harness's full log of every item, with prompts."""

    def __post_init__(self) -> None:
        check_fields(self)


class Evaluation(ABC):
    """A grid of models and cells. Finished cells are written at once and skipped when the evaluation runs again."""

    experiment: ClassVar[str]
    cells: list[str]
    protocol: Record
    """What all rows of a folder must agree on: everything that scores depend on."""

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings

    @abstractmethod
    def run(self, loaded: Loaded, cell: str, output: Path, progress: Counter) -> list[Record] | str:
        """The rows of a cell, the last with fields of the model and cell, or the reason why it is left out."""

    @abstractmethod
    def summary(self, rows: Sequence[Record]) -> str:
        """The rows of a cell in a few words."""

    def config(self) -> Record:
        """The settings that a row records."""
        return {**self.protocol, "batch_tokens": self.settings.batch_tokens}

    def evaluate(self, models: Sequence[str], output: Path, console: Console) -> list[Record]:
        """Run the cells that the folder does not have yet; returns all its rows. Without models, only returns them."""
        if not models:
            if output.is_dir():
                return read_rows(output)
            raise ValueError(f"give at least one model: efla eval MODEL ({output} holds no results to show)")
        from efla.integrations.transformers import accelerate_model

        settings, names = self.settings, names_of(list(dict.fromkeys(models)))
        with (
            RunFolder.open(output, self.experiment, self.protocol) as folder,
            GridProgress(console, len(self.cells) * len(names)) as progress,
        ):
            if folder.repaired:
                console.print(f"{folder.repaired} half-written lines were moved to rows.damaged.jsonl")
            for source, name in names.items():
                loaded = load_model(
                    source,
                    name=name,
                    tokenizer=settings.tokenizer,
                    max_length=settings.max_length,
                    device=settings.device,
                    dtype=settings.dtype,
                    weights="int8" if settings.dtype == "int8" else None,
                )
                earlier = _finished_cells(loaded, folder)
                with accelerate_model(loaded.model):
                    for cell in self.cells:
                        if cell in earlier:
                            progress.skip(f"{name}/{cell}", self.summary(earlier[cell]))
                        else:
                            self._run_cell(loaded, cell, folder, progress)
            return folder.rows()

    def _run_cell(self, loaded: Loaded, cell: str, folder: RunFolder, progress: GridProgress) -> None:
        import torch

        from efla.runs import provenance

        name = f"{loaded.name}/{cell}"
        started, start = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
        found = self.run(loaded, cell, folder.path, progress.start(name))
        if isinstance(found, str):
            progress.finish(name, f"left out: {found}")
            return
        *rows, result = found
        last = {
            "row": "cell",
            "rows": len(found),
            "digest": loaded.digest,
            **loaded.facts,
            "wall_seconds": round(time.monotonic() - start, 3),
            "started": started.isoformat(timespec="seconds"),
            "threads": torch.get_num_threads(),
            **provenance.stamp(),
            "config": self.config(),
            **result,
        }
        folder.append([{"cell": name, "model": loaded.name, **row} for row in (*rows, last)])
        remove_responses(_responses_path(folder.path, loaded.name, cell))
        progress.finish(name, self.summary([*rows, last]))


def _finished_cells(loaded: Loaded, folder: RunFolder) -> dict[str, list[Record]]:
    """Rows of the model's finished cells by cell; raises if they are of other weights with the same name."""
    found: dict[str, list[Record]] = {}
    for row in folder.rows():
        if row["model"] == loaded.name:
            found.setdefault(row["cell"].removeprefix(f"{loaded.name}/"), []).append(row)
            if row["row"] == "cell" and row["digest"] != loaded.digest:
                raise ValueError(
                    f"{folder.path} holds results of another model called {loaded.name!r} (digest {row['digest']} there, "
                    f"{loaded.digest} now); nothing was changed. Choose another --output, or rename the model's folder"
                )
    return found


class TaskEvaluation(Evaluation):
    """Tasks of lm-evaluation-harness, and WikiText with the state carried."""

    experiment = "evaluation"

    def __init__(self, settings: EvaluationSettings) -> None:
        super().__init__(settings)
        tasks = expand(settings.tasks)
        self.cells = [*tasks, *([CARRIED] if "wikitext" in tasks else [])]
        names = ("limit", "max_length", "tokenizer", "dtype")
        self.protocol = {**{name: getattr(settings, name) for name in names}, "num_fewshot": 0}

    def config(self) -> Record:
        return {**super().config(), "share": self.settings.share}

    def summary(self, rows: Sequence[Record]) -> str:
        return format_values(rows[-1]["metrics"])

    def run(self, loaded: Loaded, cell: str, output: Path, progress: Counter) -> list[Record] | str:
        from efla.evaluation.harness import HarnessModel, run_task, wikitext_items
        from efla.evaluation.perplexity import why_not_carried
        from efla.runs.provenance import versions

        settings = self.settings
        if cell == CARRIED and (reason := why_not_carried(loaded.model)):
            return reason
        name = "wikitext" if cell == CARRIED else cell
        task = load_task(name, settings.data, settings.limit)
        model = HarnessModel(
            loaded.model,
            loaded.tokenizer,
            max_length=loaded.max_length,
            share=settings.share,
            batch_tokens=settings.batch_tokens,
            progress=progress,
        )
        is_local = settings.data is not None and name in SOURCES
        if cell == CARRIED:
            total, path = SOURCES[name].num_records, "state carried"
            items = wikitext_items(model, task, settings.limit, carried=True)
            names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
            metrics = {metric: metric_items(items, metric).exact_metric() for metric in names}
            errors = standard_errors(items, names)
        else:
            belongs_to = {"digest": loaded.digest, "task": name, "max_length": loaded.max_length, **self.protocol}
            model.log = ResponseLog(_responses_path(output, loaded.name, name), belongs_to)
            found = run_task(model, name, task, settings.limit)
            total = SOURCES[name].num_records if is_local else len(task.eval_docs)
            path, items, metrics = "shared prefill" if model.share else "plain", found.items, found.metrics
            if name == "lambada_openai":
                metrics["bits_per_byte"] = metric_items(items, "bits_per_byte").metric()
            errors = standard_errors(items, [m for m in metrics if not m.endswith("_stderr") and m != "sample_len"])
            self._write_results(output / "lm_eval" / file_name(loaded.name), name, found, errors, loaded, total)
        write_items(items_path(output, loaded.name, cell), items)
        result = {
            "metrics": {metric: metrics[metric] for metric in errors},
            "standard_errors": errors,
            "num_items": len(items),
            "num_items_in_set": total,
            "path": path,
            "data": "local files" if is_local else "Hugging Face hub",
            "task": cell,
            "max_length": loaded.max_length,
            "versions": {**versions(), **_harness_versions()},
        }
        return [result]

    def _write_results(
        self, folder: Path, name: str, found: TaskRun, errors: dict[str, float], loaded: Loaded, total: int
    ) -> None:
        """Add one task to the results of the others, and write its samples, both in the harness's format."""
        from efla.models.quantization import stored_dtype

        folder.mkdir(parents=True, exist_ok=True)
        if self.settings.samples:
            lines = "".join(json.dumps(sample, default=str, ensure_ascii=False) + "\n" for sample in found.samples)
            write_atomically(folder / f"samples_{name}.jsonl", lines.encode())
        own = found.results["results"][name]
        own |= {f"{metric}_stderr,none": error for metric, error in errors.items() if f"{metric},none" in own}
        for counts in found.results.get("n-samples", {}).values():
            counts["original"] = total
        file = folder / "results.json"
        merged: Record = json.loads(file.read_text()) if file.exists() else {}
        for key, value in json.loads(json.dumps(found.results, default=str)).items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        merged["config"] = {
            "model": loaded.name,
            "model_num_parameters": loaded.facts["parameters"],
            "model_dtype": stored_dtype(loaded.model),
            "limit": self.settings.limit,
            "batch_size": self.settings.batch_tokens,
            "device": str(loaded.model.device),
            "digest": loaded.digest,
        }
        merged |= {"model_name": loaded.name, "max_length": loaded.max_length}
        merged |= {f"{name.replace('-', '_')}_version": value for name, value in _harness_versions().items()}
        write_atomically(file, (json.dumps(json.loads(dumps(merged)), indent=2) + "\n").encode())


def _responses_path(output: Path, model: str, task: str) -> Path:
    return output / "responses" / f"{file_name(model)}__{file_name(task)}.jsonl"


def _harness_versions() -> dict[str, str]:
    return {name: version(name) for name in ("lm-eval", "transformers")}
