"""Folders of weights quantized file to file: peak memory, bits, CPU time, and runs that are killed.

    python benchmarks/models/bench_larger_than_memory.py --rows bits            # a Llama of 36.6 M parameters
    python benchmarks/models/bench_larger_than_memory.py --rows kills           # of 3.7 M, killed 20 times: minutes
    python benchmarks/models/bench_larger_than_memory.py --rows depth forecast  # 1024 wide, 4 to 16 layers; 36.6 M
    python benchmarks/models/bench_larger_than_memory.py --rows free gptq       # of 1.1 B: half an hour of one core
    python benchmarks/models/bench_larger_than_memory.py --rows ranks           # one process, and two by torchrun

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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from bench_big_model import memory
from tqdm import tqdm

SIZES = {"tiny": (256, 768, 4, 4, 1024), "small": (768, 2048, 4, 12, 8192), "one": (768, 2048, 1, 12, 8192),
         "deep": (1024, 2816, 4, 16, 4096), "large": (2048, 5632, 22, 32, 32000)}
"""Width, inner width, layers, heads, vocabulary: 3.7 M, 36.6 M, 18.6 M, 53 M (with 16 layers 185 M) and 1.1 B
parameters."""

BATCHES, ROWS, TOKENS = 8, 2, 128
TURNS = 3


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


def imports() -> None:
    """What is no memory of a model, and what a process that is forked has already."""
    for name in ("compressed_tensors.compressors", "compressed_tensors.quantization", "torch._dynamo",
                 "transformers.models.llama.modeling_llama", "qtk.auto.quantize_checkpoint",
                 "qtk.workflow.forecast"):
        import_module(name)


def child(kind: str, source: Path, target: Path) -> None:
    """Quantizes a folder, or the model in memory, and prints peak, forecast and CPU time.

    ``kind``: a method or ``free``, then ``memory`` for a model in memory, ``disk`` for ``offload``, ``unverified``,
    ``little``: 16 MB of files stay in memory, not 256.
    """
    warnings.simplefilter("ignore")
    import transformers

    import qtk
    from qtk.nn import mapped_weights
    from qtk.workflow import forecast

    imports()
    Path("/proc/self/clear_refs").write_text("5")
    (least, _), started, begun = memory(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    foreseen, own = list[float](), forecast.forecast

    def kept(*arguments: Any, **options: Any) -> forecast.Forecast:
        said = own(*arguments, **options)
        foreseen.append(memory()[0] - least + said.peak_bytes / 2**20)
        return said

    forecast.forecast, mapped_weights.LARGE_BYTES = kept, 0
    name, *how = kind.split()
    if "little" in how:  # as small beside the model as 256 MB beside one of several GB
        mapped_weights.LIMIT_BYTES = 1 << 24
    methods = () if name in ("free", "copy") else name
    options = qtk.LayerwiseOptions(offload="disk" if "disk" in how else "none",
                                   inputs="symfp" if "symfp" in how else "asym")
    if "memory" in how:
        model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        for each in model.parameters():
            each.data = each.data.clone()
        sim = qtk.QuantSim(model, batches(source)[0], config="vllm_w4a16", in_place=True, dynamic_shapes="all")
        sim.compute_encodings(None, progress=False)
        qtk.round_scales(sim)
        if methods:
            qtk.apply_layerwise(sim, batches(source), methods, options=options)
        sim.export(target, formats="compressed_tensors")
    elif name == "copy":
        target.mkdir()
        for path in source.glob("*.safetensors"):
            with path.open("rb") as file, (target / path.name).open("wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 24)
                copy.flush()
                os.fsync(copy.fileno())
    else:
        qtk.quantize_checkpoint(source, target, methods=methods, data=batches(source) if methods else None,
                                options=options, verify="unverified" not in how)
    (_, peak), used = memory(), resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"peak": peak - least, "foreseen": max(foreseen, default=0.0),
                      "user": used.ru_utime - started.ru_utime, "system": used.ru_stime - started.ru_stime,
                      "wall": time.perf_counter() - begun}))


def start(kind: str, source: Path, target: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--child", kind, str(source), str(target)],
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def measured(kind: str, source: Path, target: Path) -> dict[str, float]:
    output, _ = start(kind, source, target).communicate()
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    print(f"  {kind:<18} peak {found['peak']:>6.0f} MB above imports, CPU {found['user']:.1f} s + "
          f"{found['system']:.1f} s in the kernel, {found['wall']:.1f} s by the clock", flush=True)
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
    """Both end on the disk; a copy takes once or thrice the time in the kernel, so medians of turns are compared."""
    turns: dict[str, list[dict[str, float]]] = {"copy": [], "free unverified": [], "free": []}
    for _ in range(TURNS):
        for kind, found in turns.items():
            found.append(measured(kind, source, folder / "free"))
            shutil.rmtree(folder / "free")
    largest = max(path.stat().st_size for path in source.glob("*.safetensors")) / 2**20
    peak = max(each["peak"] for each in turns["free"])
    print(f"  {peak / largest:.2f} shards of {largest:.0f} MB; medians of {TURNS} turns, CPU s and s by the clock:")
    for kind, found in turns.items():
        used, wall = (statistics.median(values) for values in (
            [each["user"] + each["system"] for each in found], [each["wall"] for each in found]))
        if kind == "copy":
            base_used, base_wall = used, wall
        print(f"  {kind:<16} {used:.1f} ({used / base_used:.1f} x the copy), {wall:.1f} ({wall / base_wall:.1f} x)")


def forked(source: Path, target: Path) -> int:
    """Begins a run in a process that has imported everything. Returns: its id."""
    pid = os.fork()
    if pid == 0:
        tqdm.set_lock(threading.RLock())  # tqdm's is one for all processes, and stays held by a process that is killed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            child("gptq", source, target)
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def row_kills(folder: Path, source: Path) -> None:
    imports()
    started = time.monotonic()
    assert os.waitpid(forked(source, folder / "whole"), 0)[1] == 0
    lasts_s, moments, target = time.monotonic() - started, list[str](), folder / "killed"
    expected, same = digests(folder / "whole"), 0
    random.seed(0)
    while len(moments) < 20:
        pid, after_s = forked(source, target), random.uniform(0.05, 1.0) * lasts_s
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != 0:
            layers = len(list(folder.glob("killed.layers/0*.safetensors")))
            moments.append(f"{after_s:.1f} s ({layers})")
            if random.random() < 0.5:  # the rest is killed again
                continue
            assert os.waitpid(forked(source, target), 0)[1] == 0
        assert digests(target) == expected
        same += 1
        shutil.rmtree(target)
    if not target.exists() and list(folder.glob("killed*")):
        assert os.waitpid(forked(source, target), 0)[1] == 0
        assert digests(target) == expected
        same += 1
        shutil.rmtree(target)
    left = [path.name for path in folder.iterdir() if path.name.startswith("killed")]
    print(f"  a run lasts {lasts_s:.1f} s; killed after (finished layers): {', '.join(moments)}\n"
          f"  {len(moments)} kills, after them {same} runs to the end: the same folder each time, byte for byte; "
          f"{len(left)} files left beside it")


FORECASTS = {"small": ("free", "seq_mse", "seq_mse memory", "gptq", "gptq memory", "gptq disk", "coordinate_descent"),
             "one": ("adaround",)}


def row_gptq(folder: Path, source: Path) -> None:
    measured("gptq", source, folder / "gptq-large")


def row_forecast(folder: Path, source: Path) -> None:
    for kind in FORECASTS[source.name]:
        found = measured(kind, source, folder / f"forecast {kind}")
        print(f"    foreseen {found['foreseen']:.0f} MB: {found['foreseen'] / found['peak'] - 1:+.0%}", flush=True)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(*sizes) for sizes in ((256, 768), (256, 768), (768, 256)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def rank(methods: str, inputs: str, out: Path) -> None:
    """Learns the weights of four blocks with a share of the batches, and prints the CPU time of this rank."""
    import torch.distributed as dist

    import qtk

    torch.set_num_threads(1)
    world, own = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = torch.nn.Sequential(*(Gated() for _ in range(4))).eval(), list(torch.randn(8, 128, 256))
    sim = qtk.QuantSim(model, data[0], weight_bits=4, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    options = qtk.LayerwiseOptions(inputs=inputs)  # type: ignore[arg-type]
    started = time.process_time()
    qtk.apply_layerwise(sim, data[own::world], methods, options=options, progress=False)
    used, bits = time.process_time() - started, hashlib.sha256()
    for each in sim.model.state_dict().values():
        bits.update(each.contiguous().numpy().tobytes())
    (out / f"{own}.json").write_text(json.dumps({"CPU s": used, "bits": bits.hexdigest()}))


def row_ranks(folder: Path, source: Path) -> None:
    for methods in ("adaround(iterations=300)", "gptq"):  # so that solves of the first dominate
        for inputs in ("asym", "symfp"):
            used, bits = list[float](), set[str]()
            for world in (1, 2):
                out = folder / f"ranks {methods} {inputs} {world}"
                out.mkdir()
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
                subprocess.run([*command, __file__, "--rank", methods, inputs, str(out)], check=True,
                               capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                found = [json.loads(path.read_text()) for path in out.iterdir()]
                used.append(max(each["CPU s"] for each in found))
                bits |= {each["bits"] for each in found}
            same = "the same bits" if len(bits) == 1 else "OTHER bits"
            print(f"  {methods} {inputs}: CPU s of one process {used[0]:.1f}, of the busier of two {used[1]:.1f}: "
                  f"{used[0] / used[1]:.2f} x; {same}", flush=True)


RUNS = {"bits": (row_bits, ("small",)), "kills": (row_kills, ("tiny",)), "free": (row_free, ("large",)),
        "gptq": (row_gptq, ("large",)), "forecast": (row_forecast, FORECASTS), "ranks": (row_ranks, ("tiny",))}
"""What measures a row, and the sizes of the models that it does so with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=["bits", "kills"],
                        choices=[*RUNS, "depth"])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--rank", nargs=3)
    arguments = parser.parse_args()
    if arguments.rank:
        methods, inputs, out = arguments.rank
        rank(methods, inputs, Path(out))
        return
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
                    width, inner, _, *others = SIZES["deep"]
                    make(folder / "source", (width, inner, layers, *others))
                    print(f"  {layers} layers", flush=True)
                    measured("gptq little", folder / "source", folder / "out")
                    shutil.rmtree(folder / "source"), shutil.rmtree(folder / "out")
                continue
            run, sizes = RUNS[row]
            for size in sizes:
                if not (folder / size).exists():
                    make(folder / size, SIZES[size])
                run(folder, folder / size)


if __name__ == "__main__":
    main()
