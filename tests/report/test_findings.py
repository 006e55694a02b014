"""Each condition, in runs made up here."""

import math
from dataclasses import replace

import pytest

from qtk.report.difference import Difference
from qtk.report.findings import Circumstances, agrees, judge, judge_alone, saturation_remedy
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes
from qtk.report.verdict import EXACT, OFF, ON, OPENVINO, FileRun, Level


def run(way, sqnr_db=math.inf, beyond=0.0, **fields):
    return FileRun(way, f"runtime {way}", Difference("outputs", 1000, 0.5, beyond, 1.0, 1.0, sqnr_db), **fields)


GOOD = {way: run(way) for way in (OFF, ON, EXACT)}


def judged(*changed, **circumstances):
    return judge([*(GOOD | {each.way: each for each in changed}).values()], Circumstances(**circumstances))


def test_nothing_is_found_where_nothing_is_wrong():
    assert judged() == ()


@pytest.mark.parametrize(("sqnr_db", "beyond", "agreeing"), [
    (50.0, 0.2, True), (20.0, 0.0005, True), (20.0, 0.01, False), (34.0, None, False), (36.0, None, True),
])
def test_a_run_agrees_within_one_step_or_with_a_high_sqnr(sqnr_db, beyond, agreeing):
    assert agrees(run(ON, sqnr_db, beyond)) is agreeing


def outputs(*sqnrs_db, beyond=None, elements=1000):
    """Differences of outputs, the first quantized and right."""
    first = Difference("codes", 100_000, 0.0, 0.0, 0.0, 0.0, math.inf)
    return first, *(Difference(f"floats_{index}", elements, 0.5, beyond, 1.0, None if beyond is None else 2.0, sqnr_db)
                    for index, sqnr_db in enumerate(sqnrs_db))


def test_each_output_is_judged_by_itself():
    wrong = [run(way, 34.0, 0.0, outputs=outputs(50.0, 11.4)) for way in (OFF, ON, EXACT)]
    assert not agrees(wrong[0])
    assert not agrees(wrong[0], (35.0, 35.0, 12.0))
    assert agrees(wrong[0], (35.0, 35.0, 11.0))
    assert judged(*wrong)[0].level is Level.RED
    (amplified, *_) = judged(*wrong, tolerances_db=(35.0, 35.0, 11.0))
    assert amplified.level is Level.YELLOW
    assert "output floats_1 is 11.4 dB from the simulation" in amplified.cause
    changed = [run(OFF, outputs=outputs(50.0)), run(ON, 34.0, 0.0, outputs=outputs(20.0)),
               run(EXACT, outputs=outputs(50.0))]
    assert "optimizations change the results" in judged(*changed)[0].cause


def test_a_value_on_an_edge_in_a_small_output_counts_for_nothing_beside_others():
    edge = run(ON, 50.0, 1e-5, outputs=outputs(20.0, beyond=0.1, elements=10))
    assert agrees(edge)
    alone = FileRun(ON, "runtime", edge.outputs[1], outputs=edge.outputs[1:])
    assert not agrees(alone)


def test_a_file_that_is_wrong_without_optimizations_is_red():
    (first, *_) = judged(run(OFF, 10.0, 0.5), run(ON, 10.0, 0.5), run(EXACT, 10.0, 0.5))
    assert first.level is Level.RED
    assert "even with the optimizations off" in first.cause


def test_saturation_is_told_from_what_the_optimizer_changes():
    spoilt = run(ON, 12.0, 0.4)
    (saturated,) = judged(spoilt, saturates=True)
    assert (saturated.level, saturated.remedy) == (Level.RED, saturation_remedy(opens=True))
    (changed,) = judged(spoilt, run(EXACT, 12.0, 0.4), saturates=True)
    assert "optimizations change the results" in changed.cause
    assert "ORT_DISABLE_ALL" in changed.remedy
    (beyond,) = judged(spoilt, run(EXACT, 12.0, 0.4), saturates=True, saturating_weights=("weight",))
    assert (beyond.level, beyond.remedy) == (Level.RED, saturation_remedy(opens=True))  # the mode does not reach all
    refused = FileRun(EXACT, "runtime", refusal="shared weight")
    (first, *_) = judged(spoilt, refused, saturates=True, saturating_weights=("weight",))
    assert first.remedy == saturation_remedy(opens=False)
    (elsewhere,) = judged(spoilt, saturates=False)
    assert "saturates" not in elsewhere.cause


