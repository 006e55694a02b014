"""What trainers do every day, on a simulation: each acts as on the float model, or says that it does not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import prune

import qtk
from qtk.errors import QtkError


class Net(nn.Module):
    """Three layers, a norm that is not folded, a skip connection."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 12), nn.LayerNorm(12)
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.norm(self.stem(x))
        return self.head(x + torch.relu(self.body(x)))


def data(rows=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(4, (rows,), generator=generator)


def simulation(model=None, **options):
    torch.manual_seed(0)
    x, _ = data()
    sim = qtk.QuantSim((Net() if model is None else model).eval(), x, weight_bits=4, activation_bits=8, **options)
    sim.compute_encodings([x], progress=False)
    sim.model.train()
    return sim


def step(sim, optimizer, x, labels):
    optimizer.zero_grad()
    loss = cross_entropy(sim.model(x), labels)
    loss.backward()
    optimizer.step()
    return float(loss)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.medium
def test_accumulated_gradients_are_those_of_the_whole_batch():
    sim, (x, labels) = simulation(), data()
    cross_entropy(sim.model(x), labels).backward()
    whole = gradients(sim.model)
    sim.model.zero_grad()
    for part, part_labels in zip(x.split(8), labels.split(8), strict=True):
        (cross_entropy(sim.model(part), part_labels) / 4).backward()
    for name, gradient in gradients(sim.model).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.medium
def test_gradients_are_clipped():
    sim, (x, labels) = simulation(), data()
    sim.learn_ranges()
    (100 * cross_entropy(sim.model(x), labels)).backward()
    before = nn.utils.clip_grad_norm_(sim.model.parameters(), 0.5)
    after = torch.stack([gradient.norm() for gradient in gradients(sim.model).values()]).norm()
    assert before > 1
    torch.testing.assert_close(after, torch.tensor(0.5), rtol=1e-3, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_a_gradient_scaler_train(dtype):
    sim, (x, labels) = simulation(), data()
    sim.learn_ranges()
    optimizer, scaler = torch.optim.Adam(sim.model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            scores = sim.model(x)
            loss = cross_entropy(scores.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.3
    assert {parameter.dtype for parameter in sim.model.parameters()} == {torch.float32}


def test_learning_rates_by_layer_and_no_decay_by_name():
    """Groups made from names and shapes of parameters, as fine-tuning scripts make them."""
    sim, (x, labels) = simulation(), data()
    rates = {"stem": 0.0, "norm": 1e-3, "body": 1e-3, "head": 1e-2}
    named = dict(sim.model.named_parameters())
    assert set(named) == set(dict(Net().named_parameters()))
    groups = [{"params": [parameter], "lr": rates[name.partition(".")[0]],
               "weight_decay": 0.0 if parameter.ndim < 2 else 0.1} for name, parameter in named.items()]
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    step(sim, torch.optim.AdamW(groups), x, labels)
    moved = {name: float((parameter - before[name]).detach().abs().max()) for name, parameter in named.items()}
    assert moved["stem.weight"] == moved["stem.bias"] == 0.0
    assert 0 < moved["body.weight"] < moved["head.weight"]


def test_what_requires_no_gradient_gets_none_and_stays():
    sim, (x, labels) = simulation(), data()
    for parameter in sim.model.body.parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(sim.model.state_dict())
    step(sim, torch.optim.SGD(sim.model.parameters(), 0.1), x, labels)
    assert sim.model.body.weight.grad is None
    after = sim.model.state_dict()
    assert torch.equal(after["body.weight"], before["body.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_frozen_in_the_float_model_is_frozen_in_the_simulation():
    model = Net()
    model.stem.requires_grad_(False)
    sim, (x, labels) = simulation(model), data()
    cross_entropy(sim.model(x), labels).backward()
    assert sim.model.stem.weight.grad is None
    assert sim.model.body.weight.grad is not None


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin ones."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


@pytest.mark.medium
def test_low_rank_adapters_train_beside_frozen_weights():
    model = Net()
    model.body = LowRank(model.body)
    sim, (x, labels) = simulation(model), data()
    frozen = sim.model.body.linear.weight.detach().clone()
    trained = [parameter for parameter in sim.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-2)
    losses = [step(sim, optimizer, x, labels) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert torch.equal(sim.model.body.linear.weight, frozen)
    assert sim.model.body.up.weight.abs().max() > 0


@pytest.mark.medium
def test_pruned_weights_stay_pruned():
    model = Net()
    prune.l1_unstructured(model.body, "weight", amount=0.5)
    sim, (x, labels) = simulation(model), data()
    optimizer = torch.optim.Adam(sim.model.parameters(), 1e-2)
    for _ in range(3):
        step(sim, optimizer, x, labels)
    mask = sim.model.body.weight_mask
    assert mask.mean() == 0.5
    sim.model.eval()
    direction = torch.where(mask == 0, 1.0, 0.0)
    with torch.no_grad():
        before = sim.model(x)
        sim.model.body.weight_orig.add_(direction)  # what is masked has no effect
        assert torch.equal(sim.model(x), before)


def test_a_head_is_swapped_before_and_refused_after():
    model = Net()
    model.head = nn.Linear(12, 7)
    sim, (x, _) = simulation(model), data()
    assert sim.model(x).shape == (32, 7)
    with pytest.raises(QtkError, match="head"):
        sim.model.head = nn.Linear(12, 3)


@pytest.mark.medium
def test_features_are_distilled_through_hooks():
    sim, (x, _) = simulation(), data()
    teacher = Net().eval()
    view = qtk.block_view(sim, ["norm", "body"])
    kept = {}
    for name, model in (("student", view), ("teacher", teacher)):
        model.get_submodule("body").register_forward_hook(
            lambda module, args, output, name=name: kept.__setitem__(name, output)
        )
    view.train()
    optimizer = torch.optim.Adam(view.parameters(), 1e-2)
    losses = []
    for _ in range(10):
        view(x)
        with torch.no_grad():
            teacher(x)
        loss = mse_loss(kept["student"], kept["teacher"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.mark.medium
def test_a_resumed_training_is_the_uninterrupted_one():
    x, labels = data()
    whole, first = simulation(), simulation()
    for sim in (whole, first):
        sim.learn_ranges()
    whole_optimizer, optimizer = (torch.optim.Adam(sim.model.parameters(), 1e-2) for sim in (whole, first))
    for _ in range(6):
        step(whole, whole_optimizer, x, labels)
    for _ in range(3):
        step(first, optimizer, x, labels)
    stored = copy.deepcopy((first.model.state_dict(), optimizer.state_dict()))
    second = simulation()
    second.learn_ranges()
    second.model.load_state_dict(stored[0])
    optimizer = torch.optim.Adam(second.model.parameters(), 1e-2)
    optimizer.load_state_dict(stored[1])
    for _ in range(3):
        step(second, optimizer, x, labels)
    state = second.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in whole.model.state_dict().items())


def test_a_float_checkpoint_loads_and_trained_weights_go_back():
    sim, (x, labels) = simulation(), data()
    other = Net()
    sim.load_float_state_dict(other.state_dict())
    sim.compute_encodings([x], progress=False)
    assert torch.equal(sim.model.stem.weight, other.stem.weight)
    step(sim, torch.optim.SGD(sim.model.parameters(), 0.1), x, labels)
    names = set(other.state_dict())
    other.load_state_dict({name: value for name, value in sim.model.state_dict().items() if name in names})
    assert torch.equal(sim.model.body.weight, other.body.weight)
