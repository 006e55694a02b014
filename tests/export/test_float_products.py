"""The second operand of a product that XNNPACK leaves in float is no dequantize op; other products keep theirs."""

import pytest
import torch
from torch import nn

import qtk
from qtk.export.repeated_ops import is_dequantize
from qtk.operators.lookup import row_of

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        mean = self.second(self.first(x).relu()).relu().mean((2, 3))
        features = self.last(mean)
        return (features @ self.weight) @ features.t()


def exported(tmp_path, config, *rules):
    """The simulation's result and the program of ``Net``, and its products."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    sim = qtk.QuantSim(Net().eval(), x, config={"version": 1, "extends": config, "rules": list(rules)})
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    program = torch.export.load(tmp_path / "out" / "model.pt2")
    products = [node for node in program.graph.nodes if (row := row_of(node)) is not None and row.product]
    with torch.no_grad():
        return sim.model(x), program.module()(x), products


def copied(products):
    return [node.args[1].target is aten.clone.default and is_dequantize(node.args[1].args[0]) for node in products]


FLOAT = {"output": "float"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("config", "rules", "expected"), [
    ("xnnpack", [], [False, False, False, True, True]),
    ("xnnpack", [{"match": {"path": "relu"}, **FLOAT}, {"match": {"path": "second"}, "input": "float"}],
     [True, True, False, True, True]),
    ("xnnpack", [{"match": {"path": "last"}, **FLOAT}], [False, False, True, True, False]),
    ("x86_inductor", [{"match": {"path": "last"}, **FLOAT}], [False] * 5),
], ids=["products of two values", "an input in float", "an output in float", "another target"])
@pytest.mark.medium
def test_operands_of_products_in_float_are_copied(config, rules, expected, tmp_path):
    simulated, computed, products = exported(tmp_path, config, *rules)
    assert copied(products) == expected
    assert torch.allclose(computed, simulated, atol=1e-5)
