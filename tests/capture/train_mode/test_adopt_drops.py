import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.capture.train_mode.adopt_drops import adopt_drops
from qtk.nn.dropout import Dropout

X = torch.randn(4, 8)


class Drops(nn.Module):
    """Drops by functions, with probabilities of train mode alone, and never."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        p = 0.4 if self.training else 0.0
        x = F.dropout(self.fc(x), p, self.training)
        x = F.dropout(x, 0.9, False)
        return F.alpha_dropout(x, 0.2, self.training)


class Branches(Drops):
    """Calls dropout in train mode alone."""

    def forward(self, x):
        x = self.fc(x)
        return F.dropout(x, 0.4) if self.training else x


def probabilities(model):
    return [module.p for module in model.modules() if isinstance(module, Dropout)]


def test_each_gets_its_own_in_order():
    model = nn.Sequential(nn.Linear(8, 8), Drops())
    prepared = qtk.prepare_model(model, X, verify=False)
    assert probabilities(prepared) == [0.0, 0.9, 0.2]
    assert list(adopt_drops(prepared, {"1": [0.4, 0.0, 0.2]})) == []
    assert probabilities(prepared) == [0.4, 0.0, 0.2]


@pytest.mark.medium
def test_of_every_call_of_a_module_and_in_islands():
    class Python(nn.Module):
        def __init__(self):
            super().__init__()
            self.drops = Drops()

        def forward(self, x):
            if float(x.sum()) > 1e9:
                return x
            return F.dropout(self.drops(self.drops(x)), 0.1, self.training)

    for model in (Python(), nn.Sequential(*[Drops()] * 2)):
        prepared = qtk.prepare_model(model, X)
        assert prepared.report.train_notes == ()
        assert set(probabilities(prepared)) == {0.4, 0.0, 0.2}
        torch.manual_seed(0)
        expected = model.train()(X)
        torch.manual_seed(0)
        assert torch.equal(prepared.train()(X), expected)


def test_what_has_no_place_is_told():
    prepared = qtk.prepare_model(nn.Sequential(Branches()), X)
    note = "0: dropout does not act, its code calls it in train mode only"
    assert prepared.report.train_notes == (note,)
    assert list(adopt_drops(prepared, {"0": [0.0]})) == []
