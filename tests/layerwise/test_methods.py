import pytest

from qtk.errors import ArgumentError, CalibrationError, ConfigError
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.coordinate_descent import CoordinateDescent
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.methods import METHODS, method
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.seq_mse import SeqMse


def test_every_method_has_its_name():
    assert dict(METHODS) == {
        "seq_mse": SeqMse(), "gptq": Gptq(), "coordinate_descent": CoordinateDescent(),
        "adaround": AdaRound(), "bias_correction": BiasCorrection(), "reconstruction": Reconstruction(),
    }
    for name, value in METHODS.items():
        assert method(name) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("seq_mse(num_candidates=50, joint=True)", SeqMse(num_candidates=50, joint=True)),
        ("seq_mse(refine=True, exact=True)", SeqMse(refine=True, exact=True)),
        ("gptq(damping=0.05, act_order=False)", Gptq(damping=0.05, act_order=False)),
        ("adaround(iterations=10, learning_rate=1)", AdaRound(iterations=10, learning_rate=1)),
        ("bias_correction()", BiasCorrection()),
    ],
)
def test_settings_are_written_behind_the_name(text, value):
    assert method(text) == value
    assert method(text.partition("(")[0]) == METHODS[text.partition("(")[0]]  # the next to ask gets the default


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seqmse", "unknown layer-wise method 'seqmse'; did you mean 'seq_mse'"),
        ("gtpq(damping=1.0)", "unknown layer-wise method 'gtpq'; did you mean 'gptq'"),
        ("gptq(dampening=1.0)", "unknown setting 'dampening'; did you mean 'damping'"),
        ("bias_correction(rate=1)", "unknown setting 'rate'; it has none"),
        ("seq_mse(num_candidates=2.5)", "num_candidates must be like 20, got 2.5"),
        ("adaround(iterations=True)", "iterations must be like 100, got True"),
        ("gptq(damping=0)", "GPTQ needs a finite damping > 0"),
        ("adaround(warm_start=1)", "0 ≤ warm_start < 1"),
        ("gptq(0.1)", "neither a name nor a name with settings"),
        ("gptq(", "neither a name nor a name with settings"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest(text, said):
    with pytest.raises(ConfigError) as raised:
        method(text)
    assert said in str(raised.value)


@pytest.mark.parametrize("make", [lambda: SeqMse(num_candidates=10**8), lambda: AdaRound(iterations=10**12)])
def test_every_count_of_a_method_has_a_bound(make):
    with pytest.raises((ArgumentError, CalibrationError)):
        make()


@pytest.mark.parametrize(
    "text", ["seq_mse(num_candidates=100000000)", "adaround(iterations=1000000000000)", "gptq(damping=1e999)"],
)
def test_a_recipe_reads_them_as_config_errors(text):
    with pytest.raises(ConfigError) as caught:
        method(text)
    assert len(str(caught.value)) < 2000
