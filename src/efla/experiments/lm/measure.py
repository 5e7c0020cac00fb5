"""What is measured of a trained model (spec lm.md 7.4): one function a number, each finished one kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efla.data.corpora import Corpus
from efla.data.streams import consecutive_rows
from efla.evaluation import ByteTokenizer, bits_by_position, even_buckets
from efla.evaluation.items import metric_items
from efla.evaluation.table import ACCURACIES
from efla.evaluation.tasks import load_task
from efla.experiments.experiment import Report
from efla.experiments.lm.config import RAW_KEYS, RECURRENT, LmConfig
from efla.experiments.lm.cost import Cost
from efla.experiments.lm.keys import QUANTILES, key_energies
from efla.experiments.lm.train import TRAINING_SHARE
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically
from efla.train.engine import Engine
from efla.train.validation import Validation, validate

if TYPE_CHECKING:
    from efla.evaluation.harness import HarnessModel

CHOICE_TASKS = tuple(column.task for column in ACCURACIES if column.task != "lambada_openai")
POSITIONS = 4
"""Bits by position are measured up to so many training lengths."""
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Subject:
    """A trained model and what it is measured on."""

    model: Any
    arm: str
    seed: int
    corpus: Corpus
    config: LmConfig

    def harness(self, max_length: int) -> HarnessModel:
        from efla.evaluation.harness import HarnessModel

        return HarnessModel(self.model, ByteTokenizer(), max_length=max_length, batch_tokens=_BATCH_TOKENS)

    def task(self, name: str, limit: int | None) -> Any:
        assert self.config.folder is not None
        # The rows have acc_norm of all sets, also of those for which the harness reports acc only.
        metrics = ("acc_norm",) if name in CHOICE_TASKS else ()
        return load_task(name, Path(self.config.folder), limit, metrics=metrics)


def measure(subject: Subject, scratch: Path | None, report: Report, cost: Cost) -> Record:
    """All measurements by name; those that ``scratch`` holds are not made again. ``cost`` is kept with each."""
    file = None if scratch is None else scratch / "measured.json"
    found: Record = json.loads(file.read_text()) if file is not None and file.exists() else {}
    subject.model.eval()
    wanted = [name for name, (applies, _) in MEASUREMENTS.items() if applies(subject)]
    for number, name in enumerate(wanted):
        if name not in found:
            found[name] = MEASUREMENTS[name][1](subject)
            if file is not None:
                write_atomically(file, dumps(found).encode())
                cost.keep()
        share = (number + 1) / len(wanted)
        report(TRAINING_SHARE + (1 - TRAINING_SHARE) * share, bits=float(found["test"]["bits"]))
    return found


def _test(subject: Subject) -> Record:
    """Consecutive rows of the training length, each scored from its second byte on."""
    return _bits(_validate(subject, "test", subject.config.test_bytes))


def _validation(subject: Subject) -> Record:
    return _bits(_validate(subject, "validation", subject.config.final_validation_bytes))


def _validate(subject: Subject, part: str, limit: int | None) -> Validation:
    config = subject.config
    engine = Engine.alone(config.device)
    return validate(
        subject.model, subject.corpus.stream(part), length=config.length, rows=config.rows, limit=limit, engine=engine
    )


def _bits(found: Validation) -> Record:
    return {"bits": found.bits_per_token, "perplexity": found.perplexity, "bytes": found.tokens}


def _wikitext(subject: Subject) -> Record:
    """Word perplexity in disjoint windows of the training length, which is the longest that every arm was trained on."""
    from efla.evaluation.harness import wikitext_items

    task = subject.task("wikitext", subject.config.wikitext_items)
    items = wikitext_items(subject.harness(subject.config.length), task, carried=False)
    return {
        "word_perplexity": metric_items(items, "word_perplexity").exact_metric(),
        "bits": metric_items(items, "bits_per_byte").exact_metric(),
        "words": sum(item["words"] for item in items),
        "articles": len(items),
    }


def _lambada(subject: Subject) -> Record:
    """The last word of passages, of which the training length's last bytes are seen."""
    from efla.evaluation.harness import run_task

    task = subject.task("lambada_openai", subject.config.lambada_items)
    items = run_task(subject.harness(subject.config.length), "lambada_openai", task).items
    return {
        "perplexity": metric_items(items, "perplexity").exact_metric(),
        "accuracy": metric_items(items, "acc").exact_metric(),
        "bits": metric_items(items, "bits_per_byte").exact_metric(),
        "passages": len(items),
    }


def _choices(subject: Subject) -> Record:
    """The eight multiple-choice sets; by column, so that WinoGrande's acc and HellaSwag's acc_norm are as in the paper."""
    from efla.evaluation.harness import run_task

    model = subject.harness(subject.config.choice_length)
    found: Record = {}
    for name in CHOICE_TASKS:
        items = run_task(model, name, subject.task(name, subject.config.choice_items)).items
        accuracies = {metric: metric_items(items, metric).exact_metric() for metric in ("acc", "acc_norm")}
        found[name] = {**accuracies, "items": len(items)}
    return found


def _keys(subject: Subject) -> Record:
    """Quantiles of lam and beta * lam by layer on the first validation rows."""
    stream = subject.corpus.stream("validation")
    rows = next(consecutive_rows(stream, subject.config.length, subject.config.rows)).to(subject.config.device)
    return {"quantiles": list(QUANTILES), "layers": key_energies(subject.model, rows)}


def _positions(subject: Subject) -> Record:
    """Bits per byte by position in rows of four training lengths of the test text, the state carried."""
    config, stream = subject.config, subject.corpus.stream("test")
    length = POSITIONS * config.length
    count = min(config.position_rows, len(stream) // (length + 1))
    if count < 1:
        raise ValueError(f"the test text has {len(stream)} bytes, too few for one row of {length + 1}")
    rows = [stream.read(i * (length + 1), (i + 1) * (length + 1)).tolist() for i in range(count)]
    curve = bits_by_position(subject.model, rows, even_buckets(length), window=config.length, batch_rows=config.rows)
    return {
        "ends": curve.ends,
        "bits": [float(f"{value:.6g}") for value in curve.bits],
        "standard_errors": [float(f"{value:.4g}") for value in curve.standard_errors],
        "rows": count,
    }


def _always(subject: Subject) -> bool:
    return True


def _has_files(subject: Subject) -> bool:
    return subject.config.downstream


# Name -> (which cells it is made for, what it returns), in the order in which they are made.
MEASUREMENTS: dict[str, tuple[Callable[[Subject], bool], Callable[[Subject], Record]]] = {
    "test": (_always, _test),
    "validation": (_always, _validation),
    "keys": (lambda subject: subject.arm in RAW_KEYS, _keys),
    "positions": (lambda subject: subject.arm in RECURRENT, _positions),
    "wikitext": (_has_files, _wikitext),
    "lambada": (_has_files, _lambada),
    "choices": (lambda subject: _has_files(subject) and subject.seed == subject.config.choice_seed, _choices),
}
