"""What is measured of a trained model (spec lm.md 7.4): one function a number, each finished one kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from efla.data.corpora import Corpus
from efla.data.streams import consecutive_rows
from efla.evaluation import ByteTokenizer, Scorer, bits_by_position, even_buckets, lambada, multiple_choice, wikitext
from efla.evaluation.columns import ACCURACIES
from efla.evaluation.local_data import records
from efla.experiments.experiment import Report
from efla.experiments.lm.config import RAW_KEYS, RECURRENT, LmConfig
from efla.experiments.lm.cost import Cost
from efla.experiments.lm.keys import QUANTILES, key_energies
from efla.experiments.lm.train import TRAINING_SHARE
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically
from efla.train.engine import Engine
from efla.train.validation import Validation, validate

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

    @cached_property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def scorer(self, max_length: int) -> Scorer:
        return Scorer(self.model, self.tokenizer, max_length=max_length, batch_tokens=_BATCH_TOKENS)

    def records(self, task: str, limit: int | None) -> list[Record]:
        assert self.config.folder is not None
        return records(task, Path(self.config.folder), limit)


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
    items = subject.records("wikitext", subject.config.wikitext_items)
    found = wikitext(subject.scorer(subject.config.length), items)
    return {
        "word_perplexity": found.word_perplexity,
        "bits": found.bits_per_byte,
        "words": sum(found.words),
        "articles": len(found.words),
    }


def _lambada(subject: Subject) -> Record:
    """The last word of passages, of which the training length's last bytes are seen."""
    items = subject.records("lambada_openai", subject.config.lambada_items)
    found = lambada(subject.scorer(subject.config.length), items)
    return {
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "bits": found.bits_per_byte,
        "passages": len(found.scores),
    }


def _choices(subject: Subject) -> Record:
    """The eight multiple-choice sets; by column, so that WinoGrande's acc and HellaSwag's acc_norm are as in the paper."""
    scorer = subject.scorer(subject.config.choice_length)
    found: Record = {}
    for task in CHOICE_TASKS:
        result = multiple_choice(scorer, task, subject.records(task, subject.config.choice_items))
        found[task] = {"acc": result.acc, "acc_norm": result.acc_norm, "items": len(result.questions)}
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
