import pytest

from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import DTYPES
from qtk.core.spec import ScaleFormat

MX = {  # OCP Microscaling Formats 1.0, table 1: element, block size; every scale is E8M0
    "mxfp8_e4m3": ("fp8_e4m3", 32), "mxfp8_e5m2": ("fp8_e5m2", 32), "mxfp6_e3m2": ("fp6_e3m2", 32),
    "mxfp6_e2m3": ("fp6_e2m3", 32), "mxfp4": ("fp4_e2m1", 32), "mxint8": ("int8", 32),
}


@pytest.mark.parametrize("name", MX)
def test_the_mx_formats_are_those_of_the_standard(name):
    row = BLOCK_FORMATS[name]
    assert (row.dtype.name, row.length) == MX[name]
    assert row.scale_format is ScaleFormat.E8M0


def test_no_name_means_two_things():
    assert not BLOCK_FORMATS.keys() & DTYPES.keys()
    assert {row.name for row in BLOCK_FORMATS.values()} == set(BLOCK_FORMATS)
