"""The gate before every benchmark: a speed is worth nothing if the result is wrong."""

from __future__ import annotations

import efla
from efla.testing import assert_matches_oracle, make_inputs


def check_contenders() -> None:
    """Every backend that will be timed equals the float64 oracle at the widths that will be timed, or RuntimeError."""
    for backend in ("native", "chunked"):
        reason = efla.backends()[backend]
        if reason is not None:
            raise RuntimeError(f"no benchmark without backend {backend!r}, which {reason}")
        for rule in efla.rules.names():
            for width in (64, 128):
                shape = {
                    "batch": 1,
                    "length": 130,
                    "key_heads": 1,
                    "value_heads": 1,
                    "key_dim": width,
                    "value_dim": width,
                }
                try:
                    assert_matches_oracle(make_inputs(rule, **shape), backend)  # type: ignore[arg-type]
                except AssertionError as error:
                    raise RuntimeError(
                        f"backend {backend!r} is wrong for rule {rule!r} at width {width}, no speed is reported: {error}"
                    ) from None
