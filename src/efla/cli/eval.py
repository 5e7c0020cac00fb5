"""``efla eval MODEL…``: the paper's table by lm-evaluation-harness, comparisons, and long contexts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from efla.data.files import data_folder
from efla.errors import refuse_ignored
from efla.evaluation.long_context import LengthEvaluation, LengthSettings, show_length
from efla.evaluation.run import EvaluationSettings, TaskEvaluation
from efla.evaluation.table import markdown, result_table, terminal
from efla.evaluation.tasks import require_lm_eval
from efla.models.loading import names_of
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically

_SETTINGS, _LENGTH_SETTINGS = EvaluationSettings(), LengthSettings()


def eval(
    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL ...]")] = (),
    /,
    settings: Annotated[EvaluationSettings, tyro.conf.arg(name="")] = _SETTINGS,
    output: Path | None = None,
    compare: Annotated[tuple[str, str] | None, tyro.conf.arg(metavar="A B")] = None,
    paper: Literal["none", "340M", "1.3B", "both"] = "340M",
    length: bool = False,
    length_settings: Annotated[LengthSettings, tyro.conf.arg(name="")] = _LENGTH_SETTINGS,
    threads: int | None = None,
    quiet: bool = False,
    json: bool = False,
) -> int:
    """Evaluate models zero-shot and print the paper's table, compare two models, or measure long contexts.

    Runs offline if --data or EFLA_DATA names a folder with the test sets, else downloads them from the Hugging Face hub.
    Results are saved as they are computed; the same command resumes, and adds models and tasks to the folder.

    Args:
        models: Folders written by save_pretrained or efla train, or names on the hub. Without any, --output is shown.
        settings: Tasks and models.
        output: Folder for rows, items and the harness's results (default: runs/eval, with --length runs/eval-length).
        compare: Two models A B: evaluate both and show B - A of each column with a 95 % interval (paired bootstrap over items).
        paper: The paper's models to print beside the results.
        length: Measure loss by position and associative recall (MQAR) instead of the tasks.
        length_settings: Long contexts.
        threads: CPU threads (default: torch's number).
        quiet: Print results only, no progress.
        json: Print the folder's rows as JSON lines instead of tables.
    """
    if length:
        given = _changed(settings, ("tasks", "limit", "max_length", "samples"))
        given |= {"no-share": not settings.share, "paper": paper != "340M", "compare": compare is not None}
        refuse_ignored(given, "with --length")
    else:
        fields = [field.name for field in dataclasses.fields(length_settings)]
        refuse_ignored(_changed(length_settings, fields), "without --length")
    refuse_ignored({"compare": json and compare is not None}, "with --json")
    chosen = list(dict.fromkeys([*models, *(compare or ())]))
    settings = dataclasses.replace(settings, data=data_folder(settings.data))
    folder = output or Path("runs/eval-length" if length else "runs/eval")
    if chosen and not length:
        require_lm_eval()
    evaluation = LengthEvaluation(settings, length_settings) if length else TaskEvaluation(settings)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    rows = evaluation.evaluate(chosen, folder, Console(stderr=True, quiet=quiet))
    if json:
        print("\n".join(map(dumps, rows)))
        return 0
    if length:
        show_length(rows, folder, Console())
        print(f"next:  efla report {folder}")
        return 0
    table = result_table(rows, paper)
    print_whole(terminal(table))
    write_atomically(folder / "table.md", (markdown(table) + "\n").encode())
    if compare is not None:
        names = names_of(chosen)
        _compare(rows, names[compare[0]], names[compare[1]], folder)
    print(f"files: {folder}/ (rows.jsonl, items/, lm_eval/, table.md)")
    print(f"next:  efla report {folder}")
    return 0


def _changed(settings: object, names: Sequence[str]) -> dict[str, bool]:
    """Option -> whether its value differs from the default."""
    default = type(settings)()
    return {name.replace("_", "-"): getattr(settings, name) != getattr(default, name) for name in names}


def print_whole(table: Any) -> None:
    """Print a table at its full width, so that numbers are never cut off or wrapped."""
    console = Console()
    wide = Measurement.get(console, console.options.update(width=400), table).maximum
    Console(width=max(console.width, wide)).print(table)


def _compare(rows: Sequence[Record], a: str, b: str, output: Path) -> None:
    from efla.evaluation.items import compare_models, comparison_lines

    if a == b:
        raise ValueError(f"--compare needs two different models, got {a!r} twice")
    found = compare_models(rows, output, a, b)
    headings, lines = comparison_lines(a, b, found)
    table = Table(*headings, title="paired bootstrap over items, 10,000 resamples")
    for line in lines:
        table.add_row(*line)
    print_whole(table)
    record = {"a": a, "b": b, "differences": {c.key: {**dataclasses.asdict(d), "b_minus_a": d.value} for c, d in found}}
    write_atomically(output / "comparison.json", (dumps(record) + "\n").encode())
