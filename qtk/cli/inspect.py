"""``qtk inspect``: prints the capture report and the quantization plan of a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from rich.console import Console

from qtk.cli.example_input import example_input
from qtk.cli.model_source import Shape, build_model, usual_input_shape
from qtk.core.dtypes import integer
from qtk.core.width import FROM_CONFIG, Width
from qtk.errors import ConfigError
from qtk.graph.footprint import footprint
from qtk.layerwise.methods import LayerwiseMethod, method
from qtk.public import public
from qtk.quantsim import QuantSim
from qtk.report.plan_table import plan_summary, plan_table, unquantized_table
from qtk.workflow.forecast import forecast_lines

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}


@public
def inspect(
    model: str,
    console: Console,
    *,
    weights: str | None = None,
    input_shapes: Iterable[str] = (),
    config: str = "default",
    weight_bits: Width = FROM_CONFIG,
    activation_bits: Width = FROM_CONFIG,
    meta: bool = False,
    memory: bool = False,
    methods: Iterable[str] = (),
    num_batches: int = 64,
) -> None:
    """Prints the capture report, the plan and the memory of a model.

    Args:
        model: as in a recipe, ``timm:resnet18``.
        console: where to print.
        weights: a file, or ``pretrained``.
        input_shapes: one text per input, as ``parse_shape`` reads it; empty: the library's input shape of the model.
        config: a shipped target or a file.
        weight_bits: as for ``QuantSim``.
        activation_bits: likewise.
        meta: a dry run: the model is built and captured without allocating its tensors.
        memory: print what runs on this machine would take instead: peak memory and time, for each ``offload``.
        methods: the layer-wise methods of that run, together; none: rounding, and GPTQ.
        num_batches: its batches, each of the input shape.

    Raises: QtkError if the model cannot be built or captured, or the configuration is wrong.
    """
    for where, bits in {"weight_bits": weight_bits, "activation_bits": activation_bits}.items():
        if isinstance(bits, int):
            integer(bits, signed=True, where=where)  # raises for an invalid width before the model is built
    shapes = [parse_shape(text) for text in input_shapes]
    if meta and weights is not None:
        raise ConfigError(f"--meta makes a model without values, and --weights names some: {weights}; give one of them")
    with torch.device("meta") if meta else nullcontext():
        module = build_model(model, weights=weights)
    module = module.to("meta") if meta else module
    if not shapes:
        library_shape = usual_input_shape(model, module)
        if library_shape is None:
            raise ConfigError(f"{model}: its input shape is not known; give --input-shape, as in 1,3,224,224")
        shapes = [(library_shape, torch.float32)]
    inputs = tuple(example_input(*shape, device="meta" if meta else "cpu") for shape in shapes)
    examples = {"input_ids": inputs[0], "use_cache": False} if model.startswith("hf:") and len(inputs) == 1 else inputs
    with console.status("capturing"):
        sim = QuantSim(module, examples, weight_bits=weight_bits, activation_bits=activation_bits, config=config,
                       in_place=True)
    if memory:
        for name, run in _runs(methods).items():
            for line in forecast_lines(sim.simulation, name, run, num_batches):
                console.print(line, markup=False, highlight=False)
        return
    console.print(str(sim.model.report), markup=False, highlight=False)
    for table in (plan_table(sim.plan), unquantized_table(sim.plan)):
        console.print(table.rich())
    console.print(plan_summary(sim.plan), markup=False, highlight=False)
    console.print(str(footprint(sim.model)), markup=False, highlight=False)


def _runs(methods: Iterable[str]) -> dict[str, list[LayerwiseMethod]]:
    names = list(methods)
    return {" + ".join(names): [method(each) for each in names]} if names else {
        "rounding": [], "gptq": [method("gptq")]}


def parse_shape(text: str) -> tuple[Shape, torch.dtype]:
    """Parses a shape, batch included, with an optional dtype after a colon (default: float32).

    Raises: ConfigError if ``text`` has another form.

    >>> parse_shape("1,16:int64")
    ((1, 16), torch.int64)
    """
    sizes, _, name = text.partition(":")
    name = name or "float32"
    try:
        shape = tuple(int(size) for size in sizes.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or name not in DTYPES:
        raise ConfigError(f"--input-shape: got {text!r}; must be sizes with an optional dtype of "
                          f"{', '.join(DTYPES)}, as in 1,3,224,224 or 1,16:int64")
    return shape, DTYPES[name]
