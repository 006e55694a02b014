"""A stack of experts against the same experts as layers of their own."""

import pytest
import torch

import qtk
from qtk.layerwise.candidates import least_prior
from qtk.numerics.error import decibels
from tests.zoo.experts import FusedExperts


def mixture(**settings):
    torch.manual_seed(0)
    fused = FusedExperts(**settings).eval()
    mix = torch.randn(16, 16) * torch.logspace(0, -1.3, 16)
    return fused, [torch.randn(256, 16) @ mix for _ in range(4)], torch.randn(512, 16) @ mix


CONFIG = {"version": 1, "extends": "default", "rules": [{"match": {"path": "gate"}, "weight": "float"}]}


def simulation(model, data, bits=3, config=CONFIG):
    sim = qtk.QuantSim(model, data[0], weight_bits=bits, activation_bits=None, config=config, dynamic_shapes="all")
    sim.compute_encodings(data, progress=False)
    return sim


@torch.no_grad()
def sqnr_db(sim, model, x):
    expected = model(x)
    return decibels(expected.square().sum(), (expected - sim.model(x)).square().sum())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("methods", ["gptq", ["seq_mse", "coordinate_descent"], "adaround(iterations=30)"],
                         ids=["gptq", "seq_mse + coordinate_descent", "adaround"])
def test_a_stack_gains_what_its_matrices_gain_as_layers(methods):
    fused, data, fresh = mixture()
    found = []
    for model in (fused, fused.apart()):
        sim = simulation(model, data)
        before = sqnr_db(sim, model, fresh)
        report = qtk.apply_layerwise(sim, data, methods, progress=False)
        found.append((before, sqnr_db(sim, model, fresh)))
    assert [result.name for result in report.layers] == [f"{kind}.{index}.weight" for index in range(4)
                                                         for kind in ("up", "down")]
    (before, after), (before_apart, after_apart) = found
    assert before == pytest.approx(before_apart, abs=0.01)
    assert after > before + 1.5
    assert after == pytest.approx(after_apart, abs=0.02)


@pytest.mark.medium
def test_scales_that_matrices_share_are_searched_for_all_together():
    fused, data, fresh = mixture()
    per_tensor = {**CONFIG, "defaults": {"weight": {"granularity": "per_tensor"}}}
    sim = simulation(fused, data, bits=4, config=per_tensor)
    before = sqnr_db(sim, fused, fresh)
    assert sim.quantizers["down_proj"].scale.numel() == 1
    report = qtk.apply_layerwise(sim, data, ["seq_mse", "gptq"], progress=False)
    assert sim.quantizers["down_proj"].scale.numel() == 1
    assert sqnr_db(sim, fused, fresh) > before + 1
    assert [result.winner.partition(",")[0] for result in report.layers] == ["SeqMse + Gptq"] * 2


def gptq_in_float64(weight, rows, scale, damping, qmax=3):
    """Algorithm 1 of arXiv 2210.17323, one column at a time, the largest first. Shape: [out, in], [n, in], [out]."""
    gram = rows.mT @ rows
    order = gram.diagonal().argsort(descending=True)
    gram = (gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype))[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    left, rounded = weight[:, order].clone(), torch.zeros_like(weight)
    for column in range(len(gram)):
        rounded[:, column] = (left[:, column] / scale).round().clamp(-qmax - 1, qmax) * scale
        error = (left[:, column] - rounded[:, column]) / upper[column, column]
        left[:, column:] -= error[:, None] * upper[column, column:]
    return rounded[:, order.argsort()]


@pytest.mark.medium
def test_each_expert_is_as_close_as_gptq_in_float64_makes_it_by_itself():
    fused, data, _ = mixture()
    sim = simulation(fused, data)
    rounded = sim.quantizers["gate_up_proj"](fused.gate_up_proj).detach().double()
    qtk.apply_gptq(sim, data, progress=False, options=qtk.LayerwiseOptions(holdout=0.0))
    found, x = sim.model.get_parameter("gate_up_proj").detach().double(), torch.cat(data)
    expert = fused.gate(x).topk(2, dim=-1).indices
    for index, weight in enumerate(fused.gate_up_proj.detach().double()):
        rows = x[(expert == index).any(-1)].double()
        scale = sim.quantizers["gate_up_proj"].scale[index].double().flatten()
        damping = 0.01 + float(least_prior((rows.mT @ rows)[None, None], len(rows)))
        reference, least, ours = (
            float((rows @ (weight - each).mT).square().sum())
            for each in (gptq_in_float64(weight, rows, scale, damping), rounded[index], found[index]))
        assert reference < 0.6 * least
        assert ours < 1.03 * reference


@pytest.mark.medium
def test_experts_that_no_row_meets_are_rounded_by_the_rows_of_all_stacked_or_not():
    fused, data, _ = mixture(experts=3, chosen=1)
    with torch.no_grad():  # the last expert is never chosen, and one of the others rarely
        fused.gate.weight[2] = 0
        fused.gate.weight[0] = 5 * fused.gate.weight[0].abs()
    data = [batch.abs() for batch in data]
    errors = []
    for model in (fused, fused.apart()):
        sim = simulation(model, data)
        with pytest.warns(match=r"2 met 0 rows|up\.2\.weight: met 0 rows"):
            report = qtk.apply_gptq(sim, data, progress=False, options=qtk.LayerwiseOptions(holdout=0.0))
        assert all(result.reason is None for result in report.layers)
        weight = dict(sim.model.named_parameters())
        found = weight["gate_up_proj"][2] if model is fused else weight["up.2.weight"]
        change = (torch.cat(data) @ (fused.gate_up_proj[2] - found).mT).detach()
        errors.append(float(change.square().sum()))
    assert report.pooled["down.2.weight"] == "met 0 rows"
    rounded = simulation(fused, data).quantizers["gate_up_proj"](fused.gate_up_proj)[2].detach()
    assert errors[0] < 0.7 * float((torch.cat(data) @ (fused.gate_up_proj[2].detach() - rounded).mT).square().sum())
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


@pytest.mark.medium
def test_a_second_method_goes_on_and_the_first_start_is_kept():
    fused, data, fresh = mixture()
    sim = simulation(fused, data)
    qtk.apply_gptq(sim, data, progress=False)
    report = qtk.apply_layerwise(sim, data, "coordinate_descent", options=qtk.LayerwiseOptions(start="present"),
                                 progress=False)
    assert all(result.after <= result.before for result in report.layers)
    again = qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(start="float"), progress=False)
    anew = simulation(fused, data)
    first = qtk.apply_gptq(anew, data, progress=False)
    assert [result.after for result in again.layers] == [result.after for result in first.layers]
    assert torch.equal(sim.model(fresh), anew.model(fresh))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:in 4 weights of experts")
def test_a_run_that_was_killed_among_experts_that_wait_for_others_goes_on_bit_for_bit(tmp_path):
    fused, data, _ = mixture(experts=3, chosen=1)
    with torch.no_grad():
        fused.gate.weight[2] = 0
        fused.gate.weight[0] = 5 * fused.gate.weight[0].abs()
    model, data = fused.apart(), [batch.abs() for batch in data]

    def run():
        sim = simulation(model, data)
        options = qtk.LayerwiseOptions(checkpoint_dir=tmp_path)
        return sim.model.state_dict(), qtk.apply_gptq(sim, data, options=options, progress=False).pooled

    expected, pooled = run()
    files = sorted(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for finished in range(1, len(files)):
        for file in files[finished:]:
            file.unlink(missing_ok=True)
        found, own = run()
        assert own == pooled
        assert all(torch.equal(found[name], value) for name, value in expected.items())
