"""Files that keep the rules of their targets, and each rule broken once in a file that says it keeps them."""

import json
import re

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import ConfigError, ExportError
from qtk.export import encodings_json
from qtk.workflow.check_target import check_target, runtimes
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated

NOTHING = "nothing of this model would be quantized"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 32, 3), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))


def exported(folder, config, formats="onnx", **options):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(Net().eval(), x, config=config, **options)
    sim.compute_encodings([x], progress=False)
    sim.export(folder, formats=formats)
    return folder


def broken(path, target=None):
    (check,) = check_target(path, target)
    return {(each.rule.name, each.place) for each in check.violations}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("target", sorted(runtimes()))
def test_what_a_target_exports_keeps_its_rules(target, tmp_path):
    formats = runtimes()[target].formats
    try:
        folder = exported(tmp_path / "out", target, formats=[each for each in ("onnx", "pt2e") if each in formats]
                          or list(formats))
    except ConfigError as error:
        if NOTHING not in str(error):
            raise
        pytest.skip("its blocks are longer than the layer")
    checks = check_target(folder)
    assert [check.runtime.target for check in checks] == [target] * len(checks)
    assert sum(check.tensors for check in checks) > 0
    assert [str(each) for check in checks for each in check.violations] == []


QUICK = {("tensorrt", "gathered_experts"), ("xnnpack", "all_transposed"), ("qnn_htp", "norms"), ("x86_inductor", "vit"),
         ("coreml", "inverted_residual"), ("tensorrt_fp8", "masked_fill"), ("onnxruntime", "recurrent_cells"),
         ("vllm_w8a8", "norms")}
OFTEN_FLOAT = {"all_transposed", "projected_lstm", "recurrent_cells"}
ANGLES = {(target, name) for target in ("litert", "xnnpack") for name in ("scalar_arithmetic", "no_grad")}
"""A sine or a floor, whose argument 8 bits would round, reads what a layer makes: that stays in float."""


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("target", "name"), [
    pytest.param(target, name, marks=() if (target, name) in QUICK else pytest.mark.slow)
    for target in sorted(runtimes()) for name in ZOO
])
def test_the_zoo_keeps_the_rules_of_every_target(target, name, tmp_path):
    try:
        sim = simulated(name, config=target)
    except ConfigError as error:
        if NOTHING in str(error) and (target.startswith(("weight_only", "vllm")) or name in OFTEN_FLOAT):
            pytest.skip("it has no layer that the target quantizes")
        raise
    sim.export(tmp_path / "out", formats=runtimes()[target].formats[0])
    found = [str(each) for check in check_target(tmp_path / "out") for each in check.violations]
    if (target, name) in ANGLES:
        found = [each for each in found if "its result is read in float" not in each]
    assert found == []


def _zero_point_of_an_activation(model):
    _set(model, "relu:out.zero_point", lambda array: array + np.int8(3))


def _unsigned_activations(model):
    for name in ("x:input", "relu:out", "mean:out", "fc:out"):
        _set(model, f"{name}.zero_point", lambda array: array.astype(np.uint8))


def _one_scale_for_a_convolution(model):
    _set(model, "conv.weight.scale", lambda array: array[0].reshape(()))


def _set(model, name, change):
    (initializer,) = (each for each in model.graph.initializer if each.name == name)
    initializer.CopyFrom(numpy_helper.from_array(np.array(change(numpy_helper.to_array(initializer))), name))


def _a_quantized_bias(model):
    (conv,) = (node for node in model.graph.node if node.op_type == "Conv")
    bias = next(each for each in model.graph.initializer if each.name == conv.input[2])
    codes = np.zeros(numpy_helper.to_array(bias).shape, np.int32)
    model.graph.initializer.append(numpy_helper.from_array(codes, "b.codes"))
    node = onnx.helper.make_node("DequantizeLinear", ["b.codes", "conv.weight.scale"], ["b.real"], "conv.bias", axis=0)
    model.graph.node.insert(0, node)
    conv.input[2] = "b.real"


