import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.nn.dropout import Dropout
from qtk.nn.instance_norm import InstanceNorm
from qtk.operators.targets import batch_norm_called
from qtk.workflow.prepare import prepare_model
from tests.zoo.models import ZOO

X = torch.randn(4, 8)


class Net(nn.Module):
    """A linear layer, then whatever a test wants."""

    def __init__(self, code, **members):
        super().__init__()
        self.fc, self.code = nn.Linear(8, 8), code
        for name, module in members.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.code(self, self.fc(x))


def modules(prepared, kind):
    return {str(n.target): prepared.get_submodule(str(n.target)) for n in prepared.graph.nodes
            if n.op == "call_module" and isinstance(prepared.get_submodule(str(n.target)), kind)}


def train_step(model, x, seed=0):
    torch.manual_seed(seed)
    return model.train()(x)


def assert_trains_alike(model, x, **options):
    """Random numbers drawn alike, statistics updated alike."""
    prepared = prepare_model(model, x, **options)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = train_step(model, x)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    assert torch.equal(train_step(prepared, x), expected)
    assert all(torch.equal(buffer, after[name]) for name, buffer in prepared.named_buffers() if name in after)
    return prepared


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["residual", "batch_norms", "reused_block", "functional_dropout", "reused_module",
                                  "depthwise_separable", "vit", "norms"])
def test_a_step_of_training_is_the_original_step(name):
    assert_trains_alike(ZOO[name].model(), ZOO[name].inputs())


class OtherEpsilon(nn.BatchNorm1d):
    """Normalizes with an epsilon that is not its attribute."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, 0.5)


def test_a_batch_norm_keeps_the_epsilon_it_computes_with():
    model = Net(lambda net, x: net.norm(x), norm=OtherEpsilon(8)).eval()
    prepared = prepare_model(model, X, verify=False)
    torch.testing.assert_close(prepared(X), model.fc(X) / 1.5**0.5)


@pytest.mark.medium
def test_modules_stand_at_their_path_and_functions_beside_their_owner():
    prepared = prepare_model(ZOO["vit"].model(), ZOO["vit"].inputs())
    names = {name for name, module in prepared.named_modules() if isinstance(module, nn.Dropout)}
    assert names == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.attn_drop", "mlp.2")}
    functional = prepare_model(ZOO["functional_dropout"].model(), ZOO["functional_dropout"].inputs())
    assert {name: module.kind for name, module in modules(functional, Dropout).items()} == {
        "dropout": "dropout", "dropout_1": "alpha_dropout", "dropout_2": "feature_dropout",
    }
    assert dict(functional.report.swaps) == {"dropout": 3}


def test_a_name_the_model_has_is_not_taken():
    model = Net(lambda self, x: self.dropout(F.dropout(x, 0.5, self.training)), dropout=nn.Linear(8, 8))
    assert set(modules(prepare_model(model, X), Dropout)) == {"dropout_1"}


@pytest.mark.medium
def test_batch_norm_keeps_momentum_eps_and_the_cumulative_average():
    prepared = prepare_model(ZOO["batch_norms"].model(), ZOO["batch_norms"].inputs())
    found = {node.args[-1].target: (type(m).__name__, m.momentum, m.eps)
             for node in prepared.graph.nodes if (m := batch_norm_called(node)) is not None}
    assert found["vector"] == ("BatchNorm1d", 0.3, 1e-3)
    assert found["sequence"] == ("BatchNorm1d", None, 1e-5)
    assert found["untracked"] == ("BatchNorm1d", 0.1, 1e-5)
    assert found["batch_norm"] == ("BatchNorm", 0.2, 1e-5)
    assert prepared.get_submodule("vector") is not ZOO["batch_norms"].model().vector


@pytest.mark.medium
def test_every_call_of_a_reused_batch_norm_counts():
    prepared = prepare_model(ZOO["reused_block"].model(), ZOO["reused_block"].inputs())
    norms = [norm for node in prepared.graph.nodes if (norm := batch_norm_called(node)) is not None]
    assert norms == [prepared.get_submodule("first.1")] * 3
    prepared.train()(ZOO["reused_block"].inputs())
    assert int(prepared.first.get_buffer("1.num_batches_tracked")) == 3


def test_instance_norm_with_running_statistics_trains():
    model = Net(lambda self, x: self.norm(x[:, :, None] * torch.ones(3)), norm=nn.InstanceNorm1d(
        8, affine=True, track_running_stats=True, momentum=0.4))
    prepared = assert_trains_alike(model, X)
    assert set(modules(prepared, InstanceNorm)) == {"norm.instance_norm"}
    assert dict(prepared.report.swaps) == {"instance_norm": 1}


@pytest.mark.medium
def test_instance_norm_without_them_stays_an_op():
    prepared = prepare_model(ZOO["norms"].model(), ZOO["norms"].inputs())
    assert any(node.target is torch.ops.aten.instance_norm.default for node in prepared.graph.nodes)


def test_dropout_written_over_its_input_is_seen_by_later_readers():
    def code(self, x):
        y = F.dropout(x, 0.5, self.training, inplace=True)
        return x + y

    assert_trains_alike(Net(code), X)


def test_monte_carlo_dropout_is_on_in_eval_mode():
    model = Net(lambda self, x: F.dropout(x, 0.5, training=True)).eval()
    prepared = prepare_model(model, X)
    torch.manual_seed(3)
    expected = model(X)
    torch.manual_seed(3)
    assert torch.equal(prepared(X), expected)
    assert not torch.equal(prepared(X), prepared(X))


@pytest.mark.medium
def test_a_frozen_backbone_gives_no_gradient_and_still_updates_statistics():
    def code(self, x):
        with torch.no_grad():
            y = F.dropout(self.bn(x), 0.3, self.training)
        return self.head(y)

    model = Net(code, bn=nn.BatchNorm1d(8), head=nn.Linear(8, 2))
    prepared = assert_trains_alike(model, X)
    prepared(X).sum().backward()
    assert {name for name, p in prepared.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}


def test_detach_is_kept():
    model = Net(lambda self, x: x * x.detach())
    prepared = prepare_model(model, X)
    expected = torch.autograd.grad(model(X).sum(), model.fc.weight)[0]
    assert torch.equal(torch.autograd.grad(prepared(X).sum(), model.fc.weight)[0], expected)
