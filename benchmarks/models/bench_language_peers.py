"""Weights of 4, 3 and 2 bits of one byte-level language model, by qtk and by its peers: divergence, perplexity, cost.

A Llama of 6 layers, 256 wide, is trained on the Python standard library for each seed (of model and data), and kept in
``--models``. All tools get the same model and the same 64 x 192 bytes to calibrate on; the head stays in float. A row
is measured on 96 x 192 bytes of files that nothing was trained on: the divergence (KL) of the quantized model from the
float one per token, in 1e-6 nats, and the perplexity; the cost is the CPU time of the tool's call, as a multiple of a
forward of the float model over the calibration data. Peers that are not installed say so.

    pip install 'qtk[llm]'; pip install --no-deps llmcompressor auto-round
    OMP_NUM_THREADS=1 python benchmarks/models/bench_language_peers.py [--seeds 0 1 2] [--train-seconds 200]
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import qtk
from qtk.analysis.divergence import divergence_of

SETTINGS = {"W4 g128": (4, 128), "W3 g128": (3, 128), "W2 g32": (2, 32)}
LENGTH, CALIBRATION, HELD_OUT, BATCH = 192, 64, 96, 8
CHAIN = ["seq_mse", "coordinate_descent"]
METHODS: dict[str, list[str]] = {
    "qtk rounding": [], "qtk GPTQ": ["gptq"], "qtk seq_mse + cd": CHAIN, "qtk AdaRound": ["adaround"]}


def text(seed: int) -> tuple[bytes, bytes]:
    """The standard library's sources: for training and calibration, and others that are held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if not {"test", "site-packages"} & set(path.parts)]
    random.Random(seed).shuffle(files)
    count = len(files) // 10
    return tuple(b"\n".join(path.read_bytes() for path in part) for part in (files[count:], files[:count]))


def samples(data: bytes, count: int, seed: int) -> Tensor:
    """Int64 [count, LENGTH]."""
    begins = torch.randint(0, len(data) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([torch.frombuffer(bytearray(data[at:at + LENGTH]), dtype=torch.uint8) for at in begins]).long()


def trained(seed: int, folder: Path, seconds: float) -> nn.Module:
    """The model of a seed, trained for so many seconds of CPU time unless the folder has it."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False, use_cache=False,
        bos_token_id=None, eos_token_id=None))
    file = folder / f"bytes_{seed}_{seconds:g}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file))
        return model.eval()
    data, _ = text(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    started, spent, step, mean = time.process_time(), 0.0, 0, 5.5
    while spent < seconds:
        rate = 2e-3 * min(1.0, (step + 1) / 50) * (1 - 0.95 * spent / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = samples(data, BATCH, 100_000 * (seed + 1) + step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent, step, mean = time.process_time() - started, step + 1, 0.98 * mean + 0.02 * float(loss.detach())
    print(f"seed {seed}: {step} steps in {spent:.0f} s, loss {mean:.3f}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model.eval()


def by_qtk(prepared: nn.Module, bits: int, block: int, methods: list[str], batches: list[Tensor]) -> nn.Module:
    weight = {"dtype": f"int{bits}", "symmetric": True, "granularity": "per_block", "block_size": block}
    config = {"version": 1, "extends": "vllm_w4a16", "rules": [
        {"match": {"op": ["linear"]}, "weight": weight}, {"match": {"lm_head": True}, "weight": "float"}]}
    sim = qtk.QuantSim(prepared, {"input_ids": batches[0]}, config=config)
    sim.compute_encodings(None)
    if methods:
        qtk.apply_layerwise(sim, [{"input_ids": batch} for batch in batches], methods, progress=False)
    return sim.model


def no_tokenizer() -> object:
    """What peers want to be given, and do not use."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))


def by_llm_compressor(model: nn.Module, bits: int, block: int, gptq: bool, batches: list[Tensor]) -> nn.Module:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(
        num_bits=bits, symmetric=True, strategy="group", group_size=block))
    modifier = (GPTQModifier if gptq else QuantizationModifier)(config_groups={"group_0": scheme}, ignore=["lm_head"])
    data = DataLoader([{"input_ids": batch} for batch in batches], batch_size=None) if gptq else None
    with tempfile.TemporaryDirectory() as folder:  # it reads the model's config from there
        model.config.save_pretrained(folder)
        model.config._name_or_path = folder
        oneshot(model=model, processor=no_tokenizer(), recipe=[modifier], dataset=data, max_seq_length=LENGTH,
                num_calibration_samples=CALIBRATION)
    return model


