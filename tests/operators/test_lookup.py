import pytest
import torch
import torch.nn.functional as F
from torch import fx

from qtk.operators.lookup import is_product, row_of


def test_matrix_products_and_convolutions_are_known_by_the_op_they_call():
    aten = torch.ops.aten
    products = aten.linear.default, aten.conv2d.default, aten.matmul.default, aten.addmm.default, aten.bmm.default
    assert all(is_product(op) for op in products)
    assert not any(is_product(op) for op in (aten.layer_norm.default, aten.add.Tensor, F.linear, torch.relu, None))


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1 / 3, -1.5, 0, 1, 2, 1.5, -1, -2.0, 3.0])
def test_a_power_is_a_root_where_its_slope_has_no_bound_and_divides_where_0_is_infinite(exponent):
    graph = fx.Graph()
    row = row_of(graph.call_function(torch.ops.aten.pow.Tensor_Scalar, (graph.placeholder("x"), exponent)))
    tiny = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    power = tiny**exponent
    power.backward()
    is_whole = float(exponent).is_integer()  # which reads values of both signs
    assert row.names == ("pow", "pow" if is_whole or tiny.grad.isfinite() else "root")
    assert row.divisors == (() if power.isfinite() else (0,))
