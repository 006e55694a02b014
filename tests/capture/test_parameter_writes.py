"""Weights that forward writes in place: prepared, trained a step, and in files."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.capture.prepared_model import PreparedGraph
from tests.exported_files import check_near_float_and_file

INDICES = torch.randint(0, 40, (8, 6), generator=torch.Generator().manual_seed(0))


def table(kind=nn.Embedding, **options):
    torch.manual_seed(0)
    return nn.Sequential(kind(40, 16, **{"max_norm": 1.0, **options}), nn.Linear(16, 5)).eval()


class Twice(nn.Module):
    """Looks up two kinds of indices in one table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 16, max_norm=1.0)

    def forward(self, x):
        return self.table(x) + self.table((x + 1) % 40)


class TiedHead(Twice):
    """Reads the table beside a lookup, as the lookup leaves it."""

    def forward(self, x):
        return F.linear(self.table(x), self.table.weight)


class Shrinks(nn.Linear):
    """Writes another weight in each call."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("make", [
    table, Twice, lambda: table(norm_type=1.0, padding_idx=0), lambda: table(nn.EmbeddingBag, mode="mean")])
def test_rows_of_a_table_have_the_largest_norm_and_the_table_is_not_written(make):
    model, x = make(), INDICES
    before = copy.deepcopy(model.state_dict())
    prepared = qtk.prepare_model(model, x)
    assert isinstance(prepared, PreparedGraph)
    assert "renorm" not in str(prepared.graph)
    others = (x + 7) % 40
    found = prepared(others)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(found, model(others))


def test_rows_that_are_renormalized_train():
    model = table()
    prepared = qtk.prepare_model(copy.deepcopy(model), INDICES)
    for each in (model, prepared):
        each(INDICES).square().sum().backward()
    expected, found = model[0].weight.grad, prepared.get_parameter("0.weight").grad
    torch.testing.assert_close(F.normalize(found), F.normalize(expected))


def test_a_table_that_is_read_elsewhere_is_as_a_lookup_leaves_it():
    model = TiedHead().eval()
    before = model.table.weight.detach().clone()
    prepared = qtk.prepare_model(model, INDICES)
    assert torch.equal(model.table.weight, before)
    torch.testing.assert_close(prepared(INDICES), model(INDICES))


def test_a_parameter_that_changes_in_each_call_is_no_graph():
    prepared = qtk.prepare_model(Shrinks(4, 2).eval(), torch.randn(3, 4))
    assert not isinstance(prepared, PreparedGraph)
    assert "forward keeps weight from call to call" in str(prepared.report)


@pytest.mark.medium
def test_a_table_is_quantized_and_its_file_is_the_simulation(tmp_path):
    model = table()
    sim = qtk.QuantSim(model, INDICES, config="onnxruntime")
    sim.compute_encodings([INDICES], progress=False)
    assert any("weight of embedding" in decided.reason for decided in sim.plan.values())
    check_near_float_and_file(sim, model, INDICES, tmp_path / "out")
