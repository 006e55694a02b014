import torch
from torch import nn

from qtk.transforms.named_tensors import NamedTensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0))


def test_a_tied_parameter_has_its_first_name_and_is_replaced_everywhere():
    model = Tied()
    old, members = model.embed.weight, NamedTensors(model)
    assert members.name(model.head.weight) == "embed.weight"
    assert list(members.tensors()) == ["table", "embed.weight"]
    members.replace({"embed.weight": torch.ones(5, 4)})
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight is not old
    assert members.tensor("embed.weight") is model.head.weight
    assert members.name(model.head.weight) == "embed.weight"


def test_replaced_tensors_keep_their_kind():
    model = Tied()
    model.embed.weight.requires_grad_(False)
    NamedTensors(model).replace({"embed.weight": torch.ones(5, 4), "table": torch.zeros(3)})
    assert not model.embed.weight.requires_grad
    assert not isinstance(model.table, nn.Parameter)


def test_removed_tensors_are_in_no_module():
    model = Tied()
    members = NamedTensors(model)
    members.remove("embed.weight")
    assert "embed.weight" not in members
    assert list(model.state_dict()) == ["table"]


def test_a_tensor_of_another_model_has_no_name():
    assert NamedTensors(Tied()).name(torch.zeros(3)) is None
