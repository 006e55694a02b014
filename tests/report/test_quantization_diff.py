import json

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
                                  "elements": None}


def test_equal_models_are_no_difference_and_other_outputs_are_one():
    equal = QuantizationDiff("a", "b", (), OutputDifference(float("inf"), 1.0, "data"))
    assert not equal
    assert equal.to_json()["outputs"] == {"sqnr_db": None, "agreement": 1.0, "measured_on": "data"}
    assert str(equal).splitlines() == ["a → b: no difference",
                                       "outputs on data: equal, 100.00% of the predictions equal"]
    other = QuantizationDiff("a", "b", (), OutputDifference(50.0, None, "data"))
    assert other
    assert other.title == "a → b: the sites are equal, the outputs are not"
