import pytest

from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer


def test_each_quantizer_returns_to_its_own_mode_even_after_an_error():
    quantizers = [Quantizer(QuantSpec(dtype("int8")), site=f"q{i}") for i in range(2)]
    quantizers[0].mode = Mode.SIMULATE
    with in_mode(iter(quantizers), Mode.OBSERVE):
        assert [quantizer.mode for quantizer in quantizers] == [Mode.OBSERVE, Mode.OBSERVE]
    with pytest.raises(ZeroDivisionError), in_mode(quantizers, Mode.BYPASS):
        raise ZeroDivisionError
    assert [quantizer.mode for quantizer in quantizers] == [Mode.SIMULATE, Mode.BYPASS]
