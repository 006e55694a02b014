from qtk.export.unique_names import free_name, unique


def test_names_that_are_taken():
    assert unique(["a", "a", "a_1", "a"]) == ["a", "a_1", "a_1_1", "a_2"]
    assert free_name("a", {"a", "a_1"}) == "a_2"
