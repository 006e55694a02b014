import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from qtk.errors import ExportError
from qtk.export.onnx.qdq import export
from qtk.runtimes import session as sessions
from qtk.runtimes.session import EXACT_MODE, create_session, integer_sums_saturate, open_session
from tests.export.onnx.simulated import activations, simulate, symmetric

INPUTS = torch.randn(3, 8)


@pytest.fixture(scope="module")
def integers(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), INPUTS)
    path = tmp_path_factory.mktemp("integers") / "model.onnx"
    export(sim, INPUTS, path)
    return sim, path


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("optimized", [True, False])
def test_a_file_of_integers_runs_as_asked(integers, optimized):
    sim, path = integers
    session, described = open_session(path, sim, optimized=optimized)
    levels = onnxruntime.GraphOptimizationLevel
    wanted = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    assert session.get_session_options().graph_optimization_level == wanted
    assert described.startswith(f"ONNX Runtime {onnxruntime.__version__}, optimizations {'on' if optimized else 'off'}")
    assert ("uint8" in described) == integer_sums_saturate()
    assert EXACT_MODE not in described


def test_threads_of_a_session_that_waits_leave_the_cores_to_others(integers):
    session, _ = create_session(integers[1])
    assert session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.medium
def test_a_file_of_small_floats_runs_without_optimizations(tmp_path):
    """A ReLU before float8 QuantizeLinear: with its optimizations ONNX Runtime drops it."""
    torch.manual_seed(0)
    sim = simulate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), INPUTS, weight=symmetric("fp8_e4m3"),
                   activation=activations("fp8_e4m3", symmetric=True))
    export(sim, INPUTS, tmp_path / "model.onnx")
    session, described = open_session(tmp_path / "model.onnx", sim)
    levels = onnxruntime.GraphOptimizationLevel
    assert session.get_session_options().graph_optimization_level == levels.ORT_DISABLE_ALL
    assert described.endswith("optimizations off (they take float8 for integers)")
    found, = session.run(None, {session.get_inputs()[0].name: INPUTS.numpy()})
    assert np.array_equal(found, sim(INPUTS).detach().numpy())
    assert (found == 0).any()


def test_what_is_no_file_is_refused_with_its_name(tmp_path, integers):
    with pytest.raises(ExportError, match=r"absent\.onnx: ONNX Runtime .* cannot load it"):
        open_session(tmp_path / "absent.onnx", integers[0])


LEVELS = onnxruntime.GraphOptimizationLevel


def sums(*columns):
    """A file that multiplies its uint8 input with int8 matrices, one operator for each name given."""
    weight = np.full((4, 1), 127, np.int8)
    nodes = [helper.make_node("MatMulInteger", ["x", name], [f"y{index}"]) for index, name in enumerate(columns)]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.INT32, [1, 1]) for node in nodes]
    graph = helper.make_graph(
        nodes, "sums", [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 4])], outputs,
        [numpy_helper.from_array(weight, name) for name in dict.fromkeys(columns)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def as_on(monkeypatch, *, saturating):
    """Sessions are opened as on a CPU whose sums saturate, or do not."""
    monkeypatch.setattr(sessions, "integer_sums_saturate", lambda: saturating)


def is_exact(session):
    try:
        return session.get_session_options().get_session_config_entry(EXACT_MODE) == "1"
    except RuntimeError:  # not set
        return False


def test_largest_codes_are_summed_exactly_on_every_cpu():
    session, _ = create_session(sums("w"))
    (result,) = session.run(None, {"x": np.full((1, 4), 255, np.uint8)})
    assert result.item() == 4 * 255 * 127
    assert is_exact(session) == integer_sums_saturate()


@pytest.mark.parametrize(("result", "saturate"), [(4 * 255 * 127, False), (2 * 32767, True)])
def test_the_probe_compares_the_sum_of_the_largest_products(result, saturate, monkeypatch):
    class Session:
        def run(self, names, feed):
            return [np.array([[result]], np.int32)]

    monkeypatch.setattr(sessions, "_session", lambda *_, **__: Session())
    assert integer_sums_saturate.__wrapped__() is saturate


def test_a_cpu_that_saturates_gets_the_exact_mode_and_is_told(monkeypatch):
    as_on(monkeypatch, saturating=True)
    session, described = create_session(sums("w"))
    assert is_exact(session)
    assert session.get_session_options().graph_optimization_level == LEVELS.ORT_ENABLE_ALL
    assert described.endswith(
        "optimizations on, session.x64quantprecision=1 (u8 × s8 sums saturate on this CPU without it)"
    )


def test_a_file_that_the_exact_mode_refuses_runs_without_optimizations(monkeypatch, capfd):
    """Two operators that share a weight."""
    as_on(monkeypatch, saturating=True)
    session, described = create_session(sums("w", "w"))
    assert not is_exact(session)
    assert session.get_session_options().graph_optimization_level == LEVELS.ORT_DISABLE_ALL
    assert "optimizations off (u8 × s8 sums saturate on this CPU" in described
    assert "onnxruntime" not in capfd.readouterr().err


@pytest.mark.parametrize(("saturating", "optimized"), [(False, True), (False, False), (True, False)])
def test_otherwise_the_exact_mode_is_off(saturating, optimized, monkeypatch):
    as_on(monkeypatch, saturating=saturating)
    session, described = create_session(sums("w", "w"), optimized=optimized)
    assert not is_exact(session)
    assert described.endswith(f"optimizations {'on' if optimized else 'off'}")


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("saturating", [True, False])
def test_who_opens_a_file_is_told_of_its_copy(saturating, optimized, integers, monkeypatch):
    as_on(monkeypatch, saturating=saturating)
    session, described = create_session(integers[1], optimized=optimized)
    assert session.get_session_options().graph_optimization_level == (
        LEVELS.ORT_ENABLE_ALL if optimized else LEVELS.ORT_DISABLE_ALL)
    switched = f"optimizations {'on' if optimized else 'off'}"
    copied = ", with uint8 weights (u8 × s8 sums saturate on this CPU)"
    assert described.endswith(switched + (copied if saturating else ""))
    assert not is_exact(session)



ORDINARY_ON_PURPOSE = {
    "tests/export/onnx/without_vnni.py": "shows what saturates in the ordinary mode",
    "benchmarks/models/bench_recurrent.py": "profiles, and compares no number",
}
"""Files that open sessions of their own, each with the reason."""


def test_sessions_are_opened_in_one_place():
    root = Path(__file__).resolve().parents[2]
    opened = [
        str(path.relative_to(root))
        for folder in ("qtk", "tests", "benchmarks") for path in (root / folder).rglob("*.py")
        if re.search(r"onnxruntime\.InferenceSession\(\w", path.read_text(encoding="utf-8"))
    ]
    assert sorted(opened) == sorted(["qtk/runtimes/session.py", *ORDINARY_ON_PURPOSE])
