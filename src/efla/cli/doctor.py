"""``efla doctor``: what runs on this machine, and whether its results are right."""

import itertools
import textwrap
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import efla

_RULES = ("efla", "gated_efla", "delta")
_PROMISE = (
    "native, every dtype, sequences and parts > 8 tokens: outputs and gradients keep "
    "their bits in any batch, packing, threads; outputs if cut at multiples of 4"
)


def doctor(verbose: bool = False) -> int:
    """Show versions, threads, SIMD level and backends, and check each backend against the float64 oracle.

    Exits with 1 if a backend that runs here gives a wrong result.

    Args:
        verbose: Also show packages that are not needed for the CPU, and the whole message of an error.
    """
    from efla.bench import machine_facts

    console = Console()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for key, value in machine_facts().items():
        if verbose or value != "not installed":
            facts.add_row(f"[bold]{key}[/]", value)
    console.print(facts)

    table = Table("backend", "self-check against the float64 oracle", box=None, pad_edge=False)
    problems = []
    for name, reason in efla.backends().items():
        start = time.perf_counter()
        problem = None if reason is not None else find_problem(name)
        result = f"[green]right[/], {time.perf_counter() - start:.2f} s"
        if reason is not None:
            result = f"[yellow]not here[/]: {escape(reason)}"
        if problem is not None:
            shown = problem if verbose else textwrap.shorten(problem, 300, placeholder=" ... (--verbose)")
            result = f"[bold red]WRONG[/]: {escape(shown)}"
        table.add_row(name, result)
        problems.append(problem)
    console.print()
    console.print(table)
    if efla.backends()["native"] is None:
        problems.append(_batch_variance())
        verdict = "[green]yes[/]" if problems[-1] is None else f"[bold red]NO[/]: {escape(problems[-1])}"
        console.print(f"{_PROMISE}: {verdict}")
    is_wrong = any(problem is not None for problem in problems)
    console.print(f"\nnext: {'report the problem with efla doctor --verbose' if is_wrong else 'efla train'}")
    return 1 if is_wrong else 0


def _batch_variance() -> str | None:
    """What changes the bits of a sequence on ``native`` and should not."""
    from efla.native import DTYPES
    from efla.testing import assert_batch_invariant

    try:
        for rule, dtype in itertools.product(_RULES, DTYPES):
            assert_batch_invariant(rule, "native", dtype)
    except AssertionError as error:
        return str(error)
    return None


def find_problem(name: str) -> str | None:
    """What is wrong with a backend, by a self-check of about two seconds: odd lengths, packing, hard inputs, gradients."""
    from efla.bench.gpu import conformance

    try:
        if name == "fla":  # on the GPU, with the error budget of half precision
            conformance.self_check()
        else:
            _check_on_cpu(name)
    except (AssertionError, efla.BackendUnavailable) as error:
        return str(error)
    except Exception as error:
        # A kernel that fails to run is what this check looks for.
        return f"{type(error).__name__}: {error}"
    return None


def _check_on_cpu(name: str) -> None:
    from efla.testing import assert_matches_oracle, make_inputs

    for rule in _RULES:
        assert_matches_oracle(make_inputs(rule, batch=1, length=65, initial_state=True), name)
    assert_matches_oracle(make_inputs("gated_efla", packed=[1, 30, 17]), name)
    assert_matches_oracle(make_inputs("efla", kind="mixed_norms", batch=1, length=40), name)
