"""What ``efla --help`` and ``efla COMMAND --help`` print."""

import re
import shutil
from functools import partial
from textwrap import fill as fill_text
from typing import NamedTuple


class Command(NamedTuple):
    """What ``efla --help`` says of a command. module: where its function is, default efla.cli.<name>."""

    group: str
    text: str
    example: str
    module: str | None = None


_MODELS, _TRAIN = "efla.cli.models", "efla.cli.train"
COMMANDS = {
    "doctor": Command("This machine", "Versions, threads and backends, each with a self-check.", "doctor"),
    "gpu-check": Command("This machine", "Compile and check the GPU kernels; works without a GPU.", "gpu-check"),
    "bench": Command("This machine", "Speed relative to transformers, softmax attention and sgemm.", "bench models"),
    "info": Command("Models", "Mixers, sizes, parameters, state bytes, FLOPs per token.", "info efla-340m", _MODELS),
    "generate": Command(
        "Models", "Continue a prompt, with tokens per second.", 'generate runs/train-tiny --prompt "The "', _MODELS
    ),
    "eval": Command("Models", "Zero-shot tasks, comparisons, long contexts.", "eval runs/train-tiny --tasks paper"),
    "convert": Command(
        "Models", "Checkpoints of flash-linear-attention to efla and back.", "convert SOURCE TARGET", _MODELS
    ),
    "export": Command("Models", "An ONNX file, which runs without torch.", "export onnx runs/train-tiny model.onnx"),
    "prepare": Command("Training", "Tokenise text into shards.", "prepare text.jsonl --output shards", _TRAIN),
    "train": Command("Training", "Train a model here, or on many devices.", "train --data shards --steps 500"),
    "explain": Command("The paper", "The method as an interactive page.", "explain"),
    "reproduce": Command("The paper", "Run an experiment of the paper.", "reproduce smnist --profile quick"),
    "report": Command("The paper", "One HTML page from the rows of runs.", "report runs/smnist-quick"),
    "mad": Command("The paper", "Show an instance of a MAD task.", "mad show compression", "efla.experiments.mad.show"),
}
fill = partial(fill_text, break_on_hyphens=False)
# Options that every command takes, after the one that prints the help.
_COMMON = {
    "-h, --help": "Print this text.",
    "--import MODULE": "Import a module or a .py file first; it may register a rule of your own.",
    "--traceback": "Print the full trace of an error (also EFLA_TRACEBACK=1).",
}


def usage(version: str) -> str:
    """The text of ``efla --help``."""
    lines = [
        f"efla {version}: Exact Flow Linear Attention",
        "",
        "usage: efla COMMAND [options]      (efla COMMAND --help lists the options)",
    ]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", group]
        lines += [f"  {name:<11}{command.text}", f"{'':13}efla {command.example}"]
    lines += [
        "",
        "The same command resumes what was interrupted. Every command takes --traceback",
        "(the full trace of an error) and --import (a module with a rule of your own).",
        "Completion in bash, zsh or fish: source <(efla --completion bash)",
    ]
    return "\n".join(lines)


def command_help(name: str, text: str) -> str:
    """The text of ``efla COMMAND --help``: tyro's in fewer words, with an example, wrapped to the terminal.

    tyro 1.0 has no public hook for any of this: tyro.conf changes single arguments, tyro.extras.get_parser is deprecated, and
    the boxes are drawn by private modules. So its printed text is the interface that lasts; the tests look for remains of it.

    text: tyro's, in one column. A heading is indented by one space, a line of options by two to four, the rest of its help by
    more; rulers follow headings and the descriptions of groups.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    _, _, _, experiment, *_ = text.split()  # usage: efla reproduce EXPERIMENT
    example = COMMANDS[name].example if experiment == "[-h]" else f"{name} {experiment} --profile quick"
    lines: list[str] = []
    entries: list[list[str]] = []
    heading = ""
    for line in [*text.splitlines(), " end"]:
        content = line.strip()
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            lines += [fill(_named(content), width)] if content or lines[-1:] != [""] else []
        elif set(content) == {"-"}:
            if entries:  # the description of the group
                heading += f": {' '.join(entries.pop()).strip()}"
        elif indent == 1:
            lines += [heading, *_table(entries, width)] if entries else [f"Example: efla {example}"]
            lines.append("")
            heading, entries = content, []
        elif indent <= 4 and (indent == 2 or content.startswith("•")):
            invocation, _, help = content.partition("  ")
            entries.append([invocation, help.strip()])
        elif entries:
            entries[-1][1] = f"{entries[-1][1]} {content}".strip()
    return "\n".join(lines).rstrip()


def _table(entries: list[list[str]], width: int) -> list[str]:
    """Options and what they do, in two columns."""
    rows: list[tuple[str, str]] = []
    for invocation, help in entries:
        if invocation == "-h, --help":
            rows += _COMMON.items()
            continue
        if invocation[0] not in "-[•" and not invocation.isupper():
            continue  # what the choice of a subcommand is
        shown = invocation.removeprefix("• ").replace("{None}|", "")
        shown = re.sub(r"\{?\[(\S+) \[[^]]*\.\.\.\]\]\}?", r"\1 ...", shown)
        shown = re.sub(r"--(\S+), --no-\1", r"--[no-]\1" if help.endswith("(default: True)") else r"--\1", shown)
        shown = _named(shown)
        pattern = r" *\(default: ?(None|False|)\)" if shown.startswith("-") else r" *\((default: ?|required)\)"
        rows.append((shown, re.sub(pattern, "", help).removesuffix(" (default: True)" * shown.startswith("--no-"))))
    column = min(26, 4 + max(len(shown) for shown, _ in rows))
    lines = []
    for shown, help in rows:
        first = f"  {shown}"
        if len(first) + 2 > column:
            lines.append(first)
            first = ""
        lines.append(fill(help, width, initial_indent=first.ljust(column), subsequent_indent=" " * column))
    return lines


def _named(text: str) -> str:
    """The text with an option's own name for its value where tyro writes STR."""
    return re.sub(r"--([\w-]+) STR\b", lambda m: f"--{m[1]} {m[1].upper().replace('-', '_')}", text)