def test_one_decibel_less_than_the_exact_mode_is_worse_though_high():
    assert judged(run(ON, 38.0, 0.1), run(EXACT, 39.5, 0.1), saturates=True)[0].level is Level.RED
    assert judged(run(ON, 39.0, 0.1), run(EXACT, 39.5, 0.1), saturates=True) == ()


def test_weights_that_can_saturate_elsewhere_are_yellow():
    (finding,) = judged(saturating_weights=("conv.weight", "fc.weight"))
    assert finding.level is Level.YELLOW
    assert "conv.weight and 1 other weights" in finding.cause
    assert judged(saturating_weights=("conv.weight",), runtime="openvino") == ()


def test_a_refusal_is_red_in_the_runtime_that_the_file_is_for():
    refused = FileRun(ON, "runtime", refusal="no kernel")
    assert judged(refused)[0].level is Level.RED
    assert "no kernel" in judged(refused)[0].cause
    assert judged(refused, runtime="openvino")[0].level is Level.YELLOW


def test_minifloats_are_named_as_the_cause():
    assert "float8" in judged(run(ON, 5.0, 0.5), has_minifloats=True)[0].cause


def test_random_inputs_do_not_make_a_file_red_for_its_rounding_edges():
    (finding,) = judged(run(ON, 30.0, 0.1), random_inputs=True)
    assert finding.level is Level.YELLOW
    assert judged(run(ON, 30.0, 0.1))[0].level is Level.RED


def test_openvino_counts_where_the_file_is_for_it():
    wrong = run(OPENVINO, 3.0, 0.9)
    assert judged(wrong)[0].level is Level.YELLOW
    assert judged(wrong, runtime="openvino")[0].level is Level.RED
    assert "config='openvino'" in judged(wrong)[0].remedy


def test_slower_than_float_names_the_products_in_float():
    nodes = RuntimeNodes({}, (FloatNode("Gemm", "head", "excluded", weighted=True),))
    slow = replace(GOOD[ON], latency_ms=3.0, float_latency_ms=2.0, nodes=nodes)
    (finding,) = judged(slow)
    assert finding.level is Level.YELLOW
    assert "1.50 × float" in finding.cause
    assert "head is in float" in finding.remedy
    assert judged(replace(slow, latency_ms=1.0)) == ()


def test_an_op_of_several_products_in_float_is_named_once():
    nodes = RuntimeNodes({}, tuple(FloatNode("MatMul", "attention", "excluded", weighted=True) for _ in range(2)))
    (finding,) = judged(run(ON, latency_ms=2.0, float_latency_ms=1.0, nodes=nodes))
    assert finding.remedy == "of its products, attention is in float"


def test_what_float_rounding_explains_is_no_fault_of_the_file():
    noisy = run(OFF, 18.1, 0.3), run(ON, 18.0, 0.3), run(EXACT, 18.0, 0.3)
    (finding,) = judged(*noisy, tolerances_db=(13.0,))
    assert finding.level is Level.YELLOW
    assert "float rounding in another order" in finding.cause
    assert judged(*noisy, tolerances_db=(19.0,))[0].level is Level.RED


def op(name, other_codes=0.0, beyond=0.0, sqnr_db=math.inf, elements=1000):
    return Difference(name, elements, other_codes, beyond, 1.0, 7.0 if beyond else 1.0, sqnr_db, other_codes)


RIGHT = (op("a:out"), op("b:out", 0.004, 0.0, 30.0), op("c:out", 1 / 20, 0.0, 25.0, elements=20))
"""Equal; some codes on edges; one of twenty values."""


def test_a_file_whose_ops_are_right_is_not_blamed_for_what_the_model_amplifies():
    far = [replace(run(way, 18.1, 0.3), ops=RIGHT) for way in (OFF, ON)]
    (finding,) = judged(*far, run(EXACT, 18.0, 0.3), tolerances_db=(19.0,))
    assert finding.level is Level.YELLOW
    assert "each of its 3 ops computes the values of the simulation" in finding.cause


@pytest.mark.parametrize("wrong", [
    op("b:out", 0.2, 0.01, 20.0), op("b:out", 1.0, 0.0, 30.0), Difference("b:out", 100, 1.0, None, 1.0, None, 20.0),
])
def test_the_op_that_departs_is_named_whatever_float_rounding_explains(wrong):
    far = [replace(run(way, 18.1, 0.3), ops=(RIGHT[0], wrong, op("z:out", 1.0, 0.5, 3.0))) for way in (OFF, ON)]
    (finding, *_) = judged(*far, run(EXACT, 18.0, 0.3), tolerances_db=(13.0,))
    assert finding.level is Level.RED
    assert "given the values of the simulation, b:out departs" in finding.cause
    assert "so do 1 other ops" in finding.cause


