"""Which site an entry of AIMET's own files is about: they name tensors as torch's TorchScript exporter does.

``/layer1/layer1.0/conv1/Conv_output_0`` is the first output of the first Conv of module ``layer1.0.conv1``. The file
that AIMET reads itself, ``…_torch.encodings``, names modules: those entries are ``layer1.0.conv1:out`` here, and
``layer1.0.conv1:in[0]``. ``onnx_scopes`` reads names of torch's other exporter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_NAME = re.compile(r"/(?:(?P<scopes>.+)/)?(?P<op>[A-Za-z]+)(?:_(?P<call>\d+))?_output_(?P<output>\d+)")

MOVEMENT = frozenset((
    "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
))
"""ONNX operators that pass on the values of their input, and so its encoding, which AIMET writes once more."""

KINDS = {"Gemm": "linear", "MatMul": "matmul", "Concat": "cat", "LayerNormalization": "layer_norm"}
"""ONNX operator → kind of op in a site, where it is not the name in lower case."""


@dataclass(frozen=True, slots=True)
class ExportedName:
    """A tensor's name, taken apart.

    Args:
        module: path of the module that made it.
        op: the ONNX operator.
        call: ordinal of the operator in the module.
        output: ordinal of the output.
        kind: kind of the ATen op, where the file says; ``call`` counts ops of that kind then.
    """

    module: str
    op: str
    call: int
    output: int
    kind: str | None = None


def parse(name: str) -> ExportedName | None:
    """A name of torch's TorchScript exporter, taken apart; ``None`` for any other.

    >>> parse("/layer1/layer1.0/conv1/Conv_output_0")
    ExportedName(module='layer1.0.conv1', op='Conv', call=0, output=0, kind=None)
    >>> parse("/Add_1_output_0")
    ExportedName(module='', op='Add', call=1, output=0, kind=None)
    >>> parse("conv1.weight")
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    path: list[str] = []
    for scope in (found["scopes"] or "").split("/"):  # a child of a list has the list's name in front of its own
        path = [*path[:-1], scope] if path and scope.startswith(f"{path[-1]}.") else [*path, scope]
    return ExportedName(".".join(path), found["op"], int(found["call"] or 0), int(found["output"]))


def sites_of(
    names: Iterable[str], known: Collection[str], scoped: Mapping[str, ExportedName] = MappingProxyType({})
) -> dict[str, str]:
    """Name → site, of the names that torch's exporter gave to one of the ``known`` sites.

    ``scoped``: what an ONNX file says of its values by metadata, by name.

    A module that is one op has one site, however many ONNX nodes it becomes, and one for each call:

    >>> sorted(sites_of(["/act/Mul_1_output_0", "/relu/Relu_1_output_0", "/relu/Relu_output_0", "/Add_output_0"],
    ...                 ["act:out", "relu:out", "relu@1:out", "add:out"]).items())  # doctest: +NORMALIZE_WHITESPACE
    [('/Add_output_0', 'add:out'), ('/act/Mul_1_output_0', 'act:out'),
     ('/relu/Relu_1_output_0', 'relu@1:out'), ('/relu/Relu_output_0', 'relu:out')]
    >>> sites_of(["/relu/Relu_1_output_0"], ["relu:out", "relu@1:out"])
    {'/relu/Relu_1_output_0': 'relu@1:out'}
    """
    parsed = {name: exported for name in names if (exported := scoped.get(name) or parse(name)) is not None}
    by_module: dict[str, list[str]] = defaultdict(list)
    for name, exported in parsed.items():
        by_module[exported.module].append(name)
    found: dict[str, str] = {}
    for module, members in by_module.items():
        ops = {parsed[name].op for name in members}
        for name in members:
            exported = parsed[name]
            candidates = [_site(exported)]
            if module and len(ops) == 1:
                is_call = len(members) > 1 or f"{module}@{exported.call}:out" in known
                call = exported.call if is_call else 0  # else one op of several nodes
                candidates.insert(0, f"{module}@{call}:out" if call else f"{module}:out")
            site = next((each for each in candidates if each in known), None)
            if site is not None:
                found[name] = site
    return found


def is_movement(name: str, scoped: Mapping[str, ExportedName] = MappingProxyType({})) -> bool:
    """Says whether a name belongs to a value that an operator only moved; ``scoped`` as in ``sites_of``."""
    exported = scoped.get(name) or parse(name)
    return exported is not None and exported.op in MOVEMENT


def _site(exported: ExportedName) -> str:
    """The site of an op that is one of several in its module."""
    kind = exported.kind or KINDS.get(exported.op, exported.op.lower())
    path = ".".join(filter(None, (exported.module, f"{kind}_{exported.call}" if exported.call else kind)))
    return f"{path}:out[{exported.output}]" if exported.output else f"{path}:out"
