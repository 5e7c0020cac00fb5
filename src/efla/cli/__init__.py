"""The command line: ``efla COMMAND``. Each command is one module in :mod:`efla.cli` with a typed function."""

from __future__ import annotations

import importlib
import sys

import tyro

import efla
from efla.errors import unknown_name
from efla.native import keep_freed_memory

# Command -> what it does. The module efla.cli.<name>, or the one named in _MODULES, holds a function <name> or
# main(arguments); it is imported when the command is called.
COMMANDS = {
    "doctor": "What runs on this machine: versions, threads, backends, and a self-check of each.",
    "gpu-check": "Do the GPU kernels compile, fit and compute the right thing? What a GPU user runs first.",
    "bench": "How fast it is: ratios against transformers, softmax attention and sgemm, in one process.",
    "info": "What a model is: mixers, sizes, parameters, state bytes, operations per token.",
    "eval": "The paper's table by lm-evaluation-harness, comparisons with their uncertainty, long contexts.",
    "generate": "Continue a prompt, streaming, with tokens per second.",
    "convert": "Checkpoints from flash-linear-attention to efla and back.",
    "prepare": "Tokenise text once, in parallel, into shards for training. Resumable.",
    "train": "Train a model: on this machine, or on many under torchrun. Resumable.",
    "mad": "Show an instance of a MAD task, its targets marked.",
    "reproduce": "Run an experiment of the paper: exactness, smnist, lr, mad, lm, throughput, or all. Resumable.",
    "report": "One self-contained HTML page from the rows of runs.",
}

_MODULES = {"mad": "efla.experiments.mad.show"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    if argv is None:
        keep_freed_memory()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"efla {efla.__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"efla: {unknown_name('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    function_name = name.replace("-", "_")
    module = importlib.import_module(_MODULES.get(name, f"efla.cli.{function_name}"))
    try:
        if hasattr(module, "main"):  # reads its own arguments: the defaults depend on one of them
            code = module.main(arguments[1:])
        else:
            code = tyro.cli(getattr(module, function_name), prog=f"efla {name}", args=arguments[1:])
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError, OSError, RuntimeError) as error:
        # The caller's mistake or the machine's: the message says what to do, a stack trace would hide it.
        print(f"efla {name}: {error}", file=sys.stderr)
        return 1
    return int(code or 0)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            f"efla {efla.__version__}: {efla.__doc__}",
            "",
            "usage: efla COMMAND [options]      (efla COMMAND --help explains one)",
            "",
            *lines,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
