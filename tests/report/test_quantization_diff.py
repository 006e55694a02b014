import json
import math

from qtk.report.quantization_diff import OutputDifference, QuantizationDiff, SiteDifference

SITES = (SiteDifference("fc.weight", "range, codes", 0.5, 12, 4096), SiteDifference("fc:out", "int8 → int16"))


def test_it_prints_and_writes_every_difference():
    diff = QuantizationDiff("a", "b", SITES, OutputDifference(31.25, 0.995, "the data given"))
    lines = str(diff).splitlines()
    assert lines[0] == "a → b: 2 sites differ"
    assert lines[3].split() == ["fc.weight", "│", "range,", "codes", "│", "0.5", "│", "12", "of", "4,096"]
    assert lines[-1] == "outputs on the data given: SQNR 31.2 dB, 99.50% of the predictions equal"
    record = json.loads(json.dumps(diff.to_json(), allow_nan=False))
    assert record["differs"]
    assert record["sites"][1] == {"site": "fc:out", "change": "int8 → int16", "steps": None, "flipped": None,
                                  "elements": None, "moved": None}


def test_equal_models_are_no_difference_and_other_outputs_are_one():
    equal = QuantizationDiff("a", "b", (), OutputDifference(float("inf"), 1.0, "data"))
    assert not equal
    assert equal.to_json()["outputs"] == {"sqnr_db": None, "agreement": 1.0, "measured_on": "data"}
    assert str(equal).splitlines() == ["a → b: no difference",
                                       "outputs on data: equal, 100.00% of the predictions equal"]
    other = QuantizationDiff("a", "b", (), OutputDifference(50.0, None, "data"))
    assert other
    assert other.title == "a → b: the sites are equal, the outputs are not"


def test_a_float_parameter_prints_its_change_and_json_has_no_infinity():
    moved = (SiteDifference("norm.bias", "float", flipped=1, elements=6, moved=math.inf),
             SiteDifference("norm.weight", "float", flipped=1, elements=6, moved=0.125))
    diff = QuantizationDiff("a", "b", moved)
    assert "float, by up to 0.12 of its largest" in str(diff)
    record = json.loads(json.dumps(diff.to_json(), allow_nan=False))
    assert [each["moved"] for each in record["sites"]] == [None, 0.125]
