import copy
import dataclasses

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CaptureError

X = torch.randn(4, 8)


@dataclasses.dataclass
class Config:
    width: int = 8
    names: tuple[str, ...] = ("a", "b")


class Net(nn.Module):
    num_heads = 2

    def __init__(self):
        super().__init__()
        self.config, self.num_classes, self.labels = Config(), 3, {0: "cat"}
        self.fc, self.hidden = nn.Linear(8, 3), [nn.Linear(2, 2)]
        self.table = torch.ones(3)
        self.act = torch.relu

    def forward(self, x):
        return self.act(self.fc(x)) + self.table

    def encode(self, x):
        return self.fc(x)


def stand_ins():
    prepared = qtk.prepare_model(Net(), X)
    return [prepared, copy.deepcopy(prepared), qtk.QuantSim(Net(), X).model]


def test_data_can_be_read():
    for model in stand_ins():
        assert model.config == Config()
        assert (model.num_classes, model.labels) == (3, {0: "cat"})
        assert (model.fc.in_features, model.fc.out_features) == (8, 3)


@pytest.mark.parametrize(("name", "match"), [
    ("encode", "has no 'encode', which is code of Net; use it on the original model"),
    ("hidden", "has no 'hidden', which holds modules, tensors or code in the original Net; read it there"),
    ("nothing", "neither the prepared model nor the original Net has 'nothing'"),
])
def test_what_is_no_data_is_named(name, match):
    for model in stand_ins():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=match):
            getattr(model, name)
        with pytest.raises(AttributeError, match="which is code of Linear"):
            model.fc.reset_parameters()


def test_setting_them_is_refused_as_before():
    for model in stand_ins():
        with pytest.raises(CaptureError, match="setting 'num_classes' would have no effect"):
            model.num_classes = 4


def test_a_name_of_the_original_is_free_for_what_capture_adds():
    model = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    prepared = qtk.prepare_model(nn.ModuleDict({"m": model})["m"], (X[None], X[None], X[None]))
    assert type(prepared.get_submodule("dropout")).__name__ == "Dropout"


def test_an_attribute_that_cannot_be_copied_is_no_hindrance():
    class Refuses:
        def __deepcopy__(self, memo):
            raise RuntimeError("planted")

    model = Net()
    model.handle = Refuses()
    assert qtk.QuantSim(model, X, in_place=True).model.handle is model.handle
    assert qtk.QuantSim(model, X).model.handle is model.handle
