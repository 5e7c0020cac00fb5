"""The arms that experiments compare. Two arms differ in their token mixer and in nothing else."""

from typing import NamedTuple


class Arm(NamedTuple):
    """Linear attention with an update rule and L2-normalised or raw keys; without a rule, another token mixer."""

    rule: str = ""
    l2_keys: bool = False
    mixer: str = "linear"


ARMS = {
    "delta-l2": Arm("delta", l2_keys=True),
    "exact-flow": Arm("efla"),
    "delta-raw": Arm("delta"),
    "exact-flow-l2": Arm("efla", l2_keys=True),
    "gated-delta": Arm("gated_delta", l2_keys=True),
    "gated-exact-flow": Arm("gated_efla"),
    "attention": Arm(mixer="attention"),
    "mamba2": Arm(mixer="mamba2"),
    "rk2": Arm("rk2"),
    "rk4": Arm("rk4"),
    "implicit-euler": Arm("implicit_euler"),
    "crank-nicolson": Arm("crank_nicolson"),
}