def _an_old_opset(model):
    model.opset_import[0].version = 12


def _an_operator_of_its_own(model):
    next(node for node in model.graph.node if node.op_type == "Conv").op_type = "QLinearConv"


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("plant", "rule", "place"), [
    (_zero_point_of_an_activation, "symmetric", "relu:out"),
    (_unsigned_activations, "activations", "relu:out"),
    (_one_scale_for_a_convolution, "per_channel", "conv.weight"),
    (_a_quantized_bias, "biases", "conv.bias"),
    (_an_old_opset, "opset", "opset"),
    (_an_operator_of_its_own, "operators", "conv"),
])
def test_a_violation_planted_in_a_tensorrt_file_is_found(plant, rule, place, tmp_path):
    path = exported(tmp_path / "out", "tensorrt") / "model.onnx"
    assert broken(path) == set()
    model = onnx.load(path)
    plant(model)
    onnx.save(model, path)
    found = broken(path)
    assert rule in {name for name, _ in found}
    assert any(where.startswith(place) for name, where in found if name == rule)


BLOCKS_OF_16 = {"version": 1, "extends": "weight_only_int4",
                "rules": [{"match": {"op": "linear"}, "weight": {"granularity": "per_block", "block_size": 16}}]}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("config", "formats", "target", "rule", "place"), [
    (BLOCKS_OF_16, "onnx", None, "block_size", "fc.weight"),
    (BLOCKS_OF_16, "pt2e", None, "block_size", "fc.weight"),
    (BLOCKS_OF_16, "encodings_json", None, "block_size", "fc.weight"),
    ("onnxruntime_vnni", "onnx", "onnxruntime", "saturation", "conv.weight"),
    ("onnxruntime", "onnx", "openvino", "biases", "conv.bias"),
    ("onnxruntime", "onnx", "dynamic", "activations", "x:input"),
    ("onnxruntime_vnni", "onnx", "tensorrt_fp8", "weights", "conv.weight"),
    ("x86_inductor", "pt2e", "xnnpack", "integer_layers", "conv2d"),
    ("x86_inductor", "pt2e", "xnnpack", "activations", "conv:in[0]"),
    ("xnnpack", "pt2e", "x86_inductor", "activations", "x:input"),
    ("onnxruntime", "pt2e", "coreml", "symmetric", "x:input"),
    ("openvino", "onnx", "qnn_htp", "activations", "x:input"),
    ("openvino", "encodings_json", "qnn_htp", "activations", "x:input"),
    ("tensorrt", "onnx", "dynamic_per_token", "activations", "x:input"),
])
def test_a_file_for_another_runtime_breaks_its_rules(config, formats, target, rule, place, tmp_path):
    folder = exported(tmp_path / "out", config, formats=formats)
    (path,) = folder.glob("[a-z]*")
    assert place in {where for name, where in broken(path, target) if name == rule}


def test_a_role_of_what_has_no_encoding_is_refused(tmp_path):
    """A mistyped name would leave its weight to be judged as an activation."""
    spec = QuantSpec(dtype("int8"), symmetric=True)
    encodings = {"fc.weight": Encoding(spec, torch.tensor([0.5]))}
    path = tmp_path / "encodings.json"
    encodings_json.export(encodings, path, parameters={"fc.wieght": "weights"})
    with pytest.raises(ExportError, match=r"parameters names fc\.wieght, .*no encoding; did you mean 'fc\.weight'\?"):
        check_target(path, "qnn_htp")
    encodings_json.export(encodings, path, parameters={"out.weight": "weights"}, dynamic={"out.weight": spec})
    check_target(path, "qnn_htp")


@pytest.mark.medium
def test_a_target_may_be_a_file_of_ones_own(tmp_path):
    path = exported(tmp_path / "out", "onnxruntime") / "model.onnx"
    assert broken(path, {"version": 1, "extends": "openvino"})
    with pytest.raises(ConfigError, match=r"is for no runtime in particular.*tensorrt"):
        check_target(path, "default")
    with pytest.raises(ConfigError, match=r"'tensort' is neither a file nor shipped with qtk; did you mean 'tensorrt'"):
        check_target(path, "tensort")


