"""``qtk quantize hf:FOLDER``: quantizes the weights of a folder, file to file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from qtk.auto.quantize_checkpoint import quantize_checkpoint
from qtk.cli.batches import Batches
from qtk.data.forward_pass import Batch
from qtk.errors import ConfigError

TARGET = "vllm_w4a16"


def quantize_folder(
    folder: str, output: Path | None, console: Console, *, config: str | None, methods: Sequence[str],
    data: str | None, num_batches: int | None, force: bool, progress: bool,
) -> None:
    """Writes the quantized folder; arguments as for ``quantize_checkpoint``, and ``data`` as in a recipe.

    Raises: ConfigError if data are missing, or given without methods; else as ``quantize_checkpoint``.
    """
    if bool(methods) != (data is not None):
        raise ConfigError("--method needs --data module:callable, and weights are rounded without either; give both, "
                          "or none")
    source = Path(folder).expanduser()
    target = output or source.with_name(f"{source.name}-{config or TARGET}")
    batches = None if data is None else _Inputs(Batches(data, "--data", num_batches, labelled=False))
    report = quantize_checkpoint(source, target, config=config or TARGET, methods=list(methods), data=batches,
                                 num_batches=num_batches, force=force, progress=progress)
    if report is not None:
        console.print(str(report), markup=False, highlight=False)
    console.print(f"written to {target}", markup=False, highlight=False)


class _Inputs:
    """The inputs of batches with labels, which can be read again."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        pairs, _ = self._batches.open()
        return (inputs for inputs, _ in pairs)
