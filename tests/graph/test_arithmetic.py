import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import qtk
from qtk.graph.arithmetic import arithmetic_digest
from tests.zoo.models import ZOO
from tests.zoo.python import PYTHON


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.fc, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        return functional.relu(self.fc(x)) * self.factor


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("one", "other"), [
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())),
    (lambda: Scaled(2.0), lambda: Scaled(2.5)),
    (lambda: nn.Conv1d(2, 2, 3, padding=1), lambda: nn.Conv1d(2, 2, 3, padding=1, stride=2)),
    (lambda: nn.LayerNorm(4), lambda: nn.LayerNorm(4, eps=1e-3)),
    (lambda: nn.BatchNorm1d(2), lambda: nn.BatchNorm1d(2, eps=1e-2)),
])
def test_other_arithmetic_under_equal_names(one, other):
    x = torch.randn(2, 2, 4)
    first, again, second = (
        arithmetic_digest(qtk.prepare_model(build().eval(), x)) for build in (one, one, other)
    )
    assert first == again
    assert first != second


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["residual", "gru", "fused_attention", "recurrent_cells", "branch"])
def test_quantizers_copies_and_devices_do_not_count(name):
    entry = {**ZOO, **PYTHON}[name]
    prepared = qtk.prepare_model(entry.model(), entry.inputs(), modules_to_exclude=getattr(entry, "unreached", ()))
    expected = arithmetic_digest(prepared)
    assert arithmetic_digest(copy.deepcopy(prepared)) == expected
    config = {"version": 1, "extends": "default", "fold_batch_norms": False}
    assert arithmetic_digest(qtk.QuantSim(prepared, entry.inputs(), config=config).model) == expected
    assert arithmetic_digest(copy.deepcopy(prepared).to("meta")) == expected
