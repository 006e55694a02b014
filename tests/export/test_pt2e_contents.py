"""What is read of an exported program, against the simulation that it was exported from."""

import pytest
import torch
from torch import nn

import qtk
from qtk.core.granularity import PerBlock
from qtk.errors import ExportError
from qtk.export.pt2e_contents import read_contents
from qtk.export.quantized_file import OUTPUT, QUANTIZE
from qtk.torch_private import load_decomposed_ops


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 32, 3), nn.Linear(32, 32)

    def forward(self, x):
        y = torch.relu(self.conv(x)).mean((2, 3), keepdim=True).flatten(1)
        return self.fc(y) + y


def exported(tmp_path, config):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(Net().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    return sim, read_contents(tmp_path / "out" / "model.pt2")


def weights_of(bits):
    rule = {"match": {"op": "linear"}, "weight": {"dtype": f"int{bits}"}}
    return {"version": 1, "extends": "xnnpack", "rules": [rule]}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["xnnpack", "x86_inductor", "onnxruntime", "weight_only_int4",
                                    *map(weights_of, (2, 3, 4, 5, 7))])
def test_tensors_are_those_of_the_simulation(config, tmp_path):
    sim, file = exported(tmp_path, config)
    read = {each.name: each for each in file.tensors}
    assert set(read) == set(sim.quantizers)
    for site, quantizer in sim.quantizers.items():
        spec, found = quantizer.spec, read[site]
        zero_point = quantizer.encoding.zero_point
        assert found.dtype == spec.dtype.name
        assert found.zero_points_are_0 == (zero_point is None or not zero_point.any())
        assert found.granularity == str(spec.granularity).partition("(")[0]
        assert found.block_size == (32 if isinstance(spec.granularity, PerBlock) else None)
        assert found.role == ("activations" if ":" in site else "biases" if site.endswith("bias") else "weights")
        assert not found.dynamic
    assert file.target == sim.config.target
    weight = read["fc.weight"]
    assert weight.readers == {"linear"}
    assert weight.codes == (int(sim_codes(sim).min()), int(sim_codes(sim).max()))


def sim_codes(sim):
    quantizer = sim.quantizers["fc.weight"]
    weight = dict(sim.model.named_parameters())["fc.weight"].detach()
    scale = quantizer.encoding.scale.reshape(weight.shape[0], -1)
    return torch.round(quantizer(weight) / scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1))


@pytest.mark.medium
def test_ops_their_operands_and_readers(tmp_path):
    _, file = exported(tmp_path, "xnnpack")
    (conv,), (linear,), (add,) = (list(file.ops_of((kind,))) for kind in ("conv", "linear", "add"))
    (relu,) = conv.readers
    assert (conv.kinds, conv.operands) == (("conv2d", "conv"), (True, True))
    assert (relu.kinds[0], relu.operands, relu.readers) == ("relu", (False,), [QUANTIZE])
    assert (linear.operands, linear.readers) == ((True, True), [QUANTIZE])
    assert (add.operands, add.readers) == ((True, True), [QUANTIZE])


@pytest.mark.medium
def test_what_is_read_in_float_is_seen(tmp_path):
    _, file = exported(tmp_path, "x86_inductor")
    (linear,), (add,) = (list(file.ops_of((kind,))) for kind in ("linear", "add"))
    (mean,) = file.ops_of(("mean",))
    assert set(mean.readers) == {QUANTIZE, add}  # behind the flattening
    assert (linear.operands, linear.readers) == ((True, True), [add])
    assert (add.operands, add.readers) == ((False, False), [OUTPUT])


def test_a_program_without_quantizers_has_no_tensors(tmp_path):
    torch.export.save(torch.export.export(Net().eval(), (torch.randn(2, 3, 8, 8),)), tmp_path / "float.pt2")
    file = read_contents(tmp_path / "float.pt2")
    assert (file.tensors, file.target) == ((), None)
    assert all(not any(op.operands) for op in file.ops)


def test_what_is_no_program_is_an_error(tmp_path):
    (tmp_path / "m.pt2").write_bytes(b"no")
    with pytest.raises(ExportError, match="as an exported program"):
        read_contents(tmp_path / "m.pt2")


@pytest.mark.parametrize(("given", "name"), [(torch.float8_e4m3fn, "fp8_e4m3"), (torch.float8_e5m2, "fp8_e5m2")])
def test_codes_in_float8_are_no_integers(given, name, tmp_path):
    load_decomposed_ops()
    ops, largest = torch.ops.quantized_decomposed, int(torch.finfo(given).max)

    class Float8(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randn(4, 8).to(given))

        def forward(self, x):
            codes = ops.quantize_per_tensor(x, 0.5, 0, -largest, largest, given)
            x = ops.dequantize_per_tensor(codes, 0.5, 0, -largest, largest, given)
            return nn.functional.linear(x, ops.dequantize_per_tensor(self.weight, 0.25, 0, -largest, largest, given))

    torch.export.save(torch.export.export(Float8(), (torch.randn(2, 8),)), tmp_path / "m.pt2")
    found = {each.role: (each.dtype, each.codes) for each in read_contents(tmp_path / "m.pt2").tensors}
    assert found == {"activations": (name, None), "weights": (name, None)}


def rounded(path, low, high, given):
    """Saves a program that rounds its input to codes of a type, from ``low`` to ``high``."""
    load_decomposed_ops()
    ops, numbers = torch.ops.quantized_decomposed, (0.5, 0, low, high, given)

    class Rounded(nn.Module):
        def forward(self, x):
            return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *numbers), *numbers)

    torch.export.save(torch.export.export(Rounded(), (torch.randn(2, 8),)), path)


@pytest.mark.parametrize(("low", "high", "given", "name"), [
    (-4, 3, torch.int8, "int3"), (-3, 3, torch.int8, "int3"), (-1, 1, torch.int8, "int2"), (-7, 7, torch.int8, "int4"),
    (-127, 127, torch.int8, "int8"), (0, 127, torch.uint8, "uint7"), (0, 255, torch.uint8, "uint8"),
    (0, 7, torch.int8, "int4"), (-2048, 2047, torch.int16, "int12"), (-32768, 32767, torch.int16, "int16"),
])
def test_the_limits_of_codes_tell_their_width(low, high, given, name, tmp_path):
    rounded(tmp_path / "m.pt2", low, high, given)
    assert [each.dtype for each in read_contents(tmp_path / "m.pt2").tensors] == [name]


def test_limits_that_no_format_holds_are_an_error(tmp_path):
    rounded(tmp_path / "m.pt2", 0, 255, torch.uint8)
    program = torch.export.load(tmp_path / "m.pt2")
    (node,) = program.graph.find_nodes(op="call_function",
                                       target=torch.ops.quantized_decomposed.dequantize_per_tensor.default)
    node.args = (*node.args[:3], -1, *node.args[4:])
    torch.export.save(program, tmp_path / "odd.pt2")
    with pytest.raises(ExportError, match="codes from -1 to 255, which no uint of 2 to 16 bits holds"):
        read_contents(tmp_path / "odd.pt2")
