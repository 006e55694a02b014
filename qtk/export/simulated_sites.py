"""The quantized values of a simulated model: for each site its encoding and, if it is constant, its value.

Encodings that are read from a file are compared with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.graph.evaluate import evaluate
from qtk.graph.graphs import with_nested
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import SITE, label
from qtk.graph.written_buffers import is_input
from qtk.nn.eval_mode import evaluating
from qtk.numerics import dynamic
from qtk.numerics.affine import expand
from qtk.numerics.codes import codes_of
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.torch_private import schema_of


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSite:
    """A call of a quantizer in SIMULATE.

    Args:
        name: name of the site.
        node: the call in its graph.
        quantizer: the quantizer that is called.
        encoding: its encoding; ``None`` for dynamic quantization.
        constant: the float value, if it depends on parameters alone; ``None`` if it depends on the inputs.
    """

    name: str
    node: fx.Node
    quantizer: Quantizer
    encoding: Encoding | None
    constant: Tensor | None

    @property
    def spec(self) -> QuantSpec:
        return self.quantizer.spec


def simulated_sites(model: fx.GraphModule) -> list[SimulatedSite]:
    """The quantized values of ``model`` and its nested graphs, in order, with the current parameters.

    A value of which nothing but its shape is read is left out, as it is from the exported graph.

    Raises: ExportError naming a site without an encoding.
    """
    sites: dict[str, SimulatedSite] = {}
    with evaluating(model), torch.no_grad():
        for module in with_nested(model):
            sites |= {site.name: site for site in _simulated_in(module)}
    return list(sites.values())


def _simulated_in(module: fx.GraphModule) -> Iterator[SimulatedSite]:
    nodes, read = quantizer_nodes(module), _read_values(module.graph)
    for node, quantizer in nodes.items():
        if quantizer.mode is not Mode.SIMULATE or node not in read:
            continue
        name = label(node, SITE)
        assert name is not None, f"{node} has no site"
        if not quantizer.ready:
            raise ExportError(f"{name} has no encoding; run sim.compute_encodings(data) first")
        (source,) = node.args
        assert isinstance(source, fx.Node)
        constant = None if quantizer.spec.dynamic else _constant(source, nodes)
        yield SimulatedSite(name, node, quantizer, quantizer.encoding, constant)


def _read_values(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of whose values results are made; a tensor like another has its shape alone."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.users and node not in read:
            continue
        row, schema, inputs = row_of(node), schema_of(node.target), set(node.all_input_nodes)
        if row is not None and row.role is Role.CREATE and schema is not None and schema.arguments[0].name == "self":
            inputs -= {node.args[0]}
        read |= inputs
    return read


def _constant(node: fx.Node, quantizers: Mapping[fx.Node, Quantizer]) -> Tensor | None:
    """The value of a node that depends on parameters alone, without another quantizer before it; else ``None``."""
    ancestors: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if is_input(current) or current in quantizers:
            return None
        if current not in ancestors:
            ancestors.add(current)
            pending.extend(current.all_input_nodes)
    value = evaluate(node, {})
    assert isinstance(value, Tensor)
    return value.detach()


StepSize = Tensor | None
"""The scale of a value, which broadcasts against it; ``None`` without one."""


def step_of(quantizer: Quantizer | None, value: Tensor, before: Tensor | None = None) -> StepSize:
    """The scale of ``value``, in a shape that broadcasts against it.

    Args:
        quantizer: its quantizer, if it has one.
        value: what the quantizer returned.
        before: what it was given; dynamic quantization has no scale without it.
    """
    if quantizer is None:
        return None
    spec = quantizer.spec
    sizes = spec.granularity.block_size(value.ndim)
    if spec.dynamic:
        if before is None:
            return None
        _, scale, _ = dynamic.fake_quantize(
            before.detach(), sizes, int(spec.qmin), int(spec.qmax), symmetric=spec.symmetric
        )
        return expand(scale, value.shape, sizes)
    encoding = quantizer.encoding
    return None if encoding is None else expand(encoding.scale, value.shape, sizes)


CPU = torch.device("cpu")


def compare_stored_sites(
    stored: Mapping[str, tuple[Encoding, Tensor | None]], simulated: Mapping[str, SimulatedSite]
) -> None:
    """Compares what a file holds with a simulation: encodings, and the codes of constants.

    Raises: ExportError naming the site of the first difference.
    """
    compare_encodings({name: encoding for name, (encoding, _) in stored.items()},
                      {name: site.encoding for name, site in simulated.items() if site.encoding is not None})
    for name, (encoding, codes) in stored.items():
        constant = simulated[name].constant
        if (codes is None) != (constant is None):
            raise ExportError(f"{name} is a constant in one of file and simulation alone")
        if codes is not None and constant is not None and not torch.equal(codes, codes_of(constant.cpu(), encoding)):
            raise ExportError(f"{name}: the stored integers differ from the codes of the simulation")


def compare_encodings(stored: Mapping[str, Encoding], simulated: Mapping[str, Encoding]) -> None:
    """Checks that both hold the same sites with bit-equal encodings.

    Raises: ExportError naming the first site that differs.
    """
    for site in [*simulated, *stored]:
        if site not in stored:
            raise ExportError(f"{site} is missing in the file")
        if site not in simulated:
            raise ExportError(f"{site} is not quantized in the simulation")
        compare_encoding(site, stored[site], simulated[site])


def compare_encoding(site: str, stored: Encoding, simulated: Encoding) -> None:
    """Checks that the encodings are bit-equal. Raises: ExportError naming the site if not."""
    simulated = simulated.to(CPU)
    if not stored.equals(simulated):
        raise ExportError(f"{site}: {_difference(stored, simulated)}")


def _difference(stored: Encoding, simulated: Encoding) -> str:
    """Describes the first difference: spec, shape or number.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.spec import QuantSpec
    >>> spec = QuantSpec(dtype("int8"), symmetric=True)
    >>> _difference(Encoding(spec, torch.tensor([0.5])), Encoding(spec, torch.tensor([0.25])))
    'scale[0] is 0.5 in the file and 0.25 in the simulation'
    """
    if stored.spec != simulated.spec:
        return f"{stored.spec} in the file and {simulated.spec} in the simulation"
    if stored.scale.shape != simulated.scale.shape:
        shapes = tuple(stored.scale.shape), tuple(simulated.scale.shape)
        return "scales of shape {} in the file and {} in the simulation".format(*shapes)
    name, in_file, in_simulation = "scale", stored.scale, simulated.scale
    if torch.equal(in_file, in_simulation):
        assert stored.zero_point is not None
        assert simulated.zero_point is not None
        name, in_file, in_simulation = "zero_point", stored.zero_point, simulated.zero_point
    index = tuple((in_file != in_simulation).nonzero()[0].tolist())
    entry = f"{name}[{', '.join(map(str, index))}]"
    return f"{entry} is {in_file[index].item()} in the file and {in_simulation[index].item()} in the simulation"
