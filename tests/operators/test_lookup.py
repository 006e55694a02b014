import torch
import torch.nn.functional as F

from qtk.operators.lookup import is_product


def test_matrix_products_and_convolutions_are_known_by_the_op_they_call():
    aten = torch.ops.aten
    products = aten.linear.default, aten.conv2d.default, aten.matmul.default, aten.addmm.default, aten.bmm.default
    assert all(is_product(op) for op in products)
    assert not any(is_product(op) for op in (aten.layer_norm.default, aten.add.Tensor, F.linear, torch.relu, None))
