import copy
import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtk
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import CaptureError, ExportError
from qtk.export.onnx.qdq import drop_default_attributes, export, read
from qtk.graph.insert import quantizer_nodes
from qtk.quantizers.quantizer import Mode
from qtk.runtimes.session import Optimizations, create_session, open_session, session_with
from tests.export.onnx.simulated import (
    activations,
    encodings_of,
    nothing,
    run_onnx,
    run_simulation,
    simulate,
    symmetric,
    weights,
)
from tests.planning.branching_net import Net, X, sites
from tests.planning.plans import WeightsAsInputs, weights_as_inputs


class SmallConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, groups=4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 10)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, image):
        x = self.norm(self.conv1(image)).relu()
        x = F.silu(self.conv2(x))
        return self.head(self.dropout(x.mean((2, 3))))


class SmallAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens):
        batch, length, _ = tokens.shape
        q, k, v = self.qkv(self.norm(tokens)).reshape(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        x = tokens + self.proj(mixed.transpose(1, 2).reshape(batch, length, 32))
        return x + self.down(F.gelu(self.up(x)))


class Linear(nn.Module):
    def __init__(self, inputs=8, outputs=4, bias=True):
        super().__init__()
        self.fc = nn.Linear(inputs, outputs, bias)

    def forward(self, x):
        return self.fc(x)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def exported(tmp_path, model, example_inputs, **choices):
    sim = simulate(model, example_inputs, **choices)
    path = tmp_path / "model.onnx"
    export(sim, example_inputs, path)
    return sim, path


def initializers(path) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}


def nodes(path, op: str) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(path).graph.node if node.op_type == op]


