"""Sizes, counted by hand."""

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.report.size import float_size_bytes, quantized_size_bytes

TENSORS = {"fc.weight": torch.zeros(5, 7), "fc.bias": torch.zeros(5), "count": torch.tensor(0)}


def weight_encoding(bits):
    return Encoding(QuantSpec(dtype(f"int{bits}"), PerChannel(0), symmetric=True), torch.ones(5))


def activation_encoding(bits=8):
    return Encoding(QuantSpec(dtype(f"uint{bits}")), torch.ones(1), torch.zeros(1, dtype=torch.int32))


def test_float_is_what_the_tensors_hold():
    assert float_size_bytes(TENSORS) == 5 * 7 * 4 + 5 * 4 + 8
    assert float_size_bytes({"half": torch.zeros(3, dtype=torch.float16)}) == 6


@pytest.mark.parametrize(("bits", "codes"), [(8, 35), (4, 18), (3, 14), (2, 9), (16, 70)])
def test_codes_are_packed_and_scales_and_the_rest_are_float(bits, codes):
    assert quantized_size_bytes(TENSORS, {"fc.weight": weight_encoding(bits)}) == codes + 5 * 4 + 5 * 4 + 8


def test_zero_points_are_codes():
    assert quantized_size_bytes({}, {"fc:out": activation_encoding()}) == 4 + 1
    assert quantized_size_bytes({}, {"fc:out": activation_encoding(16)}) == 4 + 2


def test_a_tied_tensor_counts_once_and_quantized_if_either_name_is():
    tied = {"embed.weight": TENSORS["fc.weight"], "fc.weight": TENSORS["fc.weight"]}
    assert float_size_bytes(tied) == 140
    assert quantized_size_bytes(tied, {"fc.weight": weight_encoding(8)}) == 35 + 20
    assert quantized_size_bytes(tied, {"embed.weight": weight_encoding(8)}) == 35 + 20
