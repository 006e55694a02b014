import dataclasses
import json

import pytest

from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel, PerToken, PerTokenBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import SpecError

SPECS = [
    QuantSpec(dtype("int8")),
    QuantSpec(dtype("uint16")),
    QuantSpec(dtype("int4"), PerChannel(-1), symmetric=True),
    QuantSpec(dtype("int2"), PerBlock((1, -1, 32)), symmetric=True, narrow_range=True),
    QuantSpec(dtype("uint8"), dynamic=True),
    QuantSpec(dtype("int8"), PerToken(), symmetric=True, dynamic=True),
    QuantSpec(dtype("fp4_e2m1"), PerTokenBlock(16, -1), symmetric=True, scale_format=ScaleFormat.E4M3),
    QuantSpec(dtype("int8"), PerTokenBlock(32, -3), symmetric=True, dynamic=True, scale_format=ScaleFormat.E8M0),
]


@pytest.mark.parametrize(
    ("name", "narrow", "bounds"),
    [("int8", False, (-128, 127)), ("int8", True, (-127, 127)), ("uint4", False, (0, 15)), ("uint4", True, (1, 15))],
)
def test_codes(name, narrow, bounds):
    spec = QuantSpec(dtype(name), narrow_range=narrow)
    assert (spec.qmin, spec.qmax) == bounds


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_json_and_back(spec):
    assert QuantSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": 8}, {"dtype": "int99"}, {"granularity": "per_row"}, {"granularity": {"per_block": [1, "2"]}},
        {"granularity": {"per_channel": "0"}}, {"symmetric": 1}, {"narrow_range": None}, {"extra": 1},
        {"dynamic": 1},
    ],
    ids=str,
)
def test_a_malformed_record_is_refused(change):
    with pytest.raises(SpecError):
        QuantSpec.from_json(SPECS[0].to_json() | change)


def test_a_missing_field_is_refused():
    for field in SPECS[0].to_json():
        with pytest.raises(SpecError, match="not a quantization spec"):
            QuantSpec.from_json({key: value for key, value in SPECS[0].to_json().items() if key != field})


def test_codes_of_a_symmetric_unsigned_format_are_counted_from_the_middle():
    spec = QuantSpec(dtype("uint8"), symmetric=True)
    assert (spec.qmin, spec.qmax, spec.middle_code) == (-128, 127, 128)
    narrow = QuantSpec(dtype("uint4"), symmetric=True, narrow_range=True)
    assert (narrow.qmin, narrow.qmax, narrow.middle_code) == (-7, 7, 8)
    assert QuantSpec(dtype("int8"), symmetric=True).middle_code == QuantSpec(dtype("uint8")).middle_code == 0
    with pytest.raises(SpecError, match="use int8"):
        QuantSpec(dtype("uint8"), symmetric=True, dynamic=True)


def test_a_reduced_range_is_the_inner_half_of_int8():
    spec = QuantSpec(dtype("int8"), symmetric=True, reduced_range=True)
    assert (spec.qmin, spec.qmax) == (-64, 64)
    assert 2 * 255 * spec.qmax <= 2**15 - 1
    assert QuantSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert str(spec) == "int8 per_tensor symmetric reduced"
    for name, narrow in (("int4", False), ("uint8", False), ("fp8_e4m3", False), ("int8", True)):
        with pytest.raises(SpecError, match="reduced range is -64…64 of int8"):
            QuantSpec(dtype(name), symmetric=True, reduced_range=True, narrow_range=narrow)



@pytest.mark.parametrize("granularity", [PerChannel(0), PerBlock((1, 32))], ids=str)
def test_ranges_of_run_time_belong_to_tensors_or_rows(granularity):
    with pytest.raises(SpecError, match="per tensor, per token or in blocks of these"):
        QuantSpec(dtype("int8"), granularity, symmetric=True, dynamic=True)


def test_rows_have_their_ranges_at_run_time():
    with pytest.raises(SpecError, match="use dynamic=True"):
        QuantSpec(dtype("int8"), PerToken())
    with pytest.raises(SpecError, match="use dynamic=True"):
        QuantSpec(dtype("fp4_e2m1"), PerTokenBlock(32, -1), symmetric=True, scale_format=ScaleFormat.E8M0)
    with pytest.raises(SpecError, match="need symmetric blocks"):
        QuantSpec(dtype("int4"), PerTokenBlock(32, -1), symmetric=True, dynamic=True, scale_format=ScaleFormat.INT4)


def test_it_is_frozen_and_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPECS[0].symmetric = True
    assert len({*SPECS, *map(dataclasses.replace, SPECS)}) == len(SPECS)
    assert str(SPECS[3]) == "int2 per_block(1, -1, 32) symmetric narrow"


@pytest.mark.parametrize("options", [{}, {"symmetric": True, "narrow_range": True}])
def test_a_float_has_no_zero_point_and_no_narrow_range(options):
    with pytest.raises(SpecError, match="fp8_e4m3 has neither a zero point nor a narrow range"):
        QuantSpec(dtype("fp8_e4m3"), **options)
    spec = QuantSpec(dtype("fp8_e4m3"), PerChannel(0), symmetric=True)
    assert (spec.qmin, spec.qmax) == (-448.0, 448.0)
    assert QuantSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("stored", ScaleFormat)
def test_scales_in_few_bits_are_those_of_symmetric_blocks(stored):
    spec = QuantSpec(dtype("int4"), PerBlock((1, 32)), symmetric=True, scale_format=stored)
    assert QuantSpec.from_json(spec.to_json()) == spec
    assert str(spec).endswith(f"{stored.value} scales")
    for granularity, symmetric in ((PerChannel(0), True), (PerBlock((1, 32)), False)):
        with pytest.raises(SpecError, match="need symmetric blocks"):
            QuantSpec(dtype("int4"), granularity, symmetric=symmetric, scale_format=stored)


def test_an_unknown_scale_format_is_refused():
    record = QuantSpec(dtype("int4"), PerBlock((1, 32)), symmetric=True).to_json()
    with pytest.raises(SpecError, match="unknown scale_format 'e9m9'; use one of e8m0, e4m3, int4"):
        QuantSpec.from_json({**record, "scale_format": "e9m9"})
