"""Differences of quantized models: what was planted is found, and nothing else."""

import copy
import math

import pytest
import torch
from torch import nn

import qtk
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.runtimes.session import create_session
from qtk.workflow.diff import _outputs, _sites
from qtk.workflow.quantized_source import QuantizedSource

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def simulation(**settings):
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), X, **settings)
    sim.compute_encodings([X], progress=False)
    return sim


SIM = simulation()


@pytest.mark.medium
def test_equal_simulations_and_folders_have_no_difference(tmp_path):
    SIM.save(tmp_path / "a")
    simulation().save(tmp_path / "b")
    for pair in ((SIM, simulation()), (tmp_path / "a", tmp_path / "b"), (SIM, tmp_path / "b")):
        assert not qtk.diff(*pair)


@pytest.mark.parametrize("site", SIM.encodings())
@pytest.mark.parametrize("factor", [1.01, 2.0])
def test_a_planted_scale_is_found_and_measured_in_steps(site, factor):
    other = copy.deepcopy(SIM)
    before = SIM.encodings()[site]
    other.quantizers[site].load_encoding(Encoding(before.spec, before.scale * factor, before.zero_point))
    found = qtk.diff(SIM, other, [X])
    assert [each.site for each in found.sites] == [site]
    zero_point = 0 if before.zero_point is None else before.zero_point
    farthest = max(abs(before.spec.qmin - zero_point).max() if torch.is_tensor(zero_point) else abs(before.spec.qmin),
                   abs(before.spec.qmax - zero_point).max() if torch.is_tensor(zero_point) else before.spec.qmax)
    assert found.sites[0].steps == pytest.approx(float(farthest) * (factor - 1), rel=1e-3)
    assert (found.sites[0].flipped is not None) == site.endswith("weight")
    with torch.no_grad():
        one, two = SIM.model(X).double(), other.model(X).double()
    sqnr = 10 * torch.log10(one.square().sum() / (one - two).square().sum())
    assert found.outputs.sqnr_db == pytest.approx(float(sqnr), abs=1e-3)
    assert found.outputs.agreement == pytest.approx(float((one.argmax(1) == two.argmax(1)).double().mean()))


@pytest.mark.medium
def test_codes_that_flip_are_counted():
    other = simulation()
    with torch.no_grad():
        weight = dict(other.model.named_parameters())["0.weight"]
        weight[0, 0], weight[3, 1] = -weight[0, 0], weight[3, 1] * 0.5
    (found,) = qtk.diff(SIM, other).sites
    assert (found.site, found.change, found.flipped, found.elements) == ("0.weight", "codes", 2, 128)


