"""The package compressed-tensors, and what is said without it."""

import sys

import pytest
import torch

from qtk.errors import ExportError
from qtk.export.compressed_tensors import library as module


def test_without_it_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", None)
    with pytest.raises(ExportError, match=r"compressed_tensors.* is missing; pip install 'qtk\[llm\]'"):
        module.library()


@pytest.mark.medium
def test_codes_and_zero_points_come_back():
    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 8, "dynamic": False}
    scheme = module.scheme_of(weights, None, ["Linear"])
    assert scheme.format == "pack-quantized"
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 16), generator=generator)
    zero = torch.randint(-8, 8, (16, 2), generator=generator, dtype=torch.int8)
    scale = torch.rand(16, 2, generator=generator) + 0.1
    unshifted = codes - zero.repeat_interleave(8, 1)
    stored = module.compressed({"weight": unshifted * scale.repeat_interleave(8, 1), "weight_scale": scale,
                                "weight_zero_point": zero}, scheme)
    assert torch.equal(module.codes_of_stored(stored, scheme), unshifted.float())
    assert torch.equal(module.zero_points_of_stored(stored, scheme), zero)
    symmetric = module.scheme_of({**weights, "symmetric": True}, None, [])
    assert module.zero_points_of_stored({"weight_scale": scale}, symmetric) is None
