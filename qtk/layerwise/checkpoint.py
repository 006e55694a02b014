"""Checkpoints of layer-wise runs: finished layers on disk, from which a killed run resumes.

``run.json`` says which run the directory belongs to: methods, versions, and digests of the model's arithmetic, its
quantizers, weights, encodings and data; ``0003.safetensors`` holds the update of layer 3, and its digest. Nothing is
ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from qtk.atomic import remove_unfinished, write_file
from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError
from qtk.graph.arithmetic import arithmetic_digest
from qtk.layerwise.digest import digest
from qtk.layerwise.layer_update import LayerUpdate
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.quantizers.quantizer import Quantizer

FORMAT, VERSION = "qtk.layerwise", 5
RUN_FILE = "run.json"
NUMBERS = "before", "after", "held out before", "held out after", "signal", "held out signal", "zeros"
TENSORS = "scale", "zero_point", "weight", "bias"


class Checkpoint:
    """The checkpoint directory of one run.

    Args:
        directory: is created if it is missing.
        layers: names of the layers, in order.
        settings: name → value of everything else that the result depends on.
        model: the model before the run; its weights and encodings are digested.
        calls: the data, digested too.

    Raises: CalibrationError if the directory belongs to another run, or cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layers: Sequence[str],
        settings: Mapping[str, str],
        model: nn.Module,
        calls: Iterable[object],
    ) -> None:
        self._folder = Path(directory)
        self._files = {name: f"{index:04d}.safetensors" for index, name in enumerate(layers)}
        run: dict[str, object] = {
            "format": FORMAT, "version": VERSION, "torch": torch.__version__, **settings, "layers": list(layers),
            "model": arithmetic_digest(model), "quantizers": digest(_quantizers(model)),
            "weights and encodings": digest(model.state_dict().values()), "data": digest(calls),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / RUN_FILE
            if path.exists():
                self._check(path, run)
            else:
                write_file(path, json.dumps(run, indent=1).encode())
            for name in (RUN_FILE, *self._files.values()):
                remove_unfinished(self._folder / name)
        except (OSError, ValueError) as error:  # a name with NUL is a ValueError
            raise CalibrationError(f"checkpoint_dir {directory!r}: {error}") from error

    @property
    def finished(self) -> frozenset[str]:
        """Names of the layers that are saved."""
        return frozenset(name for name, file in self._files.items() if (self._folder / file).exists())

    def save(self, layer: WeightedLayer, update: LayerUpdate) -> None:
        """Saves the update of a layer, atomically. Raises: CalibrationError if it cannot be written."""
        tensors = dict(zip(
            TENSORS, (update.encoding.scale, update.encoding.zero_point, update.weight, update.bias), strict=True
        ))
        errors = update.before, update.after, *(update.held_out or (math.nan, math.nan)), *update.signals, update.zeros
        numbers = {name: float(value).hex() for name, value in zip(NUMBERS, errors, strict=True)}
        self.write(layer.name, tensors, {"winner": update.winner, **numbers})

    def load(self, layer: WeightedLayer) -> LayerUpdate:
        """The update that ``save`` wrote. Raises: CalibrationError if the file is damaged or of another layer."""
        tensors, numbers = self.read(layer.name, layer.weight.device, ("winner", *NUMBERS))
        if "scale" not in tensors:
            raise CalibrationError(f"{self._folder / self._files[layer.name]} does not hold {layer.name}; delete it to "
                                   "do that layer again")
        before, after, *held_out, signal, held_out_signal, zeros = (float.fromhex(numbers[name]) for name in NUMBERS)
        encoding = Encoding(layer.quantizer.spec, tensors["scale"], tensors.get("zero_point"))
        return LayerUpdate(encoding, tensors.get("weight"), tensors.get("bias"), before, after,
                           None if math.isnan(held_out[0]) else (held_out[0], held_out[1]), numbers["winner"],
                           (signal, held_out_signal), zeros)

    def write(self, name: str, tensors: Mapping[str, Tensor | None], numbers: Mapping[str, str]) -> None:
        """Saves what belongs to a layer or block, atomically. Raises: CalibrationError if it cannot be written."""
        path = self._folder / self._files[name]
        contents = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items() if tensor is not None}
        metadata = {"layer": name, **numbers}
        metadata |= {"digest": digest([metadata, sorted(contents.items())])}
        try:
            write_file(path, to_bytes(contents, metadata=metadata))
        except OSError as error:
            raise CalibrationError(f"cannot write {path}: {error.strerror or error}; the layers before it are "
                                   "saved, and the same call goes on from there") from error

    def read(self, name: str, device: torch.device, numbers: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns what ``write`` wrote. Raises: CalibrationError if the file is damaged or of another layer."""
        path = self._folder / self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.metadata() or {}
                tensors: dict[str, Tensor] = {key: file.get_tensor(key).to(device) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"cannot read {path}: {error}; delete it to do {name} again") from error
        if stored.get("layer") != name or not stored.keys() >= {*numbers}:
            raise CalibrationError(f"{path} does not hold {name}; delete it to do that layer again")
        metadata = {key: stored[key] for key in ("layer", *numbers)}
        if stored.get("digest") != digest([metadata, sorted(tensors.items())]):
            raise CalibrationError(f"{path} is damaged; delete it to do {name} again")
        return tensors, metadata

    def _check(self, path: Path, run: Mapping[str, object]) -> None:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{path} is not a run of layer-wise methods: {error}; give another "
                                   "checkpoint_dir") from error
        differing = [key for key, value in run.items() if not isinstance(stored, dict) or stored.get(key) != value]
        if differing:
            raise CalibrationError(f"checkpoint_dir {self._folder} belongs to another run: not the same "
                                   f"{', '.join(differing)}; make the simulation anew from the same model and data, or "
                                   "give another directory")


def _quantizers(model: nn.Module) -> list[str]:
    """Says how every quantizer quantizes, and whether it does."""
    return [
        f"{path} {module.site} {module.spec!r} {module.mode}"
        for path, module in model.named_modules() if isinstance(module, Quantizer)
    ]
