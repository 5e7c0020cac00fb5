"""Benchmarks of speed and memory. Contenders take turns in one process and are compared as ratios.

A suite is a function of the number of rounds that yields one list of measurements per piece of work, with torch's threads.
"""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

import efla
from efla.native import kernels, rows
from efla.runs import provenance
from efla.runs.timing import Calls, Measurement, training_step
from efla.scans.backends import native
from efla.testing import assert_matches_oracle, make_inputs

Suite = Callable[[int], Iterator[list[Measurement]]]

PLAIN = "chunked, no compiled kernels"
BACKENDS = {"native": "native", "chunked": "chunked", PLAIN: "chunked"}
"""Backend of each contender. ``chunked`` uses the compiled norms, convolutions and gates too. ``PLAIN`` uses no compiled
code, as on a machine where the extension was not built."""

PIECE = 2_000  # tokens that :func:`read` reads at a time
_PACKAGES = ("efla", "torch", "transformers", "numpy", "safetensors", "triton", "flash-linear-attention")


def kernel_contenders(calls: Calls) -> Calls:
    """The contenders of ``BACKENDS``; the call of ``PLAIN`` runs without the compiled kernels."""
    return {name: rows.without_kernels()(call) if name == PLAIN else call for name, call in calls.items()}


def sgemm(size: int) -> tuple[Calls, dict[str, float]]:
    """The machine's float32 matrix product as a contender, and its flops by that contender's name."""
    left, right = torch.randn(2, size, size)
    return {"sgemm": lambda: left @ right}, {"sgemm": 2.0 * size**3}


def random_tokens(vocab_size: int, *shape: int) -> torch.Tensor:
    """Token ids above 0, the same in every call."""
    return torch.randint(1, vocab_size, shape, generator=torch.Generator().manual_seed(0))


def prefill_call(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    """A prompt without a cache: transformers refuses one of linear layers alone."""

    def call() -> object:
        return model.eval()(tokens, use_cache=False, logits_to_keep=1)

    return call


def decode_call(model: Any, cache: Any, batch: int = 1, times: int = 1) -> Callable[[], object]:
    """So many tokens after the cache, one after another."""
    token = torch.full((batch, 1), 7)

    def call() -> None:
        for _ in range(times):
            model(token, past_key_values=cache, use_cache=True)

    return call


def training_call(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training_step(model, optimizer, lambda: model(tokens, labels=tokens, use_cache=False).loss)


@torch.no_grad()
def read(model: Any, tokens: torch.Tensor) -> Any:
    """The cache after these tokens, read in pieces."""
    cache = None
    for piece in tokens.split(PIECE, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def check_contenders() -> None:
    """Compare every backend that is timed with the float64 oracle, at the widths that are timed.

    Raises RuntimeError if a backend is missing or wrong, so that no speed of a wrong result is reported.
    """
    for backend in ("native", "chunked"):
        reason = efla.backends()[backend]
        if reason is not None:
            raise RuntimeError(f"no benchmark without backend {backend!r}, which {reason}")
        for rule in efla.rules.names():
            for width in (64, 128):
                inputs = make_inputs(
                    rule, batch=1, length=130, key_heads=1, value_heads=1, key_dim=width, value_dim=width
                )
                try:
                    assert_matches_oracle(inputs, backend)
                except AssertionError as error:
                    raise RuntimeError(
                        f"backend {backend!r} is wrong for rule {rule!r} at width {width}, no speed is reported: {error}"
                    ) from None


def processor_name() -> str:
    """The processor's own name and the instruction set that torch and the kernels use of it."""
    best = kernels.simd_levels()[0] if kernels is not None else ""
    restricted = f" on a CPU with {best}" if best and kernels.active_simd() != best else ""
    return f"{provenance.processor()} ({torch.backends.cpu.get_cpu_capability()}{restricted})"


def machine_facts() -> dict[str, str]:
    """Versions, processor, threads and devices, as printable text."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        **{name: _version(name) for name in _PACKAGES},
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} processors",
        "SIMD (torch)": torch.backends.cpu.get_cpu_capability(),
        "SIMD (native)": native.simd_level(),
        "large products": "oneDNN" if rows.onednn_is_faster() else "torch's choice",
        "devices": ", ".join(devices),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
