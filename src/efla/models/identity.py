"""What tells one model from another, so that a state is only continued by the model that made it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from efla.layers.linear import PackedLinear
from efla.models.configuration_efla import EflaConfig

# Fields of a configuration that change neither the layers nor what they compute.
_IRRELEVANT = {
    "backend", "bos_token_id", "chunk_size", "conv_init", "eos_token_id", "initializer_range", "loss_chunk_size",
    "max_position_embeddings", "pad_token_id", "use_cache",
}  # fmt: skip


def identify(model: Any) -> dict[str, str]:
    """The model's ``config`` as by :func:`describe`, its ``dtype``, and a hash of its ``weights``, those of the head aside."""
    from efla.models.modeling_efla import EflaModel

    decoder = next(module for module in model.modules() if isinstance(module, EflaModel))
    dtype = str(next(decoder.parameters()).dtype).removeprefix("torch.")
    return {"config": describe(model.config), "dtype": dtype, "weights": _fingerprint(decoder)}


def describe(config: EflaConfig) -> str:
    """The fields that say what the layers are, as JSON."""
    names = sorted(set(EflaConfig.__annotations__) - _IRRELEVANT - {"model_type"})
    return json.dumps({name: getattr(config, name) for name in names}, sort_keys=True)


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """What kind of model made a state, by its :func:`identify`, if it was another than the one here."""
    old, new = json.loads(there["config"]), json.loads(here["config"])
    differing = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if differing:
        name, more = differing[0], f" ({len(differing)} fields differ)" if len(differing) > 1 else ""
        return f"another model: {name} is {old.get(name)} there, {new.get(name)} here{more}"
    if there["dtype"] != here["dtype"]:
        return f"a model in another dtype: {there['dtype']} there, {here['dtype']} here"
    if there["weights"] != here["weights"]:
        return "a model with the same configuration and other weights"
    return None


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _fingerprint(decoder: nn.Module) -> str:
    """A hash of the first 16 numbers of every parameter and the first row of every packed map: another checkpoint has another."""
    digest = hashlib.sha256()
    for name, parameter in decoder.named_parameters():
        digest.update(name.encode() + bytes_of(parameter.detach().flatten()[:16]))
    for name, module in decoder.named_modules():
        if isinstance(module, PackedLinear):
            digest.update(name.encode() + bytes_of(module.weight[0]))
    return digest.hexdigest()
