"""Models by name for every command: a training run, a model folder, a name on the hub or a preset; with their tokenizer."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efla.models import presets

if TYPE_CHECKING:
    import torch

    from efla.models.configuration_efla import EflaConfig

_logger = logging.getLogger("efla")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to score or generate. ``source``: its folder or hub name."""

    name: str
    model: Any
    tokenizer: Any
    max_length: int
    source: str

    @cached_property
    def digest(self) -> str:
        """Identifies the weights and the configuration."""
        return _digest(Path(self.source), self.model.config)

    @property
    def facts(self) -> dict[str, Any]:
        """What a row says about the model."""
        from efla.models.accounting import parameter_count
        from efla.models.tokenizer import is_byte_tokenizer

        config = self.model.config
        mixers = getattr(config, "mixers", None)
        return {
            "model_type": config.model_type,
            "mixers": ", ".join(f"{m} x {n}" for m, n in Counter(mixers).items()) if mixers else config.model_type,
            "parameters": parameter_count(self.model),
            "vocabulary": int(config.get_text_config().vocab_size),
            "tokens": "bytes" if is_byte_tokenizer(self.tokenizer) else type(self.tokenizer).__name__,
        }


def names_of(sources: list[str]) -> dict[str, str]:
    """A short name for each model: the folder's last part, more of its path where two are alike.

    The folder ``model`` of a training run goes by the run's name.
    """
    parts = {source: _parts(source) for source in sources}
    for count in range(1, 20):
        names = {source: "/".join(parts[source][-count:]) or source for source in sources}
        if len(set(names.values())) == len(set(sources)):
            return names
    return {source: source for source in sources}


def _parts(source: str) -> tuple[str, ...]:
    parts = tuple(part for part in Path(source).parts if part != "/")
    return parts[:-1] if len(parts) > 1 and parts[-1] == "model" else parts


def choose_device(name: str) -> torch.device:
    """The device of that name, if it can be used here; "auto" is a GPU where torch finds one, else the CPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used here ({reason}); use --device cpu or auto") from error
    return device


def find_model(source: str) -> str:
    """The model's folder (the folder ``model`` in that of a training run), or its name on the hub."""
    folder = Path(source)
    inner = folder / "model"
    if (inner / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        return str(inner)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{source} has no config.json; give a folder written by save_pretrained or efla train"
            )
        if (folder / "checkpoints").is_dir():
            raise FileNotFoundError(
                f"{source} is a training run without a model; finish it with the same efla train command"
            )
    elif folder.is_absolute() or source.startswith(".") or source.count("/") > 1 or folder.exists():
        raise FileNotFoundError(f"{source!r} is neither a folder with a model nor a name on the hub (owner/name)")
    return source


def load_config(source: str) -> EflaConfig:
    """The configuration of a preset, or of one of our models: a training run, a folder or a hub name."""
    from efla.models.configuration_efla import EflaConfig

    if source in presets.names():
        return presets.get(source)
    if "/" not in source and not Path(source).is_dir():
        raise FileNotFoundError(
            f"{source!r} is neither a folder, a hub name (owner/name) nor a preset; "
            f"presets: {', '.join(presets.names())}"
        )
    values, _ = EflaConfig.get_config_dict(find_model(source))
    kind = values.get("model_type")
    if kind != "efla":
        from efla.models.convert import MODEL_TYPES

        advice = (
            "`efla convert` makes an efla model of it" if kind in MODEL_TYPES else "only efla models can be described"
        )
        raise ValueError(f"{source} is a {kind!r} model; {advice}. `efla generate` and `efla eval` take it as it is")
    return EflaConfig.from_dict(values)


def load_model(
    source: str,
    *,
    name: str | None = None,
    tokenizer: str | None = None,
    max_length: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    weights: str | None = None,
) -> Loaded:
    """A causal language model, ours or any of transformers, from safetensors only.

    source: as in :func:`find_model`. tokenizer: a folder, a name on the hub or "bytes"; default the model's own.
    device: as in :func:`choose_device`. max_length: default the config's ``max_position_embeddings``, else 2,048.
    dtype: "auto" is the checkpoint's, or float32 on a CPU that computes faster in it.
    weights: "float16" or "int8" for the linear maps, as in :class:`efla.models.quantization.CpuWeightsConfig`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen_device = choose_device("cpu" if weights and device == "auto" else device)
    options: dict[str, Any] = {"dtype": dtype}
    if weights is not None:
        if chosen_device.type != "cpu":
            raise ValueError(f"{weights} weights run on the CPU only, got --device {device}; leave one of them out")
        from efla.models.quantization import CpuWeightsConfig

        options = {"quantization_config": CpuWeightsConfig(weights)}
    if source in presets.names():
        raise ValueError(f"{source!r} is a preset without weights; train it first: efla train --help")
    name = name or source
    source = find_model(source)
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{source} holds no weights (*.safetensors); pickled ones (*.bin) are not read, as they can run code"
        )
    try:
        config: Any = AutoConfig.from_pretrained(source)
    except Exception as error:
        raise ValueError(f"the configuration of {source!r} could not be read: {_line(error)}") from error
    chosen = _load_tokenizer(source, config, tokenizer)
    try:
        with without_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True, **options)
    except Exception as error:
        raise ValueError(f"the model {source!r} could not be loaded: {_line(error)}") from error
    if dtype == "auto" and chosen_device.type == "cpu" and _is_slow_on_cpu(model.dtype):
        narrow = str(model.dtype).removeprefix("torch.")
        _logger.warning("%s is %s, which this CPU has no instructions for; it runs in float32", name, narrow)
        model.float()
    model.to(chosen_device).eval()
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    return Loaded(name, model, chosen, int(max_length or limit), source)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, for loading and saving."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


def _is_slow_on_cpu(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are slower than those of float32 here: up to 8 times without instructions for them."""
    import torch

    if dtype == torch.bfloat16:
        if platform.machine() in ("x86_64", "AMD64"):
            return not torch.cpu._is_avx512_bf16_supported()
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _load_tokenizer(source: str, config: Any, tokenizer: str | None) -> Any:
    """The tokenizer asked for, else the model's own, else bytes for a vocabulary of 256."""
    from transformers import AutoTokenizer

    from efla.models.tokenizer import ByteTokenizer, is_byte_tokenizer

    folder = Path(source)
    has_own = not folder.is_dir() or any((folder / name).is_file() for name in _TOKENIZER_FILES)
    if tokenizer == "bytes" or (tokenizer is None and not has_own and config.vocab_size == 256):
        return ByteTokenizer()
    if tokenizer is None and not has_own:
        raise ValueError(
            f"{source} has no tokenizer and its vocabulary of {config.vocab_size} is not bytes; name one with --tokenizer"
        )
    try:
        found = AutoTokenizer.from_pretrained(tokenizer or source)
    except Exception as error:
        raise ValueError(f"the tokenizer {tokenizer or source!r} could not be loaded: {_line(error)}") from error
    return ByteTokenizer() if is_byte_tokenizer(found) else found


def _digest(folder: Path, config: Any) -> str:
    """A hash of the weights' bytes and the config; the commit for a model from the hub."""
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None) or "unknown")
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(file.name.encode())
        with open(file, "rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()[:16]


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
