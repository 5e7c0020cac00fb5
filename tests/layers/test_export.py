"""An exported convolution takes any length, from one token on."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from efla.layers import ShortConvolution


class Convolution(torch.nn.Module):
    """The layer with its result masked: what stands at a padded token is meaningless."""

    def __init__(self):
        super().__init__()
        self.conv = ShortConvolution(8, bias=True)

    def forward(self, x, state=None, mask=None, cu_seqlens=None):
        y, new_state = self.conv(x, state=state, mask=mask, cu_seqlens=cu_seqlens, output_state=cu_seqlens is None)
        return (y if mask is None else y.masked_fill(~mask[..., None], 0)), new_state


@pytest.mark.parametrize("given", [None, "state", "mask", "cu_seqlens"])
def test_a_dynamic_length_is_one_or_more(given):
    layer, T = Convolution(), Dim("T", min=1)

    def inputs(length):
        extra = {
            "state": torch.randn(2, 8, 3),
            "mask": torch.rand(2, length) > 0.3,
            "cu_seqlens": torch.tensor([0, length, 2 * length]),
        }
        return {"x": torch.randn(2, length, 8), **({} if given is None else {given: extra[given]})}

    shapes = {"x": {1: T}, "state": {}, "mask": {1: T}, "cu_seqlens": {}}
    example = inputs(40)
    exported = export(layer, (), example, dynamic_shapes={name: shapes[name] for name in example}).module()
    for length in (1, 2, 3, 8, 9, 40):
        arguments = inputs(length)
        for got, expected in zip(exported(**arguments), layer(**arguments), strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected)


def test_a_compiled_step_of_a_known_length_keeps_the_form_for_few_tokens():
    layer, graphs = Convolution(), []

    def note(graph, _):
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(layer, backend=note, fullgraph=True)
    for length in (1, 40):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    assert ["conv1d" in code for code in graphs] == [False, True]
