"""What users do by the type of a module acts on the model of a simulation as on the float model."""

import copy
import functools
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

import qtk
from qtk.errors import CaptureError
from qtk.torch_private import BatchNormBase, DropoutBase
from tests import fresh
from tests.zoo.prepared import slow_but

LIVE = {"version": 1, "fold_batch_norms": False}
X = torch.randn(4, 8)


class Net(nn.Module):
    """Linear layers around modules that a test wants."""

    def __init__(self, *modules):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Sequential(*modules), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Convolutions(nn.Sequential):
    """A batch norm of each rank."""

    def __init__(self):
        super().__init__(
            nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Unflatten(2, (4, 2)), nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4), nn.Unflatten(3, (2, 1)), nn.Conv3d(4, 4, 1), nn.BatchNorm3d(4), nn.SyncBatchNorm(4),
        )


class GaussianNoise(nn.Module):
    def __init__(self, sigma):
        super().__init__()
        self.sigma = sigma

    def forward(self, x):
        return x + torch.randn_like(x) * self.sigma if self.training else x


class OwnAttention(nn.Module):
    """As in transformers: the probability is 0 in the code of eval mode."""

    def __init__(self, p, fused):
        super().__init__()
        self.qkv, self.p, self.fused = nn.Linear(8, 24), p, fused

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.p if self.training else 0.0
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return F.dropout((q @ k.transpose(-1, -2)).softmax(-1), p=p, training=self.training) @ v


class TorchAttention(nn.Module):
    def __init__(self, p, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Recurrent(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=p)

    def forward(self, x):
        return self.lstm(x)[0]


def image():
    return torch.randn(2, 3, 64, 64)


def timm_model(name, **options):
    timm = pytest.importorskip("timm")
    return timm.create_model(name, **options)


def stochastic_depth(p, mode):
    return pytest.importorskip("torchvision").ops.StochasticDepth(p, mode)


def torchvision_model(name):
    return getattr(pytest.importorskip("torchvision").models, name)(weights=None)


MODELS = {
    "resnet18": (lambda: torchvision_model("resnet18"), image),
    "efficientnet_b0": (lambda: torchvision_model("efficientnet_b0"), image),
    "convnext": (lambda: timm_model("convnext_atto", drop_path_rate=0.3, drop_rate=0.1), image),
    "vit": (lambda: timm_model("vit_tiny_patch16_224", img_size=64, depth=2, drop_path_rate=0.3, proj_drop_rate=0.1,
                               attn_drop_rate=0.1), image),
    "stochastic depth": (lambda: Net(stochastic_depth(0.3, "row"), stochastic_depth(0.2, "batch")), lambda: X),
    "norms": (Convolutions, lambda: torch.randn(3, 2, 8)),
    "dropouts": (lambda: Net(nn.Dropout(0.2), nn.Dropout(0.0), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2),
                             nn.Dropout(0.1, inplace=True)), lambda: X),
    "channels": (lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.Dropout1d(0.2), nn.Unflatten(2, (4, 2)),
                                       nn.Dropout2d(0.2), nn.Unflatten(3, (2, 1)), nn.Dropout3d(0.2)),
                 lambda: torch.randn(3, 2, 8)),
    "noise": (lambda: Net(GaussianNoise(0.1)), lambda: X),
    "fused": (lambda: OwnAttention(0.3, True), lambda: torch.randn(2, 5, 8)),
    "spelled out": (lambda: OwnAttention(0.3, False), lambda: torch.randn(2, 5, 8)),
    "attention": (lambda: TorchAttention(0.3, False), lambda: torch.randn(2, 5, 8)),
    "weights": (lambda: TorchAttention(0.3, True), lambda: torch.randn(2, 5, 8)),
    "lstm": (lambda: Recurrent(0.3), lambda: torch.randn(5, 2, 8)),
}


def step(model, x):
    """The output of a step in train mode, with the buffers after it."""
    torch.manual_seed(0)
    y = model.train()(x)
    return y.detach(), {name: buffer.clone() for name, buffer in model.named_buffers()}


@functools.cache
def prepared_once(name):
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model, x = build(), inputs()
    return model, qtk.prepare_model(copy.deepcopy(model), x), x


@pytest.fixture(params=slow_but(MODELS, *(set(MODELS) - {"efficientnet_b0"})))
def pair(request):
    return copy.deepcopy(prepared_once(request.param))


@pytest.mark.sample(1)
@pytest.mark.slow
def test_train_and_eval_are_the_original_s_bit_for_bit(pair):
    model, prepared, x = pair
    assert prepared.report.train_notes == ()
    assert torch.equal(prepared.eval()(x), model.eval()(x))
    (expected, buffers), (actual, others) = step(model, x), step(prepared, x)
    assert torch.equal(actual, expected)
    assert all(torch.equal(others[name], buffer) for name, buffer in buffers.items())
    for other in (copy.deepcopy(prepared), torch.compile(prepared, backend="eager")):
        assert torch.equal(step(other, x)[0], step(model, x)[0])