@pytest.mark.medium
def test_a_file_that_names_no_target_needs_one(tmp_path):
    path = exported(tmp_path / "out", "default") / "model.onnx"
    with pytest.raises(ExportError, match=r"does not say which target it is for; name one.*xnnpack"):
        check_target(path)
    model = onnx.load(path)
    model.metadata_props.add(key="qtk.target", value="mine")
    onnx.save(model, path)
    with pytest.raises(ConfigError, match=r"for the target 'mine', which does not come with qtk.*xnnpack"):
        check_target(path)


@pytest.mark.medium
def test_a_file_in_a_format_that_the_runtime_does_not_take_is_an_error(tmp_path):
    folder = exported(tmp_path / "out", "xnnpack", formats=["onnx", "encodings_json"])
    with pytest.raises(ExportError, match=r"xnnpack \(.*\) takes pt2e; export formats=\('pt2e',\)"):
        check_target(folder)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ExportError, match="files to check end in"):
        check_target(tmp_path / "model.bin")


@pytest.mark.medium
def test_a_directory_of_exports_names_them_and_an_unknown_target_comes_first(tmp_path):
    with pytest.raises(ExportError, match=r"holds no .onnx.*; name a directory that sim.export wrote"):
        check_target(tmp_path)
    folder = exported(tmp_path / "net" / "w8a8", "tensorrt", formats=["onnx", "encodings_json"])
    with pytest.raises(ExportError, match=rf"name one of {re.escape(str(folder))}$"):
        check_target(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'tensorrt'"):
        check_target(tmp_path, "tensort")


@pytest.mark.medium
def test_every_format_carries_the_target(tmp_path):
    folder = exported(tmp_path / "out", "weight_only_int4", formats=["onnx", "pt2e", "encodings_json"])
    assert sorted(check.path.name for check in check_target(folder)) == ["encodings.json", "model.onnx", "model.pt2"]
    assert json.loads((folder / "encodings.json").read_text())["target"] == "weight_only_int4"


@pytest.mark.medium
def test_a_saved_simulation_keeps_its_target(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(Net().eval(), x, config="tensorrt")
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "saved")
    loaded = qtk.QuantSim.load(tmp_path / "saved", Net().eval(), x)
    loaded.export(tmp_path / "out", formats="onnx")
    assert onnx.load(tmp_path / "out" / "model.onnx").metadata_props
    assert check_target(tmp_path / "out")[0].runtime.target == "tensorrt"


@pytest.mark.medium
def test_the_text_says_what_was_checked(tmp_path):
    (check,) = check_target(exported(tmp_path / "out", "openvino"))
    assert str(check).endswith("4 rules: all kept")
    (check,) = check_target(tmp_path / "out", "onnxruntime")
    assert "saturation: on x86 without VNNI" in str(check)
    assert "https://onnxruntime.ai" in str(check)


@pytest.mark.medium
def test_rules_that_the_format_says_nothing_of_are_not_counted(tmp_path):
    folder = exported(tmp_path / "out", "qnn_htp", formats=["encodings_json", "onnx"])
    (whole,) = check_target(folder / "model.onnx")
    assert str(whole).endswith("4 rules: all kept")
    (check,) = check_target(folder / "encodings.json")
    assert [rule.name for rule in check.unchecked] == ["weights", "per_channel"]
    assert str(check).endswith("2 of 4 rules (encodings.json does not say: weights, per_channel): all kept")


@pytest.mark.parametrize("target", ["qnn_htp", "weight_only_int4"])
def test_a_weight_that_an_op_quantizes_for_itself_is_judged_as_a_weight(target, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            x = self.emb(ids)
            return self.head(x) @ self.emb.weight

    sim = qtk.QuantSim(Tied().eval(), torch.tensor([[1, 2]]), config=target)
    sim.compute_encodings([torch.tensor([[1, 2]])], progress=False)
    sim.export(tmp_path / "out", formats=["encodings"])
    (check,) = check_target(tmp_path / "out" / "encodings.json")
    assert not check.violations


@pytest.mark.parametrize(("sizes", "found"), [((1, 16), ["blocks of 16"]), ((1, 32), []), ((1, -1), []),
                                              ((1, 1), ["blocks of 1"]), ((16, 1), ["blocks of 16"])])
def test_the_length_of_blocks_in_encodings_is_that_of_the_axis_they_cut(sizes, found, tmp_path):
    spec = QuantSpec(dtype("int4"), PerBlock(sizes), symmetric=True)
    encodings_json.export({"fc.weight": Encoding(spec, torch.ones(4, 2), None)}, tmp_path / "encodings.json",
                          target="weight_only_int4")
    (check,) = check_target(tmp_path / "encodings.json")
    assert [each.found for each in check.violations] == found


def test_a_parameter_with_one_scale_at_an_edge_is_judged_by_its_role(tmp_path):
    weight = Encoding(QuantSpec(dtype("int8"), symmetric=True), torch.ones(1), None)
    path = tmp_path / "encodings.json"
    for parameters, rules in (({"add:in[1]": "weights"}, {"weights"}), ({"add:in[1]": "constants"}, set()),
                              ({}, {"activations"}), (None, {"activations"})):
        encodings_json.export({"add:in[1]": weight}, path, target="weight_only_int4", parameters=parameters)
        assert {name for name, _ in broken(path)} == rules


@pytest.mark.medium
def test_a_rule_of_which_encodings_say_a_part_is_named_with_what_is_left(tmp_path):
    torch.manual_seed(0)
    rule = {"check": "tensors", "of": "weights", "source": "doc", "says": "weights are int8", "fix": "let them be"}
    codes = {"codes": [-127, 127]}
    rules = [{**rule, "name": "whole", "dtype": "int8"}, {**rule, "name": "part", "dtype": "int8", **codes},
             {**rule, "name": "nothing", **codes}]
    own = {"version": 1, "extends": "default", "runtime": {
        "target": "mine", "name": "Mine", "formats": ["encodings", "onnx"], "rules": rules,
        "sources": {"doc": {"url": "https://example.org/doc", "version": "7"}}}}
    folder = exported(tmp_path / "out", own, formats=["encodings_json", "onnx"])
    (check,) = check_target(folder / "encodings.json", own)
    assert [(each.name, fields) for each, fields in check.partly_checked] == [("part", ("codes",))]
    assert str(check).endswith("2 of 3 rules (encodings.json does not say: nothing, codes of part): all kept")
    (check,) = check_target(folder / "model.onnx", own)
    assert check.partly_checked == ()
    assert {each.rule.name for each in check.violations} == {"part", "nothing"}  # codes of -128, which ONNX holds
    assert ", 3 rules: " in str(check)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("bits", "found"), [(2, "int2"), (3, "int3"), (4, None), (5, "int5"), (8, None)])
def test_weights_of_any_width_are_judged_by_it_in_programs_as_in_encodings(bits, found, tmp_path):
    rule = {"match": {"op": "linear"}, "weight": {"dtype": f"int{bits}"}}
    folder = exported(tmp_path / "out", {"version": 1, "extends": "coreml", "rules": [rule]},
                      formats=["pt2e", "encodings_json"])
    target = {"version": 1, "extends": "coreml", "runtime": {
        "target": "mine", "name": "Mine", "formats": ["pt2e", "encodings"],
        "sources": {"doc": {"url": "https://example.org/doc", "version": "7"}},
        "rules": [{"name": "weights", "check": "tensors", "of": "weights", "dtype": ["int8", "int4"],
                   "source": "doc", "says": "weights are int8 or int4", "fix": "weight: {dtype: int4}"}]}}
    for name in ("model.pt2", "encodings.json"):
        (check,) = check_target(folder / name, target)
        assert [(each.place, each.found) for each in check.violations] == [("fc.weight", found)] * (found is not None)


@pytest.mark.medium
def test_inductor_takes_inputs_in_seven_bits_of_uint8(tmp_path):
    """As torchao's quantizer writes them with reduce_range; no other width, and none in XNNPACK."""
    paths = {bits: exported(tmp_path / str(bits), {"version": 1, "extends": "x86_inductor", "defaults": {
        "activation": {"dtype": f"uint{bits}", "symmetric": False}}}, formats="pt2e") / "model.pt2" for bits in (6, 7)}
    assert broken(paths[7]) == set()
    assert {name for name, _ in broken(paths[6])} == {"activations"}
    assert "activations" in {name for name, _ in broken(paths[7], "xnnpack")}


@pytest.mark.medium
def test_exported_encodings_say_what_their_parameters_are(tmp_path):
    path = exported(tmp_path / "out", "qnn_htp", formats="encodings_json") / "encodings.json"
    assert json.loads(path.read_text())["parameters"] == {
        "conv.weight": "weights", "conv.bias": "biases", "fc.weight": "weights", "fc.bias": "biases"}


@pytest.mark.slow
def test_linear_layers_by_lpbq(tmp_path):
    """Blocks whose scales are integers times one number for each channel; ours and AIMET's file, and its checker."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 48), nn.ReLU(), nn.Linear(48, 8)).eval(), torch.randn(16, 128)
    sim = qtk.QuantSim(model, x, config="qnn_htp_lpbq")
    sim.compute_encodings([x], progress=False)
    assert "2.weight" not in sim.quantizers  # 48 inputs are no blocks of 64
    sim.export(tmp_path / "out", formats=["encodings_json", "encodings_aimet_1.0.0", "onnx"])
    assert [str(each) for check in check_target(tmp_path / "out") for each in check.violations] == []
    data = json.loads((tmp_path / "out" / "encodings_aimet_1.0.0.json").read_text())
    (weight,) = [each for each in data["param_encodings"] if each["name"] == "0.weight"]
    assert (weight["enc_type"], weight["block_size"], weight["compressed_bw"], weight["bw"]) == ("LPBQ", 64, 4, 8)
    assert set(weight["per_block_int_scale"]) <= set(range(1, 17))
    scale = sim.encodings()["0.weight"].scale
    integers = torch.tensor(weight["per_block_int_scale"]).reshape(scale.shape)
    assert torch.equal(integers.float() * torch.tensor(weight["scale"])[:, None], scale)
    assert broken(exported(tmp_path / "plain", "qnn_htp") / "model.onnx", "qnn_htp_lpbq") == set()  # int8 by channel
    wide = {"version": 1, "extends": "qnn_htp", "rules": [{"match": {"op": "linear"}, "weight": {"dtype": "int16"}}]}
    assert ("linear", "fc.weight") in broken(exported(tmp_path / "wide", wide) / "model.onnx", "qnn_htp_lpbq")


def test_targets_that_extend_another_leave_sites_as_precise_as_it_does():
    assert load_config("qnn_htp_lpbq").precise == load_config("qnn_htp").precise == 16
    assert load_config("onnxruntime").precise == "float"
    assert load_config("default").precise == 16


class Residual(nn.Module):
    """A block whose skip is a layer too, and one whose skip is what the block reads."""

    def __init__(self):
        super().__init__()
        self.first, self.skip, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = (self.first(x) + self.skip(x)).relu()
        return x + self.second(x)


def test_tensorrt_computes_a_convolution_and_the_residual_sum_together():
    x = torch.randn(1, 3, 6, 6)
    plan = qtk.QuantSim(Residual().eval(), x, config="tensorrt").plan
    sites = {site.name for site in plan if site.port}
    assert sites in ({"x:input", "relu:out", "add_1:out", branch} for branch in ("first:out", "skip:out"))
