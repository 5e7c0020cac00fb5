"""The command line, ``efla COMMAND``. A command is a typed function in a module that is imported when it is called."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import efla
from efla.errors import unknown_name


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
# These parse their arguments themselves, because one of them sets the defaults of the others; and the class they use.
_PARSES_ARGUMENTS = {"train": "TrainCommand"}
_TAKES_IMPORT = ("train", "eval", "generate", "info", "bench")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    arguments = sys.argv[1:] if argv is None else argv
    show_trace = "--traceback" in arguments or os.environ.get("EFLA_TRACEBACK", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"efla {efla.__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS and not name.startswith("--completion"):
        print(f"efla: {unknown_name('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        if name not in COMMANDS:
            return _print_completion(" ".join(arguments).removeprefix("--completion").strip(" ="))
        if argv is None and "--help" not in arguments:
            with contextlib.suppress(ImportError):  # an exported model runs without torch
                from efla.native import keep_freed_memory

                keep_freed_memory()
        with _short_help() if {"-h", "--help"} & {*arguments} else contextlib.nullcontext():
            return _run(name, arguments[1:])
    except KeyboardInterrupt:
        if show_trace:
            traceback.print_exc()
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        # A mistake of the caller or a limit of the machine. The message says what to do; a trace would hide it.
        if show_trace:
            traceback.print_exc()
        else:
            print(f"efla {name}: {error}\n(run with --traceback for the full trace)", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _short_help() -> Iterator[None]:
    """Leave out of the help what tyro writes for options without a value: "(default: None)" and "{None}|INT"."""
    terminal, help = sys.stdout, io.StringIO()
    help.isatty = terminal.isatty  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(help):
            yield
    finally:
        print(re.sub(r" *\(default:\s+None\)|\{None\}\|", "", help.getvalue()), end="", file=terminal)


def _run(name: str, arguments: list[str]) -> int:
    import tyro

    if name in _TAKES_IMPORT:
        arguments = _import_named(arguments)
    function = _function(name)
    if name in _PARSES_ARGUMENTS:
        return int(function(arguments))
    about = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:")[0].strip()
    if name in _TAKES_IMPORT:
        about += "\n\nWith --import MODULE, a module or .py file is imported first; it may register a rule of your own."
    about += f"\n\nExample: efla {COMMANDS[name].example}"
    style = (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    return int(tyro.cli(function, prog=f"efla {name}", args=arguments, description=about, config=style) or 0)


def _function(name: str) -> Callable[..., Any]:
    function_name = name.replace("-", "_")
    module = importlib.import_module(COMMANDS[name].module or f"efla.cli.{function_name}")
    return getattr(module, function_name)


def _import_named(arguments: list[str]) -> list[str]:
    """Import every MODULE of ``--import MODULE``, a .py file or a name; returns the other arguments."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        option, has_value, module = word.partition("=")
        if option != "--import":
            rest.append(word)
            continue
        if not has_value:
            module = next(words, "")
        _import(module)
    return rest


def _import(name: str) -> None:
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise FileNotFoundError(f"--import {name}: there is no such file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not name or importlib.util.find_spec(name) is None:
        raise ValueError(f"--import needs a .py file or the name of a module that Python finds, got {name!r}")
    importlib.import_module(name)


def _print_completion(shell: str) -> int:
    """Print a script that completes commands and options, made by tyro from all commands."""
    import tyro

    if shell not in ("bash", "zsh", "fish"):
        raise unknown_name("shell", shell, ["bash", "zsh", "fish"])
    commands: dict[str, Callable[..., Any]] = {}
    for name in COMMANDS:
        function = _function(name)
        module = importlib.import_module(function.__module__)
        commands[name] = getattr(module, _PARSES_ARGUMENTS[name]) if name in _PARSES_ARGUMENTS else function
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="efla", args=["--tyro-print-completion", shell], config=(tyro.conf.OmitArgPrefixes,)
        )
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def _usage() -> str:
    lines = [
        f"efla {efla.__version__}: Exact Flow Linear Attention",
        "",
        "usage: efla COMMAND [options]      (efla COMMAND --help lists the options)",
    ]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", group]
        lines += [f"  {name:<11}{command.text}", f"{'':13}efla {command.example}"]
    return "\n".join(
        [
            *lines,
            "",
            "The same command resumes what was interrupted. Every command takes --traceback",
            "(or EFLA_TRACEBACK=1), which prints the full trace of an error.",
            "Completion in bash, zsh or fish: source <(efla --completion bash)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
