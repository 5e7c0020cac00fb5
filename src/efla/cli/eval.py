"""``efla eval MODEL…``: the paper's table by lm-evaluation-harness, comparisons, and long contexts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from efla.errors import refuse_ignored

if TYPE_CHECKING:
    from rich.console import Console

    from efla.evaluation.run import Settings


_PAIRS, _LENGTHS = (4, 8, 16, 32, 64), (256, 512, 1024, 2048)


def eval(
    models: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    tasks: tuple[str, ...] = ("paper",),
    data: Path | None = None,
    output: Path | None = None,
    limit: int | None = None,
    compare: tuple[str, str] | None = None,
    length: bool = False,
    max_length: int | None = None,
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto",
    share: bool = True,
    batch_tokens: int = 4096,
    paper: Literal["none", "340M", "1.3B", "both"] = "340M",
    samples: bool = False,
    text: str | None = None,
    positions: int = 65_536,
    rows: int = 8,
    pairs: tuple[int, ...] = _PAIRS,
    lengths: tuple[int, ...] = _LENGTHS,
    recall_steps: int = 0,
) -> int:
    """Evaluate models zero-shot and print the paper's table; or compare two; or look at long contexts.

    Runs without a network where --data or EFLA_DATA names a folder with the test sets, else from the Hugging Face hub.
    Results are kept as they come: the same command goes on where it was interrupted, and adds models and tasks to the folder.

    Args:
        models: Folders written by save_pretrained or efla train, or names on the hub. Without any, what --output holds is shown.
        tasks: Names of lm-evaluation-harness tasks; "paper" stands for the ten of the paper.
        data: Folder with eval/, lambada/ and wikitext-2/ (default: EFLA_DATA; without it, the hub).
        output: Folder for rows, items and the harness's results (default: runs/eval, with --length runs/eval-length).
        limit: Score only the first so many items of each task (a quick look; the table says so).
        compare: Two models A B: evaluate both and give B - A of each column with a 95 % interval (paired bootstrap over items).
        length: Loss by position and associative recall (MQAR) instead of the tasks.
        max_length: Tokens the model sees at once (default: the config's max_position_embeddings).
        tokenizer: Tokenizer folder or name if the model's folder has none; "bytes" for bytes. A vocabulary of 256 is bytes.
        device: Where to run, such as cpu or cuda.
        dtype: Precision of the weights; auto is the checkpoint's own.
        share: Score the choices of a question from one pass over what they share; --no-share takes the harness's plain path.
        batch_tokens: Tokens in one forward pass.
        paper: Which of the paper's models to print beside the results.
        samples: Also write the harness's full log of every item (prompts included).
        text: --length: a UTF-8 file, or a corpus (novels, enwik8, shakespeare, python-docs). Default: novels where the data
            folder has them, else wikitext.
        positions: --length: positions up to this one.
        rows: --length: how many stretches of the text, and sequences of each recall setting are 8 times as many.
        pairs: --length: numbers of key-value pairs to recall; none leaves the probe out.
        lengths: --length: lengths of the recall sequences.
        recall_steps: --length: first train a copy of each model on recall for so many steps (0: as it is; a model of text was
            never asked to recall random tokens).
    """
    from rich.console import Console

    from efla.evaluation import local_data
    from efla.evaluation.run import Settings

    of_tasks = {
        "tasks": tasks != ("paper",), "limit": limit is not None, "max-length": max_length is not None, "no-share": not share,
        "paper": paper != "340M", "samples": samples,
    }  # fmt: skip
    of_length = {
        "text": text is not None, "positions": positions != 65_536, "rows": rows != 8, "pairs": pairs != _PAIRS,
        "lengths": lengths != _LENGTHS, "recall-steps": recall_steps != 0,
    }  # fmt: skip
    refuse_ignored(of_tasks if length else of_length, "with --length" if length else "without --length")
    chosen = list(models)
    if compare is not None:
        if length:
            raise ValueError("--compare is about tasks and --length is not; give one of them")
        chosen += [model for model in compare if model not in chosen]
    console = Console(stderr=True)
    settings = Settings(
        tasks=tasks,
        data=local_data.folder(data),
        limit=limit,
        max_length=max_length,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        share=share,
        batch_tokens=batch_tokens,
        samples=samples,
    )
    if length:
        from efla.evaluation.long_context import LengthSettings, evaluate_length, show_length

        asked = LengthSettings(
            text=text, positions=positions, rows=rows, pairs=pairs, lengths=lengths, recall_steps=recall_steps
        )
        folder = output or Path("runs/eval-length")
        show_length(evaluate_length(chosen, settings, asked, folder, console), folder, Console())
        return 0
    folder = output or Path("runs/eval")
    _tasks(chosen, settings, folder, paper, console)
    if compare is not None:
        _comparison(chosen, compare, folder)
    return 0


def _tasks(models: list[str], settings: Settings, output: Path, paper: str, console: Console) -> None:
    from efla.evaluation.run import evaluate
    from efla.evaluation.table import markdown, result_table, terminal
    from efla.runs.rows import read_rows, write_atomically

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
    """Print a table as wide as it is: numbers are never cut off or folded."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    wide = Measurement.get(console, console.options.update(width=400), table).maximum
    Console(width=max(console.width, wide)).print(table)


def _comparison(models: list[str], pair: tuple[str, str], output: Path) -> None:
    import dataclasses

    from rich.table import Table

    from efla.evaluation.comparison import compare, comparison_lines
    from efla.models.loading import names_of
    from efla.runs.records import dumps
    from efla.runs.rows import read_rows, write_atomically

    names = names_of(models)
    a, b = names[pair[0]], names[pair[1]]
    if a == b:
        raise ValueError(f"--compare needs two different models, got {pair[0]!r} twice")
    found = compare(read_rows(output), output, a, b)
    headings, lines = comparison_lines(a, b, found)
    table = Table(*headings, title="paired bootstrap over items, 10,000 resamples")
    for line in lines:
        table.add_row(*line)
    print_whole(table)
    record = {"a": a, "b": b, "differences": {c.key: {**dataclasses.asdict(d), "b_minus_a": d.value} for c, d in found}}
    write_atomically(output / "comparison.json", (dumps(record) + "\n").encode())
