import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qtk
from qtk.core.spec import REDUCED_CODE
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.runtimes.saturation import largest_pair, saturating_weights
from qtk.runtimes.session import create_session
from tests.export.onnx.without_vnni import QEMU, run_without_vnni

needs_qemu = pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64")
REDUCED = {"version": 1, "defaults": {"weight": {"granularity": "per_channel", "reduced_range": True}}}
SIGNED = {"version": 1, "defaults": {"activation": {"dtype": "int8", "symmetric": True},
                                     "weight": {"granularity": "per_channel"}}}
SIGNED_REDUCED = {"version": 1, "defaults": SIGNED["defaults"] | REDUCED["defaults"]}
UNSIGNED = {"version": 1, "defaults": {"weight": {"granularity": "per_channel", "dtype": "uint8", "symmetric": True}}}


@pytest.mark.parametrize(
    ("codes", "largest"),
    [([64, 64], 128), ([64, 65], 129), ([-64, -65], 129), ([127, -127], 127), ([127, 0, 127], 127), ([3], 3), ([], 0)],
)
def test_pairs_of_one_sign_add_up(codes, largest):
    assert largest_pair(torch.tensor([codes], dtype=torch.int32)) == largest


class Layers(nn.Module):
    """A convolution, a linear layer and a matrix product, all with weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.right = nn.Conv2d(6, 8, 3), nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.matmul(self.linear(self.conv(x).flatten(2).transpose(1, 2)), self.right)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("default", ["conv.weight", "linear.weight", "right"]),
        ("onnxruntime_vnni", ["conv.weight", "linear.weight", "right"]),
        ("onnxruntime", []),
        (SIGNED, ["conv.weight", "linear.weight", "right"]),
        (REDUCED, []),
        (SIGNED_REDUCED, []),
        (UNSIGNED, []),
        ({"version": 1, "defaults": {"activation": "float"}}, []),
    ],
)
def test_weights_that_can_saturate_are_named_at_export(config, names, tmp_path, recwarn):
    x = torch.randn(2, 6, 6, 6)
    sim = qtk.QuantSim(Layers(), x, config=config)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    assert sorted(saturating_weights(tmp_path / "out" / "model.onnx")) == names
    messages = [str(warning.message) for warning in recwarn if "int16" in str(warning.message)]
    assert len(messages) == bool(names)
    if names:
        assert "and 2 other weights" in messages[0]
        assert "the int8 codes" in messages[0]
        assert "config='onnxruntime'" in messages[0]


@pytest.mark.medium
def test_weights_behind_pooled_codes_are_named(tmp_path):
    x = torch.randn(2, 3, 9, 9)
    sim = qtk.QuantSim(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)), x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    assert sorted(saturating_weights(tmp_path / "out" / "model.onnx")) == ["0.weight", "3.weight"]


@pytest.mark.slow
def test_pairs_run_along_the_channels_of_a_convolution(tmp_path):
    conv = nn.Conv2d(2, 1, (1, 2), bias=False)
    for weight, saturates in (([[100, 1], [1, 100]], False), ([[100, 1], [100, 1]], True)):
        conv.weight.data = torch.tensor(weight, dtype=torch.float32).reshape(1, 2, 1, 2)
        sim = qtk.QuantSim(conv, torch.rand(2, 2, 4, 4))
        sim.compute_encodings([torch.rand(2, 2, 4, 4)], progress=False)
        sim.set_range("weight", -127.0, 127.0)
        sim.export(tmp_path / str(saturates), formats=["onnx"])
        assert bool(saturating_weights(tmp_path / str(saturates) / "model.onnx")) is saturates


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("linear", "shape"), [("gemm", (4, 2)), ("matmul", (4, 3, 2))])
def test_pairs_run_along_the_inputs_of_a_linear_layer(linear, shape, tmp_path):
    layer, x = nn.Linear(2, 2), torch.rand(shape)
    for weight, saturates in (([[100, -1], [100, -1]], False), ([[100, 100], [-1, -1]], True)):
        layer.weight.data = torch.tensor(weight, dtype=torch.float32)
        sim = qtk.QuantSim(layer, x)
        sim.compute_encodings([x], progress=False)
        sim.set_range("weight", -127.0, 127.0)
        sim.export(tmp_path / str(saturates), formats=["onnx"])
        assert bool(saturating_weights(tmp_path / str(saturates) / "model.onnx")) is saturates


def stack_of_matrices():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 8, 4))

        def forward(self, x):
            return torch.matmul(x, self.stack)

    return Stack(), torch.randn(3, 5, 8), ["stack"]


def plain_rnn():
    return nn.RNN(6, 5), torch.randn(4, 2, 6), ["weight_hh_l0", "weight_ih_l0"]


def transposed_convolution():
    return nn.ConvTranspose2d(3, 4, 3), torch.randn(2, 3, 6, 6), []


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("make", [stack_of_matrices, plain_rnn, transposed_convolution])
def test_other_products(make, tmp_path):
    model, x, names = make()
    assert named(model, x, "default", tmp_path) == names


@pytest.mark.medium
def test_int8_times_int8_is_exact_in_the_operator_that_multiplies_stacks(tmp_path):
    """Its kernel for int8 does not saturate; in front of the others ONNX Runtime makes the codes uint8."""
    model, x, _ = stack_of_matrices()
    assert named(model, x, SIGNED, tmp_path) == []


@pytest.mark.medium
def test_minifloats_are_no_codes_that_saturate(tmp_path):
    eights = {"dtype": "fp8_e4m3", "symmetric": True}
    config = {"version": 1, "defaults": {"activation": eights, "weight": eights}}
    assert named(Layers(), torch.randn(2, 6, 6, 6), config, tmp_path) == []


def named(model, x, config, tmp_path):
    sim = qtk.QuantSim(model, x, config=config)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    found = saturating_weights(tmp_path / "out" / "model.onnx")
    return sorted(name.rpartition(".")[2] for name in found)


def integer_products(kind, weight):
    """A file with one integer operator: uint8 x [4, 6] (or as an image) times codes [6, 8], and the exact sums."""
    x = np.random.default_rng(0).integers(0, 256, (4, 6)).astype(np.uint8)
    x[0] = 255
    exact = x.astype(np.int64) @ (weight.astype(np.int64) - (128 if weight.dtype == np.uint8 else 0))
    scale = 1 / 2048  # a power of two: the codes of the result are exact sums / 2048, rounded
    constants = {"one": np.float32(1), "zero": np.uint8(0), "middle": np.array(128 if weight.dtype == np.uint8 else 0,
                 weight.dtype), "scale": np.float32(1 / scale), "half": np.uint8(128)}
    if kind == "MatMulInteger":
        inputs, dtype = ["x", "w", "zero", "middle"], TensorProto.INT32
    else:
        inputs, dtype = ["x", "one", "zero", "w", "one", "middle", "scale", "half"], TensorProto.UINT8
        exact = np.clip(np.rint(exact * scale) + 128, 0, 255)
    if kind == "QLinearConv":
        x, weight, exact = x[..., None, None], weight.T[..., None, None].copy(), exact[..., None, None]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, ["y"])], kind,
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", dtype, exact.shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in inputs]
        + [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    return model.SerializeToString(), x, exact


@needs_qemu
@pytest.mark.parametrize("kind", ["MatMulInteger", "QLinearMatMul", "QLinearConv"])
def test_reduced_and_unsigned_codes_are_exact_without_vnni_and_full_ones_are_not(kind, tmp_path):
    generator = np.random.default_rng(1)
    reduced = generator.integers(-REDUCED_CODE, REDUCED_CODE + 1, (6, 8)).astype(np.int8)
    reduced[:, 0], reduced[:, 1] = REDUCED_CODE, -REDUCED_CODE
    full = np.full((6, 8), 127, np.int8)
    unsigned = generator.integers(0, 256, (6, 8)).astype(np.uint8)
    unsigned[:, 0], unsigned[:, 1] = 255, 0
    for name, weight, is_exact in (("reduced", reduced, True), ("unsigned", unsigned, True), ("full", full, False)):
        content, x, exact = integer_products(kind, weight)
        file = tmp_path / f"{name}.onnx"
        file.write_bytes(content)
        (result,) = run_without_vnni(file, x=x)
        assert np.array_equal(result, exact) is is_exact, name


@needs_qemu
@pytest.mark.parametrize("name", ["digits_vit", "digits_cnn"])
def test_digits_agree_with_the_simulation_without_vnni(name, tmp_path):
    digits = load_digits_split()
    images = digits.test_images
    sim = qtk.QuantSim(build(name), images[:2], config="onnxruntime")
    sim.compute_encodings(digits.train_images[:512].split(128), progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    file = tmp_path / "out" / "model.onnx"
    with torch.no_grad():
        simulated = sim.model(images).argmax(-1).numpy()
    given = {create_session(file)[0].get_inputs()[0].name: images.numpy()}
    (scores,) = run_without_vnni(file, **given)
    assert (scores.argmax(-1) == simulated).mean() >= 0.995
