"""Held-out samples are whole, wherever samples and tokens are among the axes, against runs on single samples."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.calls.token_masks import TokenMasks
from qtk.layerwise.walk import walk
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.holdout import Holdout
from qtk.moments.required_statistics import RequiredStatistics

SAMPLES, TOKENS, WIDTH = 5, 6, 4
HOLDOUT = Holdout(0.4)  # two of the five
REQUIRED = RequiredStatistics(dtype=torch.float64, holdout=HOLDOUT)
LENGTHS = torch.tensor([6, 2, 5, 3, 4])
MASK = torch.arange(TOKENS) < LENGTHS[:, None]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)


class BatchFirst(Layers):
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class TokensFirst(Layers):
    def forward(self, x):
        return self.last(torch.relu(self.first(x.transpose(0, 1)))).transpose(0, 1)


class Rows(Layers):
    def forward(self, x):
        return self.last(torch.relu(self.first(x.reshape(-1, WIDTH)))).reshape(x.shape[0], x.shape[1], 3)


class TokenMajorRows(Layers):
    def forward(self, x):
        rows = x.transpose(0, 1).reshape(-1, WIDTH)
        return self.last(torch.relu(self.first(rows))).reshape(x.shape[1], x.shape[0], 3)


class Pooled(Layers):
    """The mean over all tokens, so that it is judged without a mask only."""

    def forward(self, x):
        return self.last(torch.relu(self.first(x.transpose(0, 1))).mean(0))


class Loop(Layers):
    """A loop over time, whose inputs have time first."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.rnn(torch.relu(self.first(x.transpose(0, 1))))[0])


class Island(Layers):
    """Stays Python, for it branches on values."""

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.relu(y) if float(y.sum()) < 1e9 else y)


MODELS = [BatchFirst, TokensFirst, Rows, TokenMajorRows, Pooled, Loop, Island]


def problem(build):
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(SAMPLES, TOKENS, WIDTH)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    return model, sim, x


def collected(sim, calls, inputs="symfp"):
    layers = weighted_layers(sim.model, sim.plan)[0]
    return {
        each.layer.name: each for each in
        walk(sim.model, calls, dict.fromkeys(layers, REQUIRED), inputs=inputs, holdout=HOLDOUT)
    }


def gram_of_samples(module, model, samples):
    """The sum of the products of all inputs of a linear layer, each sample run by itself."""
    inputs = []
    handle = module.register_forward_pre_hook(lambda own, args: inputs.append(args[0].reshape(-1, WIDTH).double()))
    with torch.no_grad():
        for sample in samples:
            model(sample)
    handle.remove()
    rows = torch.cat(inputs)
    return rows.mT @ rows, len(rows)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("build", MODELS)
def test_samples_are_held_out_whole(build, with_mask):
    if with_mask and build in (Pooled, Loop, Island):
        pytest.skip("its tokens cannot be followed, or meet one another")
    model, sim, x = problem(build)
    found = collected(sim, [Call((x,), {}, None, valid=TokenMasks.of(MASK) if with_mask else None)])
    singles = [x[i:i + 1, :length] if with_mask else x[i:i + 1] for i, length in enumerate(LENGTHS.tolist())]
    for name in ("first", "last"):
        moments = found[f"{name}.weight"].moments
        for own, samples in ((moments, singles[:3]), (moments.held_out, singles[3:])):
            gram, rows = gram_of_samples(getattr(model, name), model, samples)
            assert own.rows == rows
            torch.testing.assert_close(own.gram[0, 0], gram, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("build", [BatchFirst, TokensFirst, Rows, TokenMajorRows])
def test_the_power_of_held_out_outputs_is_that_of_whole_samples(build):
    model, sim, x = problem(build)
    found = collected(sim, [Call((x,), {}, None, valid=TokenMasks.of(MASK))], inputs="asym")["last.weight"]
    with torch.no_grad():
        outputs = [model(x[i:i + 1, :length]) for i, length in enumerate(LENGTHS.tolist())]
    power = [float(output.square().sum()) for output in outputs]
    assert found.held_out_output.signal == pytest.approx(sum(power[3:]), rel=1e-5)
    assert found.output.signal == pytest.approx(sum(power), rel=1e-5)


@pytest.mark.slow
def test_batches_of_one_sample_are_held_out_whole_in_every_layout():
    for build in MODELS:
        _, sim, x = problem(build)
        found = collected(sim, [Call((x[i:i + 1],), {}, None) for i in range(SAMPLES)])
        for name in ("first.weight", "last.weight"):
            moments = found[name].moments
            tokens = 1 if build is Pooled and name == "last.weight" else TOKENS
            assert (moments.rows, moments.held_out.rows) == (3 * tokens, 2 * tokens)


@pytest.mark.medium
def test_islands_count_all_rows_and_say_so():
    _, sim, x = problem(Island)
    with pytest.warns(UserWarning, match=r"valid: tokens cannot be followed to the inputs of 2 layers.*first\.weight"):
        found = collected(sim, [Call((x,), {}, None, valid=TokenMasks.of(MASK))])
    assert found["first.weight"].moments.rows_of_all == SAMPLES * TOKENS


@pytest.mark.medium
def test_a_method_sees_no_held_out_token():
    """What the tokens of held-out samples are has no influence on the weights, up to whether they are taken."""
    results = []
    for scale in (1.0, 1.001):
        _, sim, x = problem(TokenMajorRows)
        data = torch.cat([x, x + 1, x - 1, x + 2])
        kept = HOLDOUT.kept(len(data), 0)
        data[kept:] *= scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            qtk.apply_gptq(sim, [data], sites="first.weight", options=qtk.LayerwiseOptions(holdout=0.4), progress=False)
        results.append(sim.model.get_parameter("first.weight").clone())
    assert torch.equal(*results)
