"""Simulations made in several threads at once are those made one after the other."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.export import Dim

import qtk
from qtk.calls.served_sizes import ALL, LATE
from qtk.capture import torch_export
from qtk.capture.tracing import FLOOR_S, TIMES, OutOfTime, tracing_for, without_collections
from qtk.errors import CaptureError

WIDTHS = range(4, 12)


def simulated(width):
    generator = torch.Generator().manual_seed(width)
    model = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(16, width, generator=generator)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x, 2 * x], progress=False)
    return sim, x


@pytest.mark.slow
def test_four_threads_find_what_one_finds():
    expected = [simulated(width) for width in WIDTHS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(simulated, WIDTHS))
    for (sim, x), (other, _) in zip(expected, found, strict=True):
        encodings = sim.encodings()
        assert encodings.keys() == other.encodings().keys() == {"input:input", "0.weight", "1:out", "2.weight", "2:out"}
        assert all(encodings[name].equals(encoding) for name, encoding in other.encodings().items())
        assert torch.equal(sim.model(x), other.model(x))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids, image):
        return self.head(self.embed(ids)) * image.mean((1, 2))[:, None, None]


IDS, IMAGE = torch.randint(20, (3, 7)), torch.randn(3, 6, 5)


@pytest.mark.parametrize("seconds", [0.0, 60.0, None])
def test_a_trace_ends_when_its_time_is_up(seconds):
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO, 2: Dim.AUTO})
    with pytest.raises(OutOfTime) if seconds == 0.0 else nullcontext(), tracing_for(seconds):
        torch.export.export(Tokens(), (IDS, IMAGE), dynamic_shapes=shapes)


@pytest.mark.medium
def test_time_that_others_compute_does_not_count():
    with tracing_for(0.5):
        time.sleep(0.6)
        torch.export.export(nn.Identity(), (IMAGE,), dynamic_shapes=({0: Dim.AUTO},))


def limited(monkeypatch, seconds):
    """``seconds``: label of an attempt → its limit, in order of the calls; what is out of time."""
    given = []

    def times(limit):
        given.append(limit)
        return tracing_for(None if limit is None else seconds.pop(0))

    monkeypatch.setattr(torch_export, "tracing_for", times)
    return given


@pytest.mark.medium
@pytest.mark.parametrize(("seconds", "shapes", "free"), [
    ([60.0], [("s", "s"), ("s", "s", "s")], None),
    ([0.0, 60.0], [("s", "s"), ("s", "6", "5")], "batch and tokens"),
    ([0.0, 0.0], [("s", "7"), ("s", "6", "5")], "batch"),
])
def test_what_takes_too_long_stays_fixed_and_is_told(monkeypatch, seconds, shapes, free):
    model = Tokens().eval()
    given = limited(monkeypatch, seconds)
    with pytest.warns(UserWarning, match="was stopped; free: ") if free else nullcontext():
        prepared = qtk.prepare_model(model, (IDS, IMAGE), dynamic_shapes="all")
    sizes = [tuple("s" if isinstance(size, torch.SymInt) else str(size) for size in node.meta["val"].shape)
             for node in prepared.graph.find_nodes(op="placeholder")]
    assert sizes == shapes
    assert given[0] == FLOOR_S
    assert prepared.sizes.asked == (LATE if free else ALL)
    assert any(f"was stopped; free: {free}. Others" in line for line in prepared.report.reasons) == bool(free)
    if free:
        with pytest.raises(CaptureError, match=r"free this one by name, dynamic_shapes=\{'image': \{0: \"batch\", 2: "):
            prepared(IDS, torch.randn(3, 6, 4))
    named = qtk.prepare_model(model, (IDS, IMAGE), dynamic_shapes={"ids": {0: "b"}, "image": {0: "b", 2: "length"}})
    assert torch.equal(named(IDS, IMAGE[..., :3]), model(IDS, IMAGE[..., :3]))


def test_a_large_model_has_a_multiple_of_the_time_of_its_batch(monkeypatch):
    given = limited(monkeypatch, [0.0, 0.0, 60.0])
    monkeypatch.setattr(torch_export, "FLOOR_S", 1e-6)
    prepared = qtk.prepare_model(Tokens().eval(), (IDS, IMAGE), dynamic_shapes="all")
    assert prepared.sizes.asked == ALL
    assert [limit is None for limit in given] == [False, False, True, False]
    assert given[3] > TIMES * 1e-3


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_behind_a_trace_that_fails_if_it_was_before(enabled):
    seen = []

    class Refuses(nn.Module):
        def forward(self, x):
            if torch.compiler.is_exporting():
                seen.append(gc.isenabled())
                raise ValueError
            return x + 1

    try:
        if not enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError), without_collections():
            raise ZeroDivisionError
        qtk.prepare_model(Refuses(), torch.ones(2))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen
    assert not any(seen)
