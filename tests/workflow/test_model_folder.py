"""Models of folders: mapped weights, tied ones, buffers, and what is missing."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qtk
from qtk.errors import ConfigError
from qtk.nn.mapped_weights import is_mapped
from qtk.workflow.model_folder import files_beside, model_of_folder


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.last.weight
        self.register_buffer("table", torch.arange(32.0), persistent=False)

    def forward(self, x):
        return self.tied(self.last(self.norm(self.first(x)) + self.table))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    net = Net().eval()
    net.norm.running_mean.add_(1)
    state = {name: each.clone() for name, each in net.state_dict().items() if name != "tied.weight"}
    save_file({name: each for name, each in state.items() if "first" in name}, tmp_path / "a.safetensors")
    save_file({name: each for name, each in state.items() if "first" not in name}, tmp_path / "b.safetensors")
    return tmp_path, net


@pytest.mark.medium
def test_weights_are_those_of_the_files_and_stay_in_them(folder):
    path, net = folder
    model, x = model_of_folder(path, Net), torch.randn(3, 16)
    assert not model.training
    assert torch.equal(model(x), net(x))
    assert model.tied.weight is model.last.weight
    assert is_mapped(model.last.weight)
    sim, other = qtk.QuantSim.from_checkpoint(path, x, model=Net, weight_bits=4), qtk.QuantSim(net, x, weight_bits=4)
    for each in (sim, other):
        each.compute_encodings([x], progress=False)
    assert torch.equal(sim.model(x), other.model(x))
    assert sim.plan == other.plan
    assert any(is_mapped(each) for each in sim.model.parameters())


def test_what_is_missing_or_of_another_shape_is_named(folder):
    path, _ = folder
    state = load_file(path / "a.safetensors")
    save_file({"first.weight": state["first.weight"][:3].clone()}, path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"missing in its files, or of another shape: first.weight, first.bias"):
        model_of_folder(path, Net)
    (path / "a.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        model_of_folder(path, Net)
    with pytest.raises(ConfigError, match=r"no folder with a config\.json"):
        model_of_folder(path)
    assert isinstance(nn.Linear(2, 2).weight.data, torch.Tensor)
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(("name", "model", "message"), [
    ("a" * 300, Net, r"holds no \*\.safetensors"), ("a" * 300, None, r"no folder with a config\.json"),
    ("", lambda: 3, "returned a int; it must return an nn.Module"), ("", 3, "a int makes no model"),
])
def test_what_is_no_folder_and_no_model_is_an_error(folder, name, model, message):
    with pytest.raises(ConfigError, match=message):
        qtk.QuantSim.from_checkpoint(folder[0] / name, torch.randn(3, 16), model=model)


def test_files_of_a_tokenizer_lie_beside(folder):
    path, _ = folder
    for name in ("tokenizer.json", "merges.txt", "config.json", "pytorch_model.bin"):
        (path / name).write_text("{}")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert [each.name for each in files_beside(path)] == ["merges.txt", "tokenizer.json"]
