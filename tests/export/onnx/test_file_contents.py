"""What is read of an ONNX file, against what the simulation says and against graphs written out here."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.file_contents import read_contents
from qtk.export.quantized_file import OUTPUT, QUANTIZE, FileOp


def contents(tmp_path, nodes, initializers, opset=21):
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), tmp_path / "m.onnx")
    return read_contents(tmp_path / "m.onnx")


@pytest.fixture
def convolution():
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], "q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "dx"),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], "dw", axis=0),
        helper.make_node("Conv", ["xd", "wd", "b"], ["c"], "conv"),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Reshape", ["r", "shape"], ["f"], "reshape"),
        helper.make_node("QuantizeLinear", ["f", "s", "z"], ["yq"], "q2"),
        helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["y"], "dy"),
    ]
    numbers = {
        "s": torch.tensor(0.5).numpy(), "z": torch.tensor(3, dtype=torch.uint8).numpy(),
        "w": torch.arange(-12, 12, dtype=torch.int8).reshape(6, 4, 1, 1).numpy(), "ws": torch.full((6,), 0.1).numpy(),
        "b": torch.zeros(6).numpy(), "shape": torch.tensor([0, -1]).numpy(),
    }
    return nodes, numbers


def test_tensors_of_a_plain_file(tmp_path, convolution):
    file = contents(tmp_path, *convolution)
    x, w, y = file.tensors
    assert (file.opset, file.target, file.format) == (21, None, "onnx")
    assert (x.name, x.role, x.dtype, x.granularity, x.zero_points_are_0) == (
        "dx", "activations", "uint8", "per_tensor", False)
    assert x.readers == {"conv2d", "conv"}
    assert (w.name, w.role, w.dtype, w.granularity, w.zero_points_are_0, w.codes) == (
        "dw", "weights", "int8", "per_channel", True, (-12, 11))
    assert (y.role, y.readers) == ("activations", frozenset())


def test_ops_their_operands_and_readers(tmp_path, convolution):
    conv, relu = contents(tmp_path, *convolution).ops
    assert (conv.operator, conv.operands, conv.readers) == ("Conv", (True, True), [relu])
    assert (relu.kinds, relu.operands, relu.readers) == (("relu",), (False,), [QUANTIZE])


def test_a_float_input_an_int32_bias_and_an_output_are_seen(tmp_path, convolution):
    nodes, numbers = convolution
    nodes[3] = helper.make_node("Conv", ["x", "wd", "bd"], ["y"], "conv")
    nodes.insert(3, helper.make_node("DequantizeLinear", ["b", "ws"], ["bd"], "db", axis=0))
    numbers["b"] = torch.arange(6, dtype=torch.int32).numpy()
    file = contents(tmp_path, nodes[:5], numbers)
    assert [(each.role, each.dtype) for each in file.tensors if each.name == "db"] == [("biases", "int32")]
    (conv,) = (op for op in file.ops if isinstance(op, FileOp))
    assert (conv.operands, conv.readers) == ((False, True), [OUTPUT])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(20, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.fc(torch.relu(self.table(x)))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("config", "weight"), [
    ("onnxruntime", ("int8", "per_channel", None, False)), ("dynamic", ("int8", "per_channel", None, False)),
    ("dynamic_per_token", ("int8", "per_channel", None, False)),
    ("weight_only_int4", ("int4", "per_block", 32, False)), ("tensorrt_fp8", ("fp8_e4m3", "per_tensor", None, False)),
])
def test_every_form_of_quantizer_is_read(config, weight, tmp_path):
    torch.manual_seed(0)
    x = torch.randint(20, (2, 5))
    sim = qtk.QuantSim(Net().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="onnx")
    file = read_contents(tmp_path / "out" / "model.onnx")
    assert file.target == config
    read = {each.name: each for each in file.tensors}
    found = read["fc.weight"]
    assert (found.dtype, found.granularity, found.block_size, found.dynamic) == weight
    assert found.role == "weights"
    assert "linear" in found.readers
    for site, quantizer in sim.quantizers.items():
        if ":" in site:
            assert read[site].role == "activations"
            assert read[site].dynamic == quantizer.spec.dynamic
            assert read[site].dtype == quantizer.spec.dtype.name
            assert read[site].granularity == str(quantizer.spec.granularity).partition("(")[0]
    if "table.weight" in sim.quantizers:
        assert read["table.weight"].readers == {"embedding"}


def test_what_is_no_onnx_is_an_error(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no")
    with pytest.raises(ExportError, match="as ONNX"):
        read_contents(tmp_path / "m.onnx")


def test_one_scale_along_an_axis_of_length_one_is_per_channel(tmp_path, convolution):
    nodes, numbers = convolution
    for length, granularity in ((1, "per_channel"), (6, "per_tensor")):
        numbers["w"], numbers["b"] = torch.ones(length, 4, 1, 1, dtype=torch.int8).numpy(), torch.zeros(length).numpy()
        numbers["ws"] = torch.full((1,), 0.1).numpy()
        assert contents(tmp_path, nodes, numbers).tensors[1].granularity == granularity


@pytest.mark.parametrize("behind_identity", [False, True])
def test_numbers_in_constant_nodes_are_those_of_initializers(behind_identity, tmp_path, convolution):
    nodes, numbers = convolution
    expected = contents(tmp_path, nodes, numbers)
    constants = []
    for name, array in numbers.items():
        held = f"{name}_held" if behind_identity else name
        constants.append(helper.make_node("Constant", [], [held], value=numpy_helper.from_array(array)))
        if behind_identity:
            constants.append(helper.make_node("Identity", [held], [name]))
    file = contents(tmp_path, [*constants, *nodes], {})
    assert file.tensors == expected.tensors
    assert [(op.name, op.kinds, op.operands) for op in file.ops] == [
        (op.name, op.kinds, op.operands) for op in expected.ops]


def test_a_scale_written_as_a_number_of_a_constant_node_is_seen(tmp_path, convolution):
    nodes, numbers = convolution
    expected = contents(tmp_path, nodes, numbers)
    del numbers["s"]
    file = contents(tmp_path, [helper.make_node("Constant", [], ["s"], value_float=0.5), *nodes], numbers)
    assert file.tensors == expected.tensors


@pytest.mark.medium
def test_codes_that_were_made_longer_have_the_names_of_their_sites(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()).eval(), x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    found = read_contents(tmp_path / "out" / "model.onnx")
    stored = onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    assert [16, 4, 3, 3] in [list(each.dims) for each in stored]
    assert {tensor.name for tensor in found.tensors} == {*sim.encodings()}
