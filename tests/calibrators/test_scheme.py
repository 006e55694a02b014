import pytest
import torch

from qtk.calibrators.scheme import SCHEMES
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError, ConfigError


def test_aliases_name_the_same_scheme():
    assert SCHEMES["post_training_tf"] is SCHEMES["min_max"]
    assert {"min_max", "moving_average"} <= set(SCHEMES)


def test_an_unknown_scheme_names_the_nearest():
    with pytest.raises(ConfigError, match="'min_max'"):
        SCHEMES["minmax"]


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_makes_an_encoding_of_what_it_saw_and_none_of_nothing(name):
    scheme, spec = SCHEMES[name], QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)
    observer = scheme.observer(spec.granularity)
    with pytest.raises(CalibrationError):
        scheme.encoding(observer, spec)
    other = scheme.observer(spec.granularity)
    other.observe(torch.randn(3, 5))
    observer.merge(other)
    encoding = scheme.encoding(observer, spec)
    assert isinstance(encoding, Encoding)
    assert encoding.scale.shape == (3,)
    assert (observer.count, observer.sentinels) == (15, 0)
