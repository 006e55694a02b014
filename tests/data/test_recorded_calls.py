"""Layer-wise methods on padded batches, against the same sequences without padding."""

import functools
import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.data.recorded_calls import recorded_calls
from qtk.errors import CalibrationError
from qtk.quantizers.quantizer import Quantizer
from tests.data import test_valid_tokens
from tests.data.test_valid_tokens import BATCH, LAYERS, MASK, SEQUENCES

simulation = functools.partial(test_valid_tokens.simulation, weight_bits=4)


@pytest.mark.medium
def test_calls_hold_the_tokens_that_count():
    sim = simulation("per_token")
    quantizers = [module for module in sim.model.modules() if isinstance(module, Quantizer)]
    for valid in ("mask", lambda batch: batch["mask"]):
        calls = recorded_calls(sim.model, quantizers, SEQUENCES, None, None, valid)
        assert [call.valid.masks[0].tolist() for call in calls] == [each["mask"].bool().tolist() for each in SEQUENCES]
    assert [call.valid for call in recorded_calls(sim.model, quantizers, SEQUENCES, None, None)] == [None, None]
    with pytest.raises(CalibrationError, match="pass the name of an input"):
        recorded_calls(sim.model, quantizers, lambda model: model(**BATCH), None, None, lambda batch: batch["mask"])


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", LAYERS)
def test_padding_leaves_no_trace_in_rounded_weights(layer):
    padded, alone, all_rows = simulation(layer), simulation(layer), simulation(layer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="valid")
        report = qtk.apply_layerwise(padded, [BATCH], "gptq", options=qtk.LayerwiseOptions(holdout=0), valid="mask",
                                     sites="layer*", progress=False)
    expected = qtk.apply_layerwise(alone, SEQUENCES, "gptq", options=qtk.LayerwiseOptions(holdout=0), sites="layer*",
                                   progress=False)
    qtk.apply_layerwise(all_rows, [BATCH], "gptq", options=qtk.LayerwiseOptions(holdout=0), sites="layer*",
                        progress=False)
    for found, wanted in zip(report.layers, expected.layers, strict=True):
        assert (found.before, found.after) == pytest.approx((wanted.before, wanted.after), rel=1e-3)
    names = [layer.name for layer in report.layers]
    states = [sim.model.state_dict() for sim in (padded, alone, all_rows)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)
    assert any(not torch.equal(states[0][name], states[2][name]) for name in names), "padding made no difference"


@pytest.mark.medium
def test_layers_that_see_all_rows_are_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(8, 8, batch_first=True)

        def forward(self, x, mask):
            return self.rnn(x)[0]

    inputs = torch.randn(2, 5, 8), MASK
    sim = qtk.QuantSim(Recurrent().eval(), inputs, weight_bits=4)
    with pytest.warns(UserWarning, match=r"tokens cannot be followed to the inputs of 2 layers.*rnn\.weight_ih_l0"):
        qtk.apply_layerwise(sim, [inputs], "seq_mse", options=qtk.LayerwiseOptions(holdout=0), valid="mask",
                            progress=False)


@pytest.mark.medium
def test_a_mask_of_other_lengths_than_any_input_is_refused():
    sim = simulation("per_token")
    with pytest.raises(CalibrationError, match=r"no input of the model begins with its axes.*\(2, 7\)"):
        qtk.apply_layerwise(sim, [BATCH], "gptq", options=qtk.LayerwiseOptions(holdout=0),
                            valid=lambda batch: torch.ones(2, 7), progress=False)


@pytest.mark.medium
def test_the_report_of_a_layer_that_sees_all_rows_is_of_all_rows():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x, mask):
            return self.conv(x.transpose(1, 2))

    inputs = torch.randn(2, 5, 8), MASK
    reports = []
    for valid in ("mask", None):
        torch.manual_seed(0)
        sim = qtk.QuantSim(Strided().eval(), inputs, weight_bits=3, activation_bits=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reports.append(qtk.apply_layerwise(sim, [inputs], "gptq", options=qtk.LayerwiseOptions(holdout=0),
                                               valid=valid, progress=False))
    assert reports[0].layers == reports[1].layers
