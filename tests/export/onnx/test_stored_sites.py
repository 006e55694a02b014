import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from torch import nn

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.export.onnx.qdq import export
from qtk.export.onnx.stored_sites import stored_sites
from qtk.runtimes.session import create_session
from tests.export.onnx.simulated import encodings_of, simulate, weights

EXAMPLE = torch.randn(2, 8)


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "granularity", "options"),
    [
        ("int8", PerTensor(), {"symmetric": True}), ("uint8", PerChannel(0), {}), ("uint8", PerChannel(-1), {}),
        ("int4", PerBlock((1, 4)), {"symmetric": True}), ("uint4", PerBlock((3, 1)), {}),
        ("int16", PerChannel(0), {"symmetric": True}), ("fp8_e4m3", PerChannel(0), {"symmetric": True}),
    ],
)
def test_a_constant_is_what_onnx_runtime_computes(name, granularity, options, tmp_path):
    torch.manual_seed(0)
    sim = simulate(nn.Linear(8, 6), EXAMPLE, weight=weights(name, granularity, **options))
    export(sim, EXAMPLE, tmp_path / "model.onnx")
    stored = {site.name: site for site in stored_sites(tmp_path / "model.onnx")}
    assert set(stored) == set(encodings_of(sim))
    assert all(stored[site].encoding.equals(encoding) for site, encoding in encodings_of(sim).items())
    assert [site for site, each in stored.items() if each.constant() is not None] == ["weight"]
    assert torch.equal(stored["weight"].constant(), run_alone(tmp_path / "model.onnx", stored["weight"].node.name))


@pytest.mark.medium
def test_what_is_read_of_the_file_of_external_data_is_freed_again(tmp_path, monkeypatch):
    torch.manual_seed(0)
    example = torch.randn(2, 64)
    sim = simulate(nn.Linear(64, 64), example, weight=weights("int4", PerBlock((1, 16)), symmetric=True))
    export(sim, example, tmp_path / "model.onnx", embedded_limit_bytes=0)
    read, load = [], ir.load
    monkeypatch.setattr(ir, "load", lambda path: read.append(load(path)) or read[-1])
    stored = {site.name: site for site in stored_sites(tmp_path / "model.onnx")}
    twice = [stored["weight"].constant() for _ in range(2)]
    assert torch.equal(*twice)
    assert torch.equal(twice[0], sim.get_submodule("qtk_quantizers.weight")(sim.get_parameter("weight")))
    tensors = [value.const_value for value in read[0].graph.initializers.values()]
    external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    assert external
    assert all(tensor.raw is None for tensor in external)


def run_alone(path, name):
    """What ONNX Runtime makes of one node whose inputs are all initializers."""
    model = onnx.load(path)
    (node,) = (node for node in model.graph.node if node.name == name)
    initializers = [each for each in model.graph.initializer if each.name in node.input]
    output = helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
    alone = helper.make_model(
        helper.make_graph([node], "alone", [], [output], initializers), opset_imports=model.opset_import, ir_version=10
    )
    session, _ = create_session(alone.SerializeToString(), optimized=False)
    return torch.from_numpy(session.run(None, {})[0])
