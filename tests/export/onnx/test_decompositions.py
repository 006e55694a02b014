"""Exports that trace a program once, and exports that need torch's decompositions."""

import onnx
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import qtk
from qtk.export.onnx import marked_graph
from qtk.runtimes.session import create_session


class Net(nn.Module):
    """Pooling to one value and to several, flatten from two axes, and the product of two computed values."""

    def __init__(self, pool):
        super().__init__()
        self.conv, self.pool, self.norm, self.fc = nn.Conv2d(3, 8, 3), pool, nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv(x).relu()
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        scores = (tokens @ tokens.transpose(1, 2)).softmax(-1)
        return self.fc((scores @ tokens).mean(1) + self.pool(x).flatten(1)[:, :8])


@pytest.fixture
def decomposed(monkeypatch):
    """The programs that torch decomposes, by their operators."""
    programs, run = [], ExportedProgram.run_decompositions
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda self, *args, **options: (
        programs.append(self), run(self, *args, **options))[1])
    return programs


X = torch.randn(2, 3, 6, 6)


@pytest.mark.medium
def test_a_program_without_such_operators_is_traced_once_and_written_as_before(tmp_path, monkeypatch, decomposed):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Net(nn.AdaptiveAvgPool2d(1)).eval(), X, config="onnxruntime")
    sim.compute_encodings([X], progress=False)
    decomposed.clear()
    sim.export(tmp_path / "once", formats=["onnx"])
    assert decomposed == []
    for name in ("decompose_where_needed", "write_decomposed"):
        monkeypatch.setattr(marked_graph, name, lambda value: None)
    sim.export(tmp_path / "twice", formats=["onnx"])
    assert len(decomposed) == 1
    graphs = [onnx.load(tmp_path / each / "model.onnx").graph for each in ("once", "twice")]
    kinds = [[(node.op_type, len(node.input)) for node in graph.node] for graph in graphs]
    assert kinds[0] == kinds[1]
    stored = [{each.name: each.raw_data for each in graph.initializer} for graph in graphs]
    assert stored[0] == stored[1]


@pytest.mark.medium
def test_what_torch_has_no_translation_of_is_decomposed(tmp_path, decomposed):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Net(nn.AdaptiveAvgPool2d(2)).eval(), X, config="onnxruntime")
    sim.compute_encodings([X], progress=False)
    decomposed.clear()
    sim.export(tmp_path / "out", formats=["onnx"])
    assert len(decomposed) == 1
    assert "AveragePool" in {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}


@pytest.mark.medium
def test_transposed_values_are_flattened_too(tmp_path):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x):
            heads = self.a(x).unflatten(-1, (4, 2)).transpose(1, 2)
            return self.b(torch.cat([heads[..., :1], heads[..., 1:]], -1).transpose(1, 2).flatten(2))

    batches = [torch.randn(2, 5, 8), torch.randn(3, 7, 8)]
    sim = qtk.QuantSim(Heads().eval(), batches[0], config="onnxruntime", dynamic_shapes="all")
    sim.compute_encodings(batches, progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    session, _ = create_session(tmp_path / "out" / "model.onnx")
    step = float(sim.quantizers["b:out"].scale)  # sums in another order may round to the next code
    for x in batches:
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        assert float((found - sim.model(x)).abs().max()) < 1.01 * step


class Written(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write, self.fc = write, nn.Linear(8, 3)

    def forward(self, x, mask):
        return self.write(self.fc(x), mask)


@pytest.mark.parametrize("write", [
    lambda y, mask: y.squeeze(-1), lambda y, mask: y[None].squeeze((0, -1)), lambda y, mask: y[:, None].squeeze(),
    lambda y, mask: y * ((1.0 - mask) > 0).to(torch.float32)[:, None],
    lambda y, mask: y + ((1.0 - mask) * -1e4)[:, None].clamp(min=-5),
    lambda y, mask: y.masked_fill((1.0 - mask).bool()[:, None], 0.0),
])
def test_what_torch_translates_wrongly(write, tmp_path):
    x, mask = torch.randn(16, 8), torch.arange(16) % 3 // 2
    sim = qtk.QuantSim(Written(write).eval(), (x, mask), config="onnxruntime")
    sim.compute_encodings([(x, mask)], progress=False)
    sim.export(tmp_path, formats=["onnx"])
    session, _ = create_session(tmp_path / "model.onnx")
    for count in (16, 5, 1):
        (got,) = session.run(None, {"x": x[:count].numpy(), "mask": mask[:count].numpy()})
        assert got.shape == (expected := sim.model(x[:count], mask[:count]).detach()).shape
        assert (torch.from_numpy(got) - expected).abs().max() <= sim.quantizers["fc:out"].scale.max() * 1.01
