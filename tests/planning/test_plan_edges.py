import pytest
import torch
from torch import nn

from tests.planning.plans import BARE, ConvReluConv, by_name, plan_of


def test_an_input_rule_puts_a_second_quantizer_on_the_edge():
    config = {**BARE, "rules": [{"match": {"path": "conv2"}, "input": {"bits": 16}}]}
    decided = by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config))
    assert decided["conv2:in[0]"].spec.dtype.bits == 16
    assert decided["relu:out"].spec.dtype.bits == 8


class Stream(nn.Module):
    """A value that a norm and a linear layer read."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        return self.norm(y), self.second(y)


@pytest.mark.parametrize(("elsewhere", "expected"), [({"bits": 8}, 8), ("float", None)], ids=["8 bits", "float"])
def test_what_reads_a_stream_beside_its_norm_reads_it_as_other_values_are(elsewhere, expected):
    rules = [{"match": {"op": "linear"}, "output": elsewhere},
             {"match": {"op": "linear", "feeds": ["layer_norm"]}, "output": {"bits": 16}}]
    decided = by_name(plan_of(Stream(), torch.randn(2, 8), {**BARE, "rules": rules}))
    assert decided["first:out"].spec.dtype.bits == 16
    found = decided.get("second:in[0]")
    assert (found and found.spec.dtype.bits) == expected
