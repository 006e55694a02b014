"""The modules of a model without its tensors."""

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qtk.capture.skeleton import Skeleton
from qtk.errors import CaptureError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.ones(3), persistent=False)
        self.hidden = [self.a]

    def forward(self, x):
        return self.b(self.hidden[0](x)) + self.shift


def tensors(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def test_a_model_is_made_again_with_other_tensors():
    model, x = Tied(), torch.randn(2, 3)
    skeleton = Skeleton(model)
    other = Tied()
    made = skeleton.filled(tensors(other))
    assert torch.equal(made(x), other(x))
    assert made.b.weight is made.a.weight is other.a.weight
    assert made.b.bias is None
    assert made.hidden[0] is made.a
    assert model.a.weight is not other.a.weight


def test_it_holds_no_tensor_of_the_model():
    model = Tied()
    skeleton = Skeleton(model)
    empty = skeleton.empty()
    assert not [*empty.parameters(), *empty.buffers()]
    assert len([*model.parameters()]) == 2
    assert copy.deepcopy(skeleton) is skeleton


def test_a_missing_tensor_is_named():
    held = tensors(Tied())
    del held["shift"]
    with pytest.raises(CaptureError, match=r"^shift of the original is no tensor of the prepared model any more"):
        Skeleton(Tied()).filled(held)


def test_a_pickle_holds_it_where_its_classes_can_be_pickled():
    loaded = pickle.loads(pickle.dumps(Skeleton(nn.Linear(3, 2))))
    linear = nn.Linear(3, 2)
    assert torch.equal(loaded.filled(tensors(linear))(torch.ones(1, 3)), linear(torch.ones(1, 3)))
    local = type("Local", (nn.Module,), {})()
    with pytest.raises(CaptureError, match="was pickled without it"):
        pickle.loads(pickle.dumps(Skeleton(local))).filled({})


def test_compiled_code_has_none():
    with pytest.raises(CaptureError, match="cannot be made again: a module of code that torch compiled"):
        Skeleton(torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))).filled({})


def test_plain_attributes_are_copies():
    model = Tied()
    model.config = model.a.config = {"sizes": [3]}
    model.lock = threading.Lock()
    model.teacher, model.holder = [nn.Linear(1, 1)], SimpleNamespace(module=nn.Linear(1, 1))
    made = Skeleton(model).filled(tensors(model))
    made.config["sizes"].append(4)
    assert model.config == {"sizes": [3]}
    assert made.a.config is made.config
    assert made.hidden[0] is made.a
    assert made.lock is model.lock
    assert made.teacher is not model.teacher
    assert made.teacher[0] is model.teacher[0]  # outside the tree
    assert made.holder.module is model.holder.module
