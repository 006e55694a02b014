"""How many codes of inputs the kernels of vLLM and SGLang, and transformers' library, compute otherwise than qtk.

    python benchmarks/models/server_codes.py

The simulation divides by the scale in float32. The formulas below are written out from the sources, read and not run:
vLLM's csrc/quantization/w8a8/int8/scaled_quant.cu and fp8/common.cu, SGLang's srt/layers/quantization/int8_kernel.py
and sgl-kernel/csrc/gemm/per_token_quant_fp8.cu, compressed-tensors 0.20. 2048 tokens of 4096 normal values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES
from qtk.numerics import affine, dynamic, minifloat

E4M3, TOKEN = DTYPES["fp8_e4m3"], (1, -1)
SMALLEST = 1 / (448 * 512)
"""vLLM's smallest scale of a token in E4M3: of a token whose largest value is 1/512."""


def to_int8(steps: Tensor) -> Tensor:
    return steps.round().clamp(-128, 127)


def to_e4m3(steps: Tensor) -> Tensor:
    return steps.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def away_from_zero(steps: Tensor) -> Tensor:
    return torch.copysign((steps.abs() + 0.5).floor(), steps).clamp(-128, 127)


def simulated(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Codes of qtk. Shape: ``x`` [tokens, width], ``scale`` [1]; results as ``x``."""
    largest = x.float().abs().amax(-1, keepdim=True)
    of_token, _ = dynamic.dynamic_range(-largest, largest, -127, 127, symmetric=True)
    of_float, _ = dynamic.dynamic_range(-largest, largest, -448, 448, symmetric=True)
    return {
        "int8 static": affine.quantize(x, scale, None, (), -128, 127).float(),
        "int8 token": affine.quantize(x, of_token, None, TOKEN, -127, 127).float(),
        "E4M3 static": minifloat.quantize(x, scale, (), E4M3),
        "E4M3 token": minifloat.quantize(x, of_float, TOKEN, E4M3),
    }


def of_vllm(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Shape: as ``simulated``."""
    x, largest = x.float(), x.float().abs().amax(-1, keepdim=True)
    return {
        "int8 static": to_int8(x / scale),
        "int8 token": to_int8(x * (127 / largest)),
        "E4M3 static": to_e4m3(x * (1 / scale)),
        "E4M3 token": to_e4m3(x / (largest / 448).clamp(min=SMALLEST)),
    }


def of_sglang(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Shape: as ``simulated``; of static int8 nothing was found."""
    x, largest = x.float(), x.float().abs().amax(-1, keepdim=True)
    return {"int8 token": away_from_zero(x * (127 / largest)), "E4M3 token": to_e4m3(x * (1 / (largest / 448)))}


def of_transformers(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Shape: as ``simulated``. All in the dtype of ``x``."""
    largest, stored = x.abs().amax(-1, keepdim=True), scale.to(x.dtype)
    return {
        "int8 static": to_int8(x / stored).float(),
        "int8 token": to_int8(x / (largest / torch.tensor(127.5, dtype=x.dtype))).float(),
        "E4M3 static": to_e4m3(x / stored),
        "E4M3 token": to_e4m3(x / (largest / torch.tensor(448.0, dtype=x.dtype))),
    }


def main() -> None:
    normal = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = normal.to(dtype)
        scale = (x.float().abs().max() / 127).to(dtype).float().reshape(1)
        own = simulated(x, scale)
        for name, formulas in (("vLLM", of_vllm), ("SGLang", of_sglang), ("transformers", of_transformers)):
            shares = [f"{kind} {100 * float((codes != own[kind]).float().mean()):.4f} %"
                      for kind, codes in formulas(x, scale).items()]
            print(f"{str(dtype).removeprefix('torch.'):9} {name:13} {', '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
