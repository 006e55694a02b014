"""Files cut at their sites: each op computes from what it is given."""

import onnx
import pytest
import torch
from torch import nn

from qtk.export.onnx.qdq import export
from qtk.runtimes.cut_file import given_name, write_cut
from qtk.runtimes.session import Optimizations, session_with
from qtk.runtimes.site_outputs import site_outputs
from tests.export.onnx.simulated import simulate

INPUTS = torch.randn(3, 8)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), INPUTS)
    path = tmp_path_factory.mktemp("cut") / "model.onnx"
    export(sim, INPUTS, path)
    return sim, path


@pytest.mark.medium
@pytest.mark.parametrize("codes", [False, True])
def test_a_site_is_computed_from_the_values_given_to_those_before(file, codes, tmp_path):
    sim, path = file
    sites = site_outputs(path, codes=codes)
    session, _ = session_with(write_cut(path, sites, tmp_path), Optimizations.ON if codes else Optimizations.OFF)
    assert [port.name for port in session.get_inputs()] == ["input", *map(given_name, sites)]
    quantizers = dict(sim.get_submodule("qtk_quantizers").named_modules())
    shapes = {"input:input": (3, 8), "0:out": (3, 6), "1:out": (3, 6), "2:out": (3, 4)}
    given = {site.site: quantizers[site.site](torch.randn(shapes[site.site])).detach() for site in sites}
    stored = {site.site: site.stored(value).to(torch.uint8) if codes else value
              for site in sites for value in [given[site.site]]}
    names = [port.name for port in session.get_outputs()]
    feed = {"input": INPUTS.numpy()} | {given_name(site): stored[site.site].numpy() for site in sites}
    results = dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True))
    with torch.no_grad():
        expected = {
            "input:input": quantizers["input:input"](INPUTS),
            "1:out": quantizers["1:out"](given["0:out"].relu()),
        }
    for site in sites:
        if site.site in expected:
            value = site.reals(results[site.name])
            assert torch.allclose(value, expected[site.site], atol=1e-6)
            assert not torch.allclose(value, given[site.site], atol=1e-6)


@pytest.mark.medium
def test_what_a_file_keeps_beside_stays_there(file, tmp_path):
    copy = onnx.load(write_cut(file[1], site_outputs(file[1], codes=False)[:1], tmp_path))
    assert next(value.name for value in copy.graph.output) == "output"
    assert {tensor.name for tensor in copy.graph.initializer} == {
        tensor.name for tensor in onnx.load(file[1]).graph.initializer}
