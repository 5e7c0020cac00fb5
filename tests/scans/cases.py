"""What every backend is tried on."""

from __future__ import annotations

import efla

RULES = efla.rules.names()[:11]
CONTRACTIVE = [name for name in RULES if efla.rules.get(name).contractive]
# "reference" is what they are compared with; "fla" takes tensors of a GPU, and its tests are in tests/gpu.
BACKENDS = [n for n, reason in efla.backends().items() if reason is None and n not in ("reference", "fla")]

# id -> arguments of efla.testing.make_inputs; lengths are awkward on purpose.
SHAPES = {
    "dense": {"length": 100},
    "one_token": {"length": 1},
    "chunk_less_one": {"length": 63},
    "one_chunk": {"length": 64},
    "chunk_and_one": {"length": 65, "initial_state": True},
    "initial_state": {"length": 80, "initial_state": True},
    "packed": {"packed": [1, 63, 64, 65, 7]},
    "packed_with_state_and_empty": {"packed": [5, 0, 70], "initial_state": True},
    "grouped_heads": {"length": 70, "key_heads": 2, "value_heads": 6},
    "wide_values": {"length": 70, "key_dim": 8, "value_dim": 24},
    "odd_widths": {"length": 33, "key_dim": 5, "value_dim": 3, "key_heads": 1, "value_heads": 1},
    "l2_norm": {"length": 70, "qk_l2norm": True},
}