def called(model, x):
    """Path → module of those that run in eval mode."""
    seen = set()
    handles = [m.register_forward_hook(lambda module, args, output: seen.add(module)) for m in model.modules()]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return {path: module for path, module in model.named_modules() if module in seen}


@pytest.mark.sample(2)
@pytest.mark.medium
def test_every_type_stands_at_its_path(pair):
    model, prepared, x = pair
    kinds = (BatchNormBase, DropoutBase, GaussianNoise)
    for path, module in called(model, x).items():
        if isinstance(module, kinds) or type(module).__name__ in ("DropPath", "StochasticDepth"):
            assert type(prepared.get_submodule(path)) is type(module), path
            assert prepared.get_submodule(path) is not module


@pytest.mark.sample(3)
@pytest.mark.medium
def test_settings_act(pair):
    model, prepared, x = pair
    settable = (BatchNormBase, DropoutBase, GaussianNoise, type(stochastic_depth(0.1, "row")))
    names = ("p", "drop_prob", "sigma", "momentum")
    changed = 0
    for path, module in called(model, x).items():
        for name in names:
            if isinstance(module, settable) and hasattr(module, name):
                setattr(module, name, 0.45)
                setattr(prepared.get_submodule(path), name, 0.45)
                changed += 1
    (expected, buffers), (actual, others) = step(model, x), step(prepared, x)
    assert torch.equal(actual, expected)
    assert all(torch.equal(others[name], buffer) for name, buffer in buffers.items())
    assert changed or isinstance(model, (OwnAttention, TorchAttention, Recurrent))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("build", "path", "name"), [
    (lambda: OwnAttention(0.3, True), "attention", "p"), (lambda: OwnAttention(0.3, False), "dropout", "p"),
    (lambda: TorchAttention(0.3, False), "attention.attention", "p"),
    (lambda: TorchAttention(0.3, True), "attention.dropout_1", "p"),
    (lambda: Recurrent(0.3), "lstm.recurrence", "dropout"),
])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_probability_inside_an_op_acts(build, path, name, quantized):
    model, x = build(), torch.randn(2, 5, 8)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    if not quantized:
        for quantizer in sim.quantizers.values():
            quantizer.mode = qtk.Mode.BYPASS
    setting = sim.model.get_submodule(path)
    assert getattr(setting, name) == 0.3
    assert not torch.equal(step(sim.model, x)[0], sim.model.eval()(x))
    setattr(setting, name, 0.0)
    assert torch.equal(step(sim.model, x)[0], sim.model.eval()(x))
    setattr(setting, name, 1.0)
    dropped = step(sim.model, x)[0]
    assert not torch.equal(dropped, sim.model.eval()(x))
    setting.eval()
    sim.model.training = True
    assert torch.equal(sim.model(x), sim.model.eval()(x))


class DropsInside(OwnAttention):
    """As timm's: the fused op reads the probability of a dropout that the code does not call."""

    def __init__(self, p):
        super().__init__(p, True)
        self.attn_drop, self.proj_drop = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.attn_drop.p if self.training else 0.0
        return self.proj_drop(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p))


@pytest.mark.medium
def test_a_dropout_that_only_lends_its_probability_names_where_that_acts():
    x = torch.randn(2, 5, 8)
    model = qtk.prepare_model(nn.Sequential(DropsInside(0.0), nn.Flatten()), x)
    with pytest.raises(CaptureError, match=r"'0\.attn_drop\.p' would have no effect.*; set '0\.attention\.p', or set"):
        model.get_submodule("0.attn_drop").p = 1.0
    model.get_submodule("0.proj_drop").p = 0.0
    model.get_submodule("0.attention").p = 1.0
    assert not model.train()(x).any()


def live(model, x):
    sim = qtk.QuantSim(model.eval(), x, config=LIVE)
    sim.compute_encodings([x], progress=False)
    return sim


@pytest.mark.medium
def test_a_frozen_batch_norm_keeps_its_statistics_in_train_mode():
    x = torch.randn(3, 2, 8)
    sim = live(Convolutions(), x)
    for module in sim.model.train().modules():
        if isinstance(module, BatchNormBase):
            module.eval()
    before = copy.deepcopy(sim.model.state_dict())
    sim.model(x)
    assert all(torch.equal(before[name], value) for name, value in sim.model.state_dict().items())