def test_a_loop_may_amplify_inside_where_float_rounding_explains_the_file():
    far = replace(run(OFF, 18.1, 0.3), ops=(op("loop:out", 0.4, 0.2, 18.0),), unseen_sites=4)
    assert judged(far, run(ON, 18.0, 0.3), tolerances_db=(13.0,))[0].level is Level.YELLOW
    assert judged(far, run(ON, 18.0, 0.3), tolerances_db=(25.0,))[0].level is Level.RED


def test_what_the_optimizations_change_is_the_op_that_departs():
    (red,) = judged(replace(run(ON, 12.0, 0.4), ops=(RIGHT[0], op("b:out", 0.5, 0.3, 12.0))))
    assert (red.level, "b:out departs (50.00% of its codes" in red.cause) == (Level.RED, True)
    (still,) = judged(replace(run(ON, 12.0, 0.4), ops=RIGHT))  # wrong between ops: they are right where they are cut
    assert (still.level, "departs" in still.cause) == (Level.RED, False)


def test_optimizations_may_amplify_otherwise_where_the_model_does():
    off, exact = replace(run(OFF, 20.0, 0.3), ops=RIGHT), run(EXACT, 17.0, 0.3)
    for sqnr_db, level in ((17.0, Level.YELLOW), (13.0, Level.RED)):
        assert judged(off, replace(run(ON, sqnr_db, 0.4), ops=RIGHT), exact, tolerances_db=(25.0,))[0].level is level
    (first, *_) = judged(off, run(ON, 17.0, 0.4), exact, tolerances_db=(25.0,))
    assert first.level is Level.RED  # nothing is known of ops


@pytest.mark.parametrize(("stray", "steps", "level"), [
    (1, 2.0, Level.YELLOW), (3, 2.0, Level.RED), (1, 9.0, Level.RED),
])
def test_one_or_two_values_among_few_are_too_few_to_judge_by(stray, steps, level):
    few = [replace(run(way), total=Difference("outputs", 20, 0.1, stray / 20, 1.0, steps, 29.8))
           for way in (OFF, ON, EXACT)]
    (first, *_) = judged(*few)
    assert first.level is level
    assert ("20 output values are too few" in first.cause) == (level is Level.YELLOW)


@pytest.mark.parametrize(("sqnr_db", "random_inputs", "level"), [
    (60.0, False, None), (10.0, False, Level.RED), (10.0, True, Level.YELLOW),
])
def test_a_runtime_without_an_exact_way_is_judged_by_its_first(sqnr_db, random_inputs, level):
    off = Difference("outputs", 9999, 0.5, 0.4, 1.0, 9.0, sqnr_db, 0.5)
    right = Difference("outputs", 9999, 0.0, 0.0, 0.0, 0.0, math.inf, 0.0)
    circumstances = Circumstances("litert", random_inputs=random_inputs)
    runs = {name: (FileRun("LiteRT", "LiteRT 2.3", each), FileRun("LiteRT, other", "LiteRT", other))
            for name, each, other in (("first", off, right), ("second", right, off))}
    first = judge_alone([*runs["first"]], circumstances)
    assert [finding.level for finding in first] == ([] if level is None else [level])
    second = judge_alone([*runs["second"]], circumstances)
    assert [finding.level for finding in second] == ([] if level is None else [Level.YELLOW])


def test_float_noise_in_its_own_simulation_explains_a_runtime():
    off = Difference("outputs", 9999, 0.5, 0.4, 1.0, 9.0, 20.0, 0.5)
    (finding,) = judge_alone([FileRun("LiteRT", "LiteRT 2.3", off)], Circumstances("litert", tolerances_db=(18.0,)))
    assert finding.level is Level.YELLOW
    assert "float rounding in another order" in finding.cause


def test_of_a_runtime_that_tells_nothing_no_product_is_said_to_be_in_integers():
    (finding,) = judge_alone([run("Core AI", latency_ms=3.0, float_latency_ms=2.0)], Circumstances("coreai"))
    assert finding.remedy == "the runtime does not tell which products it computes in integers"
