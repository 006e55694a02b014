import sys

import pytest
import torch
from torch import nn

from qtk.errors import ExportError
from qtk.export.coreai import library
from tests.export.coreai.small_file import needs_converter, small


def test_without_the_packages_the_extra_is_named(monkeypatch, tmp_path):
    for name in ("coreai_torch", "coreai.authoring"):
        monkeypatch.setitem(sys.modules, name, None)
    program = torch.export.export(nn.ReLU(), (torch.randn(2),))
    with pytest.raises(ExportError, match=r"'coreai' needs the packages coreai-torch .* missing; pip install 'qtk\[co"):
        library.converted(program, ["x"], ["y"])
    with pytest.raises(ExportError, match=r"reading an \.aimodel file needs .* missing; pip install 'qtk\[coreai\]'"):
        library.load(tmp_path / "model.aimodel")


@needs_converter
def test_what_the_converter_refuses_is_said_with_a_way_out(capfd):
    program = torch.export.export(Factored(), (torch.randn(3, 3),))
    with pytest.raises(ExportError, match=r"Core AI's converter refuses .*linalg_qr.*rule with output: float"):
        library.converted(program, ["x"], ["y"])
    assert "converting" not in "".join(capfd.readouterr())


@needs_converter
def test_another_directory_is_refused_and_files_name_no_source(tmp_path):
    with pytest.raises(ExportError, match=r"cannot read .* as an \.aimodel file: .*sim\.export wrote"):
        library.load(tmp_path)
    program = (small()[2] / "model.aimodel" / "main.mlirb").read_bytes()
    assert b".py" not in program


class Factored(nn.Module):
    def forward(self, x):
        return torch.linalg.qr(x)[0]
