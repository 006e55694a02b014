"""Exported programs in the compilers they are for; each is skipped where its package is not installed."""

import re

import pytest
import torch
from torch import nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], -1, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, groups=16), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    ).eval()


def edge_layers(graph):
    """The convolutions and linear layers of ExecuTorch's edge dialect."""
    kinds = ("convolution", "linear", "addmm", "mm")
    return [node for node in graph.nodes if any(f"aten.{kind}.default" in str(node.target) for kind in kinds)]


def is_integer(layer):
    (reader,) = layer.users
    if any(f"aten.{kind}.default" in str(reader.target) for kind in ("relu", "hardtanh")):
        (reader,) = reader.users
    operands = [value for value in layer.all_input_nodes if value.op == "call_function"]
    return ".quantize_per_tensor" in str(reader.target) and len(operands) == 2 and all(
        "dequantize" in str(value.target) for value in operands)


MODELS = {
    "convolutions": (convolutions, torch.Size([2, 3, 16, 16]), {"qconv": 2, "qlinear": 1}),
    "attention": (lambda: Attention().eval(), torch.Size([2, 6, 32]), {"qconv": 0, "qlinear": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_inductor_computes_all_layers_in_integers(name, tmp_path):
    pytest.importorskip("torchao")
    pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")  # registers the patterns
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    build, shape, expected = MODELS[name]
    x = torch.randn(shape)
    sim = qtk.QuantSim(build(), x, config="onnxruntime_vnni")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "export", formats="pt2e")
    program = torch.export.load(tmp_path / "export" / "model.pt2").module()
    with torch.no_grad(), config.patch(freezing=True):
        result, code = run_and_get_code(torch.compile(program), x)
        simulated = sim.model(x)
    calls = re.findall(r"torch\.ops\.onednn\.(qconv|qlinear)|extern_kernels\.(addmm|convolution)", "\n".join(code))
    kinds = [integer or floating for integer, floating in calls]
    assert {kind: kinds.count(kind) for kind in expected} == expected
    assert "addmm" not in kinds
    assert "convolution" not in kinds
    step = next(q.encoding.scale.item() for site, q in reversed(sim.quantizers.items()) if site.endswith(":out"))
    assert (result - simulated).abs().max() <= 1.01 * step


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_xnnpack_computes_all_layers_in_integers(name, tmp_path):
    pytest.importorskip("executorch")
    pytest.importorskip("executorch.kernels.quantized")  # quantize and dequantize outside of the delegate
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.lowered_backend_module import get_lowered_submodules
    from executorch.runtime import Runtime

    digits = load_digits_split()
    sim = qtk.QuantSim(build(name), digits.train_images[:20], config="xnnpack")
    sim.compute_encodings(digits.train_images[:256].split(32), progress=False)
    sim.export(tmp_path / "export", formats="pt2e")
    program = torch.export.load(tmp_path / "export" / "model.pt2")
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    graph = edge.exported_program().graph_module
    assert not edge_layers(graph.graph)
    delegated = [layer for _, each, _ in get_lowered_submodules(graph)
                 for layer in edge_layers(each.original_module.graph)]
    quantized = [layer for layer in delegated if "dequantize" in str(layer.all_input_nodes)]
    assert quantized
    assert all(is_integer(layer) for layer in quantized)
    buffer = edge.to_executorch().buffer
    method = Runtime.get().load_program(buffer).load_method("forward")
    found = torch.cat([method.execute([batch])[0].clone() for batch in digits.test_images.split(20)])
    with torch.no_grad():
        simulated = sim.model(digits.test_images)
    assert (found.argmax(1) == simulated.argmax(1)).float().mean() >= 0.99


def test_an_ahead_of_time_package_computes_the_program(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    sim = qtk.QuantSim(convolutions(), x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "export", formats="pt2e")
    program = torch.export.load(tmp_path / "export" / "model.pt2")
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "packed.pt2"))
    (step,) = [each.encoding.scale.item() for site, each in sim.quantizers.items() if site == "8:out"]
    with torch.no_grad():
        for batch in (x, torch.randn(7, 3, 16, 16)):
            difference = torch._inductor.aoti_load_package(package)(batch) - program.module()(batch)
            assert difference.abs().max() <= 1.01 * step
