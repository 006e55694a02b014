"""The rules of runtimes: what a target file can say, and that the shipped ones say it all."""

import pytest

from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.config.runtime import KernelRow, Kernels, Rates
from qtk.config.schema import check_op_names
from qtk.errors import ConfigError
from qtk.planning.patterns import RULE_NAMES

RULE = {"name": "signed", "says": "s", "source": "doc", "fix": "f",
        "check": "tensors", "of": "weights", "dtype": "int8"}


def config(*rules, **changes):
    runtime = {"target": "mine", "name": "Mine 1", "formats": ["onnx"],
               "sources": {"doc": {"url": "https://example.org", "version": "1"}}, "rules": list(rules)}
    return {"version": 1, "runtime": {**runtime, **changes}}


def test_a_target_without_a_runtime_has_no_name_for_files():
    assert load_config({"version": 1}).target is None
    assert load_config(config(RULE)).target == "mine"


def test_an_extension_keeps_the_runtime_or_names_its_own():
    assert load_config({"version": 1, "extends": "tensorrt"}).target == "tensorrt"
    assert load_config({**config(RULE), "extends": "tensorrt"}).target == "mine"


@pytest.mark.parametrize(("rule", "said"), [
    ({"dtype": "int99"}, "rules[0].dtype: unknown dtype 'int99'"),
    ({"source": "dco"}, "unknown source 'dco'; did you mean 'doc'"),
    ({"check": "tensor"}, "got 'tensor'; must be 'tensors'"),
    ({"of": "weight"}, "rules[0].of: got 'weight'"),
    ({"granulraity": "per_tensor"}, "granulraity: unknown key"),
    ({"check": "opset", "of": None}, "unknown key"),
])
def test_a_mistake_in_a_rule_is_told_with_its_path(rule, said):
    with pytest.raises(ConfigError) as caught:
        load_config(config({**RULE, **rule}))
    assert said in str(caught.value)


def test_a_rule_that_says_nothing_is_refused():
    empty = {key: value for key, value in RULE.items() if key != "dtype"}
    with pytest.raises(ConfigError, match="allows everything"):
        load_config(config(empty))
    with pytest.raises(ConfigError, match="needs inputs or output"):
        load_config(config({**{key: RULE[key] for key in ("name", "says", "source", "fix")}, "check": "neighbours",
                            "op": "conv"}))


def test_rules_have_names_of_their_own():
    with pytest.raises(ConfigError, match="is the name of another rule"):
        load_config(config(RULE, RULE))


def test_ops_that_rules_name_are_known():
    check_op_names(load_config(config({**RULE, "op": "conv"})), RULE_NAMES)
    with pytest.raises(ConfigError, match=r"runtime\.rules\[0\]\.op: unknown op 'convv'; did you mean 'conv'"):
        check_op_names(load_config(config({**RULE, "op": "convv"})), RULE_NAMES)
    kernels = {"source": "doc", "rows": [{"op": "covn", "float": 1.0}], "others": {"float": 1.0}, "quantize": 1.0,
               "dequantize": 1.0}
    with pytest.raises(ConfigError, match=r"runtime.kernels.rows\[0\].op: .*'covn'"):
        check_op_names(load_config(config(RULE, kernels=kernels)), RULE_NAMES)
    with pytest.raises(ConfigError, match="unknown source 'dco'"):
        load_config(config(RULE, kernels={**kernels, "source": "dco"}))


def test_the_row_of_an_op_is_by_its_kind_then_by_its_family():
    kernels = Kernels(source="doc", rows=(KernelRow(op=("conv",), float=2.0), KernelRow(op=("conv1d",), float=3.0)),
                      others=Rates(float=9.0), quantize=1.0, dequantize=1.0)
    found = [kernels.row(names).float for names in (("conv2d", "conv"), ("conv1d", "conv"), ("add", "add"))]
    assert found == [2.0, 3.0, 9.0]


def test_what_is_not_checked_has_a_source_too():
    given = config(RULE)
    given["runtime"]["unchecked"] = [{"says": "sums are fused", "source": "doc"}]
    assert load_config(given).runtime.unchecked[0].says == "sums are fused"
    given["runtime"]["unchecked"] = [{"says": "sums are fused", "source": "dco"}]
    with pytest.raises(ConfigError, match=r"unchecked\[0\].source: unknown source 'dco'; did you mean 'doc'"):
        load_config(given)


@pytest.mark.parametrize("name", sorted(set(shipped_names("targets")) - {"default"}))
def test_every_shipped_target_names_its_runtime_its_rules_and_their_sources(name):
    shipped = load_config(name)
    check_op_names(shipped, RULE_NAMES)
    assert shipped.runtime is not None
    assert shipped.runtime.target == name
    stated = (*shipped.runtime.rules, *shipped.runtime.unchecked)
    measured = set() if shipped.runtime.kernels is None else {shipped.runtime.kernels.source}
    assert {each.source for each in stated} | measured == set(shipped.runtime.sources)
    assert {"activations", "weights"} <= {rule.name for rule in shipped.runtime.rules}
