import errno
import os
import re
import sys
import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.aimet import encodings_aimet
from qtk.aimet.tensor_names import tensor_names
from qtk.atomic import MARKER, staged_directory
from qtk.errors import CheckError, ConfigError, ExportError
from qtk.export import encodings_json
from qtk.export.onnx import qdq
from qtk.report.stages import Stages
from qtk.runtimes.session import create_session
from qtk.workflow import export as module
from qtk.workflow.export import EXPORTERS, OnnxOptions, export
from tests.exported_files import RUN

EXAMPLE = torch.randn(2, 8)


def simulated(**options):
    torch.manual_seed(0)
    handle = qtk.QuantSim(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), EXAMPLE, **options)
    handle.compute_encodings([EXAMPLE], progress=False)
    return handle.simulation


@pytest.fixture(scope="module")
def sim():
    return simulated()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("config", "warns"), [
    ("default", True),
    ({"version": 1, "extends": "onnxruntime", "defaults": {"weight": {"reduced_range": False}}}, True),
    ("onnxruntime", False), ("onnxruntime_vnni", True), ("qnn_htp", False),
])
def test_saturating_sums_are_warned_of_where_the_file_may_meet_such_a_cpu(config, warns, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(simulated(config=config), EXAMPLE, tmp_path / "out", formats="onnx")
    assert any("on x86 without VNNI" in str(each.message) for each in caught) == warns


def encodings_of(simulation):
    return {site.name: quantizer.encoding for site, quantizer in simulation.quantizers.items()}


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != MARKER)


@pytest.mark.medium
def test_all_formats_hold_the_same_encodings(sim, tmp_path):
    encodings = encodings_of(sim)
    export(sim, EXAMPLE, tmp_path / "out")
    assert names(tmp_path / "out") == [
        "encodings.json", "encodings_aimet_1.0.0.json", "encodings_aimet_2.0.0.json", "model.onnx"
    ]
    sites = tensor_names(sim.model)
    specs = {name: encodings[site].spec for name, site in sites.items()}
    for back in (
        encodings_json.read(tmp_path / "out" / "encodings.json"),
        encodings_aimet.read(tmp_path / "out" / "encodings_aimet_1.0.0.json", specs),
        encodings_aimet.read(tmp_path / "out" / "encodings_aimet_2.0.0.json", specs),
        qdq.read(tmp_path / "out" / "model.onnx"),
    ):
        back = {sites.get(name, name): encoding for name, encoding in back.items()}
        assert set(back) == set(encodings)
        assert all(back[site].equals(encoding) for site, encoding in encodings.items())


@pytest.mark.medium
def test_blocks_are_read_back_too(tmp_path):
    blocks = simulated(config={"version": 1, "defaults": {"weight": {"bits": 4, "symmetric": True,
                                                                     "granularity": "per_block", "block_size": 2}}})
    export(blocks, EXAMPLE, tmp_path / "out")
    assert len(names(tmp_path / "out")) == 4


@pytest.mark.medium
@pytest.mark.parametrize("name", ["encodings_json", "encodings_aimet_0.6.1", "encodings_aimet_2.0.0", "onnx"])
def test_each_format_alone(name, sim, tmp_path):
    export(sim, EXAMPLE, tmp_path / "out", formats=(name, name))
    assert len(names(tmp_path / "out")) == 1


@pytest.mark.medium
def test_every_format_tells_the_stages_that_the_bar_counts(sim, tmp_path, monkeypatch):
    totals, made = [], []

    def counted(total, *, progress):
        totals.append(total)
        made.append(Stages(total, progress=progress))
        return made[0]

    monkeypatch.setattr(module, "Stages", counted)
    monkeypatch.setattr(module, "_run", RUN)
    formats = ["encodings", "aimet_1.0.0", "pt2e", "onnx"]
    export(sim, EXAMPLE, tmp_path / "out", formats=formats, progress=False)
    assert totals == [len(made[0].begun)]
    assert made[0].begun == [
        "encodings.json", "encodings_aimet_1.0.0.json", "float/model.onnx", "model.pt2: writing",
        "model.pt2: reading back", "model.onnx: capturing", "model.onnx: translating", "model.onnx: writing",
        "model.onnx: reading back", "model.onnx: running",
    ]


def test_a_bar_is_shown_unless_it_is_switched_off(sim, tmp_path, capsys):
    export(sim, EXAMPLE, tmp_path / "quiet", formats="encodings_json", progress=False)
    assert capsys.readouterr().err == ""
    export(sim, EXAMPLE, tmp_path / "out", formats="encodings_json")
    assert "exporting: 100%" in capsys.readouterr().err


