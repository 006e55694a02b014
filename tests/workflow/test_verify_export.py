import dataclasses
import json
import math
import sys
import warnings

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import qtk
from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.errors import CalibrationError, ExportError
from qtk.export.onnx.qdq import export
from qtk.graph.simulation import Simulation
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.report.findings import saturation_remedy
from qtk.report.verdict import EXACT, OFF, ON, Level
from qtk.runtimes import file_runs
from qtk.workflow import verify_export as verification
from qtk.workflow.verify_export import LatencyRequest
from qtk.workflow.verify_files import verify_files
from tests.export.onnx.simulated import nothing, simulate, symmetric
from tests.zoo.streams import frames, stream


def verify_export(model, directory, data, *, turns=0, **options):
    """The verb on a model that was simulated by hand, without measuring latency."""
    simulation = Simulation(model, QuantPlan({}), {})
    return verification.verify_export(simulation, directory, data, turns=turns, progress=False, **options)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 6)

    def forward(self, x, *, shift):
        return {"logits": self.fc(x), "shifted": x * 2 + shift}


def batches(count=3, size=5):
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(size, 8, generator=generator), "shift": torch.randn(size, 8, generator=generator)}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(TwoOutputs(), batches()[0], weight=symmetric(reduced_range=True))
    directory = tmp_path_factory.mktemp("out")
    export(sim, batches()[0], directory / "model.onnx")
    return sim, directory


def spoilt(directory, target, suffix, change):
    """A copy of the file with one initializer changed."""
    model = onnx.load(directory / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name.endswith(suffix):
            array = onnx.numpy_helper.to_array(tensor).copy()
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(array).astype(array.dtype), tensor.name))
    onnx.save(model, target / "model.onnx")
    return target


@pytest.mark.medium
def test_the_exported_file_agrees(written):
    sim, directory = written
    result = verify_export(sim, directory, batches(), turns=0)
    assert result.path == directory / "model.onnx"
    assert result.exact.top1 >= 0.9
    assert result.exact.differing <= 0.01
    assert result.exact.max_difference_scales <= 1.001
    assert result.optimized.max_difference_scales <= 2.001
    assert "optimizations off" in result.exact.runtime
    assert "optimizations on" in result.optimized.runtime
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.runs = ()


class CodesAndFloats(nn.Module):
    """A quantized output, and one in float: ranges that share no encoding are joined."""

    def __init__(self):
        super().__init__()
        self.codes, self.floats = nn.Linear(8, 64), nn.Linear(8, 4)

    def forward(self, x):
        return self.codes(x), torch.cat([self.floats(x).exp() * 100, self.floats(x).sigmoid()], 1)


def test_a_file_is_red_where_one_of_its_outputs_is_wrong(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(64, 8) for _ in range(4)]
    sim = qtk.QuantSim(CodesAndFloats().eval(), batches[0], config="onnxruntime")
    sim.compute_encodings(batches, progress=False)
    sim.export(tmp_path / "right", formats=("onnx",), progress=False)
    assert sim.verify_export(tmp_path / "right", batches, turns=0, progress=False).level is not Level.RED
    (tmp_path / "wrong").mkdir()
    spoilt(tmp_path / "right", tmp_path / "wrong", "", lambda array: array * (1.3 if (array == 100).all() else 1))
    result = sim.verify_export(tmp_path / "wrong", batches, turns=0, progress=False)
    assert result.level is Level.RED
    assert "the least of 2 outputs" in str(result)


def test_it_runs_off_on_and_in_the_exact_mode(written):
    runs = verify_export(*written, batches(1), turns=0).runs
    assert [run.way for run in runs[:3]] == [OFF, ON, EXACT]
    assert [run.runtime.partition(", ")[2] for run in runs[:3]] == [
        "optimizations off", "optimizations on", "optimizations on, session.x64quantprecision=1",
    ]


def test_it_prints_what_it_found(written):
    text = str(verify_export(*written, batches(), turns=0))
    assert "green, compared with the simulation" in text
    assert text.count("100.00%") >= 3  # top-1 of each run
    assert "integer nodes: 1 QLinearAdd, 1 QGemm" in text


