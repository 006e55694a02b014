from qtk.moments.required_statistics import RequiredStatistics


def test_different_blocks_need_all_columns():
    union = RequiredStatistics.union([RequiredStatistics(4), RequiredStatistics(8, difference=True)])
    assert union == RequiredStatistics(None, difference=True)
