"""The style of all figures: a colour and a line for each rule and arm (Okabe-Ito colours, safe for colour blindness)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Line(NamedTuple):
    """The label, colour and line of a curve."""

    label: str
    color: str
    dash: str = "-"
    width: float = 1.5


RULES = {
    "delta": Line("delta (explicit Euler)", "#d55e00", "-", 1.9),
    "rk2": Line("rk2 (midpoint)", "#e69f00"),
    "rk4": Line("rk4", "#cc79a7"),
    "implicit_euler": Line("implicit Euler", "#009e73"),
    "crank_nicolson": Line("Crank–Nicolson", "#56b4e9"),  # noqa: RUF001
    "efla": Line("EFLA (exact flow)", "#0b4f8a", "-", 2.4),
    "gated_delta": Line("gated delta", "#d55e00", "--"),
    "gated_efla": Line("gated EFLA", "#0b4f8a", "--"),
    "gated_efla_log": Line("gated EFLA, log rate", "#0b4f8a", ":"),
}

ARMS = {
    "exact-flow": Line("exact-flow (EFLA, raw keys)", "#0b4f8a", "-", 2.4),
    "delta-raw": Line("delta-raw (delta rule, raw keys)", "#d55e00", "--", 2.0),
    "delta-l2": Line("delta-l2 (delta rule, L2 keys)", "#7a5195", ":", 2.2),
    "exact-flow-l2": Line("exact-flow-l2 (EFLA, L2 keys)", "#56b4e9", "-."),
    "rk2": Line("rk2 (raw keys)", "#e69f00"),
    "rk4": Line("rk4 (raw keys)", "#cc79a7"),
    "implicit-euler": Line("implicit-euler (raw keys)", "#009e73"),
    "crank-nicolson": Line("crank-nicolson (raw keys)", "#8c8c00"),
    "gated-delta": Line("gated-delta (L2 keys)", "#a65628", "--"),
    "gated-exact-flow": Line("gated-exact-flow (raw keys)", "#1b9e9e", "-."),
    "attention": Line("attention (softmax)", "#555555", "--"),
    "mamba2": Line("mamba2", "#b8860b", ":"),
}


@contextmanager
def figure_style() -> Iterator[Any]:
    """Matplotlib without a display and with this project's settings; yields ``matplotlib.pyplot``."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("figures need matplotlib: pip install 'efla[experiments]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {
            "font.size": 9,
            "font.family": "DejaVu Sans",
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "savefig.dpi": 200,
            "svg.hashsalt": "efla",  # the same rows give the same file
            "svg.fonttype": "path",
        }
    ):
        yield plt


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png, bbox_inches="tight", facecolor="white")
    figure.savefig(svg, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    return [png, svg]
