"""Where configurations come from."""

import itertools
import json
import warnings
from pathlib import Path

import pytest

from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.config.tensor_setting import TensorSetting
from qtk.errors import ConfigError

AIMET = Path(__file__).parent / "data" / "aimet_npu.json"


@pytest.mark.medium
def test_yaml_json_mapping_and_config_give_the_same(tmp_path):
    value = {"version": 1, "rules": [{"match": {"op": "conv"}, "weight": {"bits": 4}}]}
    (tmp_path / "a.yaml").write_text("version: 1\nrules:\n  - {match: {op: conv}, weight: {bits: 4}}\n")
    (tmp_path / "a.json").write_text(json.dumps(value))
    config = load_config(value)
    assert config.rules[0].weight == TensorSetting(bits=4)
    assert load_config(tmp_path / "a.yaml") == load_config(str(tmp_path / "a.json")) == config
    assert load_config(config) is config


@pytest.mark.parametrize("name", shipped_names("targets"))
def test_shipped_targets_load_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(name)
    assert isinstance(config, QuantConfig)
    needed = [rule for rule in config.rules if not rule.optional and rule.match.path != ("*",)]
    assert not needed, "a shipped rule must not need an op of the user's model"


def chains(config):
    alternatives = [[[link] if isinstance(link, str) else link for link in pattern] for pattern in config.supergroups]
    return {chain for pattern in alternatives for chain in itertools.product(*pattern)}


def test_the_default_target_is_what_the_design_promises():
    config = load_config("default")
    assert config.defaults.weight == TensorSetting(symmetric=True, granularity="per_channel")
    assert config.defaults.activation == TensorSetting(symmetric=False, granularity="per_tensor")
    assert config.defaults.bias == "float"
    for producer in ("conv", "linear", "add"):
        for activation in ("relu", "relu6", "clamp", "hardswish", "silu", "gelu"):
            assert (producer, activation) in chains(config)
    assert ("conv", "batch_norm") in chains(config)
    assert ("conv", "batch_norm", "relu") in chains(config)
    assert ("masked_fill", "softmax") in chains(config)


def test_onnxruntime_convolutions_fuse_with_rectifiers_alone():
    groups = chains(load_config("onnxruntime"))
    assert ("conv", "relu") in groups
    assert ("conv", "gelu") not in groups
    assert ("linear", "gelu") in groups


def test_an_aimet_file_is_recognised_by_its_keys(tmp_path):
    renamed = tmp_path / "target.yaml"
    renamed.write_text(AIMET.read_text())
    with pytest.warns(UserWarning, match="supported_kernels"):
        config = load_config(AIMET)
    with pytest.warns(UserWarning, match="supported_kernels"):
        assert load_config(renamed) == config
    with pytest.warns(UserWarning, match="supported_kernels"):
        assert load_config(json.loads(AIMET.read_text())) == config


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("defualt", "config 'defualt' is neither a file nor shipped with qtk; did you mean 'default'"),
        ("missing/target.yaml", r"config file missing/target\.yaml does not exist; .* default, dynamic, "),
        (Path("missing.json"), r"config file missing\.json does not exist"),
    ],
)
def test_an_unknown_source_is_answered_with_what_there_is(source, said):
    with pytest.raises(ConfigError, match=said):
        load_config(source)


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nrules:\n  - {match: {op: conv}, weight: {bits: 40}}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: rules\[0\]\.weight\.bits: got 40"):
        load_config(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"mine\.yaml: a mapping of keys is expected"):
        load_config(path)


def test_a_config_extends_another_field_by_field():
    base = load_config("default")
    own = {
        "version": 1,
        "extends": "default",
        "defaults": {"weight": {"narrow_range": True}, "bias": {"bits": 16}},
        "rules": [{"match": {"path": "head"}, "weight": {"bits": 8}}],
        "supergroups": [["conv", "relu"], ["mul", "add"]],
        "io": {"outputs": "float"},
    }
    found = load_config(own)
    assert found.defaults.weight.granularity == base.defaults.weight.granularity == "per_channel"
    assert found.defaults.weight.narrow_range is True
    assert found.defaults.activation == base.defaults.activation
    assert found.defaults.bias.bits == 16
    assert found.rules[:-1] == base.rules
    assert found.rules[-1].match.path == ("head",)
    assert found.supergroups == (*base.supergroups, ("conv", "relu"), ("mul", "add"))
    assert (found.io.inputs, found.io.outputs) == ("quantized", "float")


def test_a_cache_is_that_of_the_extension(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("{version: 1, kv_cache: {dtype: int8, granularity: per_head}}")
    assert load_config({"version": 1, "extends": str(base)}).kv_cache.granularity == "per_head"
    extended = load_config({"version": 1, "extends": str(base), "kv_cache": {"dtype": "fp8_e4m3"}}).kv_cache
    assert (extended.dtype, extended.granularity) == ("fp8_e4m3", "per_tensor")


def test_extending_something_unknown_names_the_nearest():
    with pytest.raises(ConfigError, match="default"):
        load_config({"version": 1, "extends": "defalt"})


def test_extended_files_are_looked_for_beside_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text("version: 1\ndefaults: {weight: {bits: 5}}\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("version: 1\nextends: base.yaml\n", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(tmp_path / "mine.yaml").defaults.weight.bits == 5
    with pytest.raises(ConfigError, match=r"base\.yaml does not exist"):
        load_config({"version": 1, "extends": "base.yaml"})


def test_a_circle_is_named(tmp_path):
    for name, other in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.yaml").write_text(f"version: 1\nextends: {other}.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"in a circle: \S+b\.yaml → \S+c\.yaml → \S+b\.yaml;"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("extended", [5, None, ["default"], {"version": 1}])
def test_what_cannot_be_extended_is_quoted(extended):
    with pytest.raises(ConfigError, match=r"^config: extends must be a shipped name or the path of a file, got "):
        load_config({"version": 1, "extends": extended})


@pytest.mark.parametrize("source", [None, 3, ["default"]])
def test_what_is_no_config_is_quoted(source):
    with pytest.raises(ConfigError, match="config must be a shipped name, a path or a mapping, got"):
        load_config(source)