@pytest.mark.medium
def test_each_site_is_compared_in_steps_and_the_first_to_depart_is_named(written, tmp_path):
    sim, directory = written
    clean = verify_export(sim, directory, batches(), turns=0).exact
    assert [site.name for site in clean.sites] == ["x:input", "shift:input", "fc:out", "mul:out", "add:out"]
    assert all(site.max_steps <= 1.001 for site in clean.sites)
    doubled = spoilt(directory, tmp_path, "mul:out.scale", lambda array: array * 2)
    moved = verify_export(sim, doubled, batches(), turns=0)
    assert moved.exact.first_departure.name == "mul:out"
    shares = {site.name: site.differing for site in moved.exact.sites}
    assert 0.3 < shares["mul:out"] < 0.7  # half of the codes are odd
    assert shares["x:input"] == shares["fc:out"] == 0.0
    assert moved.level is Level.GREEN  # one step, which is what a runtime may differ by
    assert f"{OFF}: the first tensor to depart is mul:out" in str(moved)


def test_sites_of_the_optimized_run_are_its_codes(written):
    sites = {site.name for site in verify_export(*written, batches(), turns=0).optimized.sites}
    assert {"x:input", "fc:out"} <= sites


def test_sites_are_left_out_where_returning_them_would_change_what_is_fused(written, monkeypatch):
    monkeypatch.setattr(file_runs, "computing_kinds", lambda path: path.name)
    result = verify_export(*written, batches(1), turns=0)
    assert result.exact.sites
    assert result.optimized.sites == ()


def test_a_file_of_other_numbers_is_red_with_the_tensor(written, tmp_path):
    sim, directory = written
    result = verify_export(sim, spoilt(directory, tmp_path, "fc.weight", lambda array: -array), batches(), turns=0)
    assert result.level is Level.RED
    assert "even with the optimizations off: given the values of the simulation, fc:out departs" in str(result)


@pytest.mark.medium
def test_saturating_sums_are_red_with_the_remedy(written, monkeypatch):
    """The optimized run spoilt as saturation would, on a CPU that claims to saturate."""
    sim, directory = written
    monkeypatch.setattr(verification, "integer_sums_saturate", lambda: True)
    original = file_runs._run_session

    def saturating(session, names, feed):
        values = original(session, names, feed)
        options = session.get_session_options()
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        ordinary = options.graph_optimization_level == level and not has_entry(options)
        return {name: value / 2 if ordinary and value.is_floating_point() else value for name, value in values.items()}

    monkeypatch.setattr(file_runs, "_run_session", saturating)
    result = verify_export(sim, directory, batches(), turns=0)
    assert result.level is Level.RED
    assert result.findings[0].cause.startswith("u8 × s8 saturates on this CPU")
    assert result.findings[0].remedy == saturation_remedy(opens=True)


def has_entry(options):
    try:
        return options.get_session_config_entry("session.x64quantprecision") == "1"
    except RuntimeError:  # not set
        return False


@pytest.mark.medium
def test_weights_that_would_saturate_elsewhere_are_yellow(tmp_path):
    torch.manual_seed(0)
    inputs = torch.randn(4, 8)
    for config, levels in (("default", {Level.YELLOW, Level.RED}), ("onnxruntime", {Level.GREEN})):
        sim = qtk.QuantSim(nn.Linear(8, 4).eval(), inputs, config=config)
        sim.compute_encodings([inputs], progress=False)
        with warnings.catch_warnings(action="ignore"):
            sim.export(tmp_path / config, formats=["onnx"])
        assert sim.verify_export(tmp_path / config, [inputs], turns=0).level in levels