def assert_agrees(got: np.ndarray, expected: np.ndarray, scale: float) -> None:
    """Equal but for sums of floats that another order of summands sends over the edge of a code."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1.001 * scale
    assert (got != expected).mean() <= 0.01


def numpy_codes(value: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | int, spec: QuantSpec) -> np.ndarray:
    """An independent QuantizeLinear in numpy; scale and zero point broadcast against the value."""
    return np.clip(np.rint(value / scale) + zero_point, spec.qmin, spec.qmax).astype(np.int64)


# --- the file computes what the simulation computes


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("model", "shape"), [(SmallConvNet, (3, 12, 12)), (SmallAttention, (5, 32))], ids=["conv", "attention"]
)
def test_runtime_equals_the_simulation(model, shape, tmp_path):
    torch.manual_seed(0)
    sim, path = exported(tmp_path, model(), torch.randn(2, *shape))
    x = torch.randn(16, *shape) * 1.5
    (expected,) = run_simulation(sim, x)
    scale = float(list(read(path).values())[-1].scale)
    assert_agrees(run_onnx(path, x)[0], expected, scale)
    (fused,) = run_onnx(path, x, optimized=True)
    assert np.abs(fused - expected).max() <= 3.001 * scale  # integer kernels round where the simulation does not
    assert (fused != expected).mean() < 0.15


@pytest.mark.medium
def test_batch_stays_dynamic_also_from_an_example_of_one(tmp_path):
    sim, path = exported(tmp_path, SmallConvNet(), torch.randn(1, 3, 12, 12))
    (batch, *rest) = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert (batch.dim_param, [dim.dim_value for dim in rest]) == ("batch", [3, 12, 12])
    for size in (1, 7):
        x = torch.randn(size, 3, 12, 12)
        assert_agrees(run_onnx(path, x)[0], run_simulation(sim, x)[0], float(encodings_of(sim)["head:out"].scale))


class Products(nn.Module):
    """One product for each of several weights: an op that rounds alike everywhere."""

    def __init__(self, count):
        super().__init__()
        self.w = nn.ParameterList(torch.randn(4, 8) for _ in range(count))

    def forward(self, x):
        return tuple(x * weight for weight in self.w)


def products(tmp_path, weight_specs, activation_specs):
    """A file with one product a pair of specs."""

    def weight(site, value):
        return weight_specs[int(site.split(".")[1])]

    def activation(site, value):
        ordinal = site.removeprefix("mul").removesuffix(":out").removeprefix("_")
        return None if site == "x:input" else activation_specs[int(ordinal or 0)]

    model = Products(len(weight_specs))
    return exported(tmp_path, model, torch.randn(2, 4, 8), weight=weight, activation=activation)


@pytest.mark.medium
def test_every_width_saturates_at_its_own_codes(tmp_path):
    kinds = [dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in range(2, 17)]
    sim, path = products(tmp_path, [QuantSpec(kind) for kind in kinds], [QuantSpec(kind) for kind in kinds])
    x = torch.cat([torch.linspace(-20, 20, 64 * 32).reshape(64, 4, 8), torch.randn(64, 4, 8)])
    for kind, got, expected in zip(kinds, run_onnx(path, x), run_simulation(sim, x), strict=True):
        assert np.array_equal(got, expected), kind
        assert kind.bits > 4 or len(np.unique(got)) == 2**kind.bits, kind


@pytest.mark.medium
def test_granularities(tmp_path):
    narrow = QuantSpec(dtype("int8"), PerChannel(0), symmetric=True, narrow_range=True)
    pairs = [
        (narrow, QuantSpec(dtype("int8"), symmetric=True, narrow_range=True)),
        (QuantSpec(dtype("int4"), PerChannel(1), symmetric=True), QuantSpec(dtype("uint8"), PerChannel(-1))),
        (QuantSpec(dtype("int3"), PerBlock((1, 4)), symmetric=True), QuantSpec(dtype("uint5"), PerChannel(1))),
        (QuantSpec(dtype("uint4"), PerBlock((2, 1))), QuantSpec(dtype("int6"), PerChannel(2), symmetric=True)),
        (QuantSpec(dtype("int8"), PerBlock((1, -1)), symmetric=True), QuantSpec(dtype("uint3"))),
        (QuantSpec(dtype("int8"), PerBlock((1, 1)), symmetric=True), QuantSpec(dtype("int16"), symmetric=True)),
    ]
    sim, path = products(tmp_path, *zip(*pairs, strict=True))
    x = torch.randn(64, 4, 8) * 3
    for pair, got, expected in zip(pairs, run_onnx(path, x), run_simulation(sim, x), strict=True):
        assert np.array_equal(got, expected), pair
    back = read(path)
    assert list(back) == list(encodings_of(sim))
    for site, encoding in encodings_of(sim).items():
        assert back[site].equals(encoding), site


@pytest.mark.medium
def test_blocks_of_activations(tmp_path):
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2.0

    spec = activations("uint3", PerBlock((1, 1, 4)))
    sim = simulate(Scale(), torch.randn(3, 2, 8), activation=spec)
    for node in sim.graph.nodes:  # blocks over a batch have scales for this one size of it
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = torch.empty(3, 2, 8)
    export(sim, torch.randn(3, 2, 8), tmp_path / "model.onnx")
    x = torch.randn(3, 2, 8) * 3
    assert np.array_equal(run_onnx(tmp_path / "model.onnx", x)[0], run_simulation(sim, x)[0])
    assert nodes(tmp_path / "model.onnx", "QuantizeLinear")[0].attribute[0].name in ("axis", "block_size")


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("sizes", [(2, 4), (-1, 2), (2, -1), (-1, -1), (1, -1)])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_blocks_along_two_axes_are_stored_along_one(sizes, is_symmetric, tmp_path):
    x = torch.randn(4, 8)
    weight = weights("int8" if is_symmetric else "uint8", PerBlock(sizes), symmetric=is_symmetric)
    sim, path = exported(tmp_path, Linear(), x, weight=weight, activation=nothing)
    np.testing.assert_allclose(run_onnx(path, x)[0], run_simulation(sim, x)[0], rtol=0, atol=1e-6)  # float sums
    scale = read(path)["fc.weight"].scale
    assert scale.shape == PerBlock(sizes).qparam_shape((4, 8))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_other_float_types_are_quantized_in_float32(kind, tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4, bias=False).to(kind)

        def forward(self, x):
            return self.fc(x.to(kind)).float()

    sim, path = exported(tmp_path, Mixed(), torch.randn(4, 8))
    x = torch.randn(32, 8)
    scale = float(encodings_of(sim)["fc:out"].scale)
    assert np.abs(run_onnx(path, x)[0] - run_simulation(sim, x)[0]).max() <= 1.01 * scale
    assert read(path)["fc.weight"].equals(encodings_of(sim)["fc.weight"])


@pytest.mark.medium
def test_bfloat16_makes_a_valid_file(tmp_path):
    _, path = exported(tmp_path, Linear().bfloat16(), torch.randn(4, 8, dtype=torch.bfloat16))
    assert onnx.load(path).graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert initializers(path)["fc.weight"].data_type == onnx.TensorProto.INT8


# --- what stands in the file


@pytest.fixture(scope="module")
def _linear():
    return simulate(Linear(), torch.randn(2, 8))


@pytest.fixture
def linear(_linear):
    return copy.deepcopy(_linear)


@pytest.fixture(scope="module")
def conv_file(tmp_path_factory):
    torch.manual_seed(0)
    sim, path = exported(tmp_path_factory.mktemp("conv"), SmallConvNet(), torch.randn(2, 3, 12, 12))
    return sim, path


@pytest.mark.medium
def test_encodings_read_back_bit_for_bit(conv_file):
    sim, path = conv_file
    back = read(path)
    assert list(back) == list(encodings_of(sim))
    for site, encoding in encodings_of(sim).items():
        assert back[site].equals(encoding), site


def test_every_encoding_names_a_tensor_and_every_quantized_tensor_has_one(conv_file):
    _, path = conv_file
    stored = {node.input[0] for node in nodes(path, "DequantizeLinear") if node.input[0] in initializers(path)}
    passing = {node.input[0] for node in nodes(path, "QuantizeLinear")}
    assert stored | passing == set(read(path))
    assert len(nodes(path, "DequantizeLinear")) == len(read(path))
    assert stored == {"conv1.weight", "conv2.weight", "head.weight"}
    assert {"image:input", "conv1:out", "head:out"} <= passing


def test_weights_are_the_integers_of_the_simulation(conv_file):
    sim, path = conv_file
    for name in ("conv1.weight", "conv2.weight", "head.weight"):
        weight, encoding = sim.get_parameter(name).detach().numpy(), encodings_of(sim)[name]
        scale = encoding.scale.numpy().reshape(-1, *[1] * (weight.ndim - 1))
        stored = initializers(path)[name]
        assert stored.data_type == onnx.TensorProto.INT8
        assert np.array_equal(onnx.numpy_helper.to_array(stored), numpy_codes(weight, scale, 0, encoding.spec))


def test_only_the_float_tensors_that_are_used_remain(conv_file):
    sim, path = conv_file
    floats = {name for name, tensor in initializers(path).items() if tensor.data_type == onnx.TensorProto.FLOAT}
    scales = {f"{site}.scale" for site in read(path)}
    own = {"conv1.bias", "conv2.bias", "head.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    assert floats == own | scales
    assert own <= set(sim.state_dict())


def test_nothing_of_the_fake_quantizer_remains(conv_file):
    _, path = conv_file
    model = onnx.load(path)
    assert {node.op_type for node in model.graph.node} == {
        "Identity", "QuantizeLinear", "DequantizeLinear", "Conv", "BatchNormalization", "Relu", "Sigmoid", "Mul",
        "GlobalAveragePool", "Squeeze", "Gemm", "Max",  # of one value, in SiLU: see fused_activations.py
    }
    assert len(nodes(path, "Mul")) == 1  # of silu
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 19)]
    assert model.producer_name == "qtk"
    assert b"site-packages" not in path.read_bytes()
    assert b"Traceback" not in path.read_bytes()
    assert b"stack_trace" not in path.read_bytes()


def test_types_stand_at_inputs_and_outputs_only_and_each_spec_once(conv_file):
    model = onnx.load(conv_file[1])
    assert not model.graph.value_info
    assert all(not node.metadata_props and not node.doc_string for node in model.graph.node)
    record = json.loads({entry.key: entry.value for entry in model.metadata_props}["qtk.sites"])
    assert len(record["specs"]) == 2
    assert set(record["nodes"]) == {node.name for node in nodes(conv_file[1], "DequantizeLinear")}


def test_the_file_is_valid_onnx(conv_file):
    onnx.checker.check_model(str(conv_file[1]), full_check=True)


@pytest.mark.medium
def test_codes_are_packed(tmp_path):
    expected = {"int4": ("INT4", 16), "int3": ("INT4", 16), "uint5": ("UINT8", 32), "int12": ("INT16", 64)}
    specs = [QuantSpec(dtype(name), PerChannel(0), symmetric=name[0] == "i") for name in expected]
    sim, path = products(tmp_path, specs, [None] * len(specs))
    for index, (spec, (kind, size_bytes)) in enumerate(zip(specs, expected.values(), strict=True)):
        stored, encoding = initializers(path)[f"w.{index}"], encodings_of(sim)[f"w.{index}"]
        assert onnx.TensorProto.DataType.Name(stored.data_type) == kind
        assert len(stored.raw_data) == size_bytes
        zero_point = 0 if encoding.zero_point is None else encoding.zero_point.numpy()[:, None]
        weight = sim.get_parameter(f"w.{index}").detach().numpy()
        codes = numpy_codes(weight, encoding.scale.numpy()[:, None], zero_point, spec)
        assert np.array_equal(onnx.numpy_helper.to_array(stored).astype(np.int64), codes)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("activation", "opset", "expected"),
    [(nothing, None, (25, "INT2")), (activations(), None, (21, "INT4")), (nothing, 21, (21, "INT4"))],
    ids=["weight only", "with activations", "asked for 21"],
)
def test_two_bits_are_packed_where_runtimes_read_them(activation, opset, expected, tmp_path):
    sim = simulate(Linear(), torch.randn(4, 8), weight=symmetric("int2"), activation=activation)
    path = tmp_path / "model.onnx"
    export(sim, torch.randn(4, 8), path, opset=opset)
    kind = onnx.TensorProto.DataType.Name(initializers(path)["fc.weight"].data_type)
    assert (onnx.load(path).opset_import[0].version, kind) == expected
    x = torch.randn(32, 8)
    np.testing.assert_allclose(run_onnx(path, x)[0], run_simulation(sim, x)[0], rtol=1e-5, atol=1e-6)
    run_onnx(path, x, optimized=True)


@pytest.mark.medium
def test_large_weights_go_to_a_file_beside(tmp_path):
    sim = simulate(Linear(64, 64), torch.randn(4, 64))
    path = tmp_path / "model.onnx"
    export(sim, torch.randn(4, 64), path, embedded_limit_bytes=1000)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert path.stat().st_size < 4096 < (tmp_path / "model.onnx.data").stat().st_size + 1
    x = torch.randn(8, 64)
    assert_agrees(run_onnx(path, x)[0], run_simulation(sim, x)[0], float(encodings_of(sim)["fc:out"].scale))
    assert read(path)["fc.weight"].equals(encodings_of(sim)["fc.weight"])


# --- names of inputs and outputs


class ManyOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, mask=None, times: int = 2):
        hidden = self.a(x).relu()
        if mask is not None:
            hidden = hidden + mask
        return {
            "hidden_output": hidden,
            "hidden_output_1": hidden * times,
            "pair": (self.b(hidden), hidden),
            "a.weight": hidden + 1,
            "x": x,
            "none": None,
            "number": 3,
        }


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        ((torch.randn(2, 8),), ["x"]),
        ((torch.randn(2, 8), None, 3), ["x"]),
        ({"x": torch.randn(2, 8), "times": 4, "mask": torch.randn(2, 8)}, ["x", "mask"]),
    ],
    ids=["plain", "with constants", "keywords"],
)
def test_inputs_and_outputs_keep_their_names(inputs, names, tmp_path):
    sim, path = exported(tmp_path, ManyOutputs(), inputs)
    graph = onnx.load(path).graph
    assert sorted(value.name for value in graph.input) == sorted(names)
    assert [value.name for value in graph.output] == [
        "hidden_output", "hidden_output_1", "pair.0", "pair.1", "a.weight_1", "x_1"
    ]
    tensors = {"x": torch.randn(5, 8), "mask": torch.randn(5, 8)}
    if isinstance(inputs, dict):
        expected = run_simulation(sim, **{**inputs, **tensors})
    else:
        expected = run_simulation(sim, tensors["x"], *inputs[1:])
    got = run_onnx(path, *(tensors[value.name] for value in graph.input))
    for value, reference in zip(got, expected, strict=True):
        assert_agrees(value, reference, max(float(each.scale.max()) for each in encodings_of(sim).values()))
    assert set(read(path)) == set(encodings_of(sim))


@pytest.mark.medium
def test_nested_inputs_and_bare_tuples(tmp_path):
    class Nested(nn.Module):
        def forward(self, batch, *, y):
            return batch["x"] + batch["list"][0], [y * 2]

    inputs = {"batch": {"x": torch.randn(2, 8), "list": [torch.randn(2, 8)]}, "y": torch.randn(2, 8)}
    _, path = exported(tmp_path, Nested(), inputs)
    assert [value.name for value in onnx.load(path).graph.output] == ["output_0", "output_1.0"]
    assert [value.name for value in onnx.load(path).graph.input] == ["batch_x", "batch_list_0", "y"]


@pytest.mark.medium
def test_integer_inputs(tmp_path):
    sim, path = exported(tmp_path, nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)), torch.randint(0, 20, (2, 5)))
    ids = torch.randint(0, 20, (3, 5))
    assert_agrees(run_onnx(path, ids)[0], run_simulation(sim, ids)[0], float(encodings_of(sim)["1:out"].scale))
    assert initializers(path)["0.weight"].data_type == onnx.TensorProto.INT8


# --- which values become integers


@pytest.mark.medium
def test_a_tied_weight_is_stored_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    sim, path = exported(tmp_path, Tied(), torch.randint(0, 20, (2, 5)))
    ids = torch.randint(0, 20, (3, 5))
    assert_agrees(run_onnx(path, ids)[0], run_simulation(sim, ids)[0], float(encodings_of(sim)["head:out"].scale))
    assert sum(list(tensor.dims) == [20, 8] for tensor in initializers(path).values()) == 1


class Standardised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return F.linear(x, (self.weight - self.weight.mean(1, keepdim=True)) / self.weight.std(1, keepdim=True))


@pytest.mark.medium
def test_a_weight_made_from_parameters_is_stored_as_its_codes(tmp_path):
    def only_divided(site, value):
        return QuantSpec(dtype("int8"), PerChannel(0), symmetric=True) if site == "div:out" else None

    sim, path = exported(tmp_path, Standardised(), torch.randn(2, 8), weight=only_divided)
    assert set(initializers(path)) == {
        "div:out", *(f"{s}.{k}" for s in encodings_of(sim) for k in ("scale", "zero_point"))
    }
    x = torch.randn(16, 8)
    assert_agrees(run_onnx(path, x)[0], run_simulation(sim, x)[0], float(encodings_of(sim)["linear:out"].scale))
    value = sim.weight.detach()
    value = ((value - value.mean(1, keepdim=True)) / value.std(1, keepdim=True)).numpy()
    encoding = encodings_of(sim)["div:out"]
    expected = numpy_codes(value, encoding.scale.numpy()[:, None], 0, encoding.spec)
    assert np.array_equal(onnx.numpy_helper.to_array(initializers(path)["div:out"]), expected)


@pytest.mark.medium
def test_a_constant_behind_another_quantizer_is_quantized_at_run_time(tmp_path):
    sim, path = exported(tmp_path, Standardised(), torch.randn(2, 8))
    x = torch.randn(16, 8)
    assert_agrees(run_onnx(path, x)[0], run_simulation(sim, x)[0], float(encodings_of(sim)["linear:out"].scale))
    assert set(read(path)) == set(encodings_of(sim))


@pytest.mark.medium
def test_sites_that_share_a_quantizer_keep_their_names(tmp_path):
    class Twice(nn.Module):
        def forward(self, x):
            return torch.cat([x.relu(), x.sigmoid()], 1)

    sim = simulate(Twice(), torch.randn(2, 4))
    leader, follower = [node for node in quantizer_nodes(sim) if "relu" in node.target or "sigmoid" in node.target]
    follower.target = leader.target
    sim.recompile()
    export(sim, torch.randn(2, 4), tmp_path / "model.onnx")
    back = read(tmp_path / "model.onnx")
    assert set(back) == {"x:input", "relu:out", "sigmoid:out", "concat:out"}
    assert back["relu:out"].equals(back["sigmoid:out"])
    x = torch.randn(8, 4)
    assert np.array_equal(run_onnx(tmp_path / "model.onnx", x)[0], run_simulation(sim, x)[0])


@pytest.mark.medium
def test_one_value_under_two_quantizers(tmp_path):
    class Fork(nn.Module):
        def forward(self, x):
            return x + 1.0

    sim = simulate(Fork(), torch.randn(2, 4))
    (first, _) = quantizer_nodes(sim)
    with sim.graph.inserting_after(first):
        second = sim.graph.call_module(first.target, (first,))
    second.meta = {**first.meta, "custom": {"qtk_site": "add:in[0]"}}
    first.replace_all_uses_with(second, delete_user_cb=lambda user: user is not second)
    sim.recompile()
    export(sim, torch.randn(2, 4), tmp_path / "model.onnx")
    assert {node.input[0] for node in nodes(tmp_path / "model.onnx", "QuantizeLinear")} == {
        "x:input", "add:in[0]", "add:out"
    }


@pytest.mark.medium
def test_a_float_output_and_two_quantizers_read_one_value(tmp_path):
    class Shared(nn.Module):
        def forward(self, x):
            middle = x.sigmoid()
            return middle, middle * 2.0, middle * 3.0

    sim = simulate(Shared(), torch.randn(2, 4))
    (first,) = [node for node in quantizer_nodes(sim) if "sigmoid" in node.target]
    (value,) = first.args
    _, _, third = sim.graph.output_node().args[0]
    with sim.graph.inserting_after(first):
        second = sim.graph.call_module(first.target, (value,))
    second.meta = {**first.meta, "custom": {"qtk_site": "mul_1:in[0]"}}
    (multiplied,) = third.args
    multiplied.replace_input_with(first, second)
    sim.graph.output_node().replace_input_with(first, value)
    sim.recompile()
    path = tmp_path / "model.onnx"
    export(sim, torch.randn(2, 4), path)
    assert [each.name for each in onnx.load(path).graph.output] == ["output_0", "output_1", "output_2"]
    entering = {node.input[0] for node in nodes(path, "QuantizeLinear")}
    assert entering == set(read(path)) == {"x:input", "sigmoid:out", "mul_1:in[0]", "mul:out", "mul_1:out"}


@pytest.mark.medium
def test_quantizers_that_are_off_leave_their_value_in_float(linear, tmp_path):
    linear.get_submodule("qtk_quantizers.fc.weight").mode = Mode.BYPASS
    export(linear, torch.randn(2, 8), tmp_path / "model.onnx")
    assert initializers(tmp_path / "model.onnx")["fc.weight"].data_type == onnx.TensorProto.FLOAT
    assert "fc.weight" not in read(tmp_path / "model.onnx")


# --- the model stays as it was


@pytest.mark.medium
def test_the_model_is_left_as_it_was(tmp_path):
    sim = simulate(SmallConvNet(), torch.randn(2, 3, 12, 12))
    sim.train()
    dropout = next(module for name, module in sim.named_modules() if "dropout" in name)
    dropout.training = False
    before = [(name, module.training) for name, module in sim.named_modules()]
    state, code = copy.deepcopy(sim.state_dict()), sim.code
    export(sim, torch.randn(2, 3, 12, 12), tmp_path / "model.onnx")
    assert [(name, module.training) for name, module in sim.named_modules()] == before
    assert sim.code == code
    assert sim.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in sim.state_dict().items())
    sim.eval()
    x, scale = torch.randn(4, 3, 12, 12), float(encodings_of(sim)["head:out"].scale)
    assert_agrees(run_onnx(tmp_path / "model.onnx", x)[0], run_simulation(sim, x)[0], scale)


# --- bad input


def test_a_quantizer_without_encoding_is_named(linear, tmp_path):
    linear.get_submodule("qtk_quantizers.fc:out").scale = None
    with pytest.raises(ExportError, match=r"fc:out has no encoding; run sim\.compute_encodings"):
        export(linear, torch.randn(2, 8), tmp_path / "model.onnx")


@pytest.mark.parametrize("inputs", [(torch.randn(2, 8), torch.randn(2, 8)), {"y": torch.randn(2, 8)}])
def test_other_inputs_than_prepared_with(inputs, linear, tmp_path):
    with pytest.raises(CaptureError, match="the model was prepared with"):
        export(linear, inputs, tmp_path / "model.onnx")


@pytest.mark.parametrize("opset", [18, 99])
def test_opsets_out_of_range(opset, linear, tmp_path):
    with pytest.raises(ExportError, match=f"opset {opset}: .* 19 or later"):
        export(linear, torch.randn(2, 8), tmp_path / "model.onnx", opset=opset)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("weight", "activation", "reason"),
    [
        (symmetric("int8"), activations("uint8"), None),
        (symmetric("int5"), activations("uint6"), None),
        (symmetric("fp8_e4m3"), activations("fp8_e5m2", symmetric=True), None),
        (symmetric("int4"), nothing, "fc.weight has int4 codes"),
        (weights("uint3"), activations(), "fc.weight has uint3 codes"),
        (symmetric("int8", PerBlock((1, 4))), activations(), "fc.weight has scales in blocks"),
        (symmetric("int8"), activations("uint16"), "x:input has uint16 codes"),
    ],
)
def test_opset_19_unless_a_site_needs_more(weight, activation, reason, tmp_path, caplog):
    sim = simulate(Linear(), torch.randn(4, 8), weight=weight, activation=activation)
    path, x = tmp_path / "model.onnx", torch.randn(32, 8)
    with caplog.at_level("INFO", logger="qtk"):
        export(sim, torch.randn(4, 8), path)
    model = onnx.load(path)
    assert model.opset_import[0].version == (19 if reason is None else 21)
    assert {entry.key: entry.value for entry in model.metadata_props}.get("qtk.opset") == reason
    assert ("because" in caplog.text) == (reason is not None)
    np.testing.assert_allclose(run_onnx(path, x)[0], run_simulation(sim, x)[0], rtol=1e-5, atol=1e-5)
    if reason is not None:
        with pytest.raises(ExportError, match=f"opset 20: {reason}, which needs 21 or later"):
            export(sim, torch.randn(4, 8), path, opset=20)


class Reshaped(nn.Module):
    """A reshape between two layers, whose codes ONNX Runtime moves the reshape to."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, image):
        return self.fc(self.conv(image).relu().reshape(-1, 4 * 36))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("opset", [19, 20, 21])
