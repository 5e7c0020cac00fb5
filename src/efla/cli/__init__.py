"""The command line, ``efla COMMAND``. A command is a typed function in a module of :mod:`efla.cli`."""

import importlib
import os
import sys
import traceback

import tyro

import efla
from efla.errors import unknown_name
from efla.native import keep_freed_memory

# Command -> description. The function of that name is in efla.cli.<command> or the module below, imported on demand.
COMMANDS = {
    "doctor": "Show what runs on this machine: versions, threads, backends, and a self-check of each.",
    "gpu-check": "Check that the GPU kernels compile, fit and compute the right result. GPU users run this first.",
    "bench": "Measure speed as ratios to transformers, softmax attention and sgemm, in one process.",
    "info": "Describe a model: mixers, sizes, parameters, state bytes, operations per token.",
    "eval": "The paper's table by lm-evaluation-harness, comparisons with their uncertainty, long contexts.",
    "generate": "Continue a prompt, streaming, with tokens per second.",
    "convert": "Convert checkpoints from flash-linear-attention to efla and back.",
    "prepare": "Tokenise text once, in parallel, into shards for training. Resumable.",
    "train": "Train a model on this machine, or on many under torchrun. Resumable.",
    "mad": "Show an instance of a MAD task, its targets marked.",
    "reproduce": "Run an experiment of the paper: exactness, smnist, lr, mad, lm, throughput, or all. Resumable.",
    "report": "Write one self-contained HTML page from the rows of runs.",
}
_MODULES = {
    "info": "efla.cli.models",
    "generate": "efla.cli.models",
    "convert": "efla.cli.models",
    "prepare": "efla.cli.train",
    "mad": "efla.experiments.mad.show",
}
# These parse their arguments themselves: the defaults depend on one of them.
_PARSES_ARGUMENTS = {"train"}

_TRACEBACK = "--traceback"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    if argv is None:
        keep_freed_memory()
    arguments = sys.argv[1:] if argv is None else argv
    show_trace = _TRACEBACK in arguments or os.environ.get("EFLA_TRACEBACK", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != _TRACEBACK]
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
    function = getattr(module, function_name)
    try:
        if name in _PARSES_ARGUMENTS:
            code = function(arguments[1:])
        else:
            code = tyro.cli(function, prog=f"efla {name}", args=arguments[1:])
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
            print(f"efla {name}: {error}\n(run with {_TRACEBACK} for the full trace)", file=sys.stderr)
        return 1
    return int(code or 0)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"efla {efla.__version__}: {efla.__doc__}",
            "",
            "usage: efla COMMAND [options]      (efla COMMAND --help lists the options)",
            "",
            *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
            "",
            f"Every command takes {_TRACEBACK} (or EFLA_TRACEBACK=1), which prints the full trace of an error.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
