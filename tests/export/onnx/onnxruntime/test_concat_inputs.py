"""Concatenations of values that others read too, in ONNX Runtime's optimized graph: no rounding in front of them."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from qtk.export.onnx import qdq
from qtk.runtimes.session import create_session
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Dense(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self, layers=3, pool=None):
        super().__init__()
        self.pool = nn.Identity() if pool is None else pool
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8 * (layers + 1), 4, 1)
        self.layers = nn.ModuleList(nn.Conv2d(8 * (i + 1), 8, 3, padding=1) for i in range(layers))

    def forward(self, x):
        values = [self.pool(self.stem(x).relu())]
        for layer in self.layers:
            values.append(layer(torch.cat(values, 1)).relu())
        return self.head(torch.cat(values, 1))


class Chunks(nn.Module):
    """Halves of a value, layers behind one of them, and all of that joined."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 4, 1)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        left, right = self.stem(x).relu().chunk(2, 1)
        first = self.first(right).relu()
        return self.head(torch.cat([left, right, first, self.second(first).relu()], 1))


MODELS = {"dense": (Dense, 6), "chunks": (Chunks, 2)}


def outputs(folder, *, optimized):
    session, _ = create_session(folder / "model.onnx", optimized=optimized)
    return session.run(None, {"x": X.numpy()})[0]


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(MODELS))
def test_codes_are_joined_without_floats_between(name, tmp_path, monkeypatch):
    model = MODELS[name][0]()
    sim = exported(model, X, tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (1, 1)  # the input and the output
    assert kinds["QLinearConcat"] == len([name for name in sim.plan if "concat" in str(name) and ":out" in str(name)])
    with monkeypatch.context() as patch:
        leave_out(patch, "read_as_produced")
        sim.export(tmp_path / "rounded", formats=["onnx"])
    rounded = optimized_kinds(tmp_path / "rounded")
    assert rounded["QuantizeLinear"] > 1
    for optimized in (False, True):
        assert np.array_equal(*(outputs(tmp_path / each, optimized=optimized) for each in ("out", "rounded")))
        assert steps(sim, X, tmp_path / "out", optimized=optimized).max() < 1.01


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(MODELS))
def test_the_file_still_holds_the_sites_of_the_edges(name, tmp_path):
    sim = exported(MODELS[name][0](), X, tmp_path / "out")
    back = qdq.read(tmp_path / "out" / "model.onnx")
    edges = [site for site in back if ":in[" in site]
    assert len(edges) >= MODELS[name][1]
    assert back.keys() == sim.encodings().keys()
    assert all(back[site].equals(encoding) for site, encoding in sim.encodings().items())
    run = sim.verify_export(tmp_path / "out", [X], turns=0, progress=False).exact
    seen = {site.name for site in run.sites}
    assert set(edges) <= seen
    initializers = {each.name for each in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer}
    assert not any(":in[" in each for each in initializers)


@pytest.mark.medium
def test_a_pooled_value_that_several_join_stays_codes(tmp_path):
    sim = exported(Dense(2, nn.MaxPool2d(3, 2, 1)), X, tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["NhwcMaxPool"], kinds["QLinearConcat"]) == (1, 2)
    assert not kinds.keys() & {"MaxPool", "Concat"}
    assert steps(sim, X, tmp_path / "out", optimized=True).max() < 1.01


@pytest.mark.medium
def test_floats_are_rounded_in_front_of_it(tmp_path):
    class Mixed(nn.Module):
        """A float branch: the concatenation of a stream that feeds a norm with one that does not."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            a = self.a(x)
            return torch.cat([a, self.b(self.norm(a))], -1), self.norm(a)

    x = torch.randn(2, 5, 8)
    sim = exported(Mixed(), x, tmp_path / "out")
    session, _ = create_session(tmp_path / "out" / "model.onnx", optimized=False)
    for got, expected in zip(session.run(None, {"x": x.numpy()}), sim.model(x), strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), atol=1e-5)
