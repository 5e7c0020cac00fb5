"""The command line, ``efla COMMAND``. A command is a typed function in a module that is imported when it is called."""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import efla
from efla.cli.help import COMMANDS, command_help, usage
from efla.errors import check_names, unknown_name

# These parse their arguments themselves, because one of them sets the defaults of the others; and the class they use.
_PARSES_ARGUMENTS = {"train": "TrainCommand"}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    arguments = sys.argv[1:] if argv is None else argv
    show_trace = "--traceback" in arguments or os.environ.get("EFLA_TRACEBACK", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(efla.__version__))
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
        run = _print_help if {"-h", "--help"} & {*arguments} else _run
        return run(name, _import_named(arguments[1:]))
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
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


def _run(name: str, arguments: list[str]) -> int:
    import tyro

    function = _function(name)
    if name in _PARSES_ARGUMENTS:
        return int(function(arguments))
    about = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:")[0].strip()
    style = (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    return int(tyro.cli(function, prog=f"efla {name}", args=arguments, description=about, config=style) or 0)


def _print_help(name: str, arguments: list[str]) -> int:
    """Print what tyro knows of a command, in our words."""
    written, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "120"  # one column of options, and lines that seldom wrap
    try:
        with contextlib.redirect_stdout(written):
            _run(name, arguments)
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
        print(command_help(name, written.getvalue()))
    return 0


def _function(name: str) -> Callable[..., Any]:
    function_name = name.replace("-", "_")
    module = importlib.import_module(COMMANDS[name].module or f"efla.cli.{function_name}")
    return getattr(module, function_name)


def _import_named(arguments: list[str]) -> list[str]:
    """Import every MODULE of ``--import MODULE``, a .py file or a name; returns the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", nargs="?", const="", action="append", default=[])
    found, rest = parser.parse_known_args(arguments)
    for module in found.modules:
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

    check_names("shell", [shell], ["bash", "zsh", "fish"])
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


if __name__ == "__main__":
    sys.exit(main())
