"""What is said of weights that a configuration asks for and that stay in float."""

import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import qtk


def said(model, x, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qtk.QuantSim(model.eval(), x, **settings)
    return [str(each.message) for each in caught if "that the config asks for" in str(each.message)]


def layers(*widths):
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def test_weights_that_blocks_do_not_divide_are_counted_in_parameters():
    (line,) = said(layers(100, 160, 64), torch.randn(2, 100), config="weight_only_int4")
    share = 16000 / (16000 + 10240)
    assert line.startswith(f"{share:.0%} of the weights that the config asks for stay in float (1 of 2 tensors): ")
    assert "0.weight: float by rules[1]: block_size 32 does not divide axis 1 of shape (160, 100)" in line


@pytest.mark.parametrize("settings", [{}, {"config": {"version": 1, "rules": [
    {"match": {"path": "0"}, "weight": "float"}]}}, {"weight_bits": None}])
def test_what_a_rule_leaves_in_float_is_no_news(settings):
    assert said(layers(100, 160, 64), torch.randn(2, 100), **settings) == []
