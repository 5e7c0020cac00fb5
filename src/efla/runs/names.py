"""The names, colours and lines of rules and arms in what people read. Rows, options and files use the keys."""

from typing import NamedTuple


class Look(NamedTuple):
    """A name, a colour (Okabe-Ito and close to it, safe for colour blindness) and the dashes of a line."""

    name: str
    color: str
    dash: str = "-"


LOOKS = {
    # Arms of the experiments.
    "exact-flow": Look("EFLA", "#0b4f8a"),
    "delta-l2": Look("DeltaNet", "#d55e00"),
    "delta-raw": Look("DeltaNet (raw keys)", "#cc79a7", "--"),
    "exact-flow-l2": Look("EFLA (normalised keys)", "#56b4e9", "-."),
    "rk2": Look("Midpoint (RK2)", "#e69f00"),
    "rk4": Look("Runge–Kutta (RK4)", "#8c5aa8"),  # noqa: RUF001
    "implicit-euler": Look("Implicit Euler", "#009e73"),
    "crank-nicolson": Look("Crank–Nicolson", "#8c8c00"),  # noqa: RUF001
    "gated-delta": Look("Gated DeltaNet", "#a65628", "--"),
    "gated-exact-flow": Look("Gated EFLA", "#1b9e9e", "-."),
    "attention": Look("Softmax attention", "#555555", "--"),
    "mamba2": Look("Mamba-2", "#b8860b", ":"),
    # Rules.
    "linear": Look("Linear attention", "#777777"),
    "ssd": Look("Mamba-2", "#b8860b", ":"),
    "efla": Look("EFLA", "#0b4f8a"),
    "delta": Look("DeltaNet", "#d55e00"),
    "implicit_euler": Look("Implicit Euler", "#009e73"),
    "crank_nicolson": Look("Crank–Nicolson", "#8c8c00"),  # noqa: RUF001
    "gated_delta": Look("Gated DeltaNet", "#d55e00", "--"),
    "gated_efla": Look("Gated EFLA", "#0b4f8a", "--"),
    "gated_efla_log": Look("Gated EFLA (log gate)", "#0b4f8a", ":"),
    # Other series of charts.
    "training": Look("training", "#56b4e9"),
    "validation": Look("validation", "#0b4f8a"),
    "chance": Look("chance", "#777777", "--"),
}


def name_of(key: str) -> str:
    """The name of a rule or an arm; a key without one stands for itself."""
    return LOOKS[key].name if key in LOOKS else key
