"""Simulating models for the tests of export: any site quantized as the test says, encodings from one run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.spec import QuantSpec
from qtk.graph.flow import Flow
from qtk.graph.insert import insert
from qtk.graph.sites import is_float, name_sites, value_site
from qtk.quantizers.quantizer import Mode
from qtk.runtimes.session import create_session
from qtk.workflow.prepare import prepare_model

Choice = Callable[[str, Tensor], QuantSpec | None]


def weights(name="int8", granularity=None, **options) -> Choice:
    """Quantizes tensors of rank 2 and more, by default per channel on axis 0."""
    granularity = PerChannel(0) if granularity is None else granularity
    return lambda site, value: QuantSpec(dtype(name), granularity, **options) if value.ndim > 1 else None


def activations(name="uint8", granularity=None, **options) -> Choice:
    return lambda site, value: QuantSpec(dtype(name), granularity or PerTensor(), **options)


def symmetric(name="int8", granularity=None, **options) -> Choice:
    return weights(name, granularity, symmetric=True, **options)


def nothing(site: str, value: Tensor) -> None:
    return None


class _Recorder(fx.Interpreter):
    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.values: dict[fx.Node, object] = {}

    def run_node(self, n: fx.Node) -> object:
        self.values[n] = super().run_node(n)
        return self.values[n]


def planned(model: nn.Module, example_inputs, *, weight: Choice, activation: Choice):
    """A prepared model, a plan for every value the choices give a spec for, and the encodings."""
    prepared = prepare_model(model.eval(), example_inputs, verify=False)
    name_sites(prepared.graph)
    recorder = _Recorder(prepared)
    with torch.no_grad():
        recorder.run(*pytree.tree_leaves(example_inputs))
    flow = Flow(prepared.graph)
    sites, encodings = {}, {}
    for node, value in recorder.values.items():
        if node.op == "output" or not isinstance(value, Tensor) or not is_float(node) or not node.users:
            continue
        site = value_site(node)
        static = flow.is_static(node)
        spec = (weight if static else activation)(site.name, value)
        if spec is not None and site not in sites:
            sites[site] = SitePlan(spec, "min_max", static=static)
            encodings[site.name] = encode(value, spec)
    return prepared, QuantPlan(sites), encodings


def simulate(
    model: nn.Module,
    example_inputs,
    *,
    weight: Choice = symmetric(),  # noqa: B008
    activation: Choice = activations(),  # noqa: B008
):
    """A prepared model with a calibrated quantizer on every value the choices give a spec for."""
    prepared, plan, encodings = planned(model, example_inputs, weight=weight, activation=activation)
    for site, quantizer in insert(prepared, plan).items():
        quantizer.load_encoding(encodings[site.name])
        quantizer.mode = Mode.SIMULATE
    return prepared


def encode(value: Tensor, spec: QuantSpec) -> Encoding:
    """Min-max encoding, written down without qtk's own range math."""
    shape, counts = tuple(value.shape), spec.granularity.qparam_shape(tuple(value.shape))
    sizes = spec.granularity.block_size(value.ndim) or (-1,) * value.ndim
    pairs = [(n // size, size) if size > 0 else (1, n) for n, size in zip(shape, sizes, strict=True)]
    blocks = value.detach().float().reshape([n for pair in pairs for n in pair])
    inner = list(range(1, 2 * value.ndim, 2))
    low, high = blocks.amin(inner).clamp(max=0).reshape(counts), blocks.amax(inner).clamp(min=0).reshape(counts)
    if spec.symmetric:
        scale = torch.maximum(high / spec.qmax, low / spec.qmin).clamp(min=1e-6)
        return Encoding(spec, scale)
    scale = ((high - low) / (spec.qmax - spec.qmin)).clamp(min=1e-6)
    return Encoding(spec, scale, (spec.qmin - low / scale).round().clamp(spec.qmin, spec.qmax).int())


def encodings_of(model: fx.GraphModule) -> dict[str, Encoding]:
    """Site name → encoding, for every quantizer call."""
    return {
        node.meta["custom"]["qtk_site"]: model.get_submodule(node.target).encoding
        for node in model.graph.nodes
        if node.op == "call_module" and str(node.target).startswith("qtk_quantizers.")
    }


def run_onnx(path, *inputs: Tensor, optimized: bool = False) -> list[np.ndarray]:
    """The outputs of the file in ONNX Runtime, its graph optimizations on or off."""
    session, _ = create_session(Path(path), optimized=optimized, threads=1)
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})


def run_simulation(model: fx.GraphModule, *args, **kwargs) -> list[np.ndarray]:
    with torch.no_grad():
        return [leaf.numpy() for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
