"""An exported model takes every length."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from .tiny import ALL, random_tokens, tiny_model


@pytest.mark.parametrize("name", ["efla", "everything"])
@pytest.mark.parametrize("part", ["EflaModel", "EflaForCausalLM"])
def test_an_exported_model_takes_any_length_from_one_token_on(name, part):
    model = tiny_model(use_cache=False, **ALL[name]).double()
    model = model.model if part == "EflaModel" else model
    with torch.no_grad():
        program = export(
            model, (), {"input_ids": random_tokens(2, 40)}, dynamic_shapes={"input_ids": {1: Dim("T", min=1)}}
        ).module()
        for length in (1, 3, 8, 9, 40):
            tokens = random_tokens(2, length)
            torch.testing.assert_close(program(input_ids=tokens)[0], model(tokens)[0])
