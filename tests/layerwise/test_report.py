import pytest

from qtk.layerwise.report import LayerResult, LayerwiseReport


def test_a_layer_has_its_sqnr_before_and_after():
    result = LayerResult("fc.weight", before=9.0, after=1.0, signal=1000.0, noise=2.0)
    assert result.sqnr_db == pytest.approx(26.99, abs=0.01)  # 1000 to 2
    assert result.sqnr_before_db == pytest.approx(20.0)  # 1000 to 2 + 9 - 1
    assert str(result) == "fc.weight  20.0 → 27.0 dB"


def test_a_layer_whose_output_was_not_seen_has_its_error_alone():
    result = LayerResult("fc.weight", before=9.0, after=1.0, noise=2.0)
    assert (result.sqnr_db, result.sqnr_before_db) == (None, None)
    assert str(result) == "fc.weight  error 9 → 1"


def test_a_report_prints_layers_in_order_and_what_was_left_with_the_reason():
    report = LayerwiseReport((LayerResult("b"), LayerResult("a", reason="no rows")), {"c": "not linear"})
    assert str(report).splitlines() == ["b  error 0 → 0", "a  no rows", "c  left as it is: not linear"]
