import numpy as np
import pytest

from qtk.core.dtypes import DTYPES, FloatDtype, dtype, integer
from qtk.errors import SpecError


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
def test_the_bounds_are_numpys(name):
    assert (dtype(name).minimum, dtype(name).maximum) == (np.iinfo(name).min, np.iinfo(name).max)


INTEGERS = [name for name, row in DTYPES.items() if not isinstance(row, FloatDtype)]


@pytest.mark.parametrize("name", INTEGERS)
def test_every_integer_format_has_two_to_the_bits_codes(name):
    format_ = dtype(name)
    assert format_.maximum - format_.minimum + 1 == 2**format_.bits
    assert (format_.minimum < 0) == format_.signed == (not name.startswith("u"))
    assert integer(format_.bits, signed=format_.signed) is format_
    assert str(format_) == format_.name == name


def test_there_are_two_to_sixteen_bits():
    assert {dtype(name).bits for name in INTEGERS} == set(range(2, 17))
    assert len(INTEGERS) == 30


@pytest.mark.parametrize("name", sorted(set(DTYPES) - set(INTEGERS)))
def test_a_float_has_a_sign_an_exponent_and_a_mantissa(name):
    format_ = dtype(name)
    assert format_.bits == 1 + format_.exponent_bits + format_.mantissa_bits
    assert name == f"fp{format_.bits}_e{format_.exponent_bits}m{format_.mantissa_bits}"
    assert (format_.minimum, format_.signed) == (-format_.maximum, True)


@pytest.mark.parametrize("bits", [-1, 0, 1, 17, 32])
def test_other_widths_are_refused(bits):
    with pytest.raises(SpecError, match=f"2 to 16, got {bits}"):
        integer(bits, signed=True)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'int8'"):
        dtype("int88")
