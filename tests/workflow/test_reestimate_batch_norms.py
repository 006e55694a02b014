import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.errors import CalibrationError, NotCalibratedError, QtkError
from qtk.transforms.keep_batch_norms import is_kept
from tests.transforms.nets import Transposed, randomized

LIVE = {"version": 1, "extends": "default", "fold_batch_norms": False}
BATCHES = [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def simulation(weight_bits=2):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)]
    sim = qtk.QuantSim(randomized(nn.Sequential(*layers)).float(), BATCHES[0], config=LIVE, weight_bits=weight_bits)
    sim.compute_encodings(BATCHES, progress=False)
    return sim


@pytest.mark.medium
def test_statistics_are_the_averages_of_the_quantized_input():
    sim = simulation()
    q = sim.quantizers
    with torch.no_grad():
        inputs = []
        for batch in BATCHES:
            x = F.relu(F.conv2d(q["input:input"](batch), q["0.weight"](sim.model.get_parameter("0.weight")),
                                sim.model.get_parameter("0.bias")))
            x = F.conv2d(q["1:out"](x), q["2.weight"](sim.model.get_parameter("2.weight")),
                         sim.model.get_parameter("2.bias"))
            inputs.append(x.transpose(0, 1).flatten(1))
    mean = torch.stack([x.mean(1) for x in inputs]).mean(0)
    var = torch.stack([x.var(1) for x in inputs]).mean(0)
    result = qtk.reestimate_batch_norms(sim, BATCHES, progress=False)
    torch.testing.assert_close(sim.model.get_buffer("3.running_mean"), mean)
    torch.testing.assert_close(sim.model.get_buffer("3.running_var"), var)
    assert [group.name for group in result.applied] == ["3"]
    assert "mean moved by" in str(result)


@pytest.mark.medium
def test_what_is_behind_is_forgotten_and_what_is_before_is_kept():
    sim = simulation()
    sim.freeze("5.weight")
    qtk.reestimate_batch_norms(sim, BATCHES, progress=False)
    assert list(sim.encodings()) == ["input:input", "0.weight", "1:out", "2.weight", "5.weight"]
    sim.compute_encodings(BATCHES, only_missing=True, progress=False)
    sim.check()


@pytest.mark.medium
def test_the_error_of_low_bits_falls():
    """Weights of 2 bits, of which min_max uses half, move the statistics away from those of the float model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1), nn.BatchNorm2d(4))
    torch.optim.swa_utils.update_bn(BATCHES, model)
    model.eval()
    config = {**LIVE, "rules": [{"match": {"op": "conv"}, "weight": {"scheme": "min_max"}}]}
    sim = qtk.QuantSim(model, BATCHES[0], config=config, weight_bits=2, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    before = sum(float((sim.model(x) - model(x)).square().sum()) for x in BATCHES)
    qtk.reestimate_batch_norms(sim, BATCHES, progress=False)
    after = sum(float((sim.model(x) - model(x)).square().sum()) for x in BATCHES)
    assert after < 0.8 * before


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("bad", [torch.full((8, 3, 6, 6), torch.nan), torch.randn(8, 5, 6, 6)])
def test_an_error_changes_nothing(bad):
    sim = simulation()
    before, modules = copy.deepcopy(sim.model.state_dict()), repr(sim.model)
    with pytest.raises(QtkError):
        qtk.reestimate_batch_norms(sim, [BATCHES[0], bad], progress=False)
    after = sim.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert repr(sim.model) == modules


@pytest.mark.medium
def test_uncalibrated_and_folded_simulations_say_so():
    sim = simulation()
    sim.forget("0.weight")
    with pytest.raises(NotCalibratedError, match=r"0\.weight has no encoding"):
        qtk.reestimate_batch_norms(sim, BATCHES, progress=False)
    folded = qtk.QuantSim(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval(), BATCHES[0])
    assert "fold_batch_norms: at_export" in str(qtk.reestimate_batch_norms(folded, BATCHES, progress=False))


@pytest.mark.medium
def test_channels_at_another_axis_are_averaged_like_any():
    model, batches = randomized(Transposed()).float(), [torch.randn(6, 7, 5) for _ in range(3)]
    sim = qtk.QuantSim(model, batches[0], config={"version": 1, "fold_batch_norms": "at_export"})
    sim.compute_encodings(batches, progress=False)
    assert is_kept(sim.model)
    qtk.reestimate_batch_norms(sim, batches, progress=False)
    rows = [model.fc(batch).flatten(0, 1).detach() for batch in batches]
    mean = torch.stack([row.mean(0) for row in rows]).mean(0)
    torch.testing.assert_close(sim.model.get_buffer("bn.running_mean"), mean, rtol=0.02, atol=0.02)
    var = torch.stack([row.var(0) for row in rows]).mean(0)
    torch.testing.assert_close(sim.model.get_buffer("bn.running_var"), var, rtol=0.05, atol=0)


class OfTokens(nn.Module):
    def __init__(self, channels_last):
        super().__init__()
        self.fc, self.norm, self.channels_last = nn.Linear(8, 4), nn.BatchNorm1d(4), channels_last

    def forward(self, x, mask):
        y = self.fc(x)
        y = self.norm(y.flatten(0, 1)).view(y.shape) if self.channels_last else self.norm(y.transpose(1, 2))
        return y.sum() + mask.sum()


@pytest.mark.medium
@pytest.mark.parametrize("channels_last", [False, True])
def test_statistics_leave_out_tokens_that_do_not_count(channels_last):
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batches = [(torch.where(mask[..., None] == 1, torch.randn(2, 5, 8), 1e4), mask) for _ in range(2)]
    sim = qtk.QuantSim(OfTokens(channels_last).eval(), batches[0], config=LIVE, weight_bits=2)
    sim.compute_encodings(batches, valid="mask", progress=False)
    q, net = sim.quantizers, sim.model
    with torch.no_grad():
        rows = [F.linear(q["x:input"](x)[mask == 1], q["fc.weight"](net.fc.weight), net.fc.bias) for x, _ in batches]
        rows = [q["fc:out"](each) if "fc:out" in q else each for each in rows]
    qtk.reestimate_batch_norms(sim, batches, valid="mask", progress=False)
    torch.testing.assert_close(net.norm.running_mean, torch.stack([each.mean(0) for each in rows]).mean(0))
    torch.testing.assert_close(net.norm.running_var, torch.stack([each.var(0) for each in rows]).mean(0))


@pytest.mark.medium
def test_batches_of_padding_say_nothing_and_one_token_has_no_variance():
    torch.manual_seed(0)
    none, one = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    one[0, 0] = 1
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
    sim = qtk.QuantSim(OfTokens(True).eval(), (x, mask), config=LIVE)
    norm = sim.model.norm

    def reestimate(*batches):
        sim.compute_encodings([(x, mask)], valid="mask", progress=False)
        qtk.reestimate_batch_norms(sim, batches, valid="mask", progress=False)

    reestimate((x, mask))
    expected = norm.running_mean.clone(), norm.running_var.clone()
    norm.running_mean.fill_(100.0)
    padding = (torch.full_like(x, 50.0), none)
    reestimate(padding, (x, mask), padding)
    torch.testing.assert_close((norm.running_mean, norm.running_var), expected)
    with pytest.raises(CalibrationError, match=r"^batch 0: norm: a batch has one valid token, which has no variance"):
        reestimate((x, one))
