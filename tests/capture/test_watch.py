import pytest
import torch
from torch import nn

from qtk.capture.watch import Watch


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())


def test_each_step_of_a_path_is_watched():
    for change in (lambda model: model.__setitem__(0, nn.Sequential(model[0][0])),
                   lambda model: model[0].__setitem__(0, nn.Linear(2, 2))):
        model, watch = net(), Watch()
        assert watch.module(model, "0.0") is model[0][0]
        assert watch.holds()
        change(model)
        assert not watch.holds()


def test_a_place_that_is_empty_is_watched():
    model, watch = net(), Watch()
    watch.add(vars(model), "forward")
    model[1].weight = nn.Parameter(torch.ones(1))
    assert watch.holds()
    model.forward = len
    assert not watch.holds()


def test_hooks_anywhere_below_and_of_all_modules():
    model, watch = net(), Watch()
    watch.add_hooks(model)
    for register in (model[0][0].register_forward_hook, nn.modules.module.register_module_forward_pre_hook):
        assert watch.holds()
        handle = register(lambda *given: None)
        assert not watch.holds()
        handle.remove()


def test_the_class_of_a_module():
    model, watch = net(), Watch()
    watch.add_type(model[0][0])
    assert watch.holds()
    nn.utils.parametrizations.orthogonal(model[0][0])
    assert not watch.holds()


def test_a_step_that_is_no_module():
    model = net()
    model.note = "text"
    with pytest.raises(LookupError, match="note"):
        Watch().module(model, "note")
