"""How long matrix products take in ONNX Runtime, each as a model of one op; measured once for each shape."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtk.auto.matrix_products import MatrixProduct, matrix_products, operand_ports
from qtk.auto.site_rules import SiteRules
from qtk.auto.widths import Choice, setting_of
from qtk.config.schema import QuantConfig
from qtk.errors import QtkError
from qtk.export.onnx.kernel_times import computing_ms
from qtk.graph.flow import Flow
from qtk.graph.sites import ports
from qtk.quantsim import QuantSim

TURNS = 30


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

        Raises: ExportError if onnxruntime is not installed, or a product of floats cannot run.
        """
        op = _Op(product)
        key = (op.key, data, other)
        if key not in self._known:
            try:
                self._known[key] = self._measured(op, (data, other))
            except QtkError:
                if (data, other) == ("float", "float"):
                    raise
                return self.ms(product, "float", "float")
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
        with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
            sim.export(Path(folder) / "op", formats=("onnx",))
            return computing_ms(Path(folder) / "op" / "model.onnx", inputs, turns=TURNS)


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
