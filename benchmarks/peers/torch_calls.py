"""Calls of a torch function, for the drivers of torch's peers and of ``native``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

INPUTS = ("q", "k", "v", "beta", "log_gate")
ALL_WORK = ["forward", "training", "decoding"]


def prepare(
    function: Callable[..., Any], work: str, arrays: dict[str, np.ndarray], threads: int
) -> tuple[Callable[[], Any], Callable[[Any], dict[str, np.ndarray]]]:
    """function: of q, k, v, beta, log_gate and a state or None, to outputs and state. Training computes all gradients."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(work == "training")  # entering no_grad at every call would take a quarter of a small step
    tensors = [torch.from_numpy(arrays[name]).requires_grad_(work == "training") for name in INPUTS]
    state = torch.from_numpy(arrays["state"]) if work == "decoding" else None

    def train() -> Any:
        o, _ = function(*tensors, state)
        return o, torch.autograd.grad(o, tensors, grad_outputs=torch.ones_like(o))

    def read(results: Any) -> dict[str, np.ndarray]:
        o, rest = results
        found = {"o": o}
        if work == "training":
            found |= {f"d_{name}": gradient for name, gradient in zip(INPUTS, rest, strict=True)}
        elif work == "decoding":
            found["state"] = rest
        return {name: x.detach().numpy() for name, x in found.items()}

    return (train if work == "training" else partial(function, *tensors, state)), read
