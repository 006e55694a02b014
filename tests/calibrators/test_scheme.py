import pytest
import torch

from qtk.calibrators.entropy import Entropy
from qtk.calibrators.mse import Mse
from qtk.calibrators.percentile import Percentile
from qtk.calibrators.scheme import SCHEMES, calibrator, canonical_scheme
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import ArgumentError, CalibrationError, ConfigError


def test_aliases_name_the_same_scheme():
    assert SCHEMES["post_training_tf"] is SCHEMES["min_max"]
    assert {"min_max", "moving_average"} <= set(SCHEMES)


def test_an_unknown_scheme_names_the_nearest():
    with pytest.raises(ConfigError, match="'min_max'"):
        SCHEMES["minmax"]


def test_settings_follow_a_name():
    assert calibrator("percentile(quantile=0.99)") == Percentile(quantile=0.99)
    assert calibrator("post_training_tf_enhanced") is SCHEMES["tf_enhanced"]
    assert canonical_scheme("mse()") == "mse"
    assert canonical_scheme("tf_enhanced(variant='v1', gamma=3.0)") == "tf_enhanced(variant='v1')"
    assert calibrator(canonical_scheme("mse(steps=20, norm=1.0)")) == calibrator("mse(norm=1.0,steps=20)")


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("min-max", "did you mean 'min_max'"),
        ("percentile(quantil=0.9)", "unknown setting 'quantil'; did you mean 'quantile'"),
        ("min_max(a=1)", "unknown setting 'a'; it has none"),
        ("percentile(quantile=2.0)", "quantile must be more than 0.5"),
        ("percentile(quantile='a')", "percentile"),
        ("percentile(quantile=open('x'))", "plain number"),
        ("percentile(0.9)", "neither a name nor a name with settings"),
        ("percentile(quantile=0.9", "neither a name nor a name with settings"),
        ("moving_average(momentum=0)", "momentum"),
        (7, "given by name"),
        ("mse(steps=2.5)", r"steps must be like 100, got 2\.5"),
        ("mse(steps=True)", "steps must be like 100"),
        ("mse(norm=1, norm=2)", "."),
        ("mse(norm={[]:1})", "plain number"),
        ("tf_enhanced(gamma=None)", "gamma"),
    ],
)
def test_what_cannot_be_understood_is_refused(scheme, said):
    with pytest.raises(ConfigError, match=said):
        calibrator(scheme)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_makes_an_encoding_of_what_it_saw_and_none_of_nothing(name):
    scheme, spec = SCHEMES[name], QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)
    observer = scheme.observer(spec.granularity)
    with pytest.raises(CalibrationError):
        scheme.encodings([observer], [spec])[0]
    other = scheme.observer(spec.granularity)
    other.observe(torch.randn(3, 5))
    observer.merge(other)
    encoding = scheme.encodings([observer], [spec])[0]
    assert isinstance(encoding, Encoding)
    assert encoding.scale.shape == (3,)
    assert (observer.count, observer.sentinels) == (15, 0)


@pytest.mark.sample(101)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerBlock((2, 3))], ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "int4", "uint8"])
@pytest.mark.parametrize("scheme", [*sorted(SCHEMES), "tf_enhanced(variant='v1')"])
def test_every_scheme_does_every_granularity(scheme, name, static, granularity):
    spec = QuantSpec(dtype(name), granularity, symmetric=name != "uint8")
    x = torch.randn(4, 6)
    observer = calibrator(scheme).observer(granularity, static=static)
    observer.observe(x)
    encoding = calibrator(scheme).encodings([observer], [spec])[0]
    assert encoding.scale.shape == granularity.qparam_shape((4, 6))
    assert float(encoding.maximum.max()) <= 1.2 * float(x.abs().max())


@pytest.mark.parametrize(
    "make", [lambda: Mse(steps=10**9), lambda: Mse(steps=None), lambda: Entropy(steps=10**9), lambda: Mse(norm=1e999)],
)
def test_every_count_of_a_method_has_a_bound(make):
    with pytest.raises((ArgumentError, CalibrationError)):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "mse(steps=1000000000)", "entropy(steps=100000000)", "mse(bins=100000000)", "percentile(bins=100000000)",
        "tf_enhanced(bins=100000000)", "mse(norm=1e999)", "tf_enhanced(gamma=1e999)",
        "mse(norm=" + "-" * 100_000 + "1)", "mse(norm=" + "(" * 100_000 + "1)",
    ],
    ids=lambda text: text[:40],
)
def test_a_recipe_reads_them_as_config_errors(text):
    with pytest.raises(ConfigError) as caught:
        calibrator(text)
    assert len(str(caught.value)) < 2000
