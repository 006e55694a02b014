import pytest

from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.methods import METHODS, method
from qtk.layerwise.reconstruction import Reconstruction


def test_it_is_a_method_with_settings():
    assert METHODS["reconstruction"] == Reconstruction()
    assert method("reconstruction(window=3)") == Reconstruction(window=3)
    assert Reconstruction().refuses(QuantSpec(dtype("int4"), symmetric=True)) is None
    assert "needs codes that are integers" in Reconstruction().refuses(QuantSpec(dtype("fp8_e4m3"), symmetric=True))


@pytest.mark.parametrize("settings", [
    {"iterations": 0}, {"window": 0}, {"learning_rate": 0.0}, {"drop": 1.0}, {"divergence": -1.0},
    {"range_learning_rate": float("nan")}, {"bias_learning_rate": -1.0},
], ids=str)
def test_settings_without_sense_are_refused(settings):
    with pytest.raises(CalibrationError, match="reconstruction"):
        Reconstruction(**settings)
