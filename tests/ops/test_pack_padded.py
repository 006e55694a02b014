"""Packing against torch's own, its gradient, and lengths that torch does not check."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from qtk.ops.pack_padded import pack_padded


@pytest.mark.parametrize("batch_first", [False, True])
def test_values_and_gradient_are_those_of_torch(batch_first):
    lengths = torch.tensor([4, 2, 1])
    x = torch.randn((3, 5, 2) if batch_first else (5, 3, 2), requires_grad=True)
    expected = pack_padded_sequence(x, lengths, batch_first=batch_first)
    data, batch_sizes = pack_padded(x, lengths, batch_first)
    assert torch.equal(data, expected.data)
    assert torch.equal(batch_sizes, expected.batch_sizes)
    weight = torch.randn_like(data)
    (found,) = torch.autograd.grad((data * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected.data * weight).sum(), x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("lengths", "error", "text"), [
    ([6, 2], ValueError, "a length of 6, the padded input has 5 time steps"),
    ([2, 4], RuntimeError, "sorted"),
    ([2, 0], RuntimeError, "greater than 0"),
])
def test_lengths_that_cannot_be_are_errors(lengths, error, text):
    with pytest.raises(error, match=text):
        pack_padded(torch.randn(5, 2, 3), torch.tensor(lengths), False)


def test_traced_it_has_sizes_of_its_own():
    class Pack(torch.nn.Module):
        def forward(self, x, lengths):
            return pack_padded(x, lengths, True)

    x, lengths = torch.randn(3, 5, 2), torch.tensor([4, 2, 1])
    program = torch.export.export(Pack(), (x, lengths), dynamic_shapes=({0: torch.export.Dim.AUTO},) * 2, strict=False)
    (node,) = (node for node in program.graph.nodes if node.target is pack_padded)
    data, batch_sizes = node.meta["val"]
    assert not isinstance(data.shape[0], int)
    assert not isinstance(batch_sizes.shape[0], int)
    other = torch.randn(2, 5, 2), torch.tensor([3, 3])
    assert all(map(torch.equal, program.module()(*other), pack_padded(*other, True)))
