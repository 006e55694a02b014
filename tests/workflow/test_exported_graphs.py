import pytest
import torch
from torch import nn

import qtk
from qtk.errors import EncodingError, ExportError
from qtk.workflow.exported_graphs import graph_calls, read_back


def test_one_graph_is_called_as_the_example_calls_the_model():
    x = torch.randn(3, 4)
    model = qtk.prepare_model(nn.Linear(4, 2).eval(), x)
    ((path, (graph, call)),) = graph_calls(model, x).items()
    assert (path, graph) == ("", model)
    assert torch.equal(call.args[0], x)


@pytest.mark.parametrize("error", [EncodingError("a"), ExportError("b")])
def test_what_differs_names_the_file(error, tmp_path):
    said = r"model\.x read back differs from the simulation: .; nothing was written"
    with pytest.raises(ExportError, match=said), read_back(tmp_path / "model.x"):
        raise error
