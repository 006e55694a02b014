"""Exported programs in the compilers they are for; each is skipped where its package is not installed."""

import re

import pytest
import torch
from torch import nn

import qtk

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
