"""Bags of embeddings: prepared, trained a step, and in files, against torch's own operator."""

import pytest
import torch
from torch import nn

import qtk
from qtk.report.verdict import OFF
from tests.exported_files import check_near_float_and_file


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(50, 8, **options)
        self.linear = nn.Linear(8, 3)
        nn.init.normal_(self.bag.weight)  # the row of the padding too

    def forward(self, indices, factors=None):
        return self.linear(self.bag(indices, per_sample_weights=factors))


INDICES = torch.randint(0, 50, (6, 7), generator=torch.Generator().manual_seed(0))
INDICES[:, 5:] = 0
INDICES[2] = 0
KINDS = [*({"mode": mode} for mode in ("sum", "mean", "max")),
         *({"mode": mode, "padding_idx": 0} for mode in ("sum", "mean"))]


@pytest.mark.parametrize("options", KINDS)
def test_bags_of_equal_length_are_an_embedding_and_a_reduction(options):
    model = Bags(**options)
    prepared = qtk.prepare_model(model, INDICES)
    assert "embedding_bag" not in str(prepared.graph)
    torch.testing.assert_close(prepared(INDICES[:2]), model(INDICES[:2]))
    for each in (prepared, model):
        each.zero_grad()
        each(INDICES).square().sum().backward()
    torch.testing.assert_close(prepared.get_parameter("bag.weight").grad, model.bag.weight.grad)


def test_bags_are_weighted():
    model, factors = Bags(mode="sum"), torch.randn(6, 7)
    prepared = qtk.prepare_model(model, (INDICES, factors))
    assert "embedding_bag" not in str(prepared.graph)
    torch.testing.assert_close(prepared(INDICES, factors), model(INDICES, factors))


@pytest.mark.medium
@pytest.mark.parametrize("options", KINDS)
def test_tables_of_bags_are_quantized_and_their_file_is_the_simulation(options, tmp_path):
    model = Bags(**options).eval()
    sim = qtk.QuantSim(model, INDICES, config="onnxruntime")
    assert "bag.weight" in sim.quantizers
    sim.compute_encodings([INDICES], progress=False)
    check_near_float_and_file(sim, model, INDICES, tmp_path / "out")


class Uneven(Bags):
    def forward(self, indices, starts):
        return self.linear(self.bag(indices, starts))


def test_bags_of_other_lengths_stay_one_operator():
    model, starts = Uneven(mode="sum"), torch.tensor([0, 3, 9])
    prepared = qtk.prepare_model(model, (INDICES.flatten()[:14], starts))
    assert "embedding_bag" in str(prepared.graph)
    torch.testing.assert_close(prepared(INDICES.flatten()[:14], starts), model(INDICES.flatten()[:14], starts))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_their_tables_are_quantized_too(mode, tmp_path):
    data = INDICES.flatten()[:14], torch.tensor([0, 3, 9])
    sim = qtk.QuantSim(Uneven(mode=mode).eval(), data, config="onnxruntime")
    assert {"bag.weight", "bag:out[0]"} <= set(sim.quantizers)
    sim.compute_encodings([data], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    assert sim.verify_export(tmp_path / "out", [data], turns=0, progress=False).run(OFF).sqnr_db > 60
