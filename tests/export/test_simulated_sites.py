import pytest
import torch
from torch import nn

import qtk
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.simulated_sites import compare_encodings, simulated_sites
from qtk.runtimes.session import create_session


class Net(nn.Module):
    """A weight made from a parameter, a table that is read as it is, and two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.raw = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.b(torch.relu(self.a(x) @ (self.raw - self.raw.mean())))


def simulated(calibrate=True, **options):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Net().eval(), torch.randn(3, 4), **options)
    if calibrate:
        sim.compute_encodings([torch.randn(8, 4)], progress=False)
    return sim


def test_every_site_with_its_encoding_and_the_value_of_those_made_from_parameters():
    sim = simulated()
    sites = {site.name: site for site in simulated_sites(sim.model)}
    assert set(sites) == set(sim.encodings())
    for name, encoding in sim.encodings().items():
        assert sites[name].encoding.equals(encoding)
        assert sites[name].spec == encoding.spec
    constants = {name: site.constant for name, site in sites.items() if site.constant is not None}
    raw = sim.model.raw.detach()
    expected = {"a.weight": sim.model.a.weight, "b.weight": sim.model.b.weight, "sub:out": raw - raw.mean()}
    assert set(constants) == set(expected)
    assert all(torch.equal(constants[name], value) for name, value in expected.items())


def test_values_are_those_that_parameters_have_now():
    sim = simulated()
    with torch.no_grad():
        sim.model.a.weight.fill_(0.5)
    site = next(site for site in simulated_sites(sim.model) if site.name == "a.weight")
    assert torch.equal(site.constant, torch.full((4, 4), 0.5))


def test_a_quantizer_that_is_switched_off_is_left_out():
    sim = simulated()
    sim.quantizers["a.weight"].mode = qtk.Mode.BYPASS
    assert "a.weight" not in {site.name for site in simulated_sites(sim.model)}


def test_ranges_of_run_time_have_no_encoding():
    sim = simulated(config={"version": 1, "defaults": {"activation": {"dynamic": True}}})
    dynamic = {site.name: site for site in simulated_sites(sim.model) if site.spec.dynamic}
    assert "a:out" in dynamic
    assert all(site.encoding is None and site.constant is None for site in dynamic.values())


def test_a_site_without_an_encoding_is_named():
    with pytest.raises(ExportError, match=r"a.weight has no encoding; run sim\.compute_encodings"):
        simulated_sites(simulated(calibrate=False).model)


SPEC = QuantSpec(dtype("uint8"), PerChannel(0))


def encoding(scale=(0.5, 0.25), zero_point=(3, 4), spec=SPEC):
    return Encoding(spec, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32))


def test_equal_encodings_pass_in_any_order():
    compare_encodings({"a": encoding(), "b": encoding()}, {"b": encoding(), "a": encoding()})


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({}, "a is missing in the file"),
        ({"a": encoding(), "b": encoding()}, "b is not quantized in the simulation"),
        ({"a": encoding(scale=(0.5, 0.25000003))}, r"a: scale\[1\] is 0\.2500000\d* in the file and 0\.25 in the sim"),
        ({"a": encoding(zero_point=(2, 4))}, r"a: zero_point\[0\] is 2 in the file and 3 in the simulation"),
        ({"a": encoding(spec=QuantSpec(dtype("uint4"), PerChannel(0)))}, r"a: uint4 .* in the file and uint8 "),
        ({"a": encoding(scale=(0.5,), zero_point=(3,))}, r"a: scales of shape \(1,\) in the file and \(2,\)"),
    ],
)
def test_each_difference_names_its_site(stored, said):
    with pytest.raises(ExportError, match=said):
        compare_encodings(stored, {"a": encoding()})


class Shapes(nn.Module):
    """Reads the shape alone of one layer's result, and of another's the values too."""

    def __init__(self, like):
        super().__init__()
        self.like, self.a, self.b, self.c = like, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        b = self.b(x)
        return self.c(b + self.like(self.a(x)) + self.like(b))


LIKE = {
    "zeros_like": torch.zeros_like,
    "new_ones": lambda h: h.new_ones(h.shape),
    "full_like": lambda h: torch.full_like(h, 2),
    "through": lambda h: torch.ones_like(h.relu().transpose(0, 1)).transpose(0, 1),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
@pytest.mark.parametrize("like", LIKE)
def test_what_is_read_for_its_shape_alone_is_no_site_of_a_file(like, config, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Shapes(LIKE[like]).eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    names = {site.name.partition(".")[0].partition(":")[0] for site in simulated_sites(sim.model)}
    assert {"b", "c"} <= names
    assert "a" not in names
    sim.export(tmp_path / "file", formats=("onnx",), progress=False)
    session, _ = create_session(tmp_path / "file" / "model.onnx")
    (got,) = session.run(None, {"x": x.numpy()})
    assert torch.allclose(torch.from_numpy(got), sim.model(x), atol=1e-5)
