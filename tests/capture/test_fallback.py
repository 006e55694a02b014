"""Each rung of the ladder, and why it was not taken."""

import pytest
import torch
from torch import fx, nn

from qtk.calls.calls import Call
from qtk.capture import fallback
from qtk.capture.fallback import capture_graph
from qtk.errors import CaptureError
from tests.zoo.python import sign

X = torch.randn(4, 8)
ONE = [Call((X,), {}, None)]


class SignAlone(nn.Module):
    """Nothing captures it, and it calls no other module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight * sign(x)


def test_the_first_rung_is_taken_if_it_holds():
    graph = capture_graph(nn.Linear(8, 4), ONE, "batch", verify=True)
    assert (graph.report.rung, graph.report.reasons, graph.report.eval_difference) == ("export", (), 0.0)


@pytest.mark.medium
def test_the_second_rung_is_taken_if_the_first_does_not_hold_and_the_reason_is_kept():
    class Traced(nn.Linear):
        def forward(self, x):
            if not isinstance(x, fx.Proxy) and bool(x.isnan().any()):
                raise ValueError
            return super().forward(x)

    graph = capture_graph(Traced(8, 4), ONE, "batch", verify=True)
    assert graph.report.rung == "fx + export"
    assert any(reason.startswith("export, dynamic batch: GuardOnDataDependent") for reason in graph.report.reasons)


def test_the_reasons_of_every_rung_are_told():
    with pytest.raises(CaptureError, match="SignAlone cannot be captured as one graph") as caught:
        capture_graph(SignAlone(), ONE, "batch", verify=True)
    for label in ("export, dynamic batch", "export, static shapes", "fx + export"):
        assert f"{label}: " in str(caught.value)


def test_what_breaks_inside_a_rung_is_a_reason_too(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(fallback, "canonicalize", broken)
    with pytest.raises(CaptureError, match="export: ZeroDivisionError: inside"):
        capture_graph(nn.Linear(8, 4), ONE, "batch", verify=True)


def test_one_graph_must_serve_every_call():
    class BySize(nn.Module):
        def forward(self, x):
            return x * 2 if len(x) > 3 else x * 3

    calls = [*ONE, Call((X[:2],), {}, None)]
    with pytest.raises(CaptureError, match="BySize cannot be captured"):
        capture_graph(BySize(), calls, "all", verify=True)
    assert capture_graph(BySize(), ONE, None, verify=True).report.rung == "export"


def test_the_largest_call_is_the_example():
    for calls in ([Call((X[:1],), {}, None), *ONE], [*ONE, Call((X[:1],), {}, None)]):
        graph = capture_graph(nn.Linear(8, 4), calls, None, verify=False)
        assert graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (4, 8)


def test_calls_of_several_structures_are_no_one_graph():
    with pytest.raises(CaptureError, match="Linear is called with arguments of several kinds"):
        capture_graph(nn.Linear(8, 4), [*ONE, Call((X[0],), {}, None)], "batch", verify=True)
