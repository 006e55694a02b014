"""``fold_batch_norms`` through the public functions: by config, on a simulation, saved, loaded, with other weights."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, CaptureError, ConfigError
from tests.transforms.nets import INTO_LAYERS, INTO_SCALE_SHIFT, randomized

LIVE = {"version": 1, "extends": "default", "fold_batch_norms": False}


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)]
    return randomized(nn.Sequential(*layers)).float()


BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.mark.medium
@pytest.mark.parametrize("target", ["default", "onnxruntime", "dynamic"])
def test_shipped_targets_fold_before_planning(target):
    model = net()
    sim = qtk.QuantSim(model, BATCHES[0], config=target)
    assert list(sim.model.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert "1:out  float  (folded into 0)" in str(sim.plan)
    assert "fold_batch_norms: 2 applied; outputs changed by" in str(sim.model.report)
    assert "1.running_mean" in model.state_dict()


@pytest.mark.medium
def test_scales_belong_to_the_folded_weight():
    model = net()
    sim = qtk.QuantSim(model, BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    norm = model[1]
    weight = model[0].weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]
    expected = torch.maximum(weight.flatten(1).amax(1) / 127, weight.flatten(1).amin(1) / -128)
    torch.testing.assert_close(sim.encodings()["0.weight"].scale, expected.detach())
    assert list(sim.encodings()) == ["input:input", "0.weight", "2:out", "3.weight", "3:out"]


def test_a_config_may_keep_them_live():
    sim = qtk.QuantSim(net(), BATCHES[0], config=LIVE)
    assert "1.running_mean" in sim.model.state_dict()
    assert "folded" not in str(sim.plan)


@pytest.mark.medium
def test_the_key_is_inherited():
    assert not qtk.QuantSim(net(), BATCHES[0], config=LIVE).config.fold_batch_norms
    assert qtk.QuantSim(net(), BATCHES[0], config={"version": 1, "extends": "default"}).config.fold_batch_norms
    with pytest.raises(ConfigError, match="fold_batch_norms"):
        qtk.QuantSim(net(), BATCHES[0], config={"version": 1, "fold_batch_norms": "yes"})


@pytest.mark.medium
def test_a_folded_simulation_is_the_one_that_was_planned_folded():
    later = qtk.QuantSim(net(), BATCHES[0], config=LIVE)
    qtk.fold_batch_norms(later)
    first = qtk.QuantSim(net(), BATCHES[0])
    assert str(later.plan) == str(first.plan)
    for sim in (later, first):
        sim.compute_encodings(BATCHES, progress=False)
    assert torch.equal(later.model(BATCHES[0]), first.model(BATCHES[0]))


@pytest.mark.medium
def test_only_touched_encodings_are_forgotten():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    sim = qtk.QuantSim(model, BATCHES[0], config=LIVE)
    sim.compute_encodings(BATCHES, progress=False)
    kept = {name: sim.quantizers[name] for name in ("input:input", "0.weight", "1:out", "4:out")}
    qtk.fold_batch_norms(sim)
    assert list(sim.encodings()) == list(kept)
    assert all(sim.quantizers[name] is quantizer for name, quantizer in kept.items())
    sim.compute_encodings(BATCHES, only_missing=True, progress=False)
    assert "2.weight" in sim.encodings()


@pytest.mark.medium
@pytest.mark.parametrize("site", ["0.weight"])
def test_frozen_encodings_in_the_way_are_named_and_nothing_changes(site):
    sim = qtk.QuantSim(net(), BATCHES[0], config=LIVE)
    sim.compute_encodings(BATCHES, progress=False)
    sim.freeze(site)
    before, expected = str(sim.plan), sim.model(BATCHES[0])
    with pytest.raises(CalibrationError, match=r"0\.weight would be rewritten, but are frozen.*unfreeze"):
        qtk.fold_batch_norms(sim)
    assert str(sim.plan) == before
    assert torch.equal(sim.model(BATCHES[0]), expected)
    sim.unfreeze()
    assert len(qtk.fold_batch_norms(sim).applied) == 2


@pytest.mark.medium
def test_after_gptq_it_is_refused():
    sim = qtk.QuantSim(net(), BATCHES[0], config=LIVE)
    qtk.apply_gptq(sim, BATCHES, progress=False)
    with pytest.raises(CalibrationError, match="frozen"):
        qtk.fold_batch_norms(sim)


@pytest.mark.medium
def test_sites_that_carry_a_mask_stay_out_of_the_plan():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x, mask):
            return self.body(x).flatten(2) + mask

    mask = torch.zeros(36)
    mask[20:] = -torch.inf
    sim = qtk.QuantSim(Masked().eval(), (BATCHES[0], mask), config=LIVE)
    sim.compute_encodings([(batch, mask) for batch in BATCHES], progress=False)
    assert "mask:input" not in sim.quantizers
    qtk.fold_batch_norms(sim)
    assert "mask:input" not in sim.quantizers
    assert "carries a mask" in str(sim.plan)


def test_what_is_neither_prepared_nor_a_simulation():
    with pytest.raises(CaptureError, match="prepare_model"):
        qtk.fold_batch_norms(net())
    with pytest.raises(CaptureError, match="traced without inputs"):
        qtk.fold_batch_norms(qtk.prepare_model(net()))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("build", [
    INTO_LAYERS["islands"], INTO_LAYERS["before_linear"], INTO_LAYERS["shared_norm"],
    INTO_SCALE_SHIFT["pre_activation"], INTO_SCALE_SHIFT["without_affine_alone"],
])
def test_a_saved_simulation_is_folded_again_when_it_is_loaded(build, tmp_path):
    make, shape, *_ = build
    x = torch.randn(shape)
    sim = qtk.QuantSim(randomized(make()).float(), x)
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", randomized(make(), seed=7).float(), x)
    assert torch.equal(again.model(x), sim.model(x))
    assert list(again.model.state_dict()) == list(sim.model.state_dict())


@pytest.mark.medium
def test_a_simulation_folded_later_is_loaded_folded(tmp_path):
    sim = qtk.QuantSim(net(), BATCHES[0], config=LIVE)
    qtk.fold_batch_norms(sim)
    sim.compute_encodings(BATCHES, progress=False)
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", net(), BATCHES[0])
    assert torch.equal(again.model(BATCHES[0]), sim.model(BATCHES[0]))


def test_copies_fold_by_themselves():
    sim = qtk.QuantSim(net(), BATCHES[0], config=LIVE)
    other = copy.deepcopy(sim)
    qtk.fold_batch_norms(other)
    assert "1.running_mean" in sim.model.state_dict()
    assert "1.running_mean" not in other.model.state_dict()
