import string

import pytest

from qtk.export.file_names import LONGEST, file_stem

PATHS = [
    "/x/evil", "..", ".", ".hidden", "...", "conv/1", "conv%2F1", "conv_1", "a\\b", "a:b", "C:\\x", "nul\0",
    "line\nbreak", "a b", "ä", "模型", "\ud800", "model", "a" * 300, "a" * 299 + "b", "a" * LONGEST,
    "a" * (LONGEST + 1), "/" * 300, "模" * 300, file_stem("a" * 300), "backbone.body", "body@1",
]


@pytest.mark.medium
def test_different_paths_have_different_stems():
    assert len({file_stem(path) for path in PATHS}) == len(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_a_stem_is_one_visible_component_and_not_too_long(path, tmp_path):
    stem = file_stem(path)
    assert set(stem) <= set(string.ascii_letters + string.digits + "_.-~%+@")
    assert not stem.startswith(".")
    assert len(stem) <= LONGEST
    (tmp_path / f"{stem}.onnx.data").touch()
    assert [each.name for each in tmp_path.iterdir()] == [f"{stem}.onnx.data"]


def test_a_module_path_in_letters_is_its_own_stem():
    assert file_stem("backbone.stages.0.conv_1") == "backbone.stages.0.conv_1"