def test_a_format_that_fails_leaves_nothing(sim, tmp_path, monkeypatch):
    def failing(*args: object, **rest: object) -> None:
        raise ExportError("disk gone")

    monkeypatch.setattr(qdq, "export", failing)
    with pytest.raises(ExportError, match="disk gone"):
        export(sim, EXAMPLE, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_check_runs_before_anything_is_written(tmp_path):
    unfit = qtk.QuantSim(nn.Linear(8, 4).eval(), EXAMPLE).simulation
    with pytest.raises(CheckError, match="weight: no encoding"):
        export(unfit, EXAMPLE, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats_are_refused_with_the_known_ones(sim, tmp_path):
    with pytest.raises(ConfigError, match="unknown export format 'onx'; did you mean 'onnx'"):
        export(sim, EXAMPLE, tmp_path / "out", formats=("onx",))
    with pytest.raises(ExportError, match="no formats to export; choose from encodings"):
        export(sim, EXAMPLE, tmp_path / "out", formats=())
    assert "onnx" in EXPORTERS


def test_nothing_is_overwritten_unasked(sim, tmp_path):
    with staged_directory(tmp_path / "out") as folder:
        (folder / "mine").write_text("mine")
    arguments = (sim, EXAMPLE, tmp_path / "out")
    with pytest.raises(ExportError, match="exists already"):
        export(*arguments, formats=("encodings",))
    assert names(tmp_path / "out") == ["mine"]
    export(*arguments, formats=("encodings_json",), force=True)
    assert names(tmp_path / "out") == ["encodings.json"]


def test_without_onnx_the_extra_is_named(sim, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "qtk.export.onnx.qdq", None)
    monkeypatch.delattr("qtk.export.onnx.qdq", raising=False)
    monkeypatch.setitem(sys.modules, "qtk.export.onnx.float_graph", None)
    monkeypatch.delattr("qtk.export.onnx.float_graph", raising=False)
    for name in ("onnx", "aimet_1.0.0"):
        with pytest.raises(ExportError, match=r"pip install 'qtk\[onnx\]'"):
            export(sim, EXAMPLE, tmp_path / "out", formats=name)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("initializer", "change", "said"),
    [
        ("0.weight.codes", lambda array: array + (array < 100), "the stored integers differ from the codes"),
        ("0.weight.scale", lambda array: array * 2, r"scale\[0\] is"),
        ("1:out.zero_point", lambda array: array + 1, r"zero_point\[0\] is"),
        ("input:input.scale", lambda array: array * np.float32(1 + 2**-23), r"scale\[0\] is"),
    ],
)
def test_a_wrong_initializer_in_the_onnx_file_is_found(initializer, change, said, sim, tmp_path, monkeypatch):
    def write(graph, call, path, **rest):
        original(graph, call, path, **rest)
        model = onnx.load(path)
        (tensor,) = (each for each in model.graph.initializer if each.name == initializer.removesuffix(".codes"))
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(change(array).astype(array.dtype), tensor.name))
        onnx.save(model, path)

    original = qdq.export
    monkeypatch.setattr(qdq, "export", write)
    site = re.escape(re.sub(r"\.(codes|scale|zero_point)$", "", initializer))
    with pytest.raises(ExportError, match=rf"model\.onnx read back differs .*: {site}: {said}.* nothing was written"):
        export(sim, EXAMPLE, tmp_path / "out", formats="onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["axis", "site", "spec"])
def test_a_wrong_node_in_the_onnx_file_is_found(name, sim, tmp_path, monkeypatch):
    def write(graph, call, path, **rest):
        original(graph, call, path, **rest)
        model = onnx.load(path)
        node = next(node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.attribute)
        if name == "axis":
            node.attribute[0].i = 1
        (entry,) = (each for each in model.metadata_props if each.key == "qtk.sites")
        if name == "site":
            entry.value = entry.value.replace('"0.weight":[null', '"0.weight":["another"')
        elif name == "spec":
            entry.value = entry.value.replace("int8", "int4")
        onnx.save(model, path)

    original = qdq.export
    monkeypatch.setattr(qdq, "export", write)
    with pytest.raises(ExportError, match=r"model\.onnx read back differs .*(0\.weight|another)"):
        export(sim, torch.randn(2, 8), tmp_path / "out", formats="onnx")


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    "target",
    ["pathlib.Path.write_text", "onnx_ir.save", "onnx.checker.check_model", "os.fsync", "pathlib.Path.rename"],
)
def test_a_full_disk_is_an_export_error_and_leaves_nothing(target, sim, tmp_path, monkeypatch):
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(ExportError, match="No space left on device"):
            export(sim, EXAMPLE, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bfloat16_is_refused_with_the_way_out_and_the_way_out_works(tmp_path):
    example, model = EXAMPLE.bfloat16(), nn.Linear(8, 4).bfloat16()
    handle = qtk.QuantSim(model, example)
    handle.compute_encodings([example], progress=False)
    message = r"model\.onnx: input, output would be bfloat16; .* export model\.float\(\) instead"
    with pytest.raises(ExportError, match=message):
        handle.export(tmp_path / "out", formats=("encodings", "onnx"))
    assert not list(tmp_path.iterdir())
    way_out = qtk.QuantSim(model.float(), EXAMPLE)
    way_out.compute_encodings([EXAMPLE], progress=False)
    way_out.export(tmp_path / "float", formats=("onnx",))
    with pytest.warns(UserWarning, match=message):
        handle.export(tmp_path / "out", formats=("onnx",), check=False)
    with pytest.raises(ExportError, match=r"model\.onnx cannot be run: input, output are bfloat16; .*model\.float"):
        handle.verify_export(tmp_path / "out", [example], turns=0)


def test_float16_leaves_with_a_warning(tmp_path):
    handle = qtk.QuantSim(nn.Linear(8, 4).half(), EXAMPLE.half())
    handle.compute_encodings([EXAMPLE.half()], progress=False)
    with pytest.warns(UserWarning, match=r"model\.onnx: ONNX .* no integer .* float16 .* model\.float\(\) instead"):
        handle.export(tmp_path / "out", formats=("onnx",))


@pytest.mark.slow
def test_opset_reaches_the_file_and_is_refused_without_one(sim, tmp_path):
    export(sim, EXAMPLE, tmp_path / "out", onnx=OnnxOptions(opset=22))
    assert onnx.load(tmp_path / "out" / "model.onnx").opset_import[0].version == 22
    with pytest.raises(ExportError, match="opset=22 has no effect on the formats encodings; add 'onnx'"):
        export(sim, EXAMPLE, tmp_path / "new", formats="encodings", onnx=OnnxOptions(opset=22))


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(4, 8, 2, batch_first=True)

    def forward(self, x, h, c):
        y, (h, c) = self.net(x, (h, c))
        return y, h, c


def lengths(values):
    return {value.name: [each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim]
            for value in values}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("dynamic_shapes", "frames"), [
    ("batch", 3), ({"x": {0: "batch", 1: "frames"}, "h": {1: "batch"}, "c": {1: "batch"}}, "frames"),
])
def test_axes_and_outputs_have_the_names_that_are_given(dynamic_shapes, frames, tmp_path):
    inputs = torch.randn(5, 3, 4), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    step = qtk.QuantSim(Step().eval(), inputs, dynamic_shapes=dynamic_shapes)
    step.compute_encodings([inputs], progress=False)
    step.export(tmp_path / "out", formats="onnx", output_names=["y", "h_next", "c_next"])
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert lengths(graph.input) == {"x": ["batch", frames, 4], "h": [2, "batch", 8], "c": [2, "batch", 8]}
    assert lengths(graph.output) == {"y": ["batch", frames, 8], "h_next": [2, "batch", 8], "c_next": [2, "batch", 8]}
    others = torch.randn(2, 3, 4), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    session, _ = create_session(tmp_path / "out" / "model.onnx")
    results = session.run(["c_next", "y"], {name: x.numpy() for name, x in zip("xhc", others, strict=True)})
    for result, expected in zip(results, [step.model(*others)[index] for index in (2, 0)], strict=True):
        error = (torch.from_numpy(result) - expected).square().sum()
        assert 10 * torch.log10(expected.square().sum() / error) > 30


@pytest.mark.medium
def test_names_of_outputs_are_one_for_each_and_of_one_onnx_file(sim, tmp_path):
    with pytest.raises(ExportError, match=r"output_names has 2 names, and the model has 1 outputs: output; give"):
        export(sim, EXAMPLE, tmp_path / "out", formats="onnx", onnx=OnnxOptions(output_names=["a", "b"]))
    with pytest.raises(ExportError, match=r"output_names has 'input', which is .* of another output or of an input"):
        export(sim, EXAMPLE, tmp_path / "out", formats="onnx", onnx=OnnxOptions(output_names=["input"]))
    with pytest.raises(ExportError, match=r"output_names=\['a'\] has no effect on the formats encodings; add 'onnx'"):
        export(sim, EXAMPLE, tmp_path / "out", formats="encodings", onnx=OnnxOptions(output_names=["a"]))
    assert not (tmp_path / "out").exists()
