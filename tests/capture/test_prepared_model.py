import copy
import pickle

import pytest
import torch
from torch import nn

from qtk.errors import CaptureError
from qtk.workflow.prepare import prepare_model
from tests.zoo.models import ZOO


def prepared(name):
    return prepare_model(ZOO[name].model(), ZOO[name].inputs(), verify=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_made_in_the_code_follow_to_another_dtype_and_back(dtype):
    entry = ZOO["creations"]
    model, x = prepared("creations"), entry.inputs(3)
    expected = model(x)
    assert torch.equal(model.to(dtype)(x.to(dtype)), entry.model().to(dtype)(x.to(dtype)))
    assert model(x.to(dtype)).dtype is dtype
    if dtype is torch.float64:  # nothing was rounded on the way
        assert torch.equal(model.float()(x), expected)


def test_tensors_made_in_the_code_follow_to_another_device():
    assert prepared("creations").to("meta")(ZOO["creations"].inputs(3).to("meta")).device.type == "meta"
    assert prepared("language_model").to("meta")(ZOO["language_model"].inputs().to("meta")).device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["creations", "language_model", "vit"])
def test_a_model_captured_on_the_cpu_runs_on_the_gpu(name):
    model = prepared(name)
    expected = model(ZOO[name].inputs(3))
    assert torch.allclose(model.cuda()(ZOO[name].inputs(3).cuda()).cpu(), expected, atol=1e-4)


def test_a_model_without_tensors_remembers_where_it_is():
    class Ramp(nn.Module):
        def forward(self, x):
            return x + torch.arange(4, dtype=x.dtype, device=x.device)

    x = torch.ones(2, 4)
    model = prepare_model(Ramp(), x)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        assert model.to(dtype)(x.to(dtype)).dtype is dtype
        model = copy.deepcopy(model)


def test_integers_stay_integers():
    model = prepared("language_model").double()
    arange = next(node for node in model.graph.nodes if "arange" in str(node.target))
    assert arange.kwargs.get("dtype") is not torch.float64
    assert model(ZOO["language_model"].inputs()).dtype is torch.float64


@pytest.mark.parametrize("name", ["tied", "reused_block", "norms", "functional"])
def test_a_copy_has_every_member_in_order_and_none_in_common(name):
    model = prepared(name).train()
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [name for name, _ in twin.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())
    assert all(module.training for module in twin.modules())
    assert twin.report == model.report
    assert type(twin).__mro__[1:] == type(model).__mro__[1:]


def test_tied_parameters_stay_tied_in_a_copy():
    twin = copy.deepcopy(prepared("tied"))
    assert twin.encoder.weight is twin.decoder_weight
    block = copy.deepcopy(prepared("reused_block"))
    assert block.first is block.second


def test_pickling_is_refused():
    with pytest.raises(CaptureError, match="cannot be pickled"):
        pickle.dumps(prepared("splits"))


def test_every_node_knows_its_value():
    for name in ("batch_norms", "functional_dropout", "tied", "in_place"):
        for node in prepared(name).graph.nodes:
            if node.op != "output":
                assert node.meta.get("val") is not None, f"{name}: {node.format_node()}"


def test_compiles_whole():
    model, entry = prepared("vit"), ZOO["vit"]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for batch in (2, 5):
        assert torch.equal(compiled(entry.inputs(batch)), model(entry.inputs(batch)))
    torch.compiler.reset()
