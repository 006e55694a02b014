import copy
import dataclasses
import io
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CaptureError

X = torch.randn(4, 8)


@dataclasses.dataclass
class Config:
    width: int = 8
    names: tuple[str, ...] = ("a", "b")


class Net(nn.Module):
    num_heads = 2

    def __init__(self):
        super().__init__()
        self.config, self.num_classes, self.labels = Config(), 3, {0: "cat"}
        self.fc, self.hidden = nn.Linear(8, 3), [nn.Linear(2, 2)]
        self.table = torch.ones(3)
        self.act = torch.relu

    def forward(self, x):
        return self.act(self.fc(x)) + self.table

    def encode(self, x):
        return self.fc(x)


def stand_ins():
    prepared = qtk.prepare_model(Net(), X)
    return [prepared, copy.deepcopy(prepared), qtk.QuantSim(Net(), X).model]


@pytest.mark.medium
def test_data_can_be_read():
    for model in stand_ins():
        assert model.config == Config()
        assert (model.num_classes, model.labels) == (3, {0: "cat"})
        assert (model.fc.in_features, model.fc.out_features) == (8, 3)


@pytest.mark.medium
def test_a_class_made_at_run_time_is_pickled_as_its_base():
    class Local(nn.Linear):
        pass

    for module in (nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), Local(8, 4)):
        prepared = qtk.prepare_model(nn.Sequential(module, nn.ReLU()), X)
        twin = pickle.loads(pickle.dumps(prepared))
        assert torch.equal(twin(X), prepared(X))
        assert getattr(twin, "0").out_features == 4
        with pytest.raises(AttributeError, match="'reset_parameters', which is code of Linear"):
            getattr(twin, "0").reset_parameters  # noqa: B018


@pytest.mark.medium
@pytest.mark.parametrize(("name", "match"), [
    ("encode", "has no 'encode', which is code of Net; use it on the original model"),
    ("hidden", "has no 'hidden', which holds modules, tensors, code or what cannot be pickled in the original Net; "
               "read it there"),
    ("nothing", "neither the prepared model nor the original Net has 'nothing'"),
])
def test_what_is_no_data_is_named(name, match):
    for model in stand_ins():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=match):
            getattr(model, name)
        with pytest.raises(AttributeError, match="which is code of Linear"):
            model.fc.reset_parameters()


def test_setting_them_is_refused_as_before():
    for model in stand_ins():
        with pytest.raises(CaptureError, match="setting 'num_classes' would have no effect"):
            model.num_classes = 4


@pytest.mark.medium
def test_a_name_of_the_original_is_free_for_what_capture_adds():
    model = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    prepared = qtk.prepare_model(nn.ModuleDict({"m": model})["m"], (X[None], X[None], X[None]))
    assert type(prepared.get_submodule("dropout")).__name__ == "Dropout"


class Locked(nn.Linear):
    """Holds what cannot be pickled, as modules do that count calls of several threads."""

    def __init__(self, inside=None):
        super().__init__(8, 8)
        self.lock, self.width, self.inside = threading.Lock(), 8, inside or nn.Identity()

    def forward(self, x):
        return self.inside(super().forward(x))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.medium
@pytest.mark.parametrize("copied", [lambda model: pickle.loads(pickle.dumps(model)), saved], ids=["pickle", "save"])
@pytest.mark.parametrize("make", [Locked, lambda: nn.Sequential(Locked(), nn.ReLU()), lambda: Locked(Locked())],
                         ids=["top", "inside", "both"])
def test_what_cannot_be_pickled_is_left_out_with_a_warning_and_all_else_is_kept(make, copied):
    sim = qtk.QuantSim(make().eval(), X)
    sim.compute_encodings([X], progress=False)
    with pytest.warns(UserWarning, match="without lock of Locked, which cannot be pickled"):
        twin = copied(sim.model)
    assert torch.equal(twin(X), sim.model(X))
    holders = [(twin.get_submodule(path), module) for path, module in sim.model.named_modules()
               if getattr(module, "width", 0) and hasattr(module, "lock")]
    assert holders
    for module, original in holders:
        assert module.width == original.width == 8
        with pytest.raises(AttributeError, match=r"'lock', which holds .*cannot be pickled in the original Locked"):
            _ = module.lock
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied(twin)
        assert copy.deepcopy(sim.model).width == 8 if hasattr(sim.model, "width") else True


class Branching(nn.Module):
    """Keeps its Python, so that what it calls are islands."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Locked(), nn.ReLU())

    def forward(self, x):
        y = self.body(x)
        return y + self.body[0].width if bool((x > -99).all()) else y


@pytest.mark.medium
def test_so_is_what_a_module_inside_of_an_island_holds():
    model = qtk.prepare_model(Branching().eval(), X)
    with pytest.warns(UserWarning, match="without lock of Locked"):
        twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(X), model(X))


@pytest.mark.medium
def test_an_attribute_that_cannot_be_copied_is_no_hindrance():
    class Refuses:
        def __deepcopy__(self, memo):
            raise RuntimeError("planted")

    model = Net()
    model.handle = Refuses()
    assert qtk.QuantSim(model, X, in_place=True).model.handle is model.handle
    assert qtk.QuantSim(model, X).model.handle is model.handle
