from qtk.transforms.result import GroupResult, Outcome, TransformResult


def test_it_prints_a_line_for_each_group():
    groups = (
        GroupResult("a", Outcome.APPLIED, "into b", 2.0, 0.5),
        GroupResult("c", Outcome.SKIPPED, "it is tied"),
        GroupResult("d", Outcome.UNDONE, "the outputs changed"),
    )
    result = TransformResult("scaling", groups, difference=1e-6)
    assert str(result).splitlines() == [
        "scaling: 1 applied, 1 skipped, 1 undone; outputs changed by 1.0e-06",
        "  a  applied: into b  error 2 → 0.5",
        "  c  skipped: it is tied",
        "  d  undone: the outputs changed",
    ]
    assert (result.applied, result.skipped, result.undone) == ((groups[0],), (groups[1],), (groups[2],))


def test_an_empty_result_says_what_the_model_has_none_of():
    assert str(TransformResult("scaling", (), nothing="no layers")) == "scaling: no layers"
