"""Merges of uneven operands are planned apart while encodings are computed."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.config.schema import Match, Rule
from qtk.errors import CalibrationError
from qtk.workflow import compute_encodings


class Beside(nn.Module):
    """Boxes of hundreds and scores of at most 1 side by side, which an integer op reads."""

    def __init__(self, factor=400.0):
        super().__init__()
        self.boxes, self.scores, self.factor = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 1), factor

    def forward(self, x):
        return torch.cat([self.boxes(x).sigmoid() * self.factor, self.scores(x).sigmoid()], 1) * 0.5


class Parted(nn.Module):
    """The same, parted again in front of convolutions."""

    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 1)
        self.of_boxes, self.of_scores = nn.Conv2d(4, 4, 1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        both = torch.cat([self.boxes(x).sigmoid() * 400, self.scores(x).sigmoid()], 1).transpose(1, 2).transpose(1, 2)
        boxes, scores = both.split([4, 6], 1)
        return torch.cat([self.of_boxes(boxes), self.of_scores(scores)], 1)


def computed(model, batches, **options):
    """The simulation, and the texts of its warnings."""
    sim = qtk.QuantSim(model, batches[0], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.compute_encodings(batches, progress=False)
    return sim, [str(each.message) for each in caught]


def scores_db(sim, model, x):
    """SQNR of the scores."""
    expected, got = (each(x)[:, 4:].double() for each in (model.eval(), sim.model))
    return float(10 * (expected.square().sum() / (expected - got).square().sum()).log10())


BATCHES = list(torch.randn(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "default", "qnn_htp"])
@pytest.mark.parametrize("kind", [Beside, Parted])
def test_operands_of_uneven_ranges_do_not_share_one(kind, target):
    torch.manual_seed(0)
    model = kind().eval()
    sim, said = computed(model, BATCHES, config=target)
    assert scores_db(sim, model, torch.randn(2, 3, 8, 8)) > 28  # 0 to 4 dB with the range of the boxes
    assert not [text for text in said if "concat" in text]
    plan = sim.plan
    sim.compute_encodings(BATCHES, progress=False)
    assert sim.plan == plan


@pytest.mark.medium
def test_a_convolution_of_one_part_computes_in_integers_with_the_range_of_the_part():
    sim, _ = computed(Parted().eval(), BATCHES, config="onnxruntime")
    assert float(sim.encodings()["of_boxes:in[0]"].maximum) > 300
    assert float(sim.encodings()["of_scores:in[0]"].maximum) < 1.1


def test_operands_of_about_the_same_range_share_it():
    sim, said = computed(Beside(factor=8.0).eval(), BATCHES, config="onnxruntime")
    assert sim.quantizers["concat:out"] is sim.quantizers["mul:out"]
    assert said == []


@pytest.mark.medium
def test_what_the_config_says_of_a_merge_holds():
    rule = {"match": {"op": "concat"}, "output": {"bits": 8}}
    config = {"version": 1, "extends": "onnxruntime", "rules": [rule]}
    sim, said = computed(Beside().eval(), BATCHES, config=config)
    assert "concat:out" in sim.quantizers
    assert "shares a range with concat:out" in "".join(said)


@pytest.mark.medium
def test_data_that_can_be_run_once_are_run_once_and_the_loss_is_named():
    sim = qtk.QuantSim(Beside().eval(), BATCHES[0], config="onnxruntime")
    with pytest.warns(UserWarning, match="shares a range with concat:out"):
        sim.compute_encodings(iter(BATCHES), progress=False)
    assert "concat:out" in sim.quantizers


@pytest.mark.medium
def test_a_merge_that_a_convolution_reads_stays_in_codes():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.beside, self.head = Beside(), nn.Conv2d(10, 2, 1)

        def forward(self, x):
            return self.head(self.beside(x))

    sim, said = computed(Head().eval(), BATCHES, config="onnxruntime")
    assert "beside.concat:out" in sim.quantizers
    assert "shares a range with beside.concat:out" in "".join(said)


@pytest.mark.medium
def test_where_the_target_has_more_bits_they_are_taken():
    model = Beside().eval()
    sim, _ = computed(model, BATCHES, config="qnn_htp")
    assert sim.plan[next(site for site in sim.plan if site.name == "concat:out")].spec.dtype.bits == 16


@pytest.mark.medium
@pytest.mark.parametrize(("runs_again", "is_apart"), [(True, True), (False, False)])
def test_all_ranks_plan_apart_what_the_data_of_one_ask_for(runs_again, is_apart, monkeypatch):
    rule = Rule(match=Match(path=("concat",)), output="float", optional=True)
    monkeypatch.setattr(compute_encodings, "several_ranks", lambda: True)
    monkeypatch.setattr(compute_encodings, "exchanged", lambda mine, problem: [mine, ([rule], runs_again)])
    sim, _ = computed(Beside(factor=8.0).eval(), BATCHES, config="onnxruntime")
    assert ("concat:out" not in sim.quantizers) == is_apart


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, mask):
        return self.out((self.fc(x) + mask).softmax(-1))


def masked(share):
    mask = torch.zeros(8, 4)
    mask[:, : int(4 * share)] = -torch.inf
    return mask


def test_the_plan_is_made_anew_at_each_calibration():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Scores(), (x, masked(0)))
    whole = str(sim.plan)
    sim.compute_encodings([(x, masked(0.5))], progress=False)
    assert "mask:input" not in sim.quantizers
    sim.compute_encodings([(x, masked(0))], progress=False)
    assert str(sim.plan) == whole
    assert "mask:input" in sim.encodings()
    sim.check()


def test_a_calibration_that_fails_changes_nothing():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Scores(), (x, masked(0)))
    sim.compute_encodings([(x, masked(0.5))], progress=False)
    plan, expected, encodings = str(sim.plan), sim.model(x, masked(0.5)), sim.encodings()
    with pytest.raises(CalibrationError, match="NaN"):
        sim.compute_encodings([(x * torch.nan, masked(0))], progress=False)
    assert str(sim.plan) == plan
    assert torch.equal(sim.model(x, masked(0.5)), expected)
    assert all(encoding.equals(encodings[name]) for name, encoding in sim.encodings().items())


def test_a_calibration_that_is_interrupted_changes_nothing():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Scores(), (x, masked(0)))
    sim.compute_encodings([(x, masked(0.5))], progress=False)
    plan = str(sim.plan)

    def interrupted(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sim.compute_encodings([(x, masked(0))], forward=interrupted, progress=False)
    assert str(sim.plan) == plan


@pytest.mark.parametrize("value", [-torch.inf, -2e30])
def test_one_number_gone_wrong_is_named_and_changes_nothing(value):
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    good, bad = torch.randn(8, 64), torch.randn(8, 64)
    bad[5, 7] = value
    sim = qtk.QuantSim(model, good)
    plan = str(sim.plan)
    with pytest.raises(CalibrationError, match=r"batch 1: input:input: .* at index \[5, 7\], one of 1 values .*no att"):
        sim.compute_encodings([good, bad], progress=False)
    assert str(sim.plan) == plan
    assert not sim.encodings()


@pytest.mark.parametrize("share", [1, 40])
def test_a_weight_that_is_infinite_is_refused(share):
    model = nn.Linear(64, 8)
    with torch.no_grad():
        model.weight.view(-1)[:share] = -torch.inf
    sim = qtk.QuantSim(model, torch.randn(2, 64), activation_bits=None)
    with pytest.raises(CalibrationError, match=r"^weight: "):
        sim.compute_encodings(None, progress=False)


def test_a_constant_mask_is_left_alone():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x):
            return self.out((self.fc(x) + self.mask).softmax(-1))

    model, x = Causal().eval(), torch.randn(2, 4, 4)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    sim.check()
    assert "mask" not in sim.quantizers
    assert float((sim.model(x) - model(x)).abs().max()) < 0.1


class Masked(nn.Module):
    """Attention scores of which padded ones become finite numbers; ``form`` says how and what follows."""

    def __init__(self, form):
        super().__init__()
        self.q, self.k, self.form = nn.Linear(16, 16), nn.Linear(16, 16), form
        self.bias = nn.Parameter(2 * torch.randn(8, 8))
        self.register_buffer("causal", torch.full((8, 8), -1e4).triu(1))
        self.register_buffer("causal_bias", self.causal - torch.arange(8.0))

    def forward(self, x, mask):
        scores, padded = self.q(x) @ self.k(x).mT, ~mask[:, None, :]
        match self.form:
            case "less, softmax":
                return (scores - 1e4 * padded.float()).softmax(-1)
            case "added, divided, softmax":
                return ((scores + padded.float() * -1e4) / 4).softmax(-1)
            case "filled, log_softmax":
                return scores.masked_fill(padded, -1e9).log_softmax(-1)
            case "filled, logsumexp":
                scores = scores.masked_fill(padded, -1e9)
                return scores - scores.logsumexp(-1, keepdim=True)
            case "added, maximum":
                return (scores + padded.float() * -1e4).amax(-1)
            case "added, returned, joined":
                return torch.cat([scores + padded.float() * -1e4, scores])
            case "a bias with a mask, softmax":
                return (scores + (self.bias + self.causal)).softmax(-1)
            case "a buffer with a mask, softmax":
                return (scores + self.causal_bias).softmax(-1)


@pytest.mark.sample(8)
@pytest.mark.medium
@pytest.mark.parametrize("target", ["onnxruntime", "default", "qnn_htp"])
@pytest.mark.parametrize("form", [
    "less, softmax", "added, divided, softmax", "filled, log_softmax", "filled, logsumexp", "added, maximum",
    "added, returned, joined", "a bias with a mask, softmax", "a buffer with a mask, softmax"])
def test_finite_masks_leave_the_scores_their_codes(form, target):
    torch.manual_seed(0)
    net = Masked(form).eval()
    batches = [(torch.randn(16, 8, 16), torch.arange(8)[None] < torch.randint(3, 9, (16, 1))) for _ in range(4)]
    sim = qtk.QuantSim(net, batches[0], config=target)
    sim.compute_encodings(batches[:3], progress=False)
    with torch.no_grad():
        expected, found = net(*batches[3]), sim.model(*batches[3])
    is_score = expected > -1e3
    error = (found - expected)[is_score].square().sum() / expected[is_score].square().sum()
    assert error < 10 ** -2.8

