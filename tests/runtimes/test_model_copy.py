import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from qtk.export.onnx.qdq import export
from qtk.runtimes.model_copy import write_copy
from tests.export.onnx.simulated import run_onnx, simulate

INPUTS = torch.randn(3, 64)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["second file", "one file"])
def test_weights_lie_where_those_of_the_original_do(limit, tmp_path):
    file, folder = tmp_path / "model.onnx", tmp_path / "copy"
    export(simulate(nn.Linear(64, 64), INPUTS), INPUTS, file, embedded_limit_bytes=limit)
    folder.mkdir()
    copy = write_copy(ir.load(file), file, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in tmp_path.iterdir() if path.is_file())
    assert (folder / "model.onnx.data").exists() == (limit == 0)
    (found,), (expected,) = run_onnx(copy, INPUTS), run_onnx(file, INPUTS)
    assert np.array_equal(found, expected)
