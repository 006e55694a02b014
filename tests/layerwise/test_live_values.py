import gc
from pathlib import Path

import pytest
import torch
from torch import fx

from qtk.layerwise.live_values import LiveValues


def nodes(count):
    graph = fx.Graph()
    return [graph.placeholder(f"x{index}") for index in range(count)]


@pytest.mark.parametrize("offload", ["none", "cpu", "disk"])
def test_values_come_back_as_they_were(offload):
    a, b, c = nodes(3)
    shared = torch.randn(4, 3).mT
    values = {
        a: (shared, shared), b: (torch.randn(2, dtype=torch.float64), torch.tensor(True)),
        c: ([torch.randn(0, 3), 7], (None, torch.randn(2).to(torch.bfloat16))),
    }
    live = LiveValues(offload)
    live.put(0, dict(values))
    live.put(1, {a: (torch.ones(1), torch.ones(1))})
    found = live.take(0)
    assert list(found) == [a, b, c]
    assert torch.equal(found[a][0], shared)
    assert found[a][0] is found[a][1]  # the paths still agree
    for own, other in ((found[b][0], values[b][0]), (found[b][1], values[b][1]), (found[c][0][0], values[c][0][0]),
                       (found[c][1][1], values[c][1][1])):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)
    assert found[c][0][1] == 7
    assert found[c][1][0] is None
    assert torch.equal(live.take(1)[a][0], torch.ones(1))
    with pytest.raises(KeyError):
        live.take(0)
    live.close()


def test_files_are_gone_when_it_is_closed(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    live = LiveValues("disk")
    (a,) = nodes(1)
    live.put(0, {a: (torch.randn(100),)})
    (folder,) = Path(tmp_path).iterdir()
    assert [file.name for file in folder.iterdir()] == ["0.safetensors"]
    live.close()
    gc.collect()
    assert list(tmp_path.iterdir()) == []