@pytest.mark.medium
def test_update_bn_gives_the_statistics_it_gives_the_float_model():
    model, batches = Convolutions().eval(), [torch.randn(5, 2, 8) for _ in range(3)]
    sim = live(copy.deepcopy(model), batches[0])
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    update_bn(batches, model)
    update_bn(batches, sim.model)
    for name, buffer in model.named_buffers():
        assert torch.equal(sim.model.get_buffer(name), buffer), name
    assert int(sim.model.get_submodule("1").num_batches_tracked) == 3


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050"])
def test_timm_freezes_batch_norms(name):
    utils = pytest.importorskip("timm.layers")
    model, x = timm_model(name).eval(), image()
    sim = live(copy.deepcopy(model), x)
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    frozen = utils.freeze_batch_norm_2d(sim.model)
    original = utils.freeze_batch_norm_2d(model)
    assert not any(isinstance(module, BatchNormBase) for module in frozen.modules())
    assert {type(m).__name__ for m in frozen.modules() if "Norm" in type(m).__name__} == {
        type(m).__name__ for m in original.modules() if "Norm" in type(m).__name__}
    if name == "resnet18":
        before = copy.deepcopy(frozen.state_dict())
        torch.testing.assert_close(frozen.train()(x), original.train()(x), rtol=1e-3, atol=1e-4)
        assert all(torch.equal(before[key], value) for key, value in frozen.state_dict().items())
    thawed = utils.unfreeze_batch_norm_2d(frozen)
    assert sum(isinstance(module, BatchNormBase) for module in thawed.modules()) > 5


@pytest.mark.slow
def test_timm_freezes_modules_by_name():
    utils, x = pytest.importorskip("timm.utils"), image()
    sim = live(timm_model("resnet18"), x)
    utils.freeze(sim.model, ["layer1", "bn1"])
    assert not any(p.requires_grad for name, p in sim.model.named_parameters() if name.startswith(("layer1.", "bn1.")))
    before = copy.deepcopy(sim.model.state_dict())
    sim.model.train()(x)
    moved = {name for name, value in sim.model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved
    assert not any(name.startswith(("layer1.", "bn1.")) for name in moved)


class OverRanks(nn.SyncBatchNorm):
    """Synchronises on the CPU, which torch's own refuses."""

    def forward(self, x):
        everything = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, x)
        everything[dist.get_rank()] = x
        own = slice(dist.get_rank() * len(x), (dist.get_rank() + 1) * len(x))
        y = F.batch_norm(torch.cat(everything), self.running_mean, self.running_var, self.weight, self.bias, True,
                         self.momentum, self.eps)
        return y[own]


def on_a_rank():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 3, 5, 5)
    sim = live(model, batches[0])
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(sim.model)
    assert type(converted.get_submodule("1")) is nn.SyncBatchNorm
    whole = copy.deepcopy(sim.model.eval())
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):  # torch's own forward is reached
        converted.train()(batches[rank])
    converted.get_submodule("1").__class__ = OverRanks
    converted.train()(batches[rank])
    whole.set_submodule("1", nn.BatchNorm2d(4))
    whole.train()(batches.flatten(0, 1))
    torch.testing.assert_close(converted.get_buffer("1.running_var"), whole.get_buffer("1.running_var"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_converted_batch_norms_see_the_batches_of_all_ranks():
    fresh.run_ranks(on_a_rank, 2)


def test_a_module_put_in_the_place_of_another_acts():
    prepared = qtk.prepare_model(Net(nn.Dropout(0.5)), X)
    prepared.get_submodule("inner").add_module("0", GaussianNoise(0.0))
    assert torch.equal(step(prepared, X)[0], prepared.eval()(X))


@pytest.mark.medium
def test_folded_batch_norms_are_no_batch_norms():
    sim = qtk.QuantSim(Convolutions().eval(), torch.randn(3, 2, 8))
    assert not any(isinstance(module, BatchNormBase) for module in sim.model.modules())
    update_bn([torch.randn(3, 2, 8)], sim.model)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux_head = Net(nn.Dropout(0.5)), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        y = self.body(x)
        return (self.head(y), self.aux_head(y)) if self.training else self.head(y)


class Scales(nn.Module):
    def forward(self, x):
        y = x.abs()
        return y * 2 if self.training else y


@pytest.mark.parametrize(("model", "match"), [
    (Auxiliary(), r"the model \(Auxiliary\) in train mode alone calls aux_head \(Linear\), returns tuple"),
    (Net(Scales()), r"inner.0 \(Scales\) in train mode alone calls torch's mul\(2\)"),
])
def test_what_train_mode_does_otherwise_is_warned_of_once(model, match):
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    sim = qtk.QuantSim(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.model.eval()
    with pytest.warns(UserWarning, match=match) as record:
        sim.model.train()
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.model.train()


@pytest.mark.medium
@pytest.mark.sample(3)
def test_what_trains_alike_warns_of_nothing(pair):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair[1].train()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["noise", "dropouts", "norms", "weights"])
def test_saved_exported_and_stepped(name, tmp_path):
    build, inputs = MODELS[name]
    model, x = build().eval(), inputs()
    sim = live(model, x)
    expected = sim.model.eval()(x)
    sim.save(tmp_path / "sim")
    again = qtk.QuantSim.load(tmp_path / "sim", model, x)
    assert torch.equal(again.model.eval()(x), expected)
    program = torch.export.export(sim.model.eval(), (x,))
    assert torch.equal(program.module()(x), expected)
    if importlib.util.find_spec("onnxruntime") is not None:
        sim.export(tmp_path / "files")
    assert torch.equal(step(again.model, x)[0], step(sim.model, x)[0])
