"""Models that hold tensors of an earlier call, against a copy that was not called before."""

import contextlib
from collections import OrderedDict

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.held_tensors import own_tensors
from qtk.capture.prepared_model import PreparedGraph

CONTEXTS = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


class OverlapAdd(nn.Module):
    """Holds a view of what it computed, in a buffer or in an attribute."""

    def __init__(self, *, is_buffer):
        super().__init__()
        self.conv = nn.ConvTranspose1d(4, 1, 8, 4)
        tail = torch.zeros(1, 1, 4)
        if is_buffer:
            self.register_buffer("tail", tail)
        else:
            self.tail = tail

    def forward(self, x):
        frame = self.conv(x)
        y = frame[..., :4] + self.tail
        self.tail = frame[..., 4:]
        return y


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_model_may_have_run_before(context, is_buffer):
    torch.manual_seed(0)
    frames = torch.randn(6, 1, 4, 1).unbind()
    model, twin = (OverlapAdd(is_buffer=is_buffer).eval() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    with context():
        model(frames[0])
        twin(frames[0])
    sim = qtk.QuantSim(model, frames[0])
    assert isinstance(sim.model, PreparedGraph) is is_buffer
    sim.compute_encodings(frames, progress=False)
    prepared = qtk.prepare_model(model, frames[0])
    with torch.no_grad():
        for frame in frames[1:]:
            torch.testing.assert_close(prepared(frame), twin(frame))


@pytest.mark.parametrize("context", CONTEXTS)
def test_held_tensors_are_plain_and_share_memory_as_before(context):
    module, source = nn.Module(), torch.ones(4, requires_grad=True)
    with context():
        view = (source * 2)[1:]
    module.register_buffer("first", view)
    module.register_buffer("second", view)
    module.pair, module.items = (view, 1), [view, {"key": view}]
    module.table, module.plain = OrderedDict(key=view), torch.zeros(2)
    pair, items, table, plain = module.pair, module.items, module.table, module.plain
    own_tensors(module)
    assert module.pair is not pair
    assert (module.items, module.table) == (items, table)
    assert module.items is items
    assert module.plain is plain
    held = [module.first, module.second, module.pair[0], items[0], items[1]["key"], table["key"]]
    assert all(each is held[0] for each in held)
    assert not held[0].requires_grad
    held[0].add_(1)
    assert torch.equal(held[0], torch.full((3,), 3.0))
    assert view.is_inference() or torch.equal(view, held[0])
