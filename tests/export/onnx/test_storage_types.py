import onnx
import onnx_ir as ir
import pytest

from qtk.core.dtypes import DTYPES, FloatDtype, dtype
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.onnx.storage_types import limits, opset_for, storage_type

INTEGERS = [name for name, row in DTYPES.items() if not isinstance(row, FloatDtype)]


@pytest.mark.parametrize("opset", [21, 25])
@pytest.mark.parametrize("name", INTEGERS)
def test_the_narrowest_type_of_the_opset_that_holds_every_code(name, opset):
    row, kind = dtype(name), storage_type(dtype(name), opset=opset, stored=True)
    low, high = limits(kind)
    assert low <= row.minimum
    assert row.maximum <= high
    types = {str(each) for each in onnx.defs.get_schema("QuantizeLinear", opset).type_constraints[-1].allowed_type_strs}
    assert f"tensor({kind.name.lower()})" in types
    narrower = [ir.DataType[each[7:-1].upper()] for each in types if "int" in each]
    narrower = [each for each in narrower if each.is_signed() == kind.is_signed() and each.itemsize < kind.itemsize]
    assert not any(limits(each)[0] <= row.minimum and row.maximum <= limits(each)[1] for each in narrower)


@pytest.mark.parametrize("name", INTEGERS)
def test_codes_of_the_run_have_eight_bits_or_more(name):
    kind = storage_type(dtype(name), opset=25, stored=False)
    assert kind.itemsize >= 1
    assert limits(kind)[0] <= dtype(name).minimum
    assert limits(kind)[1] >= dtype(name).maximum
    assert kind.is_signed() == dtype(name).signed


def test_floats_have_their_own_types_or_none():
    assert storage_type(dtype("fp8_e4m3"), opset=21, stored=True) is ir.DataType.FLOAT8E4M3FN
    assert limits(ir.DataType.FLOAT8E5M2) == (-57344.0, 57344.0)
    with pytest.raises(ExportError, match="fp8_e4m3 and fp8_e5m2, not fp4_e2m1"):
        storage_type(dtype("fp4_e2m1"), opset=25, stored=True)


def test_two_bits_next_to_quantized_activations_are_stored_in_four():
    two, eight = QuantSpec(dtype("int2"), symmetric=True), QuantSpec(dtype("int8"), symmetric=True)
    assert opset_for([eight, two], []) == 25
    assert opset_for([two], [QuantSpec(dtype("uint8"))]) == 21
    assert opset_for([eight], []) == 19
    assert opset_for([eight], [QuantSpec(dtype("uint4"))]) == 19
    assert opset_for([eight], [QuantSpec(dtype("uint16"))]) == 21
