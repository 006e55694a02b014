import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from qtk.errors import ExportError
from qtk.export.onnx.qdq import export
from qtk.export.onnx.session import open_session
from tests.export.onnx.simulated import activations, simulate, symmetric

INPUTS = torch.randn(3, 8)


@pytest.fixture(scope="module")
def integers(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), INPUTS)
    path = tmp_path_factory.mktemp("integers") / "model.onnx"
    export(sim, INPUTS, path)
    return sim, path


@pytest.mark.parametrize("optimized", [True, False])
def test_a_file_of_integers_runs_as_asked(integers, optimized):
    sim, path = integers
    session, described = open_session(path, sim, optimized=optimized)
    levels = onnxruntime.GraphOptimizationLevel
    wanted = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    assert session.get_session_options().graph_optimization_level == wanted
    assert described == f"ONNX Runtime {onnxruntime.__version__}, optimizations {'on' if optimized else 'off'}"


def test_a_file_of_small_floats_runs_without_optimizations(tmp_path):
    """A ReLU before float8 QuantizeLinear: with its optimizations ONNX Runtime drops it."""
    torch.manual_seed(0)
    sim = simulate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), INPUTS, weight=symmetric("fp8_e4m3"),
                   activation=activations("fp8_e4m3", symmetric=True))
    export(sim, INPUTS, tmp_path / "model.onnx")
    session, described = open_session(tmp_path / "model.onnx", sim)
    levels = onnxruntime.GraphOptimizationLevel
    assert session.get_session_options().graph_optimization_level == levels.ORT_DISABLE_ALL
    assert described.endswith("optimizations off (they take float8 for integers)")
    found, = session.run(None, {session.get_inputs()[0].name: INPUTS.numpy()})
    assert np.array_equal(found, sim(INPUTS).detach().numpy())
    assert (found == 0).any()


def test_what_is_no_file_is_refused_with_its_name(tmp_path, integers):
    with pytest.raises(ExportError, match=r"absent\.onnx: ONNX Runtime .* cannot load it"):
        open_session(tmp_path / "absent.onnx", integers[0])