def by_auto_round(model: nn.Module, bits: int, block: int, batches: list[Tensor], iterations: int) -> nn.Module:
    from auto_round import AutoRound

    tool = AutoRound(model, no_tokenizer(), bits=bits, group_size=block, sym=True, iters=iterations, seqlen=LENGTH,
                     nsamples=CALIBRATION, batch_size=BATCH, dataset=[{"input_ids": batch} for batch in batches])
    return tool.quantize()[0]


def tools(model: nn.Module, prepared: nn.Module, bits: int, block: int, batches: list[Tensor]) -> Iterator[
        tuple[str, Callable[[], nn.Module]]]:
    """Every tool's name and its call, or a call that raises."""
    for name, methods in METHODS.items():
        yield name, lambda methods=methods: by_qtk(prepared, bits, block, methods, batches)
    for name, gptq in (("llm-compressor rounding", False), ("llm-compressor GPTQ", True)):
        yield name, lambda gptq=gptq: by_llm_compressor(copy.deepcopy(model), bits, block, gptq, batches)
    yield "AutoRound", lambda: by_auto_round(copy.deepcopy(model), bits, block, batches, 200)


def forward_seconds(model: nn.Module, batches: list[Tensor]) -> float:
    found = []
    with torch.no_grad():
        for _ in range(4):
            started = time.process_time()
            for batch in batches:
                model(input_ids=batch)
            found.append(time.process_time() - started)
    return statistics.median(found[1:])


class Recorded(nn.Module):
    """The logits of a model, which runs on each batch once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._run: Callable[..., object] = model.eval()
        self._logits: dict[int, Tensor] = {}

    def forward(self, input_ids: Tensor) -> Tensor:
        key = input_ids.data_ptr()
        if key not in self._logits:
            self._logits[key] = self._run(input_ids=input_ids).logits
        return self._logits[key]


def in_float64(model: nn.Module, reference: nn.Module, batch: dict[str, Tensor]) -> float:
    """The divergence by its formula, token by token."""
    total, logits = 0.0, [each(**batch).double().flatten(0, 1) for each in (reference, model)]
    for p, q in zip(*logits, strict=True):
        p, q = p - p.logsumexp(0), q - q.logsumexp(0)
        total += float((p.exp() * (p - q)).sum())
    return total / len(logits[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--only", nargs="*", help="tools whose names begin so")
    parser.add_argument("--train-seconds", type=float, default=200)
    parser.add_argument("--models", type=Path, default=Path("build/byte_models"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for package in ("transformers", "compressed-tensors", "llmcompressor", "auto-round"):
        try:
            print(package, version(package))
        except PackageNotFoundError:
            print(package, "is not installed")
    for seed in arguments.seeds:
        model = trained(seed, arguments.models, arguments.train_seconds)
        train, rest = text(seed)
        batches = list(samples(train, CALIBRATION, seed).split(BATCH))
        held_out = [{"input_ids": batch} for batch in samples(rest, HELD_OUT, seed).split(BATCH)]
        forward = forward_seconds(model, batches)
        reference = Recorded(model)
        scored = qtk.perplexity(reference, held_out, progress=False)
        print(f"seed {seed}: perplexity {scored:.4f}, forward {forward:.2f} s", flush=True)
        prepared = qtk.prepare_model(model, {"input_ids": batches[0]}, dynamic_shapes="all")
        is_checked = False
        for setting in arguments.settings:
            for name, call in tools(model, prepared, *SETTINGS[setting], batches):
                if arguments.only and not name.startswith(tuple(arguments.only)):
                    continue
                started = time.process_time()
                try:
                    quantized = call()
                except Exception as error:  # whatever a peer raises
                    print(f"{seed} {setting} {name:24} {type(error).__name__}: {str(error).splitlines()[:1]}")
                    continue
                cost = (time.process_time() - started) / forward
                recorded = Recorded(quantized)
                scored = qtk.perplexity(recorded, held_out, progress=False)
                found = divergence_of(recorded, reference, held_out).mean * 1e6
                if not is_checked:
                    first = divergence_of(recorded, reference, held_out[:1]).mean
                    assert math.isclose(first, in_float64(recorded, reference, held_out[0]), rel_tol=1e-3)
                    is_checked = True
                print(f"{seed} {setting} {name:24} KL {found:9.1f}  ppl {scored:.4f}  {cost:5.1f} forwards", flush=True)


if __name__ == "__main__":
    main()
