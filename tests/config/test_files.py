"""Files read into values, and what is wrong with them said with its line."""

from pathlib import Path

import pytest
from yaml.scanner import Scanner

from qtk.config import files as module
from qtk.config.files import read_file, shipped, shipped_names
from qtk.config.load import load_config
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


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{index}: &a{index} [{', '.join([f'*a{index - 1}'] * 9)}]\n" for index in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{index}: &a{index}\n  <<: [{', '.join([f'*a{index - 1}'] * 9)}]\n" for index in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", LAUGHS, r"c\.yaml: its aliases spell out more than 100000 values"),
        ("c.yaml", MERGES, r"c\.yaml: its aliases spell out more than 100000 values"),
        ("c.yaml", "a: &a [*a]\n", r"c\.yaml, line 1: an alias refers to what it is inside of"),
        ("c.yaml", "a: &a\n  b: {c: *a}\n", r"c\.yaml, line 1: an alias refers to what it is inside of"),
        ("c.yaml", "[" * 100_000, r"c\.yaml: nested too deeply"),
        ("c.yaml", "a: " + "[" * 150 + "]" * 150, r"c\.yaml: nested too deeply"),
        ("c.json", "[" * 100_000, r"c\.json: nested too deeply"),
        ("c.json", '{"a":' * 150 + "1" + "}" * 150, r"c\.json: nested too deeply"),
        ("c.json", '{"a": 1' + "0" * 5000 + "}", r"c\.json: .*digits"),
        ("c.yaml", "a: 1" + "0" * 5000 + "\n", r"c\.yaml, line 1: .*digits"),
        ("c.yaml", "a: 2026-13-45\n", r"c\.yaml, line 1: .*month"),
        ("c.yaml", "#" + "x" * (1 << 18), r"c\.yaml: larger than 262144 bytes"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_what_would_take_for_ever_is_refused(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_file(written(tmp_path, text, name))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["[" * 2000, "{a: " * 2000, "- " * 2000, "? " * 2000, "[\n" * 2000, "- [" * 1000])
def test_deep_nesting_is_refused_before_it_is_read_to_its_end(tmp_path, monkeypatch, text):
    scanned, fetch = [], Scanner.fetch_more_tokens
    monkeypatch.setattr(Scanner, "fetch_more_tokens", lambda self: (scanned.append(1), fetch(self))[1])
    with pytest.raises(ConfigError, match=r"config\.yaml: nested too deeply"):
        read_file(written(tmp_path, text))
    assert len(scanned) < 500


@pytest.mark.parametrize("around", ["[]", "{a: }"])
def test_as_many_levels_as_allowed_are_read(tmp_path, around):
    opening, closing = around[:-1], around[-1]
    value = read_file(written(tmp_path, opening * 100 + "x" + closing * 100))
    for _ in range(100):
        (value,) = value.values() if isinstance(value, dict) else value
    assert value == "x"


def test_an_anchor_that_is_used_often_is_no_bomb(tmp_path):
    text = "base: &base {match: {op: conv}, weight: {bits: 4}}\nrules: [" + ", ".join(["*base"] * 1000) + "]\n"
    assert len(read_file(written(tmp_path, text))["rules"]) == 1000


def test_the_shipped_targets_are_files():
    assert {"default", "onnxruntime"} <= set(shipped_names("targets"))
    assert all(shipped("targets", name).is_file() for name in shipped_names("targets"))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no target called 'defualt' comes with qtk; did you mean 'default'"):
        shipped("targets", "defualt")


def test_an_installed_package_holds_them_inside(tmp_path, monkeypatch):
    inside = tmp_path / "qtk" / "configs" / "targets"
    inside.mkdir(parents=True)
    (inside / "mine.yaml").write_text("version: 1\n")
    monkeypatch.setattr(module, "files", lambda package: Path(tmp_path) / package)
    assert shipped("targets", "mine") == inside / "mine.yaml"


@pytest.mark.parametrize("name", shipped_names("targets"))
def test_a_target_names_one_for_its_runtime_that_is_dynamic(name):
    runtime = load_config(name).runtime
    if runtime is not None and runtime.dynamic is not None:
        other = load_config(runtime.dynamic)
        assert other.runtime is not None
        assert other.runtime.contrib_operators == runtime.contrib_operators
        assert other.defaults.activation.dynamic
