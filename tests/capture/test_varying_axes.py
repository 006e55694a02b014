import torch
from torch import nn

from qtk.calls.calls import Call
from qtk.capture.fallback import capture_graph
from qtk.capture.varying_axes import varying_axes


class Inner(nn.Module):
    def forward(self, rows, table):
        return rows @ table


class Chosen(nn.Module):
    """Calls its child with the rows before the largest, and a table of one size."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = Inner(), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        assert float(x.max()) < 1e6
        return self.inner(x[: int(x.sum(1).argmax()) + 1], self.table)


def varying(x):
    model = Chosen()
    calls = [Call((x,), {}, None)]
    rows = x[: int(x.sum(1).argmax()) + 1]
    graph = capture_graph(model.inner, [Call((rows, model.table), {}, None)], None, verify=False)
    return varying_axes(model, calls, model.inner, graph, [("rows", 0), ("rows", 1), ("table", 0), ("table", 1)])


def test_a_count_that_follows_from_values_varies_and_a_width_does_not():
    x = torch.arange(18.0).view(6, 3)
    before = x.clone()
    assert varying(x) == {("rows", 0)}
    assert torch.equal(x, before)


def test_values_that_the_model_refuses_show_nothing():
    x = torch.zeros(6, 3)
    x[5] = 1e5

    class Refuses(Chosen):
        def forward(self, x):
            assert float(x[5].sum()) > 1e5
            return super().forward(x)

    model = Refuses()
    graph = capture_graph(model.inner, [Call((x, model.table), {}, None)], None, verify=False)
    assert varying_axes(model, [Call((x,), {}, None)], model.inner, graph, [("rows", 0)]) == set()
