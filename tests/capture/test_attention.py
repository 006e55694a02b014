"""torch's attention modules, prepared and simulated: the same function, and every product of activations quantized."""

import copy
import functools
import math

import pytest
import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode

import qtk
from qtk.core.granularity import PerChannel
from qtk.quantizers.modes import in_mode
from tests.zoo.prepared import slow_but

N, L, S, WIDTH, HEADS = 4, 12, 15, 16, 2
CODES = 256
ATEN = torch.ops.aten


class Attend(nn.Module):
    """Self-attention, or attention of the query to something else."""

    def __init__(self, *, call, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True} | options)
        self.call = call

    def forward(self, query, key=None, value=None, **masks):
        key = query if key is None else key
        return self.attn(query, key, key if value is None else value, **masks, **self.call)


def causal(dtype):
    return as_dtype(torch.ones(L, L, dtype=torch.bool).triu(1), dtype)


def mask_of_each_head(dtype):
    torch.manual_seed(3)
    return as_dtype((torch.rand(N * HEADS, L, L) < 0.4) & ~torch.eye(L, dtype=torch.bool), dtype)


def as_dtype(hidden, dtype):
    return hidden if dtype is torch.bool else torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


def padding():
    """Sequences of different lengths, none empty."""
    return torch.arange(L)[None] >= torch.tensor([L, L - 2, 5, 1])[:, None]


def query(*shape):
    return {"query": lambda: torch.randn(*(shape or (N, L, WIDTH)))}


FUSED = {"need_weights": False}
BOOL, FLOAT = {"attn_mask": lambda: causal(torch.bool)}, {"attn_mask": lambda: causal(torch.float32)}
PADDED = {"key_padding_mask": padding}
CASES = {  # options of the module, of its call, inputs
    "plain": ({}, FUSED, query()),
    "with_weights": ({}, {}, query()),
    "with_the_weights_of_each_head": ({}, {"average_attn_weights": False}, query()),
    "time_first": ({"batch_first": False}, FUSED, query()),
    "unbatched": ({}, FUSED, query(40, WIDTH)),
    "padded": ({}, FUSED, query() | PADDED),
    "padded_with_weights": ({}, {}, query() | PADDED),
    "bool_mask": ({}, FUSED, query() | BOOL),
    "float_mask": ({}, FUSED, query() | FLOAT),
    "float_mask_with_weights": ({}, {}, query() | FLOAT),
    "mask_of_each_head": ({}, FUSED, query() | {"attn_mask": lambda: mask_of_each_head(torch.bool)}),
    "float_mask_of_each_head": ({}, {}, query() | {"attn_mask": lambda: mask_of_each_head(torch.float32)}),
    "both_masks": ({}, FUSED, query() | BOOL | PADDED),
    "causal": ({}, FUSED | {"is_causal": True}, query() | BOOL),
    "other_widths": ({"kdim": 6, "vdim": 10}, FUSED,
                     query() | {"key": lambda: torch.randn(N, S, 6), "value": lambda: torch.randn(N, S, 10)}),
    "without_bias": ({"bias": False}, FUSED, query()),
    "extra_key_and_value": ({"add_bias_kv": True}, FUSED, query()),
    "extra_zeros": ({"add_zero_attn": True}, FUSED, query() | FLOAT),
}


SLOW = ("with_weights", "padded", "bool_mask", "float_mask_with_weights", "float_mask_of_each_head")
"""Each is two of the others together."""

every_case = pytest.mark.parametrize("name", slow_but(CASES, *(set(CASES) - set(SLOW))))


@functools.cache
def case(name):
    """A model in eval mode, the same prepared, and inputs by name; shared by tests that do not change them."""
    torch.manual_seed(0)
    options, call, inputs = CASES[name]
    model = Attend(call=call, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0, 0.1)  # biases are born as zeros
    made = {key: make() for key, make in inputs.items()}
    return model, qtk.prepare_model(model, made), made


def outputs(model, inputs):
    result = model(**inputs)
    return [value for value in (result if isinstance(result, tuple) else (result,)) if value is not None]


def near(a, b, tolerance):
    assert a.shape == b.shape
    assert float((a - b).detach().abs().max()) <= tolerance * max(1.0, float(a.detach().abs().max()))


