"""How long a simulation takes in the runtime of its target: each matrix product, as a model of one op, and the whole.

``qtk.runtimes.kinds.runtime_of`` says which runtime. ONNX Runtime tells how long kernels take; elsewhere a product
takes the time of its file, with the conversions at its borders, and what was measured of whole models corrects that.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qtk.algorithms.frontier import Term
from qtk.auto.matrix_products import MatrixProduct, matrix_products, operand_ports
from qtk.auto.site_rules import SiteRules
from qtk.auto.widths import Choice, Costs, setting_of
from qtk.calls.calls import Call
from qtk.calls.inputs import ExampleInputs, split_inputs
from qtk.config.schema import QuantConfig
from qtk.errors import CalibrationError, ExportError, QtkError
from qtk.export.file_signature import file_inputs
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow
from qtk.graph.graphs import roots
from qtk.graph.sites import ports
from qtk.quantsim import QuantSim
from qtk.runtimes.kernel_times import computing_ms
from qtk.runtimes.kinds import RuntimeKind, runtime_of
from qtk.runtimes.latency import median_latencies_ms
from qtk.workflow.prepare import prepare_model

TURNS, WHOLE_TURNS = 30, 40


PROFILED = "onnxruntime"
"""The runtime that says how long each kernel takes."""


@contextmanager
def _exported(sim: QuantSim) -> Iterator[tuple[RuntimeKind, Path]]:
    """The runtime of a simulation's target, and a file for it. Raises: ExportError if it is missing, or refuses."""
    kind = runtime_of(sim.simulation.target)
    kind.require()
    if kind.untimed is not None:
        raise ExportError(f"no milliseconds for the target {sim.simulation.target}: {kind.untimed}; give a budget of "
                          "bit_operations or weight_bits, or run this on such a device")
    with tempfile.TemporaryDirectory(prefix="qtk-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what users would do with the file
        sim.export(Path(folder) / "sim", formats=(kind.format,), progress=False)
        yield kind, Path(folder) / "sim" / kind.file_name("")


class OpLatencies:
    """A table of latencies, filled as it is asked.

    Args:
        config: how tensors are quantized that no width is asked for.
    """

    def __init__(self, config: QuantConfig) -> None:
        self._config = config.with_rules_optional().model_copy(update={"exclude": ()})
        self._known: dict[Hashable, float] = {}

    def ms(self, product: MatrixProduct, data: Choice, other: Choice) -> float:
        """Milliseconds that a product takes of one call of the model, with operands of these widths.

        A product that cannot run so, in such widths, counts as in float.

        Raises: ExportError if the runtime is not installed, or a product of floats cannot run.
        """
        op = _Op(product)
        key = (op.key, data, other)
        if key not in self._known:
            try:
                self._known[key] = self._measured(op, (data, other))
            except QtkError:
                if (data, other) != ("float", "float"):
                    return self.ms(product, "float", "float")
                self._known[key] = self._in_float(op)
        return product.calls * self._known[key]

    def _measured(self, op: _Op, widths: tuple[Choice, Choice]) -> float:
        inputs = op.inputs()
        sim = QuantSim(op, inputs, config=self._config, dynamic_shapes=None)
        sim.compute_encodings([inputs], progress=False)
        (product,) = matrix_products(sim.simulation, lambda: sim.model(*inputs))
        config, rules = self._config, SiteRules(sim.simulation)
        for site, width in zip(product.operands, widths, strict=True):
            if site in rules.sites:
                config = rules.config(config, [site], setting_of(width))
        sim = QuantSim(op, inputs, config=config, dynamic_shapes=None)
        sim.compute_encodings([inputs], progress=False)
        with _exported(sim) as (kind, file):
            return _file_ms(kind, file, inputs)

    def _in_float(self, op: _Op) -> float:
        """The time of a product that leaves nothing to quantize where it is in float."""
        inputs, runtime = op.inputs(), self._config.runtime
        kind = runtime_of(None if runtime is None else runtime.target)
        kind.require()
        with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
            file = Path(folder) / kind.file_name("")
            kind.write_float(roots(prepare_model(op, inputs, dynamic_shapes=None))[""], Call(inputs, {}, None), file)
            return _file_ms(kind, file, inputs)


def _file_ms(kind: RuntimeKind, file: Path, inputs: Sequence[Tensor]) -> float:
    if kind.name == PROFILED:
        return computing_ms(file, inputs, turns=TURNS)
    run = kind.load(file)({str(index): value for index, value in enumerate(inputs)})
    return median_latencies_ms({"op": run}, turns=TURNS)["op"]


class WholeLatency:
    """Measures exported simulations against the first one, which the noise of the machine slows down as much.

    Args:
        model: a prepared model.
        example_inputs: what it runs on.

    Attributes:
        first_ms: the least of the medians of the first one, which is measured with each other.

    Raises: CalibrationError for a model of islands, which is not one file.
    """

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs) -> None:
        if not isinstance(model, CapturedGraph):
            raise CalibrationError("the model was captured in parts, which are exported to a file each and have no "
                                   "latency as a whole; give a budget of bit_operations")
        inputs = file_inputs(model, Call(*split_inputs(example_inputs), None))
        self._inputs = {name: value.detach() for name, value in inputs.items()}
        self._first: Callable[[], object] | None = None
        self.first_ms = math.inf

    def ratio(self, sim: QuantSim, *, progress: bool) -> float:
        """The median time of one run as a multiple of the first simulation's.

        The file is opened twice, since each opening lays out memory anew; the slower one counts.

        Raises: ExportError if the runtime is missing, or the export fails.
        """
        with _exported(sim) as (kind, file):
            runs = {name: kind.load(file)(self._inputs) for name in ("once", "again")}
        if self._first is None:
            self._first = runs.pop("once")
        found = median_latencies_ms({"first": self._first, **runs}, turns=WHOLE_TURNS, progress=progress)
        self.first_ms = min(self.first_ms, found["first"])
        return max(found[each] for each in runs) / found["first"] if len(runs) == 2 else 1.0


