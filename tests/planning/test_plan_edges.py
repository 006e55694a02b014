import torch

from tests.planning.plans import BARE, ConvReluConv, by_name, plan_of


def test_an_input_rule_puts_a_second_quantizer_on_the_edge():
    config = {**BARE, "rules": [{"match": {"path": "conv2"}, "input": {"bits": 16}}]}
    decided = by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config))
    assert decided["conv2:in[0]"].spec.dtype.bits == 16
    assert decided["relu:out"].spec.dtype.bits == 8
