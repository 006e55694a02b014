import pytest

import qtk
from qtk.calibrators.entropy import Entropy
from qtk.calibrators.mse import Mse
from qtk.calibrators.scheme import calibrator
from qtk.core.bounds import check_count
from qtk.errors import ArgumentError, CalibrationError, ConfigError
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.methods import method
from qtk.layerwise.seq_mse import SeqMse


@pytest.mark.parametrize(
    "value", [0, -1, 11, 10**9, 10**5000, -(10**5000), 1.5, True, None, "3"], ids=lambda value: type(value).__name__
)
def test_what_is_no_count_up_to_the_bound_is_an_error(value):
    with pytest.raises(CalibrationError, match="steps must be an integer from 1 to 10, got "):
        check_count("steps", value, 10)


def test_both_ends_belong_to_it():
    check_count("steps", 1, 10)
    check_count("steps", 10, 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mse(steps=10**9), lambda: Mse(steps=None), lambda: Entropy(steps=10**9),
        lambda: SeqMse(num_candidates=10**8), lambda: AdaRound(iterations=10**12), lambda: Mse(norm=1e999),
    ],
)
def test_every_count_of_a_method_has_a_bound(make):
    with pytest.raises((ArgumentError, CalibrationError)):
        make()


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (calibrator, "mse(steps=1000000000)"), (calibrator, "entropy(steps=100000000)"),
        (calibrator, "mse(bins=100000000)"), (calibrator, "percentile(bins=100000000)"),
        (calibrator, "tf_enhanced(bins=100000000)"), (calibrator, "mse(norm=1e999)"),
        (calibrator, "tf_enhanced(gamma=1e999)"), (method, "seq_mse(num_candidates=100000000)"),
        (method, "adaround(iterations=1000000000000)"), (method, "gptq(damping=1e999)"),
        (calibrator, "mse(norm=" + "-" * 100_000 + "1)"), (calibrator, "mse(norm=" + "(" * 100_000 + "1)"),
    ],
)
def test_a_recipe_reads_them_as_config_errors(read, text):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert len(str(caught.value)) < 2000


def test_the_verb_refuses_before_it_starts():
    with pytest.raises(CalibrationError, match="num_candidates"):
        qtk.apply_seq_mse(None, [], num_candidates=10**8)
