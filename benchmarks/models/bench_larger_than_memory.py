"""Folders of weights quantized file to file: peak memory, bits, CPU time, and runs that are killed.

    python benchmarks/models/bench_larger_than_memory.py --rows bits kills      # a Llama of 36.6 M parameters
    python benchmarks/models/bench_larger_than_memory.py --rows free gptq       # of 1.1 B: half an hour of one core
    python benchmarks/models/bench_larger_than_memory.py --rows depth           # 4, 8 and 16 layers of that width

Needs compressed-tensors and transformers. Models have random weights in bfloat16, made on the spot in shards of 1 GB;
every case runs in a process of its own, whose peak (VmHWM) is counted above what it has after its imports.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path

import torch
from bench_big_model import memory

SIZES = {"small": (768, 2048, 4, 12, 8192), "large": (2048, 5632, 22, 32, 32000)}
"""Width, inner width, layers, heads, vocabulary: 36.6 M and 1.1 B parameters."""

BATCHES, ROWS, TOKENS = 8, 2, 128


def make(folder: Path, size: tuple[int, ...]) -> None:
    import transformers

    width, inner, layers, heads, vocabulary = size
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 8))
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")


def batches(folder: Path) -> list[dict[str, object]]:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = torch.randint(vocabulary, (BATCHES, ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "use_cache": False} for each in ids]


def child(kind: str, source: Path, target: Path) -> None:
    """Quantizes a folder, or the model in memory, and prints peak and CPU time."""
    warnings.simplefilter("ignore")
    import transformers

    import qtk

    for name in ("compressed_tensors.compressors", "compressed_tensors.quantization", "torch._dynamo",
                 "transformers.models.llama.modeling_llama", "qtk.auto.quantize_checkpoint"):
        import_module(name)  # imports are no memory of a model

    Path("/proc/self/clear_refs").write_text("5")
    (least, _), started = memory(), resource.getrusage(resource.RUSAGE_SELF)
    method = "gptq" if "gptq" in kind else ()
    if "memory" in kind:
        model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        for each in model.parameters():
            each.data = each.data.clone()
        sim = qtk.QuantSim(model, batches(source)[0], config="vllm_w4a16", in_place=True, dynamic_shapes="all")
        sim.compute_encodings(None, progress=False)
        qtk.round_scales(sim)
        if method:
            qtk.apply_gptq(sim, batches(source), progress=False)
        sim.export(target, formats="compressed_tensors")
    elif kind == "copy":
        target.mkdir()
        for path in source.glob("*.safetensors"):
            with path.open("rb") as file, (target / path.name).open("wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 24)
                copy.flush()
                os.fsync(copy.fileno())
    else:
        qtk.quantize_checkpoint(source, target, methods=method, data=batches(source) if method else None,
                                verify=kind != "unverified", progress=False)
    (_, peak), used = memory(), resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"peak": peak - least, "user": used.ru_utime - started.ru_utime,
                      "system": used.ru_stime - started.ru_stime}))


def start(kind: str, source: Path, target: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--child", kind, str(source), str(target)],
                            stdout=subprocess.PIPE, text=True)


def measured(kind: str, source: Path, target: Path) -> dict[str, float]:
    output, _ = start(kind, source, target).communicate()
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    print(f"  {kind:<12} peak {found['peak']:>6.0f} MB above imports, CPU {found['user']:.1f} s + "
          f"{found['system']:.1f} s in the kernel", flush=True)
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def row_bits(folder: Path, source: Path) -> None:
    for kind in ("free", "gptq"):
        measured(kind, source, folder / kind)
        measured(f"{kind} memory", source, folder / f"{kind}-memory")
        same = digests(folder / kind) == digests(folder / f"{kind}-memory")
        print(f"  {kind}: {'the same bytes' if same else 'OTHER'}", flush=True)


def row_free(folder: Path, source: Path) -> None:
    copy, free = (measured(kind, source, folder / f"free-{kind}") for kind in ("copy", "unverified"))
    measured("free", source, folder / "free-verified")
    largest = max(path.stat().st_size for path in source.glob("*.safetensors")) / 2**20
    times = [sum(each[key] for key in ("user", "system")) for each in (free, copy)]
    print(f"  {free['peak'] / largest:.2f} shards of {largest:.0f} MB; {times[0] / times[1]:.1f} x the CPU of a copy")


def row_kills(folder: Path, source: Path) -> None:
    started = time.monotonic()
    start("gptq", source, folder / "whole").wait()
    lasts_s, kills, target = time.monotonic() - started, 0, folder / "killed"
    random.seed(0)
    while kills < 20:
        run = start("gptq", source, target)
        time.sleep(random.uniform(0.2, 1.0) * lasts_s)
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
            kills += 1
        run.wait()
        if target.exists():
            assert digests(target) == digests(folder / "whole")
            shutil.rmtree(target)
    start("gptq", source, target).wait()
    same = digests(target) == digests(folder / "whole")
    print(f"  {kills} kills: {'the same folder, byte for byte' if same else 'OTHER'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=["bits", "kills"],
                        choices=["bits", "kills", "free", "gptq", "depth"])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        kind, source, target = arguments.child
        child(kind, Path(source), Path(target))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in arguments.rows:
            print(row, flush=True)
            if row == "depth":
                for layers in arguments.layers:
                    width, inner, _, *others = SIZES["large"]
                    make(folder / "source", (width, inner, layers, *others))
                    print(f"  {layers} layers", flush=True)
                    measured("gptq", folder / "source", folder / "out")
                    shutil.rmtree(folder / "source"), shutil.rmtree(folder / "out")
                continue
            source = folder / ("large" if row in ("free", "gptq") else "small")
            if not source.exists():
                make(source, SIZES[source.name])
            if row == "gptq":
                measured(row, source, folder / "gptq-large")
            else:
                {"bits": row_bits, "kills": row_kills, "free": row_free}[row](folder, source)


if __name__ == "__main__":
    main()