def test_symmetric_int8_activations_load_and_run_in_every_opset(opset, tmp_path):
    images = torch.randn(4, 3, 8, 8)
    sim = simulate(Reshaped(), images, activation=activations("int8", symmetric=True))
    export(sim, images, tmp_path / "model.onnx", opset=opset)
    scale = float(encodings_of(sim)["fc:out"].scale)
    for optimized in (False, True):
        assert_agrees(run_onnx(tmp_path / "model.onnx", images, optimized=optimized)[0], run_simulation(sim, images)[0],
                      scale)


@pytest.mark.medium
def test_an_op_that_onnx_lacks_is_an_export_error(tmp_path):
    class Exotic(nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    sim = simulate(Exotic(), torch.randn(2, 8))
    with pytest.raises(ExportError, match=r"cannot express the model in ONNX: .*i0"):
        export(sim, torch.randn(2, 8), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("limit", [0, 2**20], ids=["with data beside", "one file"])
def test_a_graph_that_the_checker_rejects_is_not_left_behind(limit, linear, tmp_path, monkeypatch):
    def reject(*args: object, **options: object) -> None:
        raise onnx.checker.ValidationError("node is wrong")

    monkeypatch.setattr(onnx.checker, "check_model", reject)
    with pytest.raises(ExportError, match="not valid ONNX: node is wrong"):
        export(linear, torch.randn(2, 8), tmp_path / "model.onnx", embedded_limit_bytes=limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_an_unwritable_path(linear, tmp_path):
    with pytest.raises(ExportError, match="cannot write"):
        export(linear, torch.randn(2, 8), tmp_path / "missing" / "model.onnx")


def test_read_refuses_other_files(conv_file, tmp_path):
    (tmp_path / "text.onnx").write_text("no protobuf")
    with pytest.raises(ExportError, match="cannot read"):
        read(tmp_path / "text.onnx")
    model = onnx.load(conv_file[1])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "bare.onnx")
    with pytest.raises(ExportError, match="was not written by qtk"):
        read(tmp_path / "bare.onnx")


@pytest.mark.medium
def test_numbers_that_a_model_returns_are_no_outputs_of_the_file(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(x), x.shape[0], 3

    sim = qtk.QuantSim(Counts().eval(), torch.randn(4, 8))
    sim.compute_encodings([torch.randn(4, 8)], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    assert sim.verify_export(tmp_path / "out", [torch.randn(6, 8)], turns=0).exact.differing == 0.0


@pytest.mark.medium
def test_chunks_of_a_dynamic_batch_are_exported(tmp_path):
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, y):
            first, second = torch.chunk(self.conv(torch.cat([x, y])), 2)
            return first * second

    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 3, 8, 8)
    sim = qtk.QuantSim(Pairs().eval(), (x, y))
    sim.compute_encodings([(x, y)], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    more = (torch.randn(5, 3, 8, 8), torch.randn(5, 3, 8, 8))
    assert sim.verify_export(tmp_path / "out", [more], turns=0).exact.differing == 0.0


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_float8_weights_and_activations_run_as_simulated(tmp_path, name):
    images = torch.randn(4, 3, 9, 9)
    sim, path = exported(tmp_path, SmallConvNet().eval(), images, weight=symmetric(name),
                         activation=activations(name, symmetric=True))
    session, described = open_session(path, sim)
    assert described.endswith("optimizations off (they take float8 for integers)")
    theirs, = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    assert np.array_equal(theirs, sim(images).detach().numpy())
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert stored["conv1.weight"] == {"fp8_e4m3": onnx.TensorProto.FLOAT8E4M3FN,
                                      "fp8_e5m2": onnx.TensorProto.FLOAT8E5M2}[name]
    found = read(path)
    assert found.keys() == encodings_of(sim).keys()
    assert all(found[site].equals(encoding) for site, encoding in encodings_of(sim).items())


@pytest.mark.medium
def test_a_float_that_onnx_does_not_know_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ExportError, match="has fp8_e4m3 and fp8_e5m2, not fp4_e2m1"):
        exported(tmp_path, Linear().eval(), torch.randn(2, 8), weight=symmetric("fp4_e2m1"), activation=nothing)
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("setting", "zero", "codes"),
    [
        ({"bits": 8, "symmetric": True, "reduced_range": True}, 0, range(-64, 65)),
        ({"dtype": "uint8", "symmetric": True}, 128, range(256)),
        ({"dtype": "uint8", "symmetric": True, "narrow_range": True}, 128, range(1, 256)),
        ({"dtype": "uint4", "symmetric": True}, 8, range(16)),
    ],
)
def test_reduced_and_unsigned_symmetric_weights(setting, zero, codes, tmp_path):
    torch.manual_seed(0)
    config = {"version": 1, "defaults": {"weight": {**setting, "granularity": "per_channel"}}}
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1)), torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(model, x, config=config, scheme="mse")  # mse clips: the bounds of the codes act
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out")  # reads all formats back, AIMET's too
    file = tmp_path / "out" / "model.onnx"
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(file).graph.initializer}
    scale = stored["0.weight.scale"].astype(np.float64).reshape(-1, 1, 1, 1)
    weight = model[0].weight.detach().numpy().astype(np.float64)
    expected = np.clip(np.rint((weight / scale).astype(np.float32)) + zero, codes[0], codes[-1])
    assert np.array_equal(stored["0.weight"].astype(np.int64), expected)
    assert set(stored.get("0.weight.zero_point", np.zeros(1)).astype(int)) == {zero}  # left out where it is 0
    session, _ = open_session(file, sim.model, optimized=False)
    with torch.no_grad():
        simulated = sim.model(x)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    step = float(sim.encodings()["2:out"].scale)
    assert np.abs(result - simulated.numpy()).max() <= 1.01 * step
    assert (np.abs(result - simulated.numpy()) < 0.01 * step).mean() > 0.99
    record = json.loads((tmp_path / "out" / "encodings_aimet_1.0.0.json").read_text())["param_encodings"][0]
    assert set(record["offset"]) == {-(1 << (record["bw"] - 1))}  # as of int8 and int4


