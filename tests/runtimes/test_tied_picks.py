"""Picks among equal scores: the simulation takes the index that runtimes take, and a verdict says so."""

import pytest
import torch
from torch import nn

import qtk
from qtk.report.verdict import OFF, Level
from qtk.runtimes.tied_picks import TiedPicks, lowest_index_first


class Picked(nn.Module):
    """Rows of one product that the scores of another pick, by topk or by sorting, and the indices."""

    def __init__(self, by):
        super().__init__()
        self.rows, self.scores, self.by = nn.Linear(3, 4), nn.Linear(3, 1), by

    def forward(self, x):
        scores = self.scores(x).sigmoid().squeeze(-1)
        indices = scores.topk(50, 1).indices if self.by == "topk" else scores.sort(1, descending=True).indices[:, :50]
        return self.rows(x).gather(1, indices[..., None].expand(-1, -1, 4)), indices


def exported(by, folder):
    torch.manual_seed(0)
    batches = [torch.randn(2, 400, 3) for _ in range(3)]
    sim = qtk.QuantSim(Picked(by).eval(), batches[0], config="onnxruntime")
    sim.compute_encodings(batches, progress=False)
    sim.export(folder, formats=("onnx",), progress=False)
    return sim, batches


@pytest.mark.medium
@pytest.mark.filterwarnings("error:.*was written, but")
def test_indices_of_equal_scores_are_no_departure(tmp_path):
    sim, batches = exported("topk", tmp_path / "out")
    verdict = sim.verify_export(tmp_path / "out", batches, turns=0, progress=False)
    assert verdict.level is Level.YELLOW
    (finding,) = verdict.findings
    assert "indices picked at topk:out are of equal scores" in finding.cause
    assert [output.differing for output in verdict.run(OFF).outputs] == [0, 0]


@pytest.mark.medium
def test_sorting_is_compared_by_the_same_rule(tmp_path):
    sim, batches = exported("sort", tmp_path / "out")
    verdict = sim.verify_export(tmp_path / "out", batches, turns=0, progress=False)
    assert verdict.level is not Level.RED
    assert [output.differing for output in verdict.run(OFF).outputs] == [0, 0]


@pytest.mark.medium
def test_other_scores_are_a_departure(tmp_path):
    _, batches = exported("topk", tmp_path / "out")
    other = qtk.QuantSim(Picked("topk").eval(), batches[0], config="onnxruntime")
    other.compute_encodings(batches, progress=False)
    assert other.verify_export(tmp_path / "out", batches, turns=0, progress=False).level is Level.RED


@pytest.mark.parametrize("largest", [True, False])
def test_the_lowest_index_of_equal_values_comes_first(largest):
    class Both(nn.Module):
        def forward(self, x):
            return *x.topk(3, 0, largest), *x.sort(0, descending=largest)

    x = torch.tensor([2.0, 1.0, 2.0, 1.0, torch.nan, 2.0])
    model = qtk.prepare_model(Both(), torch.ones(6))
    with lowest_index_first(model) as ties:
        values, indices, _, order = model(x)
    assert indices.tolist() == ([4, 0, 2] if largest else [1, 3, 0])
    assert order.tolist() == ([4, 0, 2, 5, 1, 3] if largest else [1, 3, 0, 2, 5, 4])
    assert torch.equal(values.nan_to_num(), x[indices].nan_to_num())
    assert ties.picked == 9


def test_nothing_is_said_where_nothing_is_picked_or_no_score_equal():
    with lowest_index_first(qtk.prepare_model(nn.ReLU(), torch.ones(3))) as ties:
        assert torch.ones(3).topk(2).indices.numel() == 2
    assert ties == TiedPicks()
    assert ties.findings() == []
    assert TiedPicks(("topk:out",), 5, 0).findings() == []
