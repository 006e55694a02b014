"""Copies with uint8 weights: the numbers of the file, and none of its weights saturates."""

import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.qdq import export
from qtk.runtimes.saturation import saturating_weights
from qtk.runtimes.session import create_session
from qtk.runtimes.unsigned_weights import with_unsigned_weights
from tests.export.onnx.simulated import activations, run_onnx, simulate, symmetric, weights

INPUTS = torch.randn(3, 8)


class Largest(nn.Module):
    """One weight of the largest codes, read twice: by column, and as a stack of matrices or in a loop over time."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return torch.relu(x @ self.weight) @ self.weight


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.RNN(8, 8, nonlinearity="relu", bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.1)

    def forward(self, x):
        return self.net(x)[0]


MODELS = {
    "linear": (lambda: Largest((8, 8)), (4, 8)), "stack": (lambda: Largest((3, 8, 8)), (3, 4, 8)),
    "loop": (Recurrent, (5, 2, 8)),
}


SIGNED = {"version": 1, "defaults": {"activation": {"dtype": "int8", "symmetric": True}}}
"""A format whose codes ONNX Runtime shifts by 128 on x86, so that all inputs but the most negative are large."""


CASES = [("default", "linear"), ("default", "stack"), ("default", "loop"), (SIGNED, "linear"), (SIGNED, "loop")]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("optimized", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("config", "name"), CASES)
def test_the_largest_codes_are_summed_exactly_on_every_cpu(config, name, optimized, tmp_path):
    """All products with 127: shown by CPUs that saturate, and by the type of the weights on all."""
    model, shape = MODELS[name]
    x = torch.ones(shape)
    sim = qtk.QuantSim(model().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    with warnings.catch_warnings(action="ignore"):
        sim.export(tmp_path / "out", formats=("onnx",))
    path = tmp_path / "out" / "model.onnx"
    expected = sim.model(x).detach().numpy()
    for file in (path, with_unsigned_weights(path, tmp_path)):
        session, _ = create_session(file, optimized=optimized)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert saturating_weights(path)
    assert int8_weights(path)
    assert int8_weights(tmp_path / "model.onnx") == []


def int8_weights(path):
    """The int8 matrices of a file, in bodies too."""
    model = ir.load(path)
    return [name for graph in (model.graph, *model.graph.subgraphs()) for name, value in graph.initializers.items()
            if value.dtype == ir.DataType.INT8 and len(value.shape) > 1]


@pytest.mark.medium
def test_zero_points_move_with_the_codes(tmp_path):
    torch.manual_seed(0)
    sim = simulate(nn.Linear(8, 4), INPUTS, weight=weights(symmetric=False))
    export(sim, INPUTS, tmp_path / "model.onnx")
    (tmp_path / "copy").mkdir()
    copy = with_unsigned_weights(tmp_path / "model.onnx", tmp_path / "copy")
    assert int8_weights(copy) == []
    (found,), (expected,) = (run_onnx(path, INPUTS) for path in (copy, tmp_path / "model.onnx"))
    assert np.array_equal(found, expected)


@pytest.mark.medium
def test_products_of_int8_and_int8_are_exact_without_vnni(tmp_path):
    """ONNX Runtime's kernels for int8 and int8 take the codes of the inputs plus 128."""
    sim = simulate(nn.Linear(8, 4), INPUTS, weight=symmetric(narrow_range=True), activation=activations("int8"))
    export(sim, INPUTS, tmp_path / "model.onnx")
    (tmp_path / "copy").mkdir()
    assert int8_weights(with_unsigned_weights(tmp_path / "model.onnx", tmp_path / "copy")) == []


@pytest.mark.medium
def test_a_file_without_large_pairs_is_opened_as_it_is(tmp_path):
    sim = simulate(nn.Linear(8, 4), INPUTS, weight=symmetric("int4"), activation=activations("uint8"))
    export(sim, INPUTS, tmp_path / "model.onnx")
    path = tmp_path / "model.onnx"
    assert with_unsigned_weights(path, tmp_path) == path


@pytest.mark.medium
def test_files_of_others_are_refused(tmp_path):
    sim = simulate(nn.Linear(8, 4), INPUTS, weight=symmetric(), activation=activations("uint8"))
    export(sim, INPUTS, tmp_path / "model.onnx")
    model = ir.load(tmp_path / "model.onnx")
    model.metadata_props.clear()
    ir.save(model, tmp_path / "other.onnx")
    for name in ("other.onnx", "absent.onnx"):
        with pytest.raises(ExportError, match=name):
            with_unsigned_weights(tmp_path / name, tmp_path)
