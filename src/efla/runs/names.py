"""The names of rules and arms that people read. Rows, options and files use the keys."""

NAMES = {
    # Arms of the experiments.
    "exact-flow": "EFLA",
    "delta-l2": "DeltaNet",
    "delta-raw": "DeltaNet (raw keys)",
    "exact-flow-l2": "EFLA (normalised keys)",
    "implicit-euler": "Implicit Euler",
    "crank-nicolson": "Crank–Nicolson",  # noqa: RUF001
    "gated-exact-flow": "Gated EFLA",
    "gated-delta": "Gated DeltaNet",
    "mamba2": "Mamba-2",
    "attention": "Softmax attention",
    # Rules, and arms of the same name.
    "linear": "Linear attention",
    "ssd": "Mamba-2",
    "delta": "DeltaNet",
    "rk2": "Midpoint (RK2)",
    "rk4": "Runge–Kutta (RK4)",  # noqa: RUF001
    "implicit_euler": "Implicit Euler",
    "crank_nicolson": "Crank–Nicolson",  # noqa: RUF001
    "efla": "EFLA",
    "gated_delta": "Gated DeltaNet",
    "gated_efla": "Gated EFLA",
    "gated_efla_log": "Gated EFLA (log gate)",
}


def name_of(key: str) -> str:
    """The name of a rule or an arm; a key without one stands for itself."""
    return NAMES.get(key, key)
