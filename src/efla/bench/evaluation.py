"""HellaSwag scored from shared prefills and by lm-evaluation-harness's plain path: same model, items and scores."""

from collections.abc import Callable, Iterator
from typing import Any

from efla.bench import Suite
from efla.bench.models import random_model
from efla.data.files import data_folder
from efla.evaluation import ByteTokenizer, tasks
from efla.runs.timing import Measurement, compare

ITEMS = 48
BATCH_TOKENS = 4096
PLAIN_ROWS = (8, 16)
"""Batch sizes of the plain path; all are timed, so that the ratio to its best is known."""
AGREEMENT = 1e-6
"""Nats, with the model in float64. In float32 the plain path's own sum is off by more than 1e-4 above 1,000 nats."""

# Byte models, then one with byte ids but the paper's vocabulary size, where the logits cost more.
MODELS: dict[str, dict[str, Any]] = {
    "efla, bytes": {"rule": "efla", "vocab_size": 256},
    "gated_efla, bytes": {"rule": "gated_efla", "vocab_size": 256},
    "softmax, bytes": {"mixers": ["softmax"], "vocab_size": 256},
    "efla, vocabulary 32,000": {"rule": "efla", "vocab_size": 32_000},
}

SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def hellaswag(rounds: int) -> Iterator[list[Measurement]]:
    """HellaSwag items (needs EFLA_DATA) on each model: shared prefill, then the plain path."""
    from efla.evaluation.harness import HarnessModel

    data = data_folder(None)
    if data is None:
        raise FileNotFoundError("the benchmark reads HellaSwag from a data folder: set EFLA_DATA")
    tasks.require_lm_eval()
    with tasks.silence_lm_eval():
        # The set starts with short captions and ends with long how-tos: items spread over all of it.
        total = len(tasks.local_records("hellaswag", data))
        chosen = sorted({round(i * (total - 1) / max(1, ITEMS - 1)) for i in range(ITEMS)})
        task = tasks.load_task("hellaswag", data)
        task.build_all_requests(samples=chosen, rank=0, world_size=1)
        requests = list(task.instances)
    for name, fields in MODELS.items():
        model = random_model(hidden_size=256, intermediate_size=768, **SPECIAL_TOKENS, **fields).eval()
        tokenizer = ByteTokenizer()
        options: dict[str, Any] = {"max_length": 2048, "batch_tokens": BATCH_TOKENS}
        shared = HarnessModel(model, tokenizer, **options)
        plain = {rows: HarnessModel(model, tokenizer, share=False, batch_size=rows, **options) for rows in PLAIN_ROWS}
        _check(name, model, shared, next(iter(plain.values())), requests)
        calls = {"shared prefill": _call(shared, requests)}
        calls |= {f"plain, {rows} rows": _call(lm, requests) for rows, lm in plain.items()}
        work = f"HellaSwag, {len(chosen)} items, {len(requests)} choices, 4 layers of 256: {name}"
        yield compare(work, calls, rounds=rounds)


SUITES: dict[str, Suite] = {"hellaswag": hellaswag}


def _call(lm: Any, requests: list[Any]) -> Callable[[], object]:
    def call() -> object:
        with tasks.silence_lm_eval():
            return lm.loglikelihood(requests)

    return call


def _check(name: str, model: Any, shared: Any, plain: Any, requests: list[Any]) -> None:
    """Raise RuntimeError if a score differs in float64, so that no speed is reported."""
    model.double()
    found, expected = _call(shared, requests)(), _call(plain, requests)()
    model.float()
    for (ours, _), (theirs, _) in zip(found, expected, strict=True):  # type: ignore[call-overload]
        if abs(ours - theirs) > AGREEMENT:
            raise RuntimeError(
                f"{name}: the shared prefill differs from the plain path by {abs(ours - theirs):.2g} nats in {theirs:.6g}; "
                "no speed is reported"
            )