@pytest.mark.medium
def test_weights_of_convolutions_are_stored_without_their_zero_points_of_zero(tmp_path):
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 8, 8), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    stored = initializers(tmp_path / "out" / "model.onnx")
    assert "0.weight.zero_point" not in stored
    assert not onnx.numpy_helper.to_array(stored["2.weight.zero_point"]).any()  # its product is integer only with it
    optimized = tmp_path / "optimized.onnx"
    exact, _ = session_with(tmp_path / "out" / "model.onnx", Optimizations.EXACT, optimized_file=optimized)
    assert {"QLinearConv", "QGemm"} <= {node.op_type for node in onnx.load(optimized).graph.node}
    found = exact.run(None, {exact.get_inputs()[0].name: x.numpy()})[0]
    np.testing.assert_allclose(found, sim.model(x).detach(), atol=1e-6)


@pytest.mark.medium
def test_blocks_of_a_convolution_run_as_simulated(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2)).eval(), torch.randn(2, 8, 8, 8)
    config = {"version": 1, "extends": "onnxruntime", "rules": [
        {"match": {"op": ["conv", "conv_transpose"]}, "weight": {"granularity": "per_block", "block_size": 4}},
    ]}
    sim = qtk.QuantSim(model, x, config=config)
    sim.compute_encodings([x], progress=False)
    assert sim.quantizers["0.weight"].spec.granularity == PerBlock((1, 4, -1, -1))
    sim.export(tmp_path / "exported", formats=["onnx"])
    verdict = sim.verify_export(tmp_path / "exported", [x, torch.randn(3, 8, 8, 8)], turns=0, progress=False)
    assert verdict.exact.differing == 0.0


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("target", ["default", "onnxruntime", "dynamic"])
def test_what_is_quantized_on_edges_is_exported_as_it_is_simulated(target, tmp_path):
    config = {"version": 1, "extends": target, "exclude": ["left"]}
    made = qtk.QuantSim(Net(lambda net, y: (net.left(y), net.right(y), net.third(y))).eval(), X, config=config)
    made.compute_encodings([X], progress=False)
    edges = {"right:in[0]", "third:in[0]"} & sites(made)
    assert len(edges) == 2
    made.export(tmp_path / "out")
    assert made.verify_export(tmp_path / "out", [X], turns=0).exact.top1 == 1.0
    report = qtk.apply_seq_mse(made, [X], progress=False)
    assert "left.weight" not in {layer.name for layer in report.layers}


