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
from efla.evaluation.items import compare_models, comparison_lines
from efla.evaluation.long_context import LengthSettings, evaluate_length, show_length
from efla.evaluation.run import EvaluationSettings, evaluate
from efla.evaluation.table import markdown, result_table, terminal
from efla.models.loading import names_of
from efla.runs.records import dumps
from efla.runs.rows import read_rows, write_atomically

_SETTINGS, _LENGTH_SETTINGS = EvaluationSettings(), LengthSettings()


def eval(
    models: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    settings: Annotated[EvaluationSettings, tyro.conf.arg(name="")] = _SETTINGS,
    output: Path | None = None,
    compare: tuple[str, str] | None = None,
    paper: Literal["none", "340M", "1.3B", "both"] = "340M",
    length: bool = False,
    length_settings: Annotated[LengthSettings, tyro.conf.arg(name="")] = _LENGTH_SETTINGS,
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
    """
    if length:
        given = _changed(settings, ("tasks", "limit", "max_length", "samples"))
        refuse_ignored({**given, "no-share": not settings.share, "paper": paper != "340M"}, "with --length")
    else:
        fields = [field.name for field in dataclasses.fields(length_settings)]
        refuse_ignored(_changed(length_settings, fields), "without --length")
    chosen = list(models)
    if compare is not None:
        if length:
            raise ValueError("--compare is about tasks and --length is not; give one of them")
        chosen += [model for model in compare if model not in chosen]
    console = Console(stderr=True)
    settings = dataclasses.replace(settings, data=data_folder(settings.data))
    if length:
        folder = output or Path("runs/eval-length")
        show_length(evaluate_length(chosen, settings, length_settings, folder, console), folder, Console())
        return 0
    folder = output or Path("runs/eval")
    _run_tasks(chosen, settings, folder, paper, console)
    if compare is not None:
        _compare(chosen, compare, folder)
    return 0


def _changed(settings: object, names: Sequence[str]) -> dict[str, bool]:
    """Option -> whether its value differs from the default."""
    default = type(settings)()
    return {name.replace("_", "-"): getattr(settings, name) != getattr(default, name) for name in names}


def _run_tasks(models: Sequence[str], settings: EvaluationSettings, output: Path, paper: str, console: Console) -> None:
    if models:
        found = evaluate(models, settings, output, console)
    elif output.is_dir():
        found = read_rows(output)
    else:
        raise ValueError(f"give at least one model: efla eval MODEL --tasks paper ({output} holds no results to show)")
    table = result_table(found, paper)
    print_whole(terminal(table))
    write_atomically(output / "table.md", (markdown(table) + "\n").encode())
    print(f"rows, items, lm_eval/ and table.md: {output.resolve()}")


def print_whole(table: Any) -> None:
    """Print a table at its full width, so that numbers are never cut off or wrapped."""
    console = Console()
    wide = Measurement.get(console, console.options.update(width=400), table).maximum
    Console(width=max(console.width, wide)).print(table)


def _compare(models: list[str], pair: tuple[str, str], output: Path) -> None:
    names = names_of(models)
    a, b = names[pair[0]], names[pair[1]]
    if a == b:
        raise ValueError(f"--compare needs two different models, got {pair[0]!r} twice")
    found = compare_models(read_rows(output), output, a, b)
    headings, lines = comparison_lines(a, b, found)
    table = Table(*headings, title="paired bootstrap over items, 10,000 resamples")
    for line in lines:
        table.add_row(*line)
    print_whole(table)
    record = {"a": a, "b": b, "differences": {c.key: {**dataclasses.asdict(d), "b_minus_a": d.value} for c, d in found}}
    write_atomically(output / "comparison.json", (dumps(record) + "\n").encode())
