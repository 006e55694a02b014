"""Each op of a file, given the values of the simulation."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.analysis.simulated_values import SimulatedValue, SimulatedValues
from qtk.errors import ExportError
from qtk.report.findings import departs
from qtk.runtimes.op_runs import op_differences
from qtk.runtimes.session import Optimizations, session_with
from qtk.runtimes.site_outputs import site_outputs

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Amplifier(nn.Module):
    """Four layers, and a function behind them that turns a step into anything."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x):
        return (self.layers(x) * 2e4).sin()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Amplifier().eval(), X, config="onnxruntime")
    sim.compute_encodings([X], progress=False)
    folder = tmp_path_factory.mktemp("ops") / "out"
    sim.export(folder, formats=["onnx"], check=False)
    return sim, folder / "model.onnx"


def spoilt(file, folder, name, change):
    model = onnx.load(file)
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    array = onnx.numpy_helper.to_array(tensor).copy()
    tensor.CopyFrom(onnx.numpy_helper.from_array(change(array).astype(array.dtype), name))
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def found(sim, file, optimizations=Optimizations.OFF, optimized=None):
    values = SimulatedValues(sim.model, {site.site: site.step for site in site_outputs(file, codes=False)})
    with torch.no_grad():
        output = sim.model(X)
    taken = values.take()
    values.close()
    sites = site_outputs(file, codes=optimizations is Optimizations.ON)
    return {each.name: each for each in op_differences(
        file, sites, {"x": X}, [SimulatedValue(output)], taken, optimizations=optimizations, optimized=optimized)}


@pytest.mark.medium
def test_every_op_of_a_right_file_computes_what_was_simulated(written):
    ops = found(*written)
    assert len(ops) > 4
    assert not any(map(departs, ops.values()))


@pytest.mark.medium
@pytest.mark.parametrize(("name", "change", "site"), [
    ("layers.1:out.scale", lambda array: array * 2, "layers.1:out"),
    ("layers.2.weight", lambda array: -array, "layers.2:out"),
])
def test_the_op_that_is_wrong_is_the_only_one(written, tmp_path, name, change, site):
    ops = found(written[0], spoilt(written[1], tmp_path, name, change))
    assert [each for each, op in ops.items() if departs(op)] == [site]


@pytest.mark.medium
def test_optimized_ops_are_those_that_are_fused_in_the_whole_file(written, tmp_path):
    optimized = tmp_path / "optimized.onnx"
    session_with(written[1], Optimizations.ON, optimized_file=optimized)
    ops = found(*written, Optimizations.ON, optimized)
    assert not any(map(departs, ops.values()))
    onnx.save(onnx.load(written[1]), optimized)
    with pytest.raises(ExportError, match="fuses other ops"):
        found(*written, Optimizations.ON, optimized)
