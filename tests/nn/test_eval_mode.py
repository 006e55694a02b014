import pytest
import torch
from torch import nn

from qtk.nn.eval_mode import evaluating, fast_path_off


def flags(model):
    return [module.training for module in model.modules()]


def test_every_module_evaluates_inside_and_is_as_it_was_outside():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(2, 2)))
    model.train()
    model[1].eval()
    before = flags(model)
    with evaluating(model):
        assert not any(flags(model))
    assert flags(model) == before == [True, True, False, False]


def test_flags_return_after_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert model.training


def calls_of_linear1(layer, x):
    calls = []
    forward = layer.linear1.forward  # a hook would turn the fast path off
    layer.linear1.forward = lambda *args: calls.append(args) or forward(*args)
    with torch.no_grad():
        layer(x)
    del layer.linear1.forward
    return len(calls)


def test_submodules_are_called_inside_and_the_setting_comes_back():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    assert calls_of_linear1(layer, x) == 0
    with fast_path_off():
        assert calls_of_linear1(layer, x) == 1
    assert calls_of_linear1(layer, x) == 0


def test_overlapping_uses_in_threads_keep_it_off_until_the_last_ends():
    first, second = fast_path_off(), fast_path_off()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()  # the second still runs
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_of_the_user_is_restored(enabled):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with fast_path_off():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
