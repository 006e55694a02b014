"""Files whose layers share a weight, in ONNX Runtime's exact mode for x86 without VNNI."""

import warnings

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.stored_sites import stored_sites
from qtk.runtimes.session import Optimizations, opens_in_exact_mode, session_with


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class Tied(nn.Module):
    """An embedding whose weight is that of the head, too."""

    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.relu(self.middle(self.words(ids))))


class Steps(nn.Module):
    """A loop that is unrolled."""

    def __init__(self, count):
        super().__init__()
        self.layer, self.count = nn.Linear(16, 16), count

    def forward(self, x):
        for _ in range(self.count):
            x = torch.tanh(self.layer(x))
        return x


MODELS = {
    "matrix": (lambda: Twice(nn.Linear(32, 32)), torch.randn(4, 32)),
    "rows of tokens": (lambda: Twice(nn.Linear(32, 32)), torch.randn(2, 5, 32)),
    "convolution": (lambda: Twice(nn.Conv2d(8, 8, 3)), torch.randn(2, 8, 9, 9)),
    "embedding": (Tied, torch.randint(50, (4, 7))),
    "loop": (lambda: Steps(3), torch.randn(4, 16)),
}


def exported(model, x, folder, config):
    torch.manual_seed(0)
    sim = qtk.QuantSim(model.eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.export(folder, formats=["onnx"], check=False)
    return sim, folder / "model.onnx", [str(each.message) for each in caught if "overflow" in str(each.message)]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime_vnni"])
@pytest.mark.parametrize("name", MODELS)
def test_the_exact_mode_opens_a_file_whose_layers_share_a_weight(name, config, tmp_path):
    make, x = MODELS[name]
    sim, file, (warned,) = exported(make(), x, tmp_path / "out", config)
    assert opens_in_exact_mode(file)
    assert "session.x64quantprecision=1" in warned
    session, _ = session_with(file, Optimizations.EXACT)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = sim.model(x)
    scale = next(site.encoding.scale for site in reversed(list(stored_sites(file))) if site.constant() is None)
    steps = ((torch.from_numpy(result) - expected).abs() / scale).round()
    assert (steps > 1).float().mean() < 0.01
    names = [site.name for site in stored_sites(file)]
    assert len(names) > len(set(names))  # the weight is read twice


@pytest.mark.medium
def test_codes_are_there_twice_where_both_readers_need_them(tmp_path):
    sizes = {}
    for name in ("matrix", "embedding"):
        make, x = MODELS[name]
        _, file, _ = exported(make(), x, tmp_path / name, "default")
        model = onnx.load(file)
        sizes[name] = sorted(len(each.raw_data) for each in model.graph.initializer if each.data_type == 3)[-3:]
    assert sizes["matrix"][-2:] == [32 * 32] * 2
    assert sizes["embedding"][-2:] == [32 * 32, 50 * 32]  # the head reads it transposed


@pytest.mark.medium
@pytest.mark.parametrize("config", ["onnxruntime", "openvino"])
def test_a_target_that_needs_no_exact_mode_keeps_one_dequantizelinear(config, tmp_path):
    make, x = MODELS["matrix"]
    _, file, warned = exported(make(), x, tmp_path / "out", config)
    assert [site.name for site in stored_sites(file)].count("layer.weight") == 1
    assert warned == []


@pytest.mark.medium
def test_where_the_exact_mode_refuses_a_file_nobody_is_told_to_use_it(tmp_path):
    sim, file, (warned,) = exported(Steps(6), torch.randn(4, 16), tmp_path / "out", "default")
    assert not opens_in_exact_mode(file)
    assert "x64quantprecision" not in warned
    assert "config='onnxruntime'" in warned
    verdict = sim.verify_export(tmp_path / "out", [torch.randn(4, 16)], turns=0, progress=False)
    assert "x64quantprecision=1, which" not in str(verdict)


@pytest.mark.medium
def test_weights_of_a_float_operator_stay_one(tmp_path):
    """Its gates are cut out of the dequantized weight, which no integer operator reads."""
    x = torch.randn(5, 2, 8)
    sim = qtk.QuantSim(nn.GRU(8, 16).eval(), x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    assert sim.quantizers["weight_hh_l0"].spec.qmax == 127  # beyond what the exact mode leaves in int8
    sim.export(tmp_path / "out", formats=("onnx",))
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert sorted(each.name for each in graph.initializer if each.data_type == onnx.TensorProto.INT8 and
                  len(each.dims) == 2) == ["weight_hh_l0", "weight_ih_l0"]
    assert not [node for node in graph.node if node.op_type == "DequantizeLinear" and node.domain != "qtk"
                and node.input[0].startswith("weight")]