@pytest.mark.medium
def test_weights_as_inputs_are_the_same_in_the_file(tmp_path):
    inputs = weights_as_inputs()
    sim = qtk.QuantSim(WeightsAsInputs(), inputs, config="onnxruntime")
    sim.compute_encodings([inputs], progress=False)
    sim.export(tmp_path / "exported")
    assert sim.verify_export(tmp_path / "exported", [inputs], turns=0, progress=False).exact.differing == 0.0


DEFAULTS = {"auto_pad": "NOTSET", "group": 1, "dilations": [1, 1], "strides": [1, 1], "pads": [0, 0, 0, 0]}


def convolution(**attributes):
    node = onnx.helper.make_node("Conv", ["x", "weight"], ["y"], **attributes)
    numbers = np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype(np.float32)
    weight = onnx.numpy_helper.from_array(numbers, "weight")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape in (("x", [1, 3, 8, 8]), ("y", [None] * 4)))
    graph = onnx.helper.make_graph([node], "graph", [x], [y], [weight])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9)


def without_defaults(model):
    found = ir.from_proto(model)
    drop_default_attributes(found.graph, opset=19)
    return ir.to_proto(found)


def run(model):
    x = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
    return create_session(model.SerializeToString())[0].run(None, {"x": x})[0]


@pytest.mark.parametrize("other", [
    {}, {"dilations": [2, 1]}, {"strides": [2, 2]}, {"pads": [1, 1, 1, 1]}, {"auto_pad": "SAME_UPPER"},
])
def test_only_defaults_are_dropped_and_nothing_changes(other):
    attributes = {**DEFAULTS, **other}
    if "auto_pad" in other:
        del attributes["pads"]
    model = convolution(**attributes)
    small = without_defaults(model)
    assert {attribute.name for attribute in small.graph.node[0].attribute} == set(other)
    np.testing.assert_array_equal(run(small), run(model))
