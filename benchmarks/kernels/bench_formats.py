"""Times minifloats and dynamic quantization, in multiples of ``torch.Tensor.copy_`` of the same tensor.

Beside the kernels: the reference compiled by Inductor, and torch's own cast to float8 and back where that is the same.
Nothing is timed that does not first compute what the reference does.

    python benchmarks/kernels/bench_formats.py --csv formats.csv        # on a GPU too, where there is one
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import Given, Setting, Timed, arguments, finish, multiples

from qtk.core.dtypes import DTYPES
from qtk.core.granularity import PerBlock, PerTensor, PerToken
from qtk.core.spec import QuantSpec
from qtk.numerics import dynamic, minifloat
from qtk.ops.simulate import simulate, simulate_dynamic

WIDTH = 1536
STATIC = {
    "fp8_e4m3 per tensor": QuantSpec(DTYPES["fp8_e4m3"], symmetric=True),
    "fp4_e2m1 per tensor": QuantSpec(DTYPES["fp4_e2m1"], symmetric=True),
    "fp8_e4m3 in blocks of 32 (MX)": QuantSpec(DTYPES["fp8_e4m3"], PerBlock((1, 32)), symmetric=True),
    "fp4_e2m1 in blocks of 16 (NVFP4)": QuantSpec(DTYPES["fp4_e2m1"], PerBlock((1, 16)), symmetric=True),
}
DYNAMIC = {
    "uint8 per tensor, at run time": QuantSpec(DTYPES["uint8"], PerTensor(), dynamic=True),
    "int8 per token, at run time": QuantSpec(DTYPES["int8"], PerToken(), symmetric=True, dynamic=True),
}


def static_ways(spec: QuantSpec, x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    scale = torch.rand(spec.granularity.qparam_shape(tuple(x.shape)), device=x.device) * 0.01 + 0.02
    sizes = spec.granularity.block_size(x.ndim)
    ways = {
        "qtk": lambda x: simulate(x, spec, scale),
        "reference": lambda x: minifloat.fake_quantize(x, scale, sizes, spec.dtype),  # type: ignore[arg-type]
        "compiled reference": torch.compile(lambda x: simulate(x, spec, scale)),
    }
    if spec.dtype.name == "fp8_e4m3" and not sizes:
        end = spec.qmax
        ways["torch cast"] = lambda x: (
            (x / scale).clamp(-end, end).to(torch.float8_e4m3fn).to(torch.float32) * scale
        ).to(x.dtype)
    return ways


def dynamic_ways(spec: QuantSpec, x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    sizes = spec.granularity.block_size(x.ndim)
    codes = int(spec.qmin), int(spec.qmax)
    return {
        "qtk": lambda x: simulate_dynamic(x, spec),
        "reference": lambda x: dynamic.fake_quantize(x, sizes, *codes, spec.symmetric)[0],
        "compiled reference": torch.compile(lambda x: simulate_dynamic(x, spec)),
    }


def measure(name: str, spec: QuantSpec, elements: int, kind: str, given: Given) -> list[Timed]:
    torch.compiler.reset()
    x = torch.randn(elements // WIDTH, WIDTH, device=given.device).to(getattr(torch, kind))
    into = torch.empty_like(x)
    with torch.no_grad():
        ways = dynamic_ways(spec, x) if spec.dynamic else static_ways(spec, x)
        expected = ways["reference"](x)
        for way, quantize in ways.items():
            off = (quantize(x).float() - expected.float()).abs().max()
            if float(off) > (0.0 if way in ("qtk", "torch cast") else 0.05 * float(expected.abs().max())):
                raise SystemExit(f"{way} is off by {float(off):g} on {name}; no speed is given")
        actions: dict[str, Callable[[], object]] = {"copy_": lambda: into.copy_(x), "clone": lambda: x.clone()}
        actions |= {way: (lambda quantize=quantize: quantize(x)) for way, quantize in ways.items()}
        return multiples(actions, Setting(given.device, kind, name, elements, "forward", 1.0), given)


def main() -> None:
    given = arguments(__doc__, sizes={"cpu": (2.4, 64), "cuda": (2.4, 67, 268)})
    found: list[Timed] = []
    for elements in given.elements:
        for kind in given.kinds:
            for name, spec in {**STATIC, **DYNAMIC}.items():
                found += measure(name, spec, elements, kind, given)
    finish(found, given)


if __name__ == "__main__":
    main()