@pytest.mark.slow
def test_latency_and_size_are_compared_with_a_float_export(written, tmp_path):
    sim, directory = written
    result = verify_export(sim, directory, batches(1), turns=2)
    assert result.optimized.latency_ms > 0
    assert result.optimized.float_latency_ms > 0
    assert result.exact.latency_ms is None
    assert (result.timing.rows, result.timing.threads) == (1, None)
    many = verify_export(sim, directory, batches(1), turns=1, batch_size=7, threads=1, float_export=directory)
    assert "batch 7, 1 thread" in str(many)
    assert many.to_json()["timing"]["rows"] == 7
    with pytest.raises(ExportError, match="there is no float export"):
        verify_export(sim, directory, batches(1), turns=1, float_export=tmp_path / "absent")
    for options in ({"batch_size": 0}, {"threads": 0}):
        with pytest.raises(ExportError, match="must be at least 1; got 0"):
            verify_export(sim, directory, batches(1), **options)
    assert result.size_bytes == (directory / "model.onnx").stat().st_size
    assert result.float_size_bytes > 0
    assert all(module.mode is Mode.SIMULATE for module in sim.modules() if isinstance(module, Quantizer))
    onnx.save(onnx.load(directory / "model.onnx"), tmp_path / "model.onnx")
    given = verify_export(sim, directory, batches(1), turns=1, float_export=tmp_path)
    assert given.float_size_bytes == (tmp_path / "model.onnx").stat().st_size


