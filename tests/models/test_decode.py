"""One decoded token in one kernel call a block: the same bits as its modules, and only where nothing was put between them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from efla import rules
from efla.models import EflaForCausalLM
from efla.models.block import EflaBlock
from efla.models.quantization import WEIGHTS, pack_linears
from efla.native import kernels
from tests.models.tiny import VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels were not built")

MODELS: dict[str, dict[str, Any]] = {
    **{name: {"rule": name} for name in rules.names()},
    "grouped heads": {"rule": "gated_efla", "num_key_heads": 1, "value_head_dim": 24},
    "no convolution": {"conv_size": 0},
    "no MLP": {"intermediate_size": 0},
    "everything": {"mixers": ["mamba2", "softmax", "gated_efla_log", "efla"]},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each block that one kernel computed."""
    made: list[int] = []
    step = EflaBlock._step

    def counted(self: EflaBlock, *arguments: Any) -> Tensor | None:
        y = step(self, *arguments)
        made.extend([self.layer_idx] * (y is not None))
        return y

    monkeypatch.setattr(EflaBlock, "_step", counted)
    return made


@contextmanager
def by_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EflaBlock, "_step", lambda *_: None)
        yield


@torch.no_grad()
def decode(model: nn.Module, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    """Logits of single tokens after the first four, and the states after them."""
    cache = model(ids[:, :4], use_cache=True).past_key_values
    logits = [model(ids[:, t : t + 1], past_key_values=cache, **options).logits for t in range(4, ids.shape[1])]
    states = {f"memory {i}": x.recurrent_states[0] for i, x in enumerate(cache.layers) if cache.is_linear[i]}
    return {"logits": torch.cat(logits, 1), **states}


def ids_of(batch: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["float32", "bfloat16", "float64"]
)
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_one_kernel_computes_the_bits_of_the_modules(
    fields: dict[str, Any], dtype: torch.dtype, steps: list[int]
) -> None:
    model = tiny_model(**fields).to(dtype)
    for batch in (1, 3):
        found = decode(model, ids_of(batch))
        with by_modules():
            expected = decode(model, ids_of(batch))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(steps) == 2 * 4 * (2 if "mixers" in fields else 4)


@pytest.mark.parametrize("fields", [{}, {"rule": "gated_efla"}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_smaller_weights_take_the_same_kernel(weights: str, fields: dict[str, Any], steps: list[int]) -> None:
    model = pack_linears(tiny_model(**fields), weights)
    found = decode(model, ids_of(3))
    assert len(steps) == 4 * 4
    with by_modules():
        expected = decode(model, ids_of(3))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    alone = decode(model, ids_of(3)[:1])
    assert all(torch.equal(found[name][:1], alone[name]) for name in alone)


def test_more_rows_than_the_products_take_are_left_to_the_modules(steps: list[int]) -> None:
    decode(tiny_model(), ids_of(17))
    assert not steps


def train_a_step(model: EflaForCausalLM) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(ids_of(2), labels=ids_of(2)).loss.backward()
    optimizer.step()


def load_other_weights(model: EflaForCausalLM) -> None:
    model.load_state_dict(tiny_model(seed=1).state_dict())


def replace_weights(model: EflaForCausalLM) -> None:
    model.load_state_dict(tiny_model(seed=1).state_dict(), assign=True)


def move_weights(model: EflaForCausalLM) -> None:
    model.double()


def add_lora(model: EflaForCausalLM) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config)


def add_hook(model: EflaForCausalLM) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


def replace_forward(model: EflaForCausalLM) -> None:
    norm = model.model.layers[1].mixer_norm
    forward = norm.forward
    norm.forward = lambda x: 2 * forward(x)  # as accelerate's hooks do


@pytest.mark.parametrize(
    "change", [train_a_step, load_other_weights, replace_weights, move_weights, add_lora, add_hook, replace_forward]
)
def test_what_changed_between_two_generations_is_noticed(change: Any, steps: list[int]) -> None:
    model = tiny_model()
    before = decode(model, ids_of(2))["logits"]
    assert steps
    change(model)
    found = decode(model, ids_of(2))["logits"]
    with by_modules():
        expected = decode(model, ids_of(2))["logits"]
    assert torch.equal(found, expected)
    assert not torch.allclose(found.to(before.dtype), before, rtol=0, atol=1e-3) or change is move_weights


def test_hidden_states_of_each_block_are_returned(steps: list[int]) -> None:
    model, ids = tiny_model(), ids_of(2)
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        found = model(ids[:, 7:], past_key_values=copy.deepcopy(cache), output_hidden_states=True).hidden_states
        with by_modules():
            expected = model(ids[:, 7:], past_key_values=cache, output_hidden_states=True).hidden_states
    assert steps and len(found) == 5
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("grad", [False, True])
def test_gradients_and_autocast_take_the_modules(grad: bool, steps: list[int]) -> None:
    model, ids = tiny_model(), ids_of(2)
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
    steps.clear()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=not grad):
        logits = model(ids[:, 7:], past_key_values=cache).logits
    assert logits.requires_grad == grad and not steps
