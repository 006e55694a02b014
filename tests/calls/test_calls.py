"""Calls, what they have in common, and copies of their tensors."""

import copy

import pytest
import torch
from torch import nn

from qtk.calls.calls import Call, detached, with_rows

X = torch.randn(3, 4)


def test_the_size_of_a_call_counts_all_tensors_that_go_in():
    assert Call((X, [X[:1]]), {"y": {"z": X}, "n": 3}, X).numel == 12 + 4 + 12


def test_copies_are_apart_and_without_gradients():
    x = torch.zeros(2, requires_grad=True)
    tree = detached({"a": [x * 1, 3]})
    assert tree["a"][0].requires_grad is False
    tree["a"][0] += 1
    assert not x.any()
    assert tree["a"][1] == 3


def test_a_call_without_rows_is_given_two_if_the_model_runs_on_them():
    class Picky(nn.Module):
        def forward(self, x, y):
            return x + y

    filled = with_rows(nn.Linear(4, 2), Call((X[:0],), {}, None))
    assert torch.equal(filled.args[0], torch.zeros(2, 4))
    refused = Call((X[:0], torch.zeros(1, 5)), {}, None)
    assert with_rows(Picky(), refused) is refused
    other = Call((X[:0], X[:1]), {}, None)
    assert [len(arg) for arg in with_rows(Picky(), other).args] == [2, 1]


@pytest.mark.parametrize("x", [X, torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), X.to_mkldnn()])
def test_a_copy_has_tensors_of_its_own_of_any_layout(x):
    call = Call((x,), {"x": x}, None)
    copied = copy.deepcopy(call)
    assert copied.args[0] is not x
    assert copied.args[0].layout is copied.kwargs["x"].layout is x.layout
    assert torch.equal(copied.args[0].to_dense(), x.to_dense())


def test_an_object_with_tensors_that_gradients_pass_is_copied():
    class Memory:
        def __init__(self, keys):
            self.keys = keys

    memory = Memory([2 * torch.ones(2, requires_grad=True)])
    copied = detached(memory)
    assert copied is not memory
    copied.keys[0].zero_()
    copied.keys.append(None)
    assert memory.keys[0].tolist() == [2, 2]
    assert len(memory.keys) == 1


class Window:
    """A buffer, a view of it, and a parameter; ``scale`` passes gradients to the buffer or not."""

    def __init__(self, scale):
        self.buffer = torch.zeros(2, 4) * scale
        self.view = self.buffer[:, :2]
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("scale", [torch.ones(1), torch.ones(1, requires_grad=True)])
def test_tensors_of_an_object_that_share_memory_share_it_in_its_copy(scale):
    window = Window(scale)
    first, second = detached((window, {"same": window}))
    first.buffer.detach().fill_(5)
    assert first.view.tolist() == [[5, 5], [5, 5]]
    assert not window.buffer.any()
    assert type(first.weight) is nn.Parameter
    assert first.weight is not window.weight
    assert second["same"] is first


@pytest.mark.parametrize("x", [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), X.to_mkldnn()])
def test_an_object_with_a_tensor_of_another_layout_is_copied(x):
    class Memory:
        pass

    memory = Memory()
    memory.x = x
    copied = detached(memory)
    assert copied.x is not x
    assert copied.x.layout is x.layout
