import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise.sparsity import KEPT_FROM


def correlated(rows: int = 256, columns: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
    return few + 0.3 * torch.randn(rows, columns, generator=generator)


def linear(share: float = 0.5) -> nn.Linear:
    """A layer that is pruned 2:4, or without order."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 12).eval()
    with torch.no_grad():
        if share == 0.5:
            fours = layer.weight.view(12, 4, 4)
            fours.scatter_(-1, fours.abs().argsort(-1)[..., :2], 0)
        else:
            layer.weight.view(-1)[layer.weight.view(-1).abs().argsort()[:int(share * 192)]] = 0
    return layer


def rounded(model: nn.Module, x: torch.Tensor, methods: str | list[str], **given: object) -> tuple:
    """The report, and the weight after its quantizer."""
    settings = {key: given.pop(key) for key in ("sparsity", "checkpoint_dir") if key in given}
    config = {"version": 1, "defaults": {"weight": {"bits": 3} | given}}
    sim = qtk.QuantSim(model, x[:8], config=config)
    sim.compute_encodings([x], progress=False)
    report = qtk.apply_layerwise(sim, list(x.split(64)), methods, options=qtk.LayerwiseOptions(**settings),
                                 progress=False)
    name = "weight" if "weight" in sim.quantizers else "0.weight"
    return report, sim.quantizers[name](sim.model.get_parameter(name)).detach(), sim


@pytest.mark.parametrize("methods", ["gptq", *(pytest.param(each, marks=pytest.mark.medium) for each in (
    "coordinate_descent", "adaround", ["seq_mse", "gptq"]))], ids=str)
def test_zeros_of_a_pruned_weight_stay(methods):
    layer, x = linear(), correlated()
    zeros = layer.weight == 0
    report, weight, _ = rounded(layer, x, methods)
    assert bool((weight[zeros] == 0).all())
    assert not bool((weight[~zeros] == 0).all())
    assert report.layers[0].zeros == 0.5
    assert "50% zeros kept" in str(report)
    assert report.layers[0].after < report.layers[0].before


@pytest.mark.medium
@pytest.mark.parametrize("given", [
    {"symmetric": False}, {"granularity": "per_block", "block_size": 8}, {"dtype": "fp8_e4m3", "bits": None},
], ids=str)
def test_zeros_stay_in_other_formats(given):
    layer, x = linear(), correlated()
    zeros = layer.weight == 0
    _, weight, _ = rounded(layer, x, ["seq_mse", "coordinate_descent"], **given)
    assert bool((weight[zeros] == 0).all())
    assert float((weight != 0).double().mean()) > 0.4


@pytest.mark.medium
def test_few_zeros_are_free_to_move():
    layer = linear(KEPT_FROM - 0.02)
    zeros = layer.weight == 0
    report, weight, _ = rounded(layer, correlated(), "gptq")
    assert bool((weight[zeros] != 0).any())
    assert not report.layers[0].zeros
    assert rounded(linear(KEPT_FROM + 0.02), correlated(), "gptq")[0].layers[0].zeros > KEPT_FROM


@pytest.mark.medium
def test_a_mask_is_chosen_along_the_channels_of_a_convolution_and_other_layers_stay_dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    report, weight, sim = rounded(model, correlated(256, 8 * 36).reshape(256, 8, 6, 6), "gptq", sparsity="2:4")
    fours = weight.reshape(6, 2, 4, 9)
    assert bool(((fours == 0).sum(2) >= 2).all())
    assert dict(report.dense) == {"2.weight": "2:4 needs an input axis that is a multiple of 4, this is 6"}
    assert [layer.zeros for layer in report.layers] == [0.5, 0.0]
    assert "2.weight  dense: 2:4 needs" in str(report)
    options = qtk.LayerwiseOptions(start="present")  # another call keeps the mask that this one has chosen
    x = [correlated(256, 8 * 36).reshape(256, 8, 6, 6)]
    qtk.apply_layerwise(sim, x, "coordinate_descent", options=options, progress=False)
    again = sim.quantizers["0.weight"](sim.model.get_parameter("0.weight"))
    assert bool(((again.reshape(6, 2, 4, 9) == 0).sum(2) >= 2).all())


@pytest.mark.medium
def test_a_mask_that_the_walk_chooses_costs_less_than_that_of_the_smallest_weights():
    torch.manual_seed(0)
    dense, x = nn.Linear(16, 12).eval(), correlated()
    lost = {}
    for name, layer in {"smallest": linear(), "chosen": dense}.items():
        _, _, sim = rounded(layer, x, "gptq", sparsity="2:4")
        lost[name] = (sim.model(x) - dense(x)).square().sum().item()
    assert lost["chosen"] < 0.5 * lost["smallest"]


@pytest.mark.parametrize(("model", "shape", "message"), [
    (lambda: nn.Conv2d(8, 8, 3, groups=2), (8, 6, 6), "convolution of one group, this has 2"),
    (lambda: nn.Conv2d(8, 8, 3, groups=8), (8, 6, 6), "convolution of one group, this has 8"),
    (lambda: nn.Linear(6, 4), (6,), "multiple of 4, this is 6"),
])
def test_a_pattern_that_fits_no_layer_is_refused(model, shape, message):
    with pytest.raises(CalibrationError, match=f"fits none of the 1 layers.*\n.*{message}"):
        rounded(model().eval(), torch.randn(16, *shape), "gptq", sparsity="2:4")


@pytest.mark.medium
def test_equal_rows_stay_equal():
    layer = linear()
    with torch.no_grad():
        layer.weight[6:] = layer.weight[:6]
    _, weight, _ = rounded(layer, correlated(), ["seq_mse", "adaround"])
    assert torch.equal(weight[6:], weight[:6])


@pytest.mark.medium
def test_a_resumed_run_says_the_same(tmp_path):
    said = []
    for _ in range(2):
        torch.manual_seed(0)
        report, weight, _ = rounded(nn.Linear(16, 12).eval(), correlated(), "gptq", sparsity="2:4",
                                    checkpoint_dir=tmp_path)
        said.append((str(report), weight))
    assert "50% zeros kept" in said[0][0]
    assert said[0][0] == said[1][0]
    assert torch.equal(said[0][1], said[1][1])
    with pytest.raises(CalibrationError, match="not the same sparsity"):
        rounded(nn.Linear(16, 12).eval(), correlated(), "gptq", checkpoint_dir=tmp_path)
