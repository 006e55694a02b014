import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.runtimes.session import create_session
from tests.zoo.experts import TRACES_GROUPED_PRODUCTS
from tests.zoo.models import ZOO

pytestmark = pytest.mark.skipif(not TRACES_GROUPED_PRODUCTS, reason="torch traces grouped products of bfloat16 alone")


class Grouped(nn.Module):
    """One grouped product whose groups end where the caller says."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x, ends):
        return F.grouped_mm(x, self.stack, offs=ends)


def exported(model, inputs, folder, **settings):
    sim = qtk.QuantSim(model.eval(), inputs, **settings)
    sim.compute_encodings([inputs], progress=False)
    sim.export(folder, formats=["onnx"])
    session, _ = create_session(folder / "model.onnx", optimized=False)

    def run(*tensors):
        names = [each.name for each in session.get_inputs()]
        return torch.from_numpy(session.run(None, dict(zip(names, (t.numpy() for t in tensors), strict=True)))[0])

    return sim, run


@pytest.mark.parametrize("ends", [[2, 5, 9, 12], [0, 0, 12, 12], [12, 12, 12, 12], [0, 0, 0, 12]])
def test_groups_may_be_empty(ends, tmp_path):
    inputs = torch.randn(12, 8), torch.tensor([3, 6, 9, 12], dtype=torch.int32)
    sim, run = exported(Grouped(), inputs, tmp_path / "exported", activation_bits=None)
    given = torch.randn(12, 8), torch.tensor(ends, dtype=torch.int32)
    expected = sim.model(*given)
    assert expected.abs().max() > 1
    torch.testing.assert_close(run(*given), expected, rtol=0, atol=1e-5)


def test_a_mixture_of_experts_is_equal_bit_for_bit(tmp_path):
    entry = ZOO["grouped_experts"]
    sim, run = exported(entry.model(), entry.inputs(7), tmp_path / "exported", config="onnxruntime")
    for batch in (7, 31):
        assert torch.equal(run(entry.inputs(batch)), sim.model(entry.inputs(batch)))


def test_other_grouped_products_are_refused_by_name(tmp_path):
    class Columns(nn.Module):
        """The groups are columns of one matrix."""

        def forward(self, x, y, ends):
            return F.grouped_mm(x, y, offs=ends)

    inputs = torch.randn(16, 8), torch.randn(8, 16), torch.tensor([8, 16], dtype=torch.int32)
    with pytest.raises(ExportError, match=r"_grouped_mm is a grouped product that ONNX has no form of.*formats="):
        exported(Columns(), inputs, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
