"""``efla eval --length``: bits by position in a long text and associative recall, as rows, tables and figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from efla.data import corpora
from efla.evaluation.run import Evaluation, EvaluationSettings
from efla.evaluation.tasks import definition, local_records, read_text
from efla.models.loading import Loaded
from efla.runs.progress import Counter
from efla.runs.records import Count, Minimum, Record, check_fields
from efla.runs.statistics import MISSING

_SEQUENCES_PER_ROW = 8


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """What is measured on long contexts."""

    text: str | None = None
    """--length: a UTF-8 file, or a corpus (novels, enwik8, shakespeare, python-docs) (default: novels if the data folder
    has them, else wikitext)."""
    positions: Count = 65_536
    """--length: last position."""
    rows: Count = 8
    """--length: number of stretches of the text; each recall setting has 8 times as many sequences."""
    pairs: tuple[Count, ...] = (4, 8, 16, 32, 64)
    """--length: numbers of key-value pairs to recall; none skips recall."""
    lengths: tuple[Count, ...] = (256, 512, 1024, 2048)
    """--length: lengths of the recall sequences."""
    recall_steps: Annotated[int, Minimum(0)] = 0
    """--length: first train a copy of each model on recall for this many steps. With 0, expect chance from models that were
    trained on text alone."""
    seed: int = 0
    """--length: seed of the recall sequences and of training on them."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def grid(self) -> list[tuple[int, int]]:
        """(pairs, length) of every recall setting that fits: each pair takes four tokens."""
        return [(n, length) for length in self.lengths for n in self.pairs if 4 * n <= length]


class LengthEvaluation(Evaluation):
    """Bits by position, and recall for each number of pairs and length."""

    experiment = "evaluation-length"

    def __init__(self, settings: EvaluationSettings, asked: LengthSettings) -> None:
        super().__init__(settings)
        if settings.dtype == "int8" and asked.recall_steps:
            raise ValueError(
                "--recall-steps trains a copy of the model, and int8 weights cannot be trained; leave one of them out"
            )
        name, self._text = load_text(asked.text, settings.data)
        self._asked = asked
        self._probed: tuple[Loaded, Any] | None = None
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
            rows = [self._recall(loaded, *self._grid[cell], progress)]
        return [*rows, {"trained_length": int(getattr(loaded.model.config, "max_position_embeddings", 0) or 0)}]

    def summary(self, rows: Sequence[Record]) -> str:
        first, last = rows[0], rows[-2]
        if first["row"] == "recall":
            return f"accuracy {first['accuracy']:.3f}, among the values {first['among_values']:.3f}"
        bits = [f"{row['bits_per_byte']:.3f} at {row['end']}" for row in (first, last)]
        return f"bits per byte {', '.join(bits)}"

    def _positions(self, loaded: Loaded, progress: Counter) -> list[Record]:
        """Bits by position in stretches spread evenly over the text, with the state carried through each."""
        from efla.evaluation.perplexity import bits_by_position, doubling_buckets

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

    def _recall(self, loaded: Loaded, num_pairs: int, length: int, progress: Counter) -> Record:
        """Recall of the model, or with ``recall_steps`` of a copy that is first trained on the task."""
        from efla.evaluation.recall import finetune_on_recall, make_batch, recall, usable_tokens

        asked, batch_tokens = self._asked, self.settings.batch_tokens
        config, prefix = loaded.model.config.get_text_config(), loaded.tokenizer.bos_token_id
        special = {prefix, loaded.tokenizer.eos_token_id, config.pad_token_id, 0} - {None}
        usable = usable_tokens(int(config.vocab_size), sorted(special))
        if self._probed is None or self._probed[0] is not loaded:
            model = loaded.model
            if asked.recall_steps:
                progress.begin(asked.recall_steps)
                options = {"steps": asked.recall_steps, "seed": asked.seed, "prefix": prefix}
                model = finetune_on_recall(
                    model, usable, asked.grid, batch_tokens=batch_tokens, progress=progress.advance, **options
                )
            self._probed = (loaded, model)
        sequences = _SEQUENCES_PER_ROW * asked.rows
        batch = make_batch(usable, num_pairs, length, sequences, asked.seed, prefix)
        progress.begin(sequences)
        found = recall(self._probed[1], batch, batch_tokens=batch_tokens, progress=progress.advance)
        about = {"row": "recall", "num_pairs": num_pairs, "length": length}
        return {**about, **asdict(found), "chance": 1 / num_pairs, "steps": asked.recall_steps}


def load_text(given: str | None, data: Path | None) -> tuple[str, str]:
    """The name and content of the text to measure on."""
    if given is None:
        given = "python-docs" if data is None else "novels" if corpora.find_in("novels", data) else "wikitext"
    if given == "wikitext":
        if data is None:
            raise FileNotFoundError("the text wikitext is read from the data folder: give --data DIR or set EFLA_DATA")
        detokenize = definition("wikitext")["doc_to_target"]
        return given, "\n".join(detokenize(record) for record in local_records("wikitext", data))
    if given in corpora.names():
        test = corpora.load(given, data).test.tobytes().replace(b"\0", b"\n\n")
        return given, test.decode("utf-8", errors="ignore").strip()
    file = Path(given)
    if not file.is_file():
        raise FileNotFoundError(f"{given!r} is neither a file nor one of: wikitext, {', '.join(corpora.names())}")
    return file.name, read_text(file)


def show_length(rows: Sequence[Record], output: Path, console: Console) -> None:
    """Print a table of each measurement, with a column per model, and write the figures."""
    from efla.evaluation.section import length_figures
    from efla.runs.vega import save_all, unavailable

    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    for kind, (title, headings, line_of, value_of) in _TABLES.items():
        values = {(line_of(row), row["model"]): value_of(row) for row in rows if row["row"] == kind}
        if values:
            table = Table(*headings, *models, title=title)
            for line in dict.fromkeys(line for line, _ in values):
                table.add_row(*line, *(values.get((line, model), MISSING) for model in models))
            console.print(table)
    if missing := unavailable():
        console.print(f"no figures: {missing}", markup=False, soft_wrap=True)
        return
    for file in save_all(length_figures(rows), output / "figures"):
        console.print(f"figure: {file}", soft_wrap=True)


# Kind of row -> title and first headings of its table, the first cells of a row's line, and its value.
_TABLES: dict[str, tuple[str, list[str], Callable[[Record], tuple[str, ...]], Callable[[Record], str]]] = {
    "position": (
        "bits per byte by position, state carried",
        ["position"],
        lambda row: (f"{row['start']:,} to {row['end']:,}",),
        lambda row: f"{float(row['bits_per_byte']):.3f}",
    ),
    "recall": (
        "recall among the sequence's values, percent",
        ["pairs", "length", "chance"],
        lambda row: (str(row["num_pairs"]), f"{row['length']:,}", f"{100 / row['num_pairs']:.1f}"),
        lambda row: f"{100 * float(row['among_values']):.1f}",
    ),
}
