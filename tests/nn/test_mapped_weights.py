"""Mapped weights: what is in memory, what is dropped, and that nothing that was written is lost."""

import subprocess
import sys
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qtk
from qtk.nn import mapped_weights
from qtk.nn.mapped_weights import bounded, has_mapped, is_mapped, readable_bytes, rewrite

MEGABYTE = 1 << 20


def resident(kind):
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind)) * 1024


def resident_files():
    return resident("RssFile")


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        found = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    found.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    return found.eval()


def test_weights_are_dropped_while_a_model_runs_and_read_again(model):
    assert has_mapped(model)
    assert is_mapped(model[0].weight)
    assert not is_mapped(torch.ones(3))
    x, least = torch.randn(2, 512), resident_files()
    expected, most = model(x), []
    assert resident_files() - least > 7 * MEGABYTE
    hooks = [each.register_forward_hook(lambda *_: most.append(resident_files())) for each in model]
    with bounded(model, limit_bytes=2 * MEGABYTE):
        least = resident_files()
        assert torch.equal(model(x), expected)
    assert max(most) - least < 5 * MEGABYTE
    for hook in hooks:
        hook.remove()
    assert torch.equal(model(x), expected)


def test_other_files_in_memory_do_not_drop_weights_again_and_again(model, tmp_path, monkeypatch):
    save_file({"x": torch.ones(2 * MEGABYTE)}, tmp_path / "other.safetensors")
    other, drops, drop = load_file(tmp_path / "other.safetensors")["x"], [], mapped_weights._Pages.drop
    monkeypatch.setattr(mapped_weights._Pages, "drop", lambda pages: (drops.append(pages), drop(pages)))
    with bounded(model, limit_bytes=4 * MEGABYTE):
        other.sum()  # 8 MB that stay
        for _ in range(20):
            torch.ones(1).sum()
    assert len(drops) <= 3  # at the beginning, then, and at the end


HEAP = """
import sys
import torch
from safetensors.torch import load_file
from torch import nn
from qtk.nn.mapped_weights import bounded

model = nn.Linear(512, 512)
model.load_state_dict(load_file(sys.argv[1]), assign=True)

def resident():
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

def kept():
    before = resident()
    blocks = [torch.ones(6, 1 << 18) for _ in range(12)]
    above = torch.ones(1000)  # of the heap: what is freed below it stays
    del blocks
    return resident() - before

torch.ones(16, 1 << 18)  # after such a block glibc takes smaller ones from the heap
with bounded(model, limit_bytes=1 << 18):
    with bounded(model, limit_bytes=1 << 18):
        print(kept())
    print(kept())
"""


@pytest.mark.medium
def test_large_blocks_go_back_to_the_system_while_it_runs(tmp_path):
    """In a process of its own, whose heap has no room yet that other tests have left."""
    save_file(nn.Linear(512, 512).state_dict(), tmp_path / "model.safetensors")
    run = subprocess.run([sys.executable, "-c", HEAP, str(tmp_path / "model.safetensors")], check=True,
                         capture_output=True, text=True)
    assert max(map(float, run.stdout.split())) < 72 / 2  # all 12 blocks stay without it


def test_what_was_written_before_or_inside_stays(model):
    with torch.no_grad():
        model[0].weight[3, 5] = 7.0
        model[1].weight.data[0, 0] = 8.0
        with bounded(model, limit_bytes=MEGABYTE):
            model[2].weight.mul_(2)
            expected = model[2].weight.clone()
            model(torch.ones(1, 512))
            model[3].weight.data = torch.full((512, 512), 9.0)
            for _ in range(3):
                model(torch.ones(1, 512))
    assert model[0].weight[3, 5] == 7
    assert model[1].weight[0, 0] == 8
    assert bool((model[3].weight == 9).all())
    assert torch.equal(model[2].weight, expected)


def test_a_rewritten_weight_is_in_a_file_again_and_the_old_one_unchanged(model, tmp_path, monkeypatch):
    before, held = model[0].weight.clone(), model[0].weight.detach()
    rewrite(model[0].weight, before * 2)
    assert is_mapped(model[0].weight)
    assert torch.equal(model[0].weight, before * 2)
    assert torch.equal(held, before)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], before)
    rewrite(model[0].weight, held)
    assert model[0].weight.data_ptr() == held.data_ptr()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    rewrite(model[0].weight, before * 3)
    assert torch.equal(model[0].weight, before * 3)
    assert torch.equal(held, before)
    plain = nn.Parameter(torch.zeros(3))
    address = plain.data_ptr()
    rewrite(plain, torch.ones(3))
    assert plain.data_ptr() == address
    assert bool((plain == 1).all())


def test_bytes_that_a_run_may_read_are_not_in_memory_yet(model, monkeypatch):
    around = 9 * MEGABYTE // 16  # the system maps neighbours of a page too, and biases are mapped
    with bounded(model, limit_bytes=0):
        pass
    assert 8 * MEGABYTE - around < readable_bytes(model) < 8 * MEGABYTE + around
    for layer in model[:4]:
        layer.weight.sum()
    assert 4 * MEGABYTE - around < readable_bytes(model) < 4 * MEGABYTE + around
    monkeypatch.setattr(mapped_weights, "LIMIT_BYTES", 5 * MEGABYTE)
    assert readable_bytes(model) < MEGABYTE + around
    for layer in model[4:]:
        layer.weight.sum()
    assert readable_bytes(model) == 0
    assert readable_bytes(nn.Linear(512, 512)) == 0


def test_without_proc_nothing_is_mapped(model, monkeypatch):
    monkeypatch.setattr(mapped_weights, "_file_ranges", list)
    assert not has_mapped(model)
    with bounded(model, limit_bytes=1):
        model(torch.ones(1, 512))


@pytest.mark.medium
def test_layerwise_methods_give_the_bits_of_a_model_in_memory(model, tmp_path):
    x = torch.randn(2, 128, 64) @ torch.randn(64, 512)
    options = qtk.LayerwiseOptions(checkpoint_dir=tmp_path / "layers", holdout=0)
    plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    plain.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})
    sims = [qtk.QuantSim(each, x[0], weight_bits=4, activation_bits=None, in_place=True) for each in (plain, model)]
    for sim in sims:
        sim.compute_encodings(None)
        report = qtk.apply_gptq(sim, x, sites=["0.weight", "1.weight"], progress=False,
                                options=options if sim is sims[1] else qtk.LayerwiseOptions(holdout=0))
        assert any(layer.after < layer.before for layer in report.layers)
    memory, mapped = (sim.model.state_dict() for sim in sims)
    assert all(torch.equal(mapped[name], each) for name, each in memory.items())
    weight, held = model[0].weight, load_file(tmp_path / "model.safetensors")["0.weight"]
    assert is_mapped(weight)
    assert not torch.equal(weight, held)
    with pytest.raises(qtk.QtkError, match="NaN"):  # and the float weights were there again meanwhile
        qtk.apply_gptq(sims[1], [x[0], x[1] * float("nan")], sites="0.weight", progress=False,
                       options=qtk.LayerwiseOptions(start="float"))
    assert torch.equal(weight, memory["0.weight"])
    report = qtk.apply_gptq(sims[1], x, sites="0.weight", progress=False,
                            options=qtk.LayerwiseOptions(start="float", holdout=0))
    assert report.restarted == ("0.weight",)
