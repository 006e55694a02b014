"""The report: of the numbers that were measured, and whole or not at all."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, ExportError
from qtk.report.svg import curve_svg
from tests.report.written_report import simulation, written


@pytest.mark.medium
def test_its_numbers_are_those_measured(tmp_path):
    sim, data, text = written(tmp_path)
    worst = sim.compare(data, progress=False)[0]
    assert f"own {worst.own_sqnr_db:.1f} dB, accumulated {worst.sqnr_db:.1f} dB" in text
    with torch.no_grad():
        x = torch.cat(data)
        quantized = sim.model(x)
        for quantizer in sim.quantizers.values():
            quantizer.mode = qtk.Mode.BYPASS
        expected = sim.model(x)
    db = 10 * torch.log10(expected.square().sum() / (quantized - expected).square().sum())
    assert f"<b>{float(db):.1f} dB</b><span>SQNR of the outputs</span>" in text
    weights, biases = 4 * 6 + 12 * 3, 6 + 3
    assert f"<b>{(weights / 2 + 4 * biases) / 1e3:.1f} kB</b>" in text
    assert f"of {4 * (weights + biases) / 1e3:.1f} kB in float" in text


@pytest.mark.medium
def test_the_error_of_a_model_with_states_is_drawn_along_its_sequences(tmp_path):
    class Average(nn.Module):
        def forward(self, x, mean):
            mean = 0.9 * mean + 0.1 * x
            return (x - mean) * 3, mean

    torch.manual_seed(0)
    batches = qtk.Sequences([(x, torch.zeros(2, 3)) for x in torch.randn(6, 2, 3)], reset=3)
    sim = qtk.QuantSim(Average(), batches.data[0], states={"mean": 1})
    sim.compute_encodings(batches, progress=False)
    sim.report(tmp_path / "report.html", batches, progress=False, sensitivity=False)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    drift = sim.drift(batches, progress=False)
    assert str(drift) in text
    assert curve_svg(drift.sqnr_db) in text


@pytest.mark.medium
def test_values_that_are_clipped_are_marked(tmp_path):
    sim, data = simulation()
    sim.set_range("1:out", 0.0, 0.5)
    sim.report(tmp_path / "report.html", data, progress=False, sensitivity=False)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    card = text[text.index("<h3>1:out</h3>"):]
    assert "The error along a sequence" not in text
    card = card[:card.index("</svg>")]
    assert 'class="clipped"' in card
    assert "What the output loses" not in text


@pytest.mark.slow
def test_what_was_tried_is_told(tmp_path):
    sim, data = simulation()
    _, account = qtk.quantize(nn.Linear(4, 2), torch.randn(4, 16, 4), progress=False)
    sim.report(tmp_path / "report.html", data, account=account, headline={"top-1": "99.1 %"}, progress=False)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "plain calibration" in text
    assert account.end in text
    assert "<b>99.1 %</b><span>top-1</span>" in text


class Classes(nn.Module):
    """Experts that not all data reach, and an output without a fraction."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        scores = x.new_zeros(len(x), 4)
        for expert, rows in ((self.first, x.sum(1) > 0), (self.second, x.sum(1) <= 0)):
            if bool(rows.any()):
                scores[rows] = expert(x[rows])
        return scores.argmax(-1)


@pytest.mark.medium
def test_what_cannot_be_measured_is_said(tmp_path):
    torch.manual_seed(0)
    data = [torch.rand(4, 8), -torch.rand(4, 8)]
    sim = qtk.QuantSim(Classes().eval(), torch.cat(data))
    sim.compute_encodings(data, progress=False)
    sim.report(tmp_path / "report.html", data[:1], progress=False)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Not shown: the SQNR of the outputs. the model has no finite output in floating point" in text
    assert "Not shown: what the outputs lose by each site." in text
    assert "<h3>first.weight</h3><svg" in text
    assert "<h3>second.weight</h3><svg" not in text


@pytest.mark.medium
def test_mistakes_leave_what_was_there(tmp_path):
    sim, data = simulation()
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(ExportError, match=r"report.html exists; pass force=True"):
        sim.report(path, data, progress=False)
    with pytest.raises(ExportError, match="is a directory"):
        sim.report(tmp_path, data, force=True, progress=False)
    with pytest.raises(ExportError, match="nothing is no directory"):
        sim.report(tmp_path / "nothing" / "report.html", data, progress=False)
    with pytest.raises(CalibrationError, match="at least 1 batches are needed, got 0"):
        sim.report(path, [], force=True, progress=False)
    assert path.read_text() == "mine"
    sim.report(path, data, force=True, progress=False)
    assert path.read_text().startswith("<!doctype html>")


class PerToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(20, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.words.weight[19] *= 30

    def forward(self, ids, mask):
        return self.first(self.words(ids)), mask


@pytest.mark.medium
def test_padding_has_no_part_in_the_page(tmp_path):
    torch.manual_seed(0)
    ids, mask = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 19, 19]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = {"ids": ids, "mask": mask}
    model = PerToken().eval()
    sim = qtk.QuantSim(model, batch, weight_bits=4)
    sim.compute_encodings([batch], progress=False, valid="mask")
    with torch.no_grad():
        reference, value = (each(**batch)[0][mask.bool()].double() for each in (model, sim.model))
    db = float(10 * torch.log10(reference.square().sum() / (reference - value).square().sum()))
    pages = {}
    for valid in (None, "mask"):
        sim.report(tmp_path / f"{valid}.html", [batch], progress=False, valid=valid)
        pages[valid] = (tmp_path / f"{valid}.html").read_text(encoding="utf-8")
    assert f"{db:.1f} dB" in pages["mask"]
    assert f"{db:.1f} dB" not in pages[None]