class LatencyModel:
    """Latency as a line over the sum of the latencies of the products: the rest of a model takes its time, too.

    Args:
        products: the latencies of the products, by choices.
    """

    def __init__(self, products: Costs) -> None:
        self._products, self._rest, self._factor = products, 0.0, 1.0

    @property
    def costs(self) -> Costs:
        """The latency of the whole model, by choices."""
        terms = (Term(term.variables, self._factor * term.costs) for term in self._products.terms)
        return Costs(self._rest + self._factor * self._products.fixed, tuple(terms))

    def fit(self, picks: Sequence[Sequence[int]], measured: Sequence[float]) -> None:
        """Fits the line to some assignments; it is flat where fewer bits took longer."""
        sums = [self._products.of(each) for each in picks]
        factor, rest = map(float, np.polyfit(sums, measured, 1))
        self._factor, self._rest = (factor, rest) if factor > 0 else (0.0, float(np.mean(measured)))

    def correct(self, tried: Mapping[tuple[int, ...], float], limit: float) -> None:
        """Fits the line to the two measured assignments next to a limit, one on either side of it.

        Widths that are mixed are converted, which takes time that no product has; so the line is right near the limit
        alone. Where the limit was exceeded three times in a row or more, the distance of the other end is halved each
        time (the Illinois rule; Dowell and Jarratt, BIT 11, 1971). Without such a pair the line is moved to where the
        last assignment was measured.
        """
        below, above = ([each for each, ms in tried.items() if (ms <= limit) is fits] for fits in (True, False))
        if below and above:
            ends = max(below, key=self._products.of), min(above, key=self._products.of)
            if self._products.of(ends[0]) < self._products.of(ends[1]):
                missed = len(list(itertools.takewhile(lambda ms: ms > limit, reversed(list(tried.values())))))
                nearer = limit - (limit - tried[ends[0]]) / 2 ** max(0, missed - 2)
                self.fit(ends, [nearer, tried[ends[1]]])
                return
        last = list(tried)[-1]
        self._rest += tried[last] - self.costs.of(last)


class _Op(nn.Module):
    """A model of one product: what is a weight in the product's own model is one here."""

    def __init__(self, product: MatrixProduct) -> None:
        super().__init__()
        node = product.node
        flow, of_weight = Flow(node.graph), product.operands[1] is not None and not product.operands[1].port
        self._target: Callable[..., Tensor] = node.target  # type: ignore[assignment]
        self._args: list[Any] = list(node.args)
        self._shapes: list[list[int]] = []
        for port in ports(node):
            assert port.item is None
            shape = product.lengths(port.value)
            is_other = port == operand_ports(node)[1]
            if flow.is_parameter(port.value) or (is_other and of_weight):
                self.register_parameter(f"parameter_{port.arg}", nn.Parameter(torch.randn(shape)))
                self._args[port.arg] = f"parameter_{port.arg}"
            else:
                self._args[port.arg] = len(self._shapes)
                self._shapes.append(shape)
        self._tensors = {port.arg for port in ports(node)}
        arguments = [tuple(self.get_parameter(each).shape) if isinstance(each, str) and index in self._tensors else
                     tuple(self._shapes[each]) if index in self._tensors else each
                     for index, each in enumerate(self._args)]
        self.key = (str(node.target), str(arguments), str(node.kwargs), of_weight)
        self.eval()

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(shape, generator=generator) for shape in self._shapes)

    def forward(self, *inputs: Tensor) -> Tensor:
        args = [each if index not in self._tensors else inputs[each] if isinstance(each, int) else
                self.get_parameter(each) for index, each in enumerate(self._args)]
        return self._target(*args)
