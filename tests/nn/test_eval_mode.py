import pytest
from torch import nn

from qtk.nn.eval_mode import evaluating


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