@pytest.mark.medium
def test_the_reasons_of_float_nodes_are_those_of_the_plan(tmp_path):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    rule = {"match": {"path": "2"}, "weight": "float", "output": "float"}
    sim = qtk.QuantSim(model, inputs, config={"version": 1, "extends": "onnxruntime", "rules": [rule]})
    sim.compute_encodings([inputs], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    nodes = sim.verify_export(tmp_path / "out", [inputs], turns=0).optimized.nodes
    reasons = {node.op: node.reason for node in nodes.weighted_floats}
    assert reasons == {
        "2": f"parameter in float ({sim.plan.unquantized[Site.parameter('2.weight')]})",
    }


@pytest.mark.slow
def test_the_scores_of_trained_attention_reach_softmax_in_float(tmp_path):
    """QLinearSoftmax, which divides integers, was the largest loss: 1.4 % of the outputs off by more than one step."""
    pytest.importorskip("sklearn")
    digits = load_digits_split()
    sim = qtk.QuantSim(build("digits_vit"), digits.test_images[:2], config="onnxruntime")
    sim.compute_encodings(digits.train_images[:256].split(128), progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    run = sim.verify_export(tmp_path / "out", digits.test_images.split(128), turns=0, progress=False).run(ON)
    assert run.nodes.integer == {"QLinearConv": 1, "QGemm": 13, "MatMulIntegerToFloat": 3, "QLinearMatMul": 3}
    assert run.total.beyond_one_step <= 0.001
    assert run.differing <= 0.05


def test_a_verdict_is_json(written):
    record = json.loads(json.dumps(verify_export(*written, batches(1), turns=0).to_json(), allow_nan=False))
    assert record["level"] == "green"
    assert [run["way"] for run in record["runs"][:3]] == [OFF, ON, EXACT]
    assert record["runs"][0]["sites"][0]["name"] == "x:input"


@pytest.mark.parametrize(
    ("suffix", "change", "scales"),
    [
        ("fc:out.zero_point", lambda array: array + 1, 0.99),
        ("mul:out.scale", lambda array: array * 2, 0.99),
        ("fc.weight", lambda array: -array, 10.0),
    ],
)
def test_a_wrong_file_is_seen(suffix, change, scales, written, tmp_path):
    sim, directory = written
    result = verify_export(sim, spoilt(directory, tmp_path, suffix, change), batches(), turns=0)
    assert result.exact.max_difference_scales >= scales
    assert result.exact.differing > 0.02
    assert result.optimized.max_difference_scales >= scales


def test_the_difference_is_measured_in_the_scales_of_its_own_output(written, tmp_path):
    sim, directory = written
    moved = spoilt(directory, tmp_path, "fc:out.zero_point", lambda array: array + 1)
    result = verify_export(sim, moved, batches(), turns=0)
    scale = float(sim.get_submodule("qtk_quantizers.fc:out").scale)
    assert math.isclose(result.exact.max_difference, scale, rel_tol=1e-4)
    assert math.isclose(result.exact.max_difference_scales, 1.0, rel_tol=1e-4)


def test_top1_counts_rows(written, tmp_path):
    sim, directory = written
    result = verify_export(sim, spoilt(directory, tmp_path, "fc.weight", lambda array: array * 0), batches(), turns=0)
    with torch.no_grad():
        expected = [sim(**batch)["logits"].argmax(-1) for batch in batches()]
    constant = torch.cat(expected) == sim.get_parameter("fc.bias").argmax()
    assert result.exact.top1 == int(constant.sum()) / len(constant)


@pytest.mark.medium
def test_forward_and_data_that_run_themselves(written):
    sim, directory = written
    loader = [(batch, "label") for batch in batches()]
    plain = verify_export(sim, directory, batches(), turns=0)
    by_hand = verify_export(sim, directory, loader, forward=lambda model, batch: model(**batch[0])["logits"], turns=0)
    assert by_hand.to_json() == plain.to_json()

    def loop(model):
        for batch in batches():
            model(**batch)

    assert verify_export(sim, directory, loop, turns=0).to_json() == plain.to_json()


@pytest.mark.medium
def test_outputs_without_a_quantizer_have_no_scales(tmp_path):
    sim = simulate(nn.Linear(8, 4), torch.randn(2, 8), activation=nothing)
    export(sim, torch.randn(2, 8), tmp_path / "model.onnx")
    result = verify_export(sim, tmp_path, [torch.randn(5, 8)], turns=0)
    assert result.exact.max_difference_scales is None
    assert result.exact.max_difference < 1e-5


def test_the_training_flags_come_back(written):
    sim, directory = written
    sim.train()
    verify_export(sim, directory, batches(1), turns=0)
    assert sim.training
    sim.eval()


def test_bad_input(written, tmp_path):
    sim, directory = written
    with pytest.raises(ExportError, match=r"holds no model.onnx to verify"):
        verify_export(sim, tmp_path, batches(), turns=0)
    with pytest.raises(CalibrationError, match="no batches"):
        verify_export(sim, directory, [], turns=0)
    (tmp_path / "model.onnx").write_text("no protobuf")
    with pytest.raises(ExportError, match="cannot load it"):
        verify_export(sim, tmp_path, batches(), turns=0)


class OneInput(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return tuple(x * (factor + 2) for factor in range(self.outputs))


@pytest.mark.medium
def test_a_file_of_another_model(written, tmp_path):
    one, two = (simulate(OneInput(outputs), torch.randn(2, 8)) for outputs in (1, 2))
    with pytest.raises(ExportError, match="the file takes x, shift, the model x; verify a file with"):
        verify_export(one, written[1], [torch.randn(2, 8)], turns=0)
    export(one, torch.randn(2, 8), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="the file returns 1 tensors, the model 2"):
        verify_export(two, tmp_path, [torch.randn(2, 8)], turns=0)
    with pytest.raises(ExportError, match="cannot run the file"):
        verify_export(one, tmp_path, [torch.randn(2, 8, dtype=torch.float64)], turns=0)


def test_without_onnxruntime_the_extra_is_named(written, monkeypatch):
    sim, directory = written
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ExportError, match=r'pip install "qtk\[onnx\]"'):
        verify_export(sim, directory, batches(), turns=0)


@pytest.mark.slow
def test_half_precision_is_verified_and_told_from_integers(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)).eval().half(), torch.randn(8, 32).half()
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    verdict = sim.verify_export(tmp_path / "out", [x], progress=False, turns=0)
    assert verdict.level is Level.YELLOW
    assert verdict.exact.sqnr_db > 35
    assert "simulate and export model.float()" in [finding.remedy for finding in verdict.findings]


class Deep(nn.Module):
    """Layers, and a sine behind them by which a step of the last one may become anything."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.factor = nn.Parameter(torch.tensor(3e3))
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        return self.last((self.layers(x) * self.factor).sin())


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    config = {"version": 1, "rules": [{"match": {"path": "layers.*"}, "output": {"bits": 16}}]}
    sim = qtk.QuantSim(Deep().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    directory = tmp_path_factory.mktemp("deep") / "out"
    with warnings.catch_warnings(action="ignore"):
        sim.export(directory, formats=["onnx"], check=False)
    return sim, directory, x


@pytest.mark.medium
@pytest.mark.parametrize(("factor", "level", "cause"), [
    (1 + 2e-4, Level.YELLOW, "each of its 5 ops computes the values of the simulation"),
    (1.1, Level.RED, "given the values of the simulation, layers.0:out departs"),
])
def test_the_op_that_departs_is_told_from_what_the_model_amplifies(deep, factor, level, cause, tmp_path):
    sim, directory, x = deep
    changed = spoilt(directory, tmp_path, "layers.0.bias", lambda array: array * factor)
    result = sim.verify_export(changed, [x], turns=0, progress=False)
    assert result.exact.sqnr_db < 35
    assert (result.level, cause in str(result)) == (level, True)
    assert len(result.to_json()["runs"][0]["ops"]) == 5


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids, mask):
        hidden = torch.relu(self.first(self.words(ids)))
        return self.head(hidden), (hidden * mask[..., None]).sum(1)


@pytest.mark.medium
def test_padding_has_no_part_in_the_verdict(tmp_path):
    """A file whose row of the padding is wrong, and no other."""
    torch.manual_seed(0)
    ids, mask = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 19, 19]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    sim = qtk.QuantSim(Padded().eval(), {"ids": ids, "mask": mask}, config="onnxruntime")
    batch = {"ids": ids, "mask": mask}
    sim.compute_encodings([batch], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"], check=False)

    def other_padding(array):
        array[19] = 1 - array[19]
        return array

    spoilt(tmp_path / "out", tmp_path / "out", "words.weight", other_padding)
    for valid in ("mask", lambda batch: batch["mask"]):
        counted = sim.verify_export(tmp_path / "out", [batch], turns=0, progress=False, valid=valid)
        assert (counted.level, counted.exact.differing, counted.exact.top1) == (Level.GREEN, 0.0, 1.0)
        assert counted.exact.total.elements == 8 * 5 + 2 * 8  # the sum has no tokens
        assert {site.elements for site in counted.exact.sites} <= {8 * 8, 8 * 5, 2 * 8}
    everything = sim.verify_export(tmp_path / "out", [batch], turns=0, progress=False)
    assert everything.exact.differing > 0
    assert everything.exact.total.elements == 10 * 5 + 2 * 8
    with pytest.raises(CalibrationError, match="valid='other' names no input"):
        sim.verify_export(tmp_path / "out", [batch], turns=0, progress=False, valid="other")


@pytest.mark.slow
def test_each_call_of_a_file_begins_with_the_buffers_of_the_simulation(tmp_path, monkeypatch):
    batches = frames("recurrent", 8)
    sim = qtk.QuantSim(stream("recurrent"), batches[0], config="onnxruntime")
    sim.compute_encodings(batches, progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), check=False)
    verdict = sim.verify_export(tmp_path / "out", batches, turns=2, progress=False)
    assert [each.name for each in verdict.runs[0].outputs] == ["output", "h_out", "steps_out"]
    assert verdict.runs[0].total.max_difference == 0
    assert float(sim.model.h.abs().sum()) == 0
    begun, reference = [], file_runs.FileRuns.reference
    monkeypatch.setattr(file_runs.FileRuns, "reference",
                        lambda runs, inputs: begun.append(int(inputs["steps"])) or reference(runs, inputs))
    (alone,) = verify_files(tmp_path / "out", [*batches], latency=LatencyRequest(0), progress=False)
    assert begun == list(range(8))  # each batch with what the one before returned
    assert alone.level is not Level.RED
    (random,) = verify_files(tmp_path / "out", latency=LatencyRequest(0), progress=False)
    assert random.level is not Level.RED
