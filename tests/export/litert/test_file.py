import json
import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.litert import file
from qtk.export.litert.flatbuffer import LiteRtModel
from qtk.graph.graphs import roots
from tests.export.litert.small_file import needs_converter, small


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total += x.sum(0)
        return x * self.total


def test_buffers_that_forward_writes_are_refused_with_a_way_out(tmp_path):
    sim = qtk.QuantSim(Counting().eval(), torch.randn(4, 3), config="litert")
    sim.compute_encodings([torch.randn(4, 3)], progress=False)
    with pytest.raises(ExportError, match=r"no buffers that forward writes; .*states=.*formats=\('onnx',\)"):
        sim.export(tmp_path / "out", formats="litert")
    assert not (tmp_path / "out").exists()


@needs_converter
def test_every_site_is_in_the_file_bit_for_bit_and_every_layer_in_integers():
    sim, _, folder = small()
    read = file.read(folder / "model.tflite")
    simulated = {name: each for name, each in sim.encodings().items() if not name.endswith("bias")}
    assert read.keys() == simulated.keys()
    for name, encoding in simulated.items():
        assert torch.equal(read[name].scale.flatten(), encoding.scale.flatten()), name
    model = LiteRtModel.load(folder / "model.tflite")
    tensors = model.tensors
    layers = [op for op in model.ops if op.kind in ("CONV_2D", "FULLY_CONNECTED")]
    assert len(layers) == 2
    assert all([tensors[index].kind for index in op.inputs] == ["INT8", "INT8", "INT32"] for op in layers)


@needs_converter
def test_int32_biases_are_the_codes_of_the_simulation():
    sim, _, folder = small()
    model = LiteRtModel.load(folder / "model.tflite")
    tensors = model.tensors
    for op, name in zip([op for op in model.ops if op.kind in ("CONV_2D", "FULLY_CONNECTED")], ("0", "3"), strict=True):
        encoding = sim.encodings()[f"{name}.bias"]
        bias = dict(sim.model.named_parameters())[f"{name}.bias"].detach()
        codes = (bias.double() / encoding.scale.double()).round()
        assert (model.values(tensors[op.inputs[2]]).double() - codes).abs().max() <= 1


@needs_converter
@pytest.mark.parametrize("planted", ["scale", "zero_point", "codes"])
def test_a_planted_difference_is_found(planted, tmp_path):
    sim, _, folder = small()
    model = LiteRtModel.load(folder / "model.tflite")
    site = next(each for each in file.file_sites(model) if each.name == ("0.weight" if planted == "codes" else "1:out"))
    tensor = model._graph.tensors[site.tensor.index]
    if planted == "scale":
        tensor.quantization.scale = tensor.quantization.scale * 1.0001
    elif planted == "zero_point":
        tensor.quantization.zeroPoint = tensor.quantization.zeroPoint + 1
    else:
        data = model._model.buffers[tensor.buffer].data
        model._model.buffers[tensor.buffer].data = [*data[:-1], (int(data[-1]) + 1) % 256]
    (tmp_path / "model.tflite").write_bytes(model.to_bytes())
    with pytest.raises(ExportError, match=rf"{site.name}: .*(scale|zero_point|stored integers)"):
        file.compare_with_simulation(tmp_path / "model.tflite", roots(sim.model)[""])
    file.compare_with_simulation(folder / "model.tflite", roots(sim.model)[""])


@needs_converter
def test_the_target_and_one_row_are_in_the_file_and_another_file_is_refused(tmp_path):
    model = LiteRtModel.load(small()[2] / "model.tflite")
    assert model.metadata["qtk.target"] == b"litert"
    assert [model.tensors[index].shape for index in model.inputs.values()] == [(1, 3, 6, 6)]
    model._model.metadata = [each for each in model._model.metadata if each.name != b"qtk.sites"]
    (tmp_path / "a.tflite").write_bytes(model.to_bytes())
    with pytest.raises(ExportError, match=r"no metadata qtk\.sites.*formats=\('litert',\)"):
        file.read(tmp_path / "a.tflite")


@needs_converter
def test_sites_that_the_file_does_not_hold_are_named():
    sim, _, folder = small()
    sites = file.SITES
    model = LiteRtModel.load(folder / "model.tflite")
    kept = [each for each in json.loads(model.metadata[sites]) if each[0] != "1:out"]
    model.set_metadata({sites: json.dumps(kept).encode()})
    path = folder.parent / "less.tflite"
    path.write_bytes(model.to_bytes())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file.compare_with_simulation(path, roots(sim.model)[""])
    assert "less.tflite holds no codes of 1:out" in str(caught[-1].message)
