"""A function called whole, against the function itself."""

import copy
import pickle

import pytest
import torch

from qtk.errors import CaptureError
from qtk.nn.scan import Scan
from qtk.torch_private import pytree


def summed(x, *, start, steps, scale=1.0):
    for step in range(steps):
        start = start * 0.5 + x[:, step] * scale
    return {"last": start, "none": None}


def scan():
    leaves, structure = pytree.tree_flatten(((None,), {"start": None, "steps": None, "scale": 3.0}))
    return Scan(summed, structure, leaves, (0, 1, 2))


def test_tensors_and_lengths_are_passed_by_position():
    x, start = torch.randn(2, 5), torch.randn(2, requires_grad=True)
    (last,) = scan()(x, start, 5)
    assert torch.equal(last, summed(x, start=start, steps=5, scale=3.0)["last"])
    (gradient,) = torch.autograd.grad(last.sum(), start)
    assert gradient.tolist() == [0.5**5] * 2


def stepped(x, state):
    state.copy_(state * 0.5 + x)
    return state + 1


def test_a_state_that_is_written_is_left_as_it_is_and_returned():
    leaves, structure = pytree.tree_flatten(((None, None), {}))
    state = torch.ones(2)
    result, written = Scan(stepped, structure, leaves, (0, 1), (1,))(torch.full((2,), 3.0), state)
    assert state.tolist() == [1.0, 1.0]
    assert written.tolist() == [3.5, 3.5]
    assert result.tolist() == [4.5, 4.5]


def test_copies_and_pickles_call_the_same_function():
    x, start = torch.randn(2, 5), torch.randn(2)
    for copied in (copy.deepcopy(scan()), pickle.loads(pickle.dumps(scan()))):
        assert copied.function is summed
        assert torch.equal(copied(x, start, 5)[0], scan()(x, start, 5)[0])
    assert "summed, 3.0" in repr(scan())


def test_a_copy_calls_a_function_that_has_no_name_outside_of_another():
    def doubled(x):
        return x * 2

    leaves, structure = pytree.tree_flatten(((None,), {}))
    copied = copy.deepcopy(Scan(doubled, structure, leaves, (0,)))
    assert copied.function is doubled
    assert copied(torch.ones(1))[0].item() == 2
    with pytest.raises(CaptureError, match="doubled"):
        pickle.dumps(copied)