def assert_prepared_alike(model, prepared, inputs):
    """In eval mode without grad, where torch takes its fast path, and with grad, gradients too."""
    with torch.no_grad():
        for a, b in zip(outputs(model, inputs), outputs(prepared, inputs), strict=True):
            near(a, b, 1e-6)
    gradients = []
    for module in (model, prepared):
        leaves = {key: value.clone().requires_grad_() if key in ("query", "key", "value", "src", "tgt") else value
                  for key, value in inputs.items()}
        results = outputs(module, leaves)
        total = sum((t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in results)
        parameters = dict(module.named_parameters())
        wanted = [parameters[name] for name, _ in model.named_parameters()]
        wanted += [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients.append((*results, *torch.autograd.grad(total, wanted)))
    for a, b in zip(*gradients, strict=True):
        near(a, b, 1e-6)


class Products(TorchFunctionMode):
    """The operands of every product of two activations."""

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (ATEN.matmul.default, ATEN.bmm.default, ATEN.baddbmm.default):
            self.operands += args[-2:]
        return func(*args, **(kwargs or {}))


def distinct_values(model, inputs):
    """How many different numbers each operand of every product holds, heads and batch together."""
    with Products() as products:
        outputs(model, inputs)
    return [operand.unique().numel() for operand in products.operands]


def simulated(prepared, inputs, bits):
    sim = qtk.QuantSim(prepared, inputs, weight_bits=bits, activation_bits=bits)
    sim.compute_encodings([inputs], progress=False)
    return sim


def assert_quantized(model, prepared, inputs, *, blocks, linears):
    """``blocks``: how many attentions there are; ``linears``: how many weights of linear layers."""
    sim = simulated(prepared, inputs, 8)
    weights = {site.name: decided for site, decided in sim.plan.items() if site.name.endswith("weight")}
    weights = {name: decided for name, decided in weights.items() if model.get_parameter(name).ndim == 2}
    assert len(weights) == linears
    assert all(decided.spec.granularity == PerChannel(0) for decided in weights.values())
    with torch.no_grad(), in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        for a, b in zip(outputs(model, inputs), outputs(sim.model, inputs), strict=True):
            near(a, b, 1e-6)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = distinct_values(sim.model, inputs)
        assert len(found) == 4 * blocks  # queries, keys; weights, values
        assert max(found) <= CODES
    assert_sane(sim)


def assert_sane(sim):
    """What was observed are numbers a net of this size makes, not the −∞ of a mask."""
    for name, encoding in sim.encodings().items():
        bounds = torch.maximum(encoding.minimum.abs(), encoding.maximum.abs())
        assert float(bounds.min()) > 1e-6, name
        assert float(bounds.max()) < 100, name


def assert_near_float_at_16_bits(model, prepared, inputs):
    sim = simulated(prepared, inputs, 16)
    with torch.no_grad():
        assert min(distinct_values(sim.model, inputs)) > CODES  # or counting them at 8 bits would say nothing
        for a, b in zip(outputs(model, inputs), outputs(sim.model, inputs), strict=True):
            signal, noise = (float(t.double().square().sum()) for t in (a, a - b))
            assert noise < 1e-5 * signal  # 50 dB


@pytest.mark.sample(1)
@pytest.mark.medium
@every_case
def test_a_prepared_attention_is_the_original(name):
    assert_prepared_alike(*case(name))


@pytest.mark.sample(2)
@pytest.mark.medium
@every_case
def test_a_simulated_attention_quantizes_weights_and_both_products(name):
    assert_quantized(*case(name), blocks=1, linears=4 if name == "other_widths" else 2)


@pytest.mark.sample(1)
@pytest.mark.medium
@every_case
def test_at_16_bits_attention_is_near_float(name):
    assert_near_float_at_16_bits(*case(name))


@pytest.mark.medium
def test_a_sleeping_simulation_takes_torchs_fused_kernel():
    _, prepared, inputs = case("both_masks")
    sim = simulated(prepared, inputs, 8)
    with torch.no_grad(), in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        assert not distinct_values(sim.model, inputs)
    assert distinct_values(sim.model, inputs)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["plain", "both_masks", "float_mask"])
def test_scores_weights_and_context_are_sites_and_masked_scores_are_none(name):
    sim = simulated(*case(name)[1:], 8)
    place = "attn.attention.core"
    assert {f"{place}.{value}:out" for value in ("scores", "softmax", "context")} <= set(sim.quantizers)
    left = {site.name for site in sim.plan.unquantized}
    masked = {"plain": set(), "both_masks": {f"{place}.add:out"}, "float_mask": {f"{place}.add:out"}}[name]
    assert {f"{place}.mul:out", *masked} <= left


@pytest.mark.parametrize("grad", [False, True])
def test_every_quantizer_runs_whether_or_not_gradients_are_wanted(grad):
    _, prepared, inputs = case("both_masks")
    sim = simulated(prepared, inputs, 8)
    calls = {id(quantizer): 0 for quantizer in sim.quantizers.values()}

    def count(module, *_):
        calls[id(module)] += 1

    for quantizer in sim.quantizers.values():
        quantizer.register_forward_hook(count)
    with torch.set_grad_enabled(grad):
        outputs(sim.model, inputs)
    assert set(calls.values()) == {1}


@pytest.mark.medium
def test_gradients_pass_through_a_simulated_attention_to_every_parameter():
    model, prepared, inputs = case("extra_key_and_value")
    sim = simulated(prepared, inputs, 8)
    outputs(sim.model, inputs)[0].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in sim.model.named_parameters()}
    assert all(gradients[name] is not None and bool(gradients[name].isfinite().all()) and bool(gradients[name].any())
               for name, _ in model.named_parameters())


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True, **options)


