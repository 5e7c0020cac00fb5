"""What the log that lets tokens be taken back costs in decoding, and loading a state against reading the tokens again."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from efla import state
from efla.bench import Suite, random_tokens
from efla.runs.timing import Measurement, compare

TOKENS, CONTEXT, PIECE = 64, 10_000, 2_000


def rewind(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """64 decoded tokens with and without the log."""
    model = _model()
    calls = {"decode": _decode(model, record=False), "decode, logged": _decode(model, record=True)}
    yield compare(f"decode {TOKENS}, 4 layers of 512", calls, threads=threads, rounds=rounds, items=TOKENS)


def loading(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """10,000 tokens, read or loaded."""
    model = _model()
    tokens = random_tokens(model.config.vocab_size, 1, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        state.save(read(model, tokens), file)
        calls = {"read": lambda: read(model, tokens), "load": lambda: state.load(file, model)}
        work = f"the state after {CONTEXT:,} tokens, 4 layers of 512"
        yield compare(work, calls, threads=threads, rounds=rounds, items=CONTEXT)


SUITES: dict[str, Suite] = {"rewind": rewind, "loading": loading}


def _model() -> Any:
    from efla.bench.models import efla_model  # which lists these suites

    return efla_model("efla").eval()


@torch.no_grad()
def read(model: Any, tokens: torch.Tensor) -> Any:
    """The cache after these tokens, read in pieces."""
    cache = None
    for piece in tokens.split(PIECE, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def _decode(model: Any, *, record: bool) -> Callable[[], object]:
    cache = read(model, torch.zeros(1, 8, dtype=torch.long))
    if record:
        cache.activate_past_recording()

    def call() -> None:
        for _ in range(TOKENS):
            model(torch.tensor([[7]]), past_key_values=cache)

    return call
