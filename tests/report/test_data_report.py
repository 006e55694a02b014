from qtk.report.data_report import CalibrationSize, DataReport, OddBatch

SIZES = (CalibrationSize(1, 64, 0.5, 20.0, 0.1), CalibrationSize(2, 128, 1.0, float("inf"), None))


def test_it_prints_all_that_was_found():
    report = DataReport(SIZES, 2, (OddBatch(3, 41.4, "conv:out", "mean 9 beside 1"),), {"relu:out": (1, 5)},
                        {"experts.weight": (0, 7, 3)}, 4)
    lines = str(report).splitlines()
    assert lines[0] == "calibration data: 2 batches are enough"
    assert lines[3].split(" │ ") == ["       1", "     64", "              0.50", "    20.0", "             10.0 %"]
    assert lines[4].split() == ["2", "│", "128", "│", "1.00", "│", "∞", "│", "–"]
    assert lines[5:] == [
        "batch 3 stands out (41 robust standard deviations): mean 9 beside 1 at conv:out",
        "relu:out: 2 channels are 0 in all samples (1, 5)",
        "experts.weight: experts got 0 to 7 rows, 1 of 3 none",
    ]
    assert report.decibels == (20.0, float("inf"))


def test_too_few_batches_and_made_ones_are_said():
    assert DataReport(SIZES, None).verdict == ("2 batches are not enough: the last ones still change the result; give "
                                               "twice as many")
    assert DataReport(SIZES[:1], None).verdict == ("one batch calibrates, which shows nothing: give more batches, or "
                                                   "smaller ones")
    assert DataReport(SIZES, 1, source="random tokens").verdict == "synthetic data, random tokens: 1 batch is enough"


def test_where_more_batches_widen_ranges_and_harm_no_more_are_asked_for():
    def verdict(last_db):
        sizes = tuple(CalibrationSize(count, count, 1.0, db, 0.1) for count, db in ((1, 15.2), (2, last_db)))
        return DataReport(sizes, recommended=None).verdict

    assert verdict(11.9).startswith("the more batches, the worse: 15.2 dB with 1, 11.9 with 2, for ranges widen; pass")
    assert "give twice as many" in verdict(15.0)
