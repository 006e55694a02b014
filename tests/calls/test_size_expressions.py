import math

import pytest
import torch
from torch import nn

from qtk.calls.size_expressions import evaluate, is_readable, size_at
from qtk.torch_private import size_text


def test_a_condition_reads_lengths_and_nothing_else():
    assert evaluate("max(s0, s1) // 2 == 3", {"s0": 7, "s1": 2})
    assert not evaluate("8 % (s0 // 4) == 0", {"s0": 3})
    for text in ("open('x')", "math.__loader__", "torch.load('x')", "s0.real", "s1 > 2"):
        with pytest.raises(NameError):
            evaluate(text, {"s0": 3})
    with pytest.raises(SyntaxError):
        evaluate("[s0 for s0 in (1, 2)]", {"s0": 3})


def test_a_condition_without_a_value_does_not_hold():
    assert not evaluate("torch._sym_sqrt(3 - s0) >= 0", {"s0": 4})
    assert not evaluate("2.0 ** s0 > 0", {"s0": 5000})


def test_a_condition_with_unknown_functions_is_not_readable():
    assert is_readable("not (s0 > 3 or s0 == 1)", {"s0": 3})
    assert not is_readable("IsNonOverlappingAndDenseIndicator(s0, 1)", {"s0": 3})
    assert not is_readable("s0 >", {"s0": 3})
    assert size_at("LShift(s0, 1)", {"s0": 3}) is None


class Lengths(nn.Module):
    """Makes tensors whose lengths are what a function of sizes gives."""

    def forward(self, x):
        length = x.shape[0]
        lengths = [
            math.trunc(length * 1.7), math.trunc(length / 2), math.ceil(length / 3), math.floor(length * 0.3),
            round(length * 1.3), math.trunc(round(length * 0.33, 1) * 10), math.trunc(torch.sym_float(length) // 3),
            length**2, math.trunc(length**0.5), math.trunc(2.0 ** (length / 8)), torch.sym_max(length, 20),
            torch.sym_min(length, 20), abs(20 - length), length % 7 + 1, length * 7 % 5, length // 3, -(-length // 5),
            length & 6, length | 6,
        ]
        return [x.new_zeros(each) for each in lengths]


def test_lengths_that_torch_computes_have_the_values_that_python_computes():
    program = torch.export.export(Lengths(), (torch.ones(16),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    (x,) = program.graph.find_nodes(op="placeholder")
    sizes = [node.meta["val"].shape[0] for node in program.graph.output_node().args[0]]
    assert not any(isinstance(size, int) for size in sizes)
    for length in (16, 17, 31):
        found = [size_at(size_text(size), {size_text(x.meta["val"].shape[0]): length}) for size in sizes]
        assert found == [len(each) for each in Lengths()(torch.ones(length))]
