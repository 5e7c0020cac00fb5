"""What is measured of a trained model: one function per measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from efla.data.corpora import Corpus
from efla.data.sampling import consecutive_rows
from efla.evaluation import ByteTokenizer, bits_by_position, even_buckets
from efla.evaluation.items import metric_items
from efla.evaluation.tasks import load_task
from efla.experiments.lm.config import CHOICES, RAW_KEYS, RECURRENT, LmConfig
from efla.layers import LinearAttention
from efla.runs.records import Record
from efla.scans.keys import l2_normalize
from efla.train.engine import Engine
from efla.train.step import Validation, validate

if TYPE_CHECKING:
    from efla.evaluation.harness import HarnessModel

POSITIONS = 4
"""Bits by position are measured up to this many training lengths."""
QUANTILES = (0.5, 0.99, 1.0)
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Subject:
    """A model of one arm and seed, with the text and the config that it is trained and measured with."""

    model: Any
    arm: str
    seed: int
    corpus: Corpus
    config: LmConfig

    def validate(self, part: str, limit: int | None) -> Validation:
        """Score consecutive rows of the training length, each from its second byte on."""
        config, engine = self.config, Engine.alone(self.config.device)
        stream = self.corpus.stream(part)
        return validate(self.model, stream, length=config.length, rows=config.rows, limit=limit, engine=engine)

    def validation_rows(self) -> Tensor:
        """The first rows of the validation text."""
        stream = self.corpus.stream("validation")
        return next(consecutive_rows(stream, self.config.length, self.config.rows)).to(self.config.device)

    def harness(self, max_length: int) -> HarnessModel:
        from efla.evaluation.harness import HarnessModel

        return HarnessModel(self.model, ByteTokenizer(), max_length=max_length, batch_tokens=_BATCH_TOKENS)

    def task(self, name: str, limit: int | None) -> Any:
        assert self.config.folder is not None
        # The rows have acc_norm of all sets, also of those for which the harness reports acc only.
        metrics = ("acc_norm",) if name in CHOICES else ()
        return load_task(name, Path(self.config.folder), limit, metrics=metrics)


def measurements(subject: Subject) -> dict[str, Callable[[Subject], Record]]:
    """The measurements of a cell by name, in the order in which they are made."""
    config = subject.config
    found: dict[str, Callable[[Subject], Record]] = {
        "test": lambda subject: _bits(subject.validate("test", config.test_bytes)),
        "validation": lambda subject: _bits(subject.validate("validation", config.final_validation_bytes)),
    }
    if subject.arm in RAW_KEYS:
        found["keys"] = _keys
    if subject.arm in RECURRENT:
        found["positions"] = _positions
    if config.downstream:
        found |= {"wikitext": _wikitext, "lambada": _lambada}
        if subject.seed == config.choice_seed:
            found["choices"] = _choices
    return found


def _bits(found: Validation) -> Record:
    return {"bits": found.bits_per_token, "perplexity": found.perplexity, "bytes": found.tokens}


def _wikitext(subject: Subject) -> Record:
    """Word perplexity in disjoint windows of the training length, the longest that every arm was trained on."""
    from efla.evaluation.harness import wikitext_items

    task = subject.task("wikitext", subject.config.wikitext_items)
    items = wikitext_items(subject.harness(subject.config.length), task, carried=False)
    found = _metrics(items, {"word_perplexity": "word_perplexity", "bits": "bits_per_byte"})
    return found | {"words": sum(item["words"] for item in items), "articles": len(items)}


def _lambada(subject: Subject) -> Record:
    """The last word of each passage. The model sees the last bytes of the passage, up to the training length."""
    from efla.evaluation.harness import run_task

    task = subject.task("lambada_openai", subject.config.lambada_items)
    items = run_task(subject.harness(subject.config.length), "lambada_openai", task).items
    names = {"perplexity": "perplexity", "accuracy": "acc", "bits": "bits_per_byte"}
    return _metrics(items, names) | {"passages": len(items)}


def _choices(subject: Subject) -> Record:
    """The eight multiple-choice sets, with both metrics: the paper reports acc for some and acc_norm for others."""
    from efla.evaluation.harness import run_task

    model = subject.harness(subject.config.choice_length)
    found: Record = {}
    for name in CHOICES:
        items = run_task(model, name, subject.task(name, subject.config.choice_items)).items
        found[name] = _metrics(items, {"acc": "acc", "acc_norm": "acc_norm"}) | {"items": len(items)}
    return found


def _metrics(items: Sequence[Record], names: dict[str, str]) -> Record:
    """Metrics of the items; names: key in the row -> the harness's name."""
    return {key: metric_items(items, name).exact_metric() for key, name in names.items()}


def _positions(subject: Subject) -> Record:
    """Bits per byte by position in long rows of the test text, with the state carried along each row."""
    config, stream = subject.config, subject.corpus.stream("test")
    length = POSITIONS * config.length
    count = min(config.position_rows, len(stream) // (length + 1))
    if count < 1:
        raise ValueError(f"the test text has {len(stream)} bytes, too few for one row of {length + 1}")
    rows = [stream.read(i * (length + 1), (i + 1) * (length + 1)).tolist() for i in range(count)]
    curve = bits_by_position(subject.model, rows, even_buckets(length), window=config.length, batch_rows=config.rows)
    bits = [float(f"{value:.6g}") for value in curve.bits]
    errors = [float(f"{value:.4g}") for value in curve.standard_errors]
    return {"ends": curve.ends, "bits": bits, "standard_errors": errors, "rows": count}


def _keys(subject: Subject) -> Record:
    return {"quantiles": list(QUANTILES), "layers": key_energies(subject.model, subject.validation_rows())}


@torch.no_grad()
def key_energies(model: nn.Module, rows: Tensor) -> list[Record]:
    """Quantiles (50, 99, 100 %) of lam = k.k and of beta * lam over all tokens and heads of rows [B, T], per layer."""
    found: list[Record] = []

    def look(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(mixer, LinearAttention)
        projected = mixer.project(arguments[0])
        _, k, _, _ = mixer._queries_keys_values(projected, None, None, None, False)
        beta, _ = mixer._step_inputs(projected)
        assert beta is not None
        k = k.float()
        lam = (l2_normalize(k) if mixer.key_norm else k).square().sum(-1)  # [B, T, Hk]
        lam = lam.repeat_interleave(mixer.num_heads // mixer.num_key_heads, dim=2)
        found.append({"layer": len(found), "lam": _quantiles(lam), "step_size": _quantiles(beta * lam)})

    mixers = [module for module in model.modules() if isinstance(module, LinearAttention) and module.rule.needs_beta]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    was_training = model.training
    model.eval()
    try:
        model(input_ids=rows, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return found


def _quantiles(values: Tensor) -> list[float]:
    flat = values.double().flatten()
    return [float(f"{q:.6g}") for q in torch.quantile(flat, flat.new_tensor(QUANTILES)).tolist()]
