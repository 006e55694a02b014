"""Files read into values, and what is wrong with them said with its line."""

import pytest

from qtk.config.files import read_file
from qtk.errors import ConfigError


def written(tmp_path, text, name="config.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_and_json_give_the_same_values(tmp_path):
    yaml = written(tmp_path, "a: [1, 2.5, true]\nb: {c: text}\n")
    json = written(tmp_path, '{"a": [1, 2.5, true],\t"b": {"c": "text"}}', "config.json")
    assert read_file(yaml) == read_file(json) == {"a": [1, 2.5, True], "b": {"c": "text"}}


def test_anchors_and_merge_keys_work(tmp_path):
    value = read_file(written(tmp_path, "base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  b: 3\n"))
    assert value["more"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "a: 1\nb: 2\na: 3\n", r"c\.yaml, line 3: key 'a' appears twice"),
        ("c.yaml", "x:\n  a: 1\n  a: 1\n", r"c\.yaml, line 3: key 'a' appears twice"),
        ("c.yaml", "a: [1,\nb: 2\n", r"c\.yaml, line \d: "),
        ("c.yaml", "a: !!python/object/apply:os.system [ls]\n", r"line 1: could not determine a constructor"),
        ("c.json", '{"a": 1, "a": 2}', r"c\.json: key 'a' appears twice"),
        ("c.json", '{"a": 1,\n}', r"c\.json, line \d: not JSON"),
    ],
)
def test_a_broken_file_is_answered_with_its_place(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        read_file(written(tmp_path, text, name))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_file(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        read_file(tmp_path / "latin.yaml")


@pytest.mark.parametrize("value", ["2026-99-99", "2026-02-30", "!!int abc", "!!timestamp x", "!!bool x", "!!float x",
                                   "!!set 0", "9" * 5000, "0b", "190:20:99.x"])
def test_a_scalar_that_does_not_parse_is_named_with_its_line(tmp_path, value):
    path = tmp_path / "config.yaml"
    path.write_text(f"version: 1\nname: {value}\n", encoding="utf-8")
    if value in ("0b", "190:20:99.x"):
        assert read_file(path) == {"version": 1, "name": value}
    else:
        said = "does not parse as .*; put a text in quotes|expected a mapping"
        with pytest.raises(ConfigError, match=rf"config\.yaml, line 2: .*({said})"):
            read_file(path)


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", "[" * 100_000, '{"a": 1' ])
def test_json_of_any_kind_is_read_or_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_file(path)
