"""Prints a digest of all that qtk makes of the zoo: plans, encodings, layer-wise weights, exported files.

Two trees that print the same make the same bits, so that a refactoring is checked by

    python tests/golden/fingerprints.py > after.txt      # in either tree
    diff before.txt after.txt

Node names, locations and stack traces in ONNX files are left out: they hold paths of the source.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import qtk
from tests.zoo.entry import Entry
from tests.zoo.models import ZOO

CONFIGS = ("default", "onnxruntime", "dynamic", "dynamic_per_token")
LAYERWISE = ("residual", "all_convolutions", "vit", "gru", "reused_module", "two_inputs")
METHODS = ["seq_mse", "gptq", "bias_correction"]


def digest(*parts: bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:16]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def onnx_bytes(path: Path) -> bytes:
    import onnx

    model = onnx.load(path)
    for holder in (model, model.graph, *model.graph.node, *model.functions):
        if hasattr(holder, "metadata_props"):
            del holder.metadata_props[:]
        holder.doc_string = ""
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
    return model.SerializeToString(deterministic=True)


def of_simulation(entry: Entry, config: str) -> Iterator[tuple[str, str]]:
    sim = qtk.QuantSim(entry.model(), entry.inputs(), config=config, weight_bits=4)
    yield "plan", digest(str(sim.plan).encode())
    sim.compute_encodings([entry.inputs()], progress=False)
    encodings = sim.encodings()
    yield "encodings", digest(*(
        part for name, encoding in encodings.items()
        for part in (name.encode(), tensor_bytes(encoding.scale),
                     b"" if encoding.zero_point is None else tensor_bytes(encoding.zero_point))
    ))
    outputs = entry.run(sim.model)
    leaves = torch.utils._pytree.tree_leaves(outputs)
    yield "outputs", digest(*(tensor_bytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "export"
        try:
            sim.export(target, formats=("encodings", "onnx") if config != "default" else ("encodings",))
        except qtk.QtkError as error:
            yield "export", f"{type(error).__name__}"
            return
        for path in sorted(target.rglob("*")):
            if path.is_file():
                content = onnx_bytes(path) if path.suffix == ".onnx" else path.read_bytes()
                yield str(path.relative_to(target)), digest(content)


def of_layerwise(entry: Entry) -> Iterator[tuple[str, str]]:
    sim = qtk.QuantSim(entry.model(), entry.inputs(), weight_bits=4)
    batches = [entry.inputs(batch) for batch in (4, 6)]
    sim.compute_encodings(batches, progress=False)
    qtk.apply_layerwise(sim, batches, METHODS, progress=False)
    yield "weights", digest(*(tensor_bytes(tensor) for tensor in sim.model.state_dict().values()))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(ZOO)
    for name in names:
        for config in CONFIGS:
            for what, value in of_simulation(ZOO[name], config):
                print(f"{name} {config} {what} {value}", flush=True)
        if name in LAYERWISE:
            for what, value in of_layerwise(ZOO[name]):
                print(f"{name} layerwise {what} {value}", flush=True)


if __name__ == "__main__":
    main()
