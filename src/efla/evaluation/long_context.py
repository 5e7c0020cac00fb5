"""``efla eval --length``: bits by position in a long text and associative recall, as rows, tables and figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from efla.evaluation.perplexity import bits_by_position, doubling_buckets
from efla.evaluation.recall import finetune_on_recall, make_batch, recall, usable_tokens
from efla.evaluation.run import Evaluation, EvaluationSettings
from efla.evaluation.table import MISSING
from efla.evaluation.tasks import definition, local_records, read_text
from efla.models.loading import Loaded
from efla.runs.progress import Counter
from efla.runs.records import Record
from efla.runs.rows import read_rows

CORPORA = ("novels", "enwik8", "shakespeare", "python-docs")
_SEQUENCES_PER_ROW = 8


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """What is measured on long contexts."""

    text: str | None = None
    """--length: a UTF-8 file, or a corpus (novels, enwik8, shakespeare, python-docs). Default: novels if the data folder has
    them, else wikitext."""
    positions: int = 65_536
    """--length: last position."""
    rows: int = 8
    """--length: number of stretches of the text; each recall setting has 8 times as many sequences."""
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    """--length: numbers of key-value pairs to recall; none skips recall."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    """--length: lengths of the recall sequences."""
    recall_steps: int = 0
    """--length: first train a copy of each model on recall for so many steps. With 0, expect chance from models that were
    trained on text alone."""
    seed: tyro.conf.Suppress[int] = 0

    def __post_init__(self) -> None:
        if self.positions < 1 or self.rows < 1:
            raise ValueError(f"positions and rows must be at least 1, got {self.positions} and {self.rows}")
        if self.recall_steps < 0:
            raise ValueError(f"recall_steps must not be negative, got {self.recall_steps}")
        if any(n < 1 for n in (*self.pairs, *self.lengths)):
            raise ValueError(f"pairs and lengths must be positive, got {self.pairs} and {self.lengths}")

    @property
    def grid(self) -> list[tuple[int, int]]:
        """(pairs, length) of every recall setting that fits: each pair takes four tokens."""
        return [(n, length) for length in self.lengths for n in self.pairs if 4 * n <= length]


def evaluate_length(
    models: Sequence[str], settings: EvaluationSettings, asked: LengthSettings, output: Path, console: Console
) -> list[Record]:
    """Measure every model, skipping what the folder already has; returns all rows of the folder."""
    if not models:
        if output.is_dir():
            return read_rows(output)
        raise ValueError(f"give at least one model: efla eval MODEL --length ({output} holds no results to show)")
    return LengthEvaluation(settings, asked).evaluate(models, output, console)


class LengthEvaluation(Evaluation):
    """Bits by position, and recall for each number of pairs and length."""

    experiment = "evaluation-length"

    def __init__(self, settings: EvaluationSettings, asked: LengthSettings) -> None:
        super().__init__(settings)
        name, self._text = load_text(asked.text, settings.data)
        self._asked = asked
        self._recall: _RecallProbe | None = None
        self._grid = {f"recall-{n}-{length}": (n, length) for n, length in asked.grid}
        self.cells = ["positions", *self._grid]
        self.protocol = {
            "text": name,
            "positions": asked.positions,
            "rows": asked.rows,
            "recall_steps": asked.recall_steps,
            "recall_grid": [list(pair) for pair in asked.grid] if asked.recall_steps else None,
            "dtype": settings.dtype,
            "seed": asked.seed,
        }

    def run(self, loaded: Loaded, cell: str, output: Path, progress: Counter) -> list[Record]:
        if cell == "positions":
            rows = self._positions(loaded, progress)
        else:
            if self._recall is None or self._recall.loaded is not loaded:
                self._recall = _RecallProbe(loaded, self._asked, self.settings.batch_tokens, progress)
            rows = [self._recall.measure(*self._grid[cell], progress)]
        return [*rows, {"trained_length": int(getattr(loaded.model.config, "max_position_embeddings", 0) or 0)}]

    def summary(self, rows: Sequence[Record]) -> str:
        first, last = rows[0], rows[-2]
        if first["row"] == "recall":
            return f"accuracy {first['accuracy']:.3f}, among the values {first['among_values']:.3f}"
        bits = [f"{row['bits_per_byte']:.3f} at {row['end']}" for row in (first, last)]
        return f"bits per byte {', '.join(bits)}"

    def _positions(self, loaded: Loaded, progress: Counter) -> list[Record]:
        """Bits by position in stretches spread evenly over the text, with the state carried through each."""
        asked, batch_tokens = self._asked, self.settings.batch_tokens
        tokens: NDArray[np.int64] = np.asarray(loaded.tokenizer.encode(self._text, add_special_tokens=False))
        needed = asked.positions + 1
        if len(tokens) < needed:
            raise ValueError(
                f"the text has {len(tokens):,} tokens for {loaded.name!r}, but {asked.positions:,} positions need {needed:,}; "
                "give a longer --text or fewer --positions"
            )
        count = min(asked.rows, len(tokens) // needed)
        starts = np.linspace(0, len(tokens) - needed, count).astype(int)
        progress.begin(count * asked.positions)
        curve = bits_by_position(
            loaded.model,
            [tokens[start : start + needed].tolist() for start in starts],
            doubling_buckets(asked.positions),
            window=min(1024, batch_tokens),
            batch_rows=max(1, batch_tokens // 1024),
            progress=progress.advance,
        )
        bytes_per_token = len(self._text.encode()) / len(tokens)
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


class _RecallProbe:
    """Recall of a model, or with ``recall_steps`` of a copy that is first trained on the task."""

    def __init__(self, loaded: Loaded, asked: LengthSettings, batch_tokens: int, progress: Counter) -> None:
        self.loaded, self.asked, self.batch_tokens = loaded, asked, batch_tokens
        config = loaded.model.config.get_text_config()
        ids = (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id, config.pad_token_id, 0)
        self.usable = usable_tokens(int(config.vocab_size), sorted({i for i in ids if i is not None}))
        self.prefix = loaded.tokenizer.bos_token_id
        self.model: Any = loaded.model
        if asked.recall_steps:
            progress.begin(asked.recall_steps)
            self.model = finetune_on_recall(
                loaded.model,
                self.usable,
                asked.grid,
                steps=asked.recall_steps,
                seed=asked.seed,
                prefix=self.prefix,
                batch_tokens=batch_tokens,
                progress=progress.advance,
            )

    def measure(self, num_pairs: int, length: int, progress: Counter) -> Record:
        asked, sequences = self.asked, _SEQUENCES_PER_ROW * self.asked.rows
        batch = make_batch(self.usable, num_pairs, length, sequences, asked.seed, self.prefix)
        progress.begin(sequences)
        found = recall(self.model, batch, num_pairs, length, batch_tokens=self.batch_tokens, progress=progress.advance)
        return {"row": "recall", **asdict(found), "chance": 1 / num_pairs, "steps": asked.recall_steps}


def load_text(given: str | None, data: Path | None) -> tuple[str, str]:
    """The name and content of the text to measure on."""
    from efla.data import corpora

    if given is None:
        has_novels = data is not None and any(
            (data / sub / "english_novels_98.tar.xz").is_file() for sub in ("", "corpus")
        )
        given = "novels" if has_novels else "wikitext" if data is not None else "python-docs"
    if given == "wikitext":
        if data is None:
            raise FileNotFoundError("the text wikitext is read from the data folder: give --data DIR or set EFLA_DATA")
        detokenize = definition("wikitext")["doc_to_target"]
        return given, "\n".join(detokenize(record) for record in local_records("wikitext", data))
    if given in CORPORA:
        test = corpora.load(given, data).test.tobytes().replace(b"\0", b"\n\n")
        return given, test.decode("utf-8", errors="ignore").strip()
    file = Path(given)
    if not file.is_file():
        raise FileNotFoundError(f"{given!r} is neither a file nor one of: wikitext, {', '.join(CORPORA)}")
    return file.name, read_text(file)


def show_length(rows: Sequence[Record], output: Path, console: Console) -> None:
    """Print a table of each measurement and write the figures."""
    from efla.evaluation.plot import plot_length

    positions = [row for row in rows if row["row"] == "position"]
    if positions:
        console.print(
            _table(
                "bits per byte by position, state carried",
                ["position"],
                rows,
                {(row["start"], row["end"], row["model"]): f"{float(row['bits_per_byte']):.3f}" for row in positions},
                lambda start, end: [f"{start:,} to {end:,}"],
            )
        )
    probes = [row for row in rows if row["row"] == "recall"]
    if probes:
        console.print(
            _table(
                "recall among the sequence's values, percent",
                ["pairs", "length", "chance"],
                rows,
                {
                    (row["num_pairs"], row["length"], row["model"]): f"{100 * float(row['among_values']):.1f}"
                    for row in probes
                },
                lambda n, length: [str(n), f"{length:,}", f"{100 / n:.1f}"],
            )
        )
    for file in plot_length(rows, output):
        console.print(f"figure: {file}", soft_wrap=True)


def _table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Record],
    values: Mapping[tuple[int, int, str], str],
    labels: Callable[[int, int], list[str]],
) -> Table:
    """A column per model and a line per pair of numbers; ``labels`` gives the line's first cells."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    table = Table(*headings, *models, title=title)
    for a, b in dict.fromkeys((a, b) for a, b, _ in values):
        table.add_row(*labels(a, b), *(values.get((a, b, model), MISSING) for model in models))
    return table
