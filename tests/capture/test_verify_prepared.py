import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.capture.verify_prepared import eval_difference, train_difference
from qtk.errors import VerificationError
from qtk.nn.attention import Attention as qtk_attention  # noqa: N813 - a class of that name is below
from qtk.workflow.prepare import prepare_model

X = (torch.randn(4, 3),)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x):
        y = self.bn(F.dropout(self.drop(self.fc(x)), 0.3, self.training))
        return {"first": x, "second": [y, 3]}


class Attention(nn.Module):
    """Drops inside the fused op, positional or by keyword."""

    def forward(self, x):
        p = 0.5 if self.training else 0.0
        x = x[None]
        y = F.scaled_dot_product_attention(x, x, x, None, p, False)
        return y + F.scaled_dot_product_attention(x, x, x, dropout_p=p, is_causal=True)


class Made(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def changed(model, edit):
    other = copy.deepcopy(model)
    with torch.no_grad():
        edit(other)
    return other


def test_a_copy_differs_by_nothing_in_either_mode():
    model = Net()
    other = copy.deepcopy(model)
    assert eval_difference(model, other, X, {}) == 0.0
    assert train_difference(model, other, X, {}) == (0.0, [])


@pytest.mark.medium
def test_dropout_inside_attention_is_switched_off_and_adopted():
    prepared = prepare_model(Attention(), X, verify=False)
    attentions = [module for module in prepared.modules() if isinstance(module, qtk_attention)]
    assert [module.p for module in attentions] == [0.0, 0.0]
    assert train_difference(Attention(), prepared, X, {}) == (0.0, [])
    assert [module.p for module in attentions] == [0.5, 0.5]


def test_a_difference_names_the_output():
    model = Net()
    other = changed(model, lambda net: net.bn.bias.add_(0.01))
    with pytest.raises(VerificationError, match=r"output\['second'\]\[0\] differs by 0\.01"):
        eval_difference(model, other, X, {})


def test_rounding_is_measured_and_allowed():
    model = Net()
    other = changed(model, lambda net: net.fc.weight.mul_(1 + 2e-7))
    assert 0 < eval_difference(model, other, X, {}) < 1e-5


def test_a_wrong_update_of_statistics_is_found():
    model = Net()
    other = changed(model, lambda net: setattr(net.bn, "momentum", 0.3))
    assert eval_difference(model, other, X, {}) == 0.0
    with pytest.raises(VerificationError, match=r"buffer \['bn.running_mean'\] differs"):
        train_difference(model, other, X, {})


def test_a_buffer_written_in_eval_mode_is_compared_and_restored():
    class Counter(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step = step
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += self.step
            return x

    model, other = Counter(1), Counter(2)
    with pytest.raises(VerificationError, match=r"buffer \['count'\] differs by 1"):
        eval_difference(model, other, X, {})
    assert float(model.count) == 0
    assert eval_difference(model, Counter(1), X, {}) == 0.0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: (x,), "built differently"),
        (lambda x: [x.half(), 1], "torch.float16"),
        (lambda x: [x[:1], 1], r"of shape \(1, 3\)"),
        (lambda x: [x, 2], "output.1. is 2, was 1"),
        (lambda x: [x * float("nan"), 1], "differs by inf"),
    ],
)
def test_other_structure_dtype_shape_or_constant(other, message):
    with pytest.raises(VerificationError, match=message):
        eval_difference(Made(lambda x: [x, 1]), Made(other), X, {})
    assert eval_difference(Made(lambda x: x / 0), Made(lambda x: x / 0), X, {}) == 0.0


def test_neither_model_is_changed():
    model = Net()
    model.bn.eval()
    other = copy.deepcopy(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    train_difference(model, other, X, {})
    eval_difference(model, other, X, {})
    for each in (model, other):
        assert all(torch.equal(value, before[key]) for key, value in each.state_dict().items())
        assert each.training
        assert not each.bn.training
        assert each.drop.p == 0.5
    assert torch.equal(torch.get_rng_state(), random)


def test_train_only_modules_of_both_models_are_off():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) if self.training else x

    model = nn.Sequential(Noise(), nn.Linear(3, 3))
    assert train_difference(model, copy.deepcopy(model), X, {}, train_only=[model[0]]) == (0.0, [])
    with pytest.raises(VerificationError, match="output differs"):
        train_difference(model, model[1:], X, {})


def test_objects_of_a_class_without_equality_are_compared_by_what_they_hold():
    class Held:
        def __init__(self, x):
            self.x = x

    same, other = Made(lambda x: Held(x)), Made(lambda x: Held(x + 1))
    assert eval_difference(same, same, X, {}) == 0.0
    with pytest.raises(VerificationError, match=r"output\.\['x'\] differs"):
        eval_difference(same, other, X, {})


def test_sparse_outputs_are_compared():
    assert eval_difference(Made(lambda x: x.to_sparse()), Made(lambda x: x.to_sparse()), X, {}) == 0.0
    with pytest.raises(VerificationError, match="output differs"):
        eval_difference(Made(lambda x: x.to_sparse()), Made(lambda x: (x + 1).to_sparse()), X, {})


def test_a_class_of_the_user_called_attention_is_no_attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = 0.5

        def forward(self, x):
            return x.abs() ** self.p

    report = prepare_model(Attention(), torch.randn(2, 3)).report
    assert report.train_difference == 0.0
    assert report.notes == report.train_notes == ()
