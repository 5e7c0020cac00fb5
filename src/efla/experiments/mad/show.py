"""``efla mad show TASK``: an instance of a MAD task in colour, its targets marked."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from efla.experiments.mad.exact import IGNORE
from efla.experiments.mad.tasks import FUZZY, SEED, TASKS, Setting, baseline, generate

if TYPE_CHECKING:
    Task = str
else:
    Task = Literal[tuple(TASKS)]

_STYLES = {
    "key": "bold cyan", "value": "green", "noise": "bright_black", "pad": "bright_black", "blank": "bright_black",
    "content": "bold cyan", "marker": "bold magenta",
}  # fmt: skip
_TARGET = "bold black on bright_yellow"

_STORIES = {
    "in-context-recall": "Key-value pairs. Wherever a key was shown before, its value is asked for: the target at the key's "
    "position is the token that follows.",
    "noisy-in-context-recall": "Key-value pairs among pairs of noise. Wherever a key was shown before, its value is asked for "
    "at the key's position.",
    "fuzzy-in-context-recall": "Keys and values are motifs of one to three tokens. Wherever a key motif was shown before, its "
    "whole value motif is asked for, token by token, from the key's last token on.",
    "selective-copying": "Content scattered among blanks, then a marker. At the blanks behind the marker the content is asked "
    "for in order: nothing in those inputs says what it was.",
    "compression": "Content and a marker. Every token is asked for, from the hidden state at the marker alone: the sequence "
    "has to pass through one vector.",
    "memorization": "Keys, each followed by a marker at which the key's value is asked for. The map from keys to values is "
    "the same in every instance and no input ever shows it: it has to go into the weights.",
}


def mad(
    what: Annotated[Literal["show"], tyro.conf.Positional],
    task: Annotated[Task, tyro.conf.Positional],
    /,
    index: int = 0,
    training: bool = False,
    seed: int = SEED,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    frac_noise: float | None = None,
    num_tokens_to_copy: int | None = None,
    guarantee_probe: bool = False,
) -> int:
    """Print an instance of a MAD task: input tokens coloured by kind, and below each its target if it has one.

    Args:
        what: Show.
        task: Which task.
        index: Which instance of the set.
        training: An instance of the training set (recall: every next token is a target) instead of the test set.
        seed: Seed of the set.
        vocab_size: Size of the vocabulary, instead of the baseline's.
        seq_len: Tokens of the sequence, instead of the baseline's.
        frac_noise: Share of noise pairs (noisy recall) instead of the baseline's.
        num_tokens_to_copy: Content tokens (selective copying) instead of the baseline's.
        guarantee_probe: Fuzzy recall always shows its probe before it asks for it.
    """
    if index < 0:
        raise ValueError(f"index must be 0 or more, got {index}")
    if guarantee_probe and task != FUZZY:
        raise ValueError(f"--guarantee-probe is an option of {FUZZY}, got it with {task}; leave it out")
    changes: dict[str, Any] = {
        "vocab_size": vocab_size, "seq_len": seq_len, "frac_noise": frac_noise, "num_tokens_to_copy": num_tokens_to_copy,
        "num_train_examples": index + 1 if training else 1, "num_test_examples": 1 if training else index + 1,
    }  # fmt: skip
    setting = replace(baseline(task), **{name: value for name, value in changes.items() if value is not None})
    data = generate(setting, seed, bit_exact=True, guarantee_probe=guarantee_probe)
    inputs, targets = (data.train_inputs, data.train_targets) if training else (data.test_inputs, data.test_targets)
    console = Console(highlight=False)
    for line in describe(setting, training):
        console.print(line)
    console.print()
    for line in instance_lines(setting, inputs[index].tolist(), targets[index].tolist(), console.width):
        console.print(line, no_wrap=True, crop=False)
    console.print(f"next: efla reproduce mad --tasks {task}")
    return 0


def token_kind(setting: Setting, token: int) -> str:
    """The kind of a token: key, value, noise, pad, content, blank or marker."""
    task = setting.task
    if task == "selective-copying":
        return "marker" if token == setting.marker else "blank" if token == setting.blank else "content"
    if task == "compression":
        return "marker" if token == setting.marker else "content"
    if token in setting.keys:
        return "key"
    if token in setting.values:
        return "value"
    return {"noisy-in-context-recall": "noise", "fuzzy-in-context-recall": "pad"}.get(task, "marker")


def describe(setting: Setting, training: bool) -> list[Text]:
    """What the task asks for, and the kinds of its tokens."""
    title = f"{setting.task}, {'training' if training else 'test'} instance"
    story = _STORIES[setting.task]
    if training and "recall" in setting.task:
        story += " In training every next token is a target (plain next-token prediction)."
    legend = Text("tokens: ")
    kinds: dict[str, list[int]] = {}
    for token in range(setting.vocab_size):
        kinds.setdefault(token_kind(setting, token), []).append(token)
    for kind, tokens in kinds.items():
        span = f"{tokens[0]}" if len(tokens) == 1 else f"{tokens[0]}-{tokens[-1]}"
        legend.append(f"{kind} {span}", style=_STYLES[kind]).append("   ")
    legend.append("target", style=_TARGET).append("   · no target")
    size = f"vocabulary {setting.vocab_size}, length {setting.length}"
    return [Text(title, style="bold").append(f"  ({size})", style="not bold"), Text(story), legend]


def instance_lines(setting: Setting, inputs: list[int], targets: list[int], width: int) -> list[Text]:
    """Blocks of three lines (position, input, target), as many tokens in a row as fit."""
    cell = max(len(str(setting.vocab_size - 1)), len(str(len(inputs) - 1))) + 1
    per_row = max(2, (width - 10) // cell // 2 * 2)  # pairs stay together
    lines = []
    for start in range(0, len(inputs), per_row):
        part = range(start, min(start + per_row, len(inputs)))
        position, shown, wanted = Text("at      "), Text("input   "), Text("target  ")
        for i in part:
            position.append(f"{i if (i - start) % 4 == 0 else '':>{cell}}", style="bright_black")
            shown.append(f"{inputs[i]:>{cell}}", style=_STYLES[token_kind(setting, inputs[i])])
            if targets[i] == IGNORE:
                wanted.append(f"{'·':>{cell}}", style="bright_black")
            else:
                text = str(targets[i])
                wanted.append(" " * (cell - len(text))).append(text, style=_TARGET)
        lines += [position, shown, wanted, Text()]
    return lines[:-1]