def decoder_layer(**options):
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True, **options)


def sequence(length=L):
    return torch.randn(N, length, WIDTH)


def encoder(nested=False):
    return nn.TransformerEncoder(encoder_layer(), 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=nested)


def transformer():
    return nn.Transformer(WIDTH, HEADS, 1, 1, 32, batch_first=True)


LAYERS = {  # builder, inputs, attentions, weights of linear layers
    "encoder_layer": (encoder_layer, lambda: {"src": sequence()}, 1, 4),
    "encoder_layer_norm_first": (lambda: encoder_layer(norm_first=True, activation="gelu"),
                                 lambda: {"src": sequence(), "src_key_padding_mask": padding()}, 1, 4),
    "encoder_layer_causal": (encoder_layer, lambda: {"src": sequence(), "src_mask": causal(torch.float32)}, 1, 4),
    "decoder_layer": (decoder_layer, lambda: {"tgt": sequence(), "memory": sequence(S)}, 2, 6),
    "decoder_layer_norm_first": (lambda: decoder_layer(norm_first=True, activation="gelu"),
                                 lambda: {"tgt": sequence(), "memory": sequence(S), "tgt_mask": causal(torch.bool),
                                          "tgt_key_padding_mask": padding()}, 2, 6),
    "padded_encoder": (encoder, lambda: {"src": sequence(), "src_key_padding_mask": padding()}, 2, 8),
    "encoder": (encoder, lambda: {"src": sequence()}, 2, 8),
    "transformer": (transformer, lambda: {"src": sequence(S), "tgt": sequence(), "tgt_mask": causal(torch.float32)},
                    3, 10),
}


every_layer = pytest.mark.parametrize("name", slow_but(
    LAYERS, "encoder_layer", "encoder_layer_norm_first", "decoder_layer", "padded_encoder"
))


@functools.cache
def layer(name):
    torch.manual_seed(0)
    build, make, *_ = LAYERS[name]
    model, inputs = build().eval(), make()
    return model, qtk.prepare_model(model, inputs), inputs


@pytest.mark.sample(2)
@pytest.mark.medium
@every_layer
def test_a_prepared_transformer_is_the_original(name):
    assert_prepared_alike(*layer(name))


@pytest.mark.sample(2)
@pytest.mark.medium
@every_layer
def test_a_simulated_transformer_quantizes_weights_and_all_products(name):
    *_, blocks, linears = LAYERS[name]
    assert_quantized(*layer(name), blocks=blocks, linears=linears)


@pytest.mark.sample(2)
@pytest.mark.medium
@every_layer
def test_at_16_bits_a_transformer_is_near_float(name):
    assert_near_float_at_16_bits(*layer(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_would_nest_its_tensors_is_prepared_too():
    model, (_, _, inputs) = encoder(nested=True).eval(), layer("padded_encoder")
    prepared = qtk.prepare_model(model, inputs)
    seen = ~inputs["src_key_padding_mask"]
    with torch.no_grad():
        near(model(**inputs)[seen], prepared(**inputs)[seen], 1e-6)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["encoder_layer", "padded_encoder"])
def test_dropout_inside_attention_is_on_in_train_mode_only(name):
    model, inputs = copy.deepcopy(layer(name)[0]), layer(name)[2]
    prepared = qtk.prepare_model(model, inputs).train()
    assert not torch.equal(*(outputs(prepared, inputs)[0] for _ in range(2)))
    torch.manual_seed(5)
    expected = outputs(model.train(), inputs)
    torch.manual_seed(5)
    for a, b in zip(expected, outputs(prepared, inputs), strict=True):
        near(a, b, 1e-6)


@pytest.mark.slow
def test_torchvisions_vit_is_quantized_throughout():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32,
                                                 mlp_dim=64, num_classes=10).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 3:
                parameter.normal_(0, 0.1)  # the head, and others, are born as zeros
    inputs = {"x": torch.randn(16, 3, 32, 32)}
    prepared = qtk.prepare_model(model, inputs)
    assert prepared.report.rung == "export"
    assert_quantized(model, prepared, inputs, blocks=2, linears=9)
    assert_near_float_at_16_bits(model, prepared, inputs)
