import pytest
import torch
from torch import nn

from qtk.nn.fast_path import fast_path_off


def calls_of_linear1(layer, x):
    calls = []
    handle = layer.linear1.register_forward_pre_hook(lambda module, args: calls.append(module))
    handle.remove()  # a hook alone turns the fast path off, so the call itself is watched
    forward = layer.linear1.forward
    layer.linear1.forward = lambda *args: calls.append(args) or forward(*args)
    with torch.no_grad():
        layer(x)
    del layer.linear1.forward
    return len(calls)


def test_submodules_are_called_inside_and_the_setting_comes_back():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    assert calls_of_linear1(layer, x) == 0
    with pytest.raises(KeyError), fast_path_off():
        assert calls_of_linear1(layer, x) == 1
        raise KeyError
    assert calls_of_linear1(layer, x) == 0
