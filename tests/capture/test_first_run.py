import gc
import weakref

import pytest
import torch
from torch import nn

from qtk.calls.calls import Call
from qtk.capture.first_run import first_run
from qtk.capture.scans import loops_of
from qtk.errors import CaptureError


def decayed(x):
    state = x.new_zeros(x.shape[0], x.shape[2])
    states = []
    for frame in x.unbind(1):
        state = 0.9 * state + frame
        states.append(state)
    return torch.stack(states, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        x.mul_(2)
        return decayed(self.drop(self.fc(x)))


def test_one_run_tells_outcome_writes_dropouts_and_loops():
    model, x = Net().eval(), torch.randn(2, 5, 4)
    given = x.clone()
    run = first_run(model, Call((given,), {}, None))
    assert torch.equal(given, x)
    assert torch.equal(run.outcome.output, model(x.clone()))
    assert run.written == (0,)
    assert list(run.train_only) == [model.drop]
    assert decayed in run.loops
    assert run.loops == loops_of(model, Call((x,), {}, None))


def test_an_op_that_takes_a_graph_is_run_without_looking_for_loops():
    class Chooses(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    run = first_run(Chooses(), Call((torch.ones(2),), {}, None))
    assert run.outcome.output.tolist() == [2.0, 2.0]
    assert run.loops in (None, [])


def test_nothing_is_kept_of_a_run_that_fails():
    kept = []

    class Chooses(nn.Module):
        def forward(self, x):
            large = x.new_zeros(1000)
            kept.append(weakref.ref(large))
            assert len(kept) == 1 or kept[0]() is None
            return torch.ops.higher_order.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    gc.disable()
    try:
        run = first_run(Chooses(), Call((torch.ones(2),), {}, None))
    finally:
        gc.enable()
    assert len(kept) == 2
    assert run.loops is None


def test_a_model_that_does_not_run_says_where():
    with pytest.raises(CaptureError, match=r"Net does not run .* \[\(2, 3\)\]\), in fc \(Linear\)"):
        first_run(Net(), Call((torch.randn(2, 3),), {}, None))
