"""Language models of transformers, tiny and with random weights, by their default call."""

import copy

import pytest
import torch

import qtk
from qtk.errors import CaptureError
from qtk.torch_private import pytree

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 64, "head_dim": 16,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def causal(prefix, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def equal(a, b):
    leaves, others = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(leaves) == len(others) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(leaves, others, strict=True))


@pytest.mark.parametrize(("prefix", "more"), [
    ("Llama", {}), ("Mistral", {"sliding_window": 4}),
    ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
])
def test_the_default_call_is_one_graph_with_a_cache_of_the_same_class(prefix, more):
    model = causal(prefix, **more)
    prepared = qtk.prepare_model(model, {"input_ids": IDS})
    assert (prepared.report.rung, prepared.report.eval_difference) == ("export", 0)
    expected, output = model(IDS), prepared(input_ids=IDS)
    assert type(output.cache) is type(expected.cache)
    assert equal(output, expected)


def test_an_encoder_decoder_is_one_graph():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    model, call = transformers.T5ForConditionalGeneration(config).eval(), {"input_ids": IDS, "decoder_input_ids": IDS}
    prepared = qtk.prepare_model(model, call)
    assert (prepared.report.rung, prepared.report.eval_difference) == ("export", 0)
    assert isinstance(prepared(**call).cache, transformers.EncoderDecoderCache)


def test_greedy_tokens_with_a_cache_are_those_without():
    model = causal("Llama")
    options = {"max_new_tokens": 12, "do_sample": False}
    weights = qtk.QuantSim(model, {"input_ids": IDS}, config="weight_only_int4", dynamic_shapes="all")
    weights.compute_encodings(None)
    own = weights.to_original()
    assert type(own) is type(model)
    assert torch.equal(own.generate(IDS, **options), own.generate(IDS, use_cache=False, **options))
    step = {"input_ids": IDS[:, :3], "cache": model(IDS).cache}
    sim = qtk.QuantSim(model, {"input_ids": IDS}, variants=[step], dynamic_shapes="all")
    sim.compute_encodings([{"input_ids": IDS}, step], progress=False)
    made = sim.to_original()
    assert torch.equal(made.generate(IDS, **options), made.generate(IDS, use_cache=False, **options))


def test_a_static_cache_goes_in_and_comes_out():
    model = causal("Llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(IDS, cache=cache)
    step = {"input_ids": IDS[:, :2], "cache": cache}
    prepared = qtk.prepare_model(model, step)
    assert prepared.report.rung == "export"
    expected = model(**copy.deepcopy(step))
    assert equal(prepared(**copy.deepcopy(step)), expected)


def test_a_cache_that_counts_in_python_is_taken_at_its_length_alone():
    model = causal("Mistral", sliding_window=4)
    prepared = qtk.prepare_model(model, {"input_ids": IDS[:, :3], "cache": model(IDS).cache}, dynamic_shapes="all")
    with pytest.raises(CaptureError, match="cumulative_length 8, the model was captured for 9"):
        prepared(input_ids=IDS[:, :3], cache=model(IDS[:, 1:]).cache)
