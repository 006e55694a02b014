import copy

import pytest
import torch
from torch import nn

from qtk.capture.calls import Call
from qtk.capture.variants import add_variant
from qtk.errors import CaptureError
from qtk.graph.graphs import graphs, with_nested
from qtk.workflow.prepare import prepare_model

MATRIX, CUBE = torch.randn(3, 8), torch.randn(2, 3, 8)


def kind(*args):
    return Call(args, {}, None).kind


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout())


def pair():
    """A module, and the graph of its calls with three axes, which hands those with two on to another."""
    model = net().eval()
    main, other = prepare_model(model, CUBE), prepare_model(model, MATRIX, verify=False)
    add_variant(main, kind(MATRIX), other)
    return model, main, other


def test_each_kind_of_call_goes_to_its_graph():
    model, main, other = pair()
    ran = []
    other.register_forward_pre_hook(lambda *_: ran.append("other"))
    assert torch.equal(main(CUBE), model(CUBE))
    assert ran == []
    assert torch.equal(main(MATRIX), model(MATRIX))
    assert ran == ["other"]
    with pytest.raises(CaptureError, match="input input has shape"):
        main(MATRIX[0])


def test_they_have_one_set_of_members_and_the_keys_of_the_module():
    model, main, other = pair()
    assert list(main.state_dict()) == list(model.state_dict())
    assert main._modules is other._modules
    assert graphs(main) == {"": main, "@1": other}
    assert with_nested(main) == [main]


def test_a_copy_has_members_of_its_own_shared_again():
    _, main, _ = pair()
    twin = copy.deepcopy(main)
    other = twin.variants[kind(MATRIX)]
    assert twin._modules is other._modules is not main._modules
    with torch.no_grad():
        twin.get_parameter("0.weight").zero_()
        twin.get_parameter("0.bias").zero_()
    assert not torch.equal(twin(MATRIX), main(MATRIX))
    assert torch.equal(twin(MATRIX), twin(MATRIX * 2))


def test_all_follow_to_another_dtype():
    class Ramp(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.arange(8, dtype=torch.float32)

    model = Ramp(8, 8)
    main = prepare_model(model, CUBE)
    add_variant(main, kind(MATRIX), prepare_model(model, MATRIX))
    main = copy.deepcopy(main).to(torch.bfloat16)
    assert main(MATRIX.bfloat16()).dtype is main(CUBE.bfloat16()).dtype is torch.bfloat16


def test_members_of_one_name_that_differ_are_refused_and_nothing_changes():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x) + torch.tensor([float(x.ndim)] * 8)

    model = Constant()
    main, other = prepare_model(model, CUBE), prepare_model(model, MATRIX)
    before, modules = dict(main.named_buffers()), main._modules
    with pytest.raises(CaptureError, match="would each have a lifted_tensor_0 of their own"):
        add_variant(main, kind(MATRIX), other)
    assert main.variants == {}
    assert dict(main.named_buffers()).keys() == before.keys()
    assert main._modules is modules is not other._modules
