"""Blocks of GGUF against the package gguf, and against the layout written out here."""

import struct

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import ExportError
from qtk.export.gguf_blocks import blocks_of, gguf_type
from qtk.numerics.codes import codes_of, values_of

BLOCKS = PerBlock((1, 32))
SPECS = {
    "Q4_0": [QuantSpec(dtype("int4"), BLOCKS, symmetric=True), QuantSpec(dtype("uint4"), BLOCKS, symmetric=True)],
    "Q8_0": [QuantSpec(dtype("int8"), BLOCKS, symmetric=True, narrow_range=True)],
    "Q4_1": [QuantSpec(dtype("uint4"), BLOCKS), QuantSpec(dtype("int4"), BLOCKS)],
}
CASES = [(name, spec) for name, specs in SPECS.items() for spec in specs]


def quantized(spec):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 64, generator=generator)
    scale = (torch.rand(5, 2, generator=generator) / 8 + 0.1).half().float()
    zero = None if spec.symmetric else torch.randint(int(spec.qmin), int(spec.qmax) + 1, (5, 2), generator=generator,
                                                     dtype=torch.int32)
    return weight, Encoding(spec, scale, zero)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_the_bytes_are_those_of_the_layout(name, spec):
    weight, encoding = quantized(spec)
    data = bytes(blocks_of(weight, encoding)[3].tolist())
    values = values_of(codes_of(weight, encoding), encoding)[3]
    length = {"Q4_0": 18, "Q8_0": 34, "Q4_1": 20}[name]
    assert len(data) == 2 * length
    for block in range(2):
        part = data[block * length:][:length]
        (scale,) = struct.unpack("<e", part[:2])
        low = struct.unpack("<e", part[2:4])[0] if name == "Q4_1" else 0.0 if name == "Q8_0" else -8 * scale
        if name == "Q8_0":
            codes = struct.unpack("32b", part[2:])
        else:
            halves = part[-16:]
            codes = [byte & 15 for byte in halves] + [byte >> 4 for byte in halves]
        decoded = torch.tensor([code * scale + low for code in codes])
        off = (decoded - values[32 * block:][:32]).abs().max()
        assert off <= (2.0**-11 * abs(low) if name == "Q4_1" else 1e-6)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_the_package_reads_what_is_simulated(name, spec):
    gguf = pytest.importorskip("gguf")
    weight, encoding = quantized(spec)
    found = torch.from_numpy(gguf.quants.dequantize(blocks_of(weight, encoding).numpy(),
                                                    gguf.GGMLQuantizationType[name]))
    difference = (found - values_of(codes_of(weight, encoding), encoding)).abs().max()
    assert difference <= (2e-3 if name == "Q4_1" else 0.0)  # a float16 minimum of up to 3.4


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_the_type_of_a_spec(name, spec):
    assert gguf_type(spec) == name


@pytest.mark.parametrize("spec", [
    QuantSpec(dtype("int4"), PerBlock((1, 64)), symmetric=True),
    QuantSpec(dtype("int4"), PerChannel(0), symmetric=True),
    QuantSpec(dtype("int6"), BLOCKS, symmetric=True), QuantSpec(dtype("uint8"), BLOCKS),
    QuantSpec(dtype("fp4_e2m1"), BLOCKS, symmetric=True, scale_format=ScaleFormat.E8M0),
])
def test_what_has_no_type(spec):
    assert gguf_type(spec) is None
    with pytest.raises(ExportError, match="GGUF has no blocks of"):
        blocks_of(torch.zeros(2, 64), Encoding(spec, torch.ones(1), None if spec.symmetric else torch.zeros(1).int()))


def test_scales_that_float16_does_not_hold():
    weight, encoding = quantized(SPECS["Q4_0"][0])
    with pytest.raises(ExportError, match=r"run qtk.round_scales\(sim, torch.float16\)"):
        blocks_of(weight, Encoding(encoding.spec, encoding.scale * 1.0001))
