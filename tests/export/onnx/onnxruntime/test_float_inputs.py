import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.onnxruntime.float_inputs import weights_of_floats
from tests.export.onnx.simulated import run_onnx
from tests.export.onnx.without_vnni import run_with_defaults


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.factor = nn.Conv1d(4, 4, 1), nn.Linear(8, 8), nn.Parameter(torch.randn(8, 3))

    def forward(self, x):
        return self.linear(self.conv(x)).relu() @ self.factor


def simulation(config="default", **options):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    sim = qtk.QuantSim(Layers().eval(), x, config=config, **options)
    sim.compute_encodings([x], progress=False)
    return sim, x


@pytest.mark.medium
def test_products_with_floats_are_found():
    assert sorted(weights_of_floats(simulation(activation_bits=None)[0].model)) == ["factor", "linear.weight"]
    assert weights_of_floats(simulation()[0].model) == []
    assert weights_of_floats(simulation("dynamic")[0].model) == []


@pytest.mark.medium
def test_the_export_names_the_setting_that_keeps_the_numbers(tmp_path):
    torch.manual_seed(0)
    x, model = torch.randn(4, 64), nn.Linear(64, 8).eval()
    sim = qtk.QuantSim(model, x, activation_bits=None)
    sim.compute_encodings(None)
    with pytest.warns(UserWarning, match=r"floats with \S*weight: .* with session\.qdq_matmulnbits_accuracy_level=1"):
        sim.export(tmp_path / "out", formats=("onnx",))
    with torch.no_grad():
        expected = sim.model(x).numpy()
    path = tmp_path / "out" / "model.onnx"
    (with_setting,), (by_default,) = run_onnx(path, x, optimized=True), run_with_defaults(path, input=x.numpy())
    assert abs(with_setting - expected).max() / abs(expected).max() < 2e-6
    assert abs(by_default - expected).max() / abs(expected).max() > 1e-4  # as long as this is so, the warning is needed


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, mask):
        def heads(t):
            return t.view(*x.shape[:2], 2, 8).transpose(1, 2)

        y = nn.functional.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), attn_mask=mask[:, None, None, :].bool())
        return self.o(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.medium
def test_codes_of_an_attention_that_are_moved_are_no_floats():
    inputs = torch.randn(2, 5, 16), torch.ones(2, 5)
    sim = qtk.QuantSim(Attention().eval(), inputs, config="onnxruntime")
    sim.compute_encodings([inputs], progress=False)
    assert weights_of_floats(sim.model) == []


@pytest.mark.medium
@pytest.mark.parametrize(("net", "inputs", "found"), [
    (nn.GRU(8, 4), (torch.randn(5, 2, 8),), []),
    (nn.GRUCell(8, 4), (torch.randn(2, 8), torch.randn(2, 4)), ["weight_ih", "weight_hh"]),
])
def test_one_operator_for_all_of_a_net_dequantizes_its_weights_first(net, inputs, found):
    sim = qtk.QuantSim(net.eval(), inputs, config="onnxruntime")
    sim.compute_encodings([inputs], progress=False)
    assert weights_of_floats(sim.model) == found  # a cell is written out, but for ONNX Runtime
    assert weights_of_floats(sim.model, contrib_operators=True) == []
