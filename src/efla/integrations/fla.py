"""efla's CPU kernels as a backend of flash-linear-attention's gated delta rule.

    from efla.integrations.fla import register
    register()
    fla.ops.gated_delta_rule.chunk_gated_delta_rule(q, k, v, g, beta)      # CPU tensors run on native, others as before

flash-linear-attention 0.6 chooses among backends in ``chunk_gated_delta_rule`` alone. Its delta rule, its recurrent functions
and the norms and convolutions of its layers have no such choice and need a GPU; for those :mod:`efla.ops` is the drop-in.
"""

from typing import Any

from torch import Tensor

from efla import ops


def register() -> None:
    """Add the backend to flash-linear-attention's registry; ``FLA_EFLA=0`` in the environment switches it off."""
    from fla.backends import BaseBackend
    from fla.backends import register as register_backend

    class EflaBackend(BaseBackend):  # type: ignore[misc]
        backend_type = "efla"
        env_var = "FLA_EFLA"
        priority = 1
        chunk_gated_delta_rule = staticmethod(ops.chunk_gated_delta_rule)

        def chunk_gated_delta_rule_verifier(self, q: Tensor, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return q.device.type == "cpu", f"efla's kernels run on the CPU, q is on {q.device}"

    register_backend("gated_delta_rule")(EflaBackend)
