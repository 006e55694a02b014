import pytest
import torch

from qtk.ops.forward_mode import refuse_forward_mode


def test_one_tensor_of_several_is_enough_and_none_is_none():
    x = torch.ones(2)
    refuse_forward_mode("qtk::op", x, None)

    def called(y):
        refuse_forward_mode("qtk::op", x, None, y)
        return y

    torch.func.grad(lambda y: called(y).sum())(x)
    with pytest.raises(NotImplementedError, match=r"qtk::op has no derivatives in forward mode .* torch\.func\.vjp"):
        torch.func.jvp(called, (x,), (x,))
