"""What the log that lets tokens be taken back costs in decoding, and loading a state against reading the tokens again."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from efla import state
from efla.bench import Suite
from efla.runs.timing import Contender, Measurement, compare

TOKENS, CONTEXT, PIECE = 64, 10_000, 2_000


def rewind(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """64 decoded tokens with and without the log."""
    model = _model()
    calls = {"decode": _decode(model, record=False), "decode, logged": _decode(model, record=True)}
    contenders = [Contender(name, call) for name, call in calls.items()]
    yield compare(f"decode {TOKENS}, 4 layers of 512", contenders, threads=threads, rounds=rounds, items=TOKENS)


def loading(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """10,000 tokens, read or loaded."""
    model = _model()
    tokens = torch.randint(model.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        state.save(_read(model, tokens), file)
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: _read(model, tokens),
            "load": lambda: state.load(file, model),
        }
        contenders = [Contender(name, call) for name, call in calls.items()]
        work = f"the state after {CONTEXT:,} tokens, 4 layers of 512"
        yield compare(work, contenders, threads=threads, rounds=rounds, items=CONTEXT)


SUITES: dict[str, Suite] = {"rewind": rewind, "loading": loading}


def _model() -> Any:
    from efla.bench.models import efla_model  # which lists these suites

    return efla_model("efla").eval()


@torch.no_grad()
def _read(model: Any, tokens: torch.Tensor) -> Any:
    cache = None
    for piece in tokens.split(PIECE, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def _decode(model: Any, *, record: bool) -> Callable[[], object]:
    cache = _read(model, torch.zeros(1, 8, dtype=torch.long))
    if record:
        cache.activate_past_recording()

    def call() -> None:
        for _ in range(TOKENS):
            model(torch.tensor([[7]]), past_key_values=cache)

    return call