class Normed(nn.Module):
    """Biases and the weight of a norm stay float."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.linear(x))


def normed(change=""):
    """A simulation, with one element of a float parameter moved by an eighth of its largest value."""
    torch.manual_seed(0)
    sim = qtk.QuantSim(Normed().eval(), X)
    sim.compute_encodings([X], progress=False)
    if change:
        with torch.no_grad():
            value = sim.model.get_parameter(change)
            value[2] += value.abs().max() / 8
    return sim


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["linear.bias", "norm.weight", "norm.bias"])
@pytest.mark.parametrize("written", ["simulation", "saved", pytest.param("exported", marks=pytest.mark.slow)])
def test_a_changed_float_parameter_is_named(name, written, tmp_path):
    if name == "norm.bias":  # zeros: any change is larger than its largest value
        sims = [normed(), normed()]
        with torch.no_grad():
            sims[1].model.get_parameter(name)[2] = 1.0
    else:
        sims = [normed(), normed(name)]
    given = list(sims)
    for index, sim in enumerate(sims):
        if written == "saved":
            sim.save(tmp_path / f"{index}")
        elif written == "exported":
            sim.export(tmp_path / f"{index}", formats=("onnx",), check=False)
        if written != "simulation":
            given[index] = tmp_path / f"{index}"
    assert not qtk.diff(given[0], given[0])
    (found,) = qtk.diff(*given).sites
    assert (found.site, found.change, found.flipped, found.elements) == (name, "float", 1, 6)
    assert found.moved == (math.inf if name == "norm.bias" else pytest.approx(1 / 8))


@pytest.mark.medium
def test_one_file_is_compared_in_two_runtimes(tmp_path):
    SIM.export(tmp_path / "out", formats=("onnx",), check=False)
    file = tmp_path / "out" / "model.onnx"
    found = qtk.diff(file, file, [X], runtimes=("onnxruntime-off", "onnxruntime-on"))
    assert found.first.endswith("optimizations off")
    assert found.second.endswith("optimizations on")
    assert not found.sites
    runs = []
    for optimized in (False, True):
        session, _ = create_session(file, optimized=optimized)
        runs.append(torch.from_numpy(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]).double())
    noise = float((runs[0] - runs[1]).square().sum())
    sqnr = math.inf if noise == 0 else 10 * math.log10(float(runs[0].square().sum()) / noise)
    assert found.outputs.sqnr_db == pytest.approx(sqnr, abs=0.1)
    with pytest.raises(EncodingError, match=r"runtimes run two single ONNX files on data; got .* and no data"):
        qtk.diff(file, file, runtimes=("onnxruntime-off", "onnxruntime-on"))
    with pytest.raises(EncodingError, match="got the simulation"):
        qtk.diff(SIM, file, [X], runtimes=("onnxruntime-off", "onnxruntime-on"))


class Output(nn.Module):
    """What it returns is taken from ``values`` one by one."""

    def __init__(self, *values):
        super().__init__()
        self.values = iter(values)

    def forward(self, x):
        return next(self.values)


def outputs_of(one, other):
    sources = [QuantizedSource("", {}, {}, model=Output(each)) for each in (one, other)]
    return _outputs(*sources, [X], None)


def test_outputs_that_are_not_finite_or_not_floats_differ():
    scores = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert outputs_of(scores, scores.clone()).sqnr_db == torch.inf
    assert outputs_of(scores, torch.tensor([[1.0, torch.nan, -torch.inf]])).sqnr_db == -torch.inf
    found = outputs_of(torch.tensor([3, 4]), torch.tensor([3, 1]))
    assert (found.sqnr_db < torch.inf, found.agreement) == (True, 0.5)
    pixels = torch.zeros(1, 2, 3, 3)
    pixels[0, 1, 0] = 1.0
    assert outputs_of(pixels, torch.zeros(1, 2, 3, 3)).agreement == pytest.approx(6 / 9)
    with pytest.raises(EncodingError, match="the outputs have shapes"):
        outputs_of(scores, scores[:, :2])


def test_dynamic_sites_are_compared_and_equal_codes_of_small_floats_are_equal():
    before, after = (QuantSpec(dtype(name), symmetric=True, dynamic=True) for name in ("int8", "int4"))
    one, other = (QuantizedSource("", {}, {}, {"a:out": spec}) for spec in (before, after))
    assert [each.change for each in _sites(one, other)] == [f"{before} → {after}"]
    assert not [*_sites(one, one)]
    spec = QuantSpec(dtype("fp8_e4m3"), symmetric=True)
    codes = torch.arange(8, 16) / 8
    for factor in (1.1, 1.2345, 1.9):
        sources = [QuantizedSource("", {"w": Encoding(spec, scale)}, {"w": codes * scale})
                   for scale in (torch.tensor([0.7]), torch.tensor([0.7 * factor]))]
        assert [each.flipped for each in _sites(*sources)] == [0]


@pytest.mark.slow
def test_formats_and_sites_of_one_alone_are_named():
    found = qtk.diff(SIM, simulation(activation_bits=None))
    assert {each.change for each in found.sites} == {"not in the second"}
    found = qtk.diff(simulation(activation_bits=None), SIM)
    assert {each.change for each in found.sites} == {"not in the first"}
    found = qtk.diff(SIM, simulation(weight_bits=4))
    assert [each.site for each in found.sites] == ["0.weight", "2.weight"]
    assert found.sites[0].change.startswith("int8 per_channel(axis=0) symmetric → int4")


@pytest.mark.slow
def test_files_are_compared_and_run(tmp_path):
    other = simulation()
    other.set_range("1:out", low=0.0, high=1.0)
    for name, sim in (("a", SIM), ("b", other)):
        sim.export(tmp_path / name, formats=("onnx",), check=False)
    assert not qtk.diff(tmp_path / "a", SIM)
    found = qtk.diff(tmp_path / "a", tmp_path / "b" / "model.onnx", [(X, torch.zeros(64))])
    assert "1:out" in {each.site for each in found.sites}
    assert found.outputs.sqnr_db == pytest.approx(qtk.diff(SIM, other, [X]).outputs.sqnr_db, abs=0.1)
    with pytest.raises(EncodingError, match="of two simulations, or of two single ONNX files"):
        qtk.diff(SIM, tmp_path / "a", [X])
