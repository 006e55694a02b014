import os
import sys

import pytest
import torch
from torch import nn

from qtk.errors import ExportError
from qtk.export.litert import library
from tests.export.litert.small_file import needs_converter


def test_without_the_converter_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    program = torch.export.export(nn.ReLU(), (torch.randn(2),))
    with pytest.raises(ExportError, match=r"'litert' needs the package litert-torch, .* missing; pip install 'qtk\[l"):
        library.converted(program, ["x"], ["y"])


def test_without_the_runtime_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ExportError, match=r"needs the package ai-edge-litert, .* missing; pip install 'qtk\[litert\]'"):
        library.schema()


@needs_converter
def test_what_the_converter_refuses_is_said_with_a_way_out():
    program = torch.export.export(Sorted(), (torch.randn(3, 3),))
    before = os.environ.get("LITERT_TORCH_SHOW_PROGRESS")
    with pytest.raises(ExportError, match=r"LiteRT's converter refuses .*linalg_qr.*rule with output: float"):
        library.converted(program, ["x"], ["y"])
    assert os.environ.get("LITERT_TORCH_SHOW_PROGRESS") == before


class Sorted(nn.Module):
    def forward(self, x):
        return torch.linalg.qr(x)[0]
