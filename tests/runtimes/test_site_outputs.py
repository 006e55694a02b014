import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.qdq import export
from qtk.runtimes.session import Optimizations, session_with
from qtk.runtimes.site_outputs import site_outputs, sites_in_bodies, write_with_outputs
from tests.export.onnx.simulated import activations, simulate

INPUTS = torch.randn(3, 8)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), INPUTS)
    path = tmp_path_factory.mktemp("sites") / "model.onnx"
    export(sim, INPUTS, path)
    return sim, path


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("codes", [False, True])
def test_values_are_those_of_the_simulation(file, codes, tmp_path):
    sim, path = file
    sites = site_outputs(path, codes=codes)
    assert [site.site for site in sites] == ["input:input", "0:out", "1:out", "2:out"]
    session, _ = session_with(write_with_outputs(path, sites, tmp_path), Optimizations.OFF)
    arrays = session.run(None, {"input": INPUTS.numpy()})
    values = {port.name: torch.from_numpy(array) for port, array in zip(session.get_outputs(), arrays, strict=True)}
    captured = {}
    quantizers = dict(sim.get_submodule("qtk_quantizers").named_modules())
    handles = [
        quantizers[site.site].register_forward_hook(
            lambda module, inputs, output, name=site.site: captured.update({name: output.detach()}))
        for site in sites
    ]
    sim(INPUTS)
    for handle in handles:
        handle.remove()
    for site in sites:
        value = values[site.name]
        assert (value.dtype == torch.uint8) == codes
        assert np.allclose(site.reals(value).numpy(), captured[site.site].numpy(), atol=1e-6)


def test_the_copy_returns_the_outputs_of_the_file_first(file, tmp_path):
    copy = write_with_outputs(file[1], site_outputs(file[1], codes=False), tmp_path)
    levels = onnxruntime.GraphOptimizationLevel
    session, _ = session_with(copy, Optimizations.OFF)
    assert session.get_session_options().graph_optimization_level == levels.ORT_DISABLE_ALL
    names = [value.name for value in session.get_outputs()]
    assert names[0] == "output"
    assert len(names) == 4  # the output is the last site


@pytest.mark.medium
@pytest.mark.parametrize("width", ["uint16", "uint4"])
def test_codes_of_other_widths_are_returned_in_the_type_that_holds_them(width, tmp_path):
    sim = simulate(nn.Linear(8, 4), INPUTS, activation=activations(width))
    export(sim, INPUTS, tmp_path / "model.onnx")
    sites = site_outputs(tmp_path / "model.onnx", codes=True)
    session, _ = session_with(write_with_outputs(tmp_path / "model.onnx", sites, tmp_path), Optimizations.OFF)
    values = dict(zip([port.name for port in session.get_outputs()], session.run(None, {"input": INPUTS.numpy()}),
                      strict=True))
    assert [site.site for site in sites] == ["input:input", "linear:out"]
    assert {str(values[site.name].dtype) for site in sites} == {"uint16" if width == "uint16" else "uint8"}
    reals = sites[-1].reals(torch.from_numpy(values[sites[-1].name]))
    torch.testing.assert_close(reals, sim(INPUTS).detach())
    assert torch.equal(sites[-1].stored(reals), torch.from_numpy(values[sites[-1].name].astype("int32")))


@pytest.mark.slow
def test_sites_in_the_body_of_a_loop_are_counted(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    x = torch.randn(2, 5, 4)
    rule = {"match": {"op": "lstm"}, "inside": "quantized"}
    sim = qtk.QuantSim(Net().eval(), x, config={"version": 1, "extends": "onnxruntime", "rules": [rule]})
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    file = tmp_path / "out" / "model.onnx"
    inside = sites_in_bodies(file)
    assert inside > 5
    names = {site.site for site in site_outputs(file, codes=False)}
    assert "lstm:in[0]" in names
    assert len(names) + inside <= len(sim.plan)
