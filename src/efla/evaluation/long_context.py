"""``efla eval --length``: bits by position in a long text, and associative recall, into a folder of rows with figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from efla.evaluation.local_data import read_text, records
from efla.evaluation.positions import bits_by_position, doubling_buckets
from efla.evaluation.progress import Display, Stopwatch
from efla.evaluation.prompts import wikitext_text
from efla.evaluation.recall import adapted, make_batch, recall, usable_tokens
from efla.evaluation.run import Settings
from efla.models.loading import Loaded, load_model, names_of
from efla.runs.folder import RunFolder
from efla.runs.provenance import git_commit, machine, versions
from efla.runs.records import Record
from efla.runs.rows import read_rows

EXPERIMENT = "evaluation-length"
CORPORA = ("novels", "enwik8", "shakespeare", "python-docs")
_SEQUENCES_PER_ROW = 8


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """What is probed: positions up to ``positions`` on ``rows`` stretches of a text, recall of ``pairs`` in ``lengths``."""

    text: str | None = None
    positions: int = 65_536
    rows: int = 8
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    recall_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.positions < 1 or self.rows < 1:
            raise ValueError(f"positions and rows must be at least 1, got {self.positions} and {self.rows}")
        if self.recall_steps < 0:
            raise ValueError(f"recall_steps must not be negative, got {self.recall_steps}")
        if any(n < 1 for n in (*self.pairs, *self.lengths)):
            raise ValueError(f"pairs and lengths must be positive, got {self.pairs} and {self.lengths}")

    @property
    def grid(self) -> list[tuple[int, int]]:
        """(pairs, length) of every recall setting that fits: pairs and questions take four tokens each."""
        return [(n, length) for length in self.lengths for n in self.pairs if 4 * n <= length]


def evaluate_length(
    models: Sequence[str], settings: Settings, asked: LengthSettings, output: Path, console: Console
) -> list[Record]:
    """Probe every model, skipping what the folder already holds; returns all rows of the folder."""
    if not models:
        if output.is_dir():
            return read_rows(output)
        raise ValueError(f"give at least one model: efla eval MODEL --length ({output} holds no results to show)")
    name_of_text, text = _text(asked.text, settings.data)
    protocol = {
        "text": name_of_text,
        "positions": asked.positions,
        "rows": asked.rows,
        "recall_steps": asked.recall_steps,
        "recall_grid": [list(pair) for pair in asked.grid] if asked.recall_steps else None,
        "dtype": settings.dtype,
        "seed": asked.seed,
    }
    names = names_of(list(dict.fromkeys(models)))
    with RunFolder.open(output, EXPERIMENT, protocol) as folder:
        display = Display(console, len(names) * (1 + len(asked.grid)))
        for source, name in names.items():
            loaded = load_model(
                source, name=name, tokenizer=settings.tokenizer, device=settings.device, dtype=settings.dtype
            )
            _check_digest(loaded, folder)
            probe = _Recall(loaded, asked, settings, display)
            cells: list[tuple[str, Callable[[], list[Record]]]] = [
                (f"{name}/positions", partial(_positions, loaded, text, asked, settings, display))
            ]
            cells += [(f"{name}/recall-{n}-{length}", partial(probe, n, length)) for n, length in asked.grid]
            for cell, run in cells:
                if cell in folder.finished():
                    display.finished(cell, "", None)
                    continue
                watch = Stopwatch()
                with display.work(cell):
                    rows = run()
                for row in rows:
                    row |= {"cell": cell, "model": name}
                last = {
                    "cell": cell,
                    "row": "cell",
                    "rows": len(rows) + 1,
                    "model": name,
                    "digest": loaded.digest,
                    **loaded.facts,
                    "trained_length": int(getattr(loaded.model.config, "max_position_embeddings", 0) or 0),
                    "wall_seconds": round(watch.seconds, 3),
                    "started": watch.started,
                    "threads": torch.get_num_threads(),
                    "versions": versions(),
                    "commit": git_commit(),
                    "machine": machine(),
                    "config": {**protocol, "batch_tokens": settings.batch_tokens},
                }
                folder.append([*rows, last])
                display.finished(cell, _summary(rows), watch.seconds)
        return folder.rows()


def _positions(loaded: Loaded, text: str, asked: LengthSettings, settings: Settings, display: Display) -> list[Record]:
    """Stretches spread evenly over the text, read from their first token to ``positions`` with the state carried."""
    tokens: NDArray[np.int64] = np.asarray(loaded.tokenizer.encode(text, add_special_tokens=False))
    needed = asked.positions + 1
    if len(tokens) < needed:
        raise ValueError(
            f"the text has {len(tokens):,} tokens for {loaded.name!r}, {needed:,} are needed for {asked.positions:,} positions; "
            "give a longer --text or fewer --positions"
        )
    count = min(asked.rows, len(tokens) // needed)
    starts = np.linspace(0, len(tokens) - needed, count).astype(int)
    rows = [tokens[start : start + needed].tolist() for start in starts]
    buckets = doubling_buckets(asked.positions)
    display.begin(count * asked.positions)
    curve = bits_by_position(
        loaded.model,
        rows,
        buckets,
        window=min(1024, settings.batch_tokens),
        batch_rows=max(1, settings.batch_tokens // 1024),
        progress=display.advance,
    )
    bytes_per_token = len(text.encode()) / len(tokens)
    return [
        {
            "row": "position",
            "start": start,
            "end": end,
            "bits_per_token": bits,
            "standard_error": error,
            "bits_per_byte": bits / bytes_per_token,
            "num_rows": count,
        }
        for start, end, bits, error in zip(curve.starts, curve.ends, curve.bits, curve.standard_errors, strict=True)
    ]


class _Recall:
    """The recall probe of one model; with ``recall_steps`` of a copy that was first trained on the task."""

    def __init__(self, loaded: Loaded, asked: LengthSettings, settings: Settings, display: Display) -> None:
        config = loaded.model.config.get_text_config()
        ids = (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id, config.pad_token_id, 0)
        self.usable = usable_tokens(int(config.vocab_size), sorted({i for i in ids if i is not None}))
        self.prefix = loaded.tokenizer.bos_token_id
        self.asked, self.settings, self.display = asked, settings, display
        self.original = loaded.model
        self.model: Any = None

    def __call__(self, num_pairs: int, length: int) -> list[Record]:
        asked, batch_tokens = self.asked, self.settings.batch_tokens
        if self.model is None:
            self.model = self.original
            if asked.recall_steps:
                self.display.begin(asked.recall_steps)
                self.model = adapted(
                    self.original,
                    self.usable,
                    asked.grid,
                    steps=asked.recall_steps,
                    seed=asked.seed,
                    prefix=self.prefix,
                    batch_tokens=batch_tokens,
                    progress=self.display.advance,
                )
        sequences = _SEQUENCES_PER_ROW * asked.rows
        batch = make_batch(self.usable, num_pairs, length, sequences, asked.seed, self.prefix)
        self.display.begin(sequences)
        found = recall(self.model, batch, num_pairs, length, batch_tokens=batch_tokens, progress=self.display.advance)
        return [{"row": "recall", **asdict(found), "chance": 1 / num_pairs, "steps": asked.recall_steps}]


def _text(given: str | None, data: Path | None) -> tuple[str, str]:
    """The text to read and its name."""
    from efla.data import corpora

    if given is None:
        has_novels = data is not None and any(
            (data / sub / "english_novels_98.tar.xz").is_file() for sub in ("", "corpus")
        )
        given = "novels" if has_novels else "wikitext" if data is not None else "python-docs"
    if given == "wikitext":
        if data is None:
            raise FileNotFoundError("the text wikitext is read from the data folder: give --data DIR or set EFLA_DATA")
        return given, "\n".join(wikitext_text(record["page"]) for record in records("wikitext", data))
    if given in CORPORA:
        test = corpora.load(given, data).test.tobytes().replace(b"\0", b"\n\n")
        return given, test.decode("utf-8", errors="ignore").strip()
    file = Path(given)
    if not file.is_file():
        raise FileNotFoundError(f"{given!r} is neither a file nor one of: wikitext, {', '.join(CORPORA)}")
    return file.name, read_text(file)


def _check_digest(loaded: Loaded, folder: RunFolder) -> None:
    for row in folder.rows():
        if row.get("row") == "cell" and row["model"] == loaded.name and row["digest"] != loaded.digest:
            raise ValueError(
                f"{folder.path} holds results of another model called {loaded.name!r}; choose another --output, or rename "
                "the model's folder"
            )


def _summary(rows: Sequence[Record]) -> str:
    if rows[0]["row"] == "position":
        first, last = rows[0], rows[-1]
        return f"bits per byte {first['bits_per_byte']:.3f} at {first['end']}, {last['bits_per_byte']:.3f} at {last['end']}"
    return f"accuracy {rows[0]['accuracy']:.3f}, among the values {rows[0]['among_values']:.3f}"


def show_length(rows: Sequence[Record], output: Path, console: Console) -> None:
    """Both tables on the console, both figures in the folder."""
    from efla.evaluation.plot import plot_length

    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    positions = [row for row in rows if row["row"] == "position"]
    if positions:
        table = Table("position", *models, title="bits per byte by position, state carried")
        by_cell = {(row["start"], row["end"], row["model"]): row for row in positions}
        for start, end in dict.fromkeys((row["start"], row["end"]) for row in positions):
            values = [by_cell.get((start, end, model)) for model in models]
            shown = ["–" if row is None else f"{float(row['bits_per_byte']):.3f}" for row in values]  # noqa: RUF001
            table.add_row(f"{start:,} to {end:,}", *shown)
        console.print(table)
    probes = [row for row in rows if row["row"] == "recall"]
    if probes:
        table = Table("pairs", "length", "chance", *models, title="recall among the sequence's values, percent")
        found = {(row["num_pairs"], row["length"], row["model"]): row for row in probes}
        for n, length in dict.fromkeys((row["num_pairs"], row["length"]) for row in probes):
            cells = [found.get((n, length, model)) for model in models]
            shown = ["–" if row is None else f"{100 * float(row['among_values']):.1f}" for row in cells]  # noqa: RUF001
            table.add_row(str(n), f"{length:,}", f"{100 / n:.1f}", *shown)
        console.print(table)
    for file in plot_length(rows, output):
        console.print(f"figure: {file}", soft_wrap=True)
