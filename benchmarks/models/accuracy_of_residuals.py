"""W8A8 of transformers with and without the rules that keep residual streams out of 8 bits: cosine with float.

Weights are random. The BERT has planted outliers: a few channels of its residual stream are 50 times as large as the
others, as in trained encoders. ``before`` leaves out the rules that match by ``feeds``; ``in float`` counts products of
weighted ops and attention with a factor that is not quantized, in the plan with these rules.

    python benchmarks/models/accuracy_of_residuals.py
    python benchmarks/models/accuracy_of_residuals.py --models vit_tiny_patch16_224 bert --configs onnxruntime
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import qtk
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.graph.flow import Flow, maker
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.insert import quantizer_called

TIMM = ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "xcit_nano_12_p16_224", "cait_xxs24_224", "crossvit_tiny_240",
        "swin_tiny_patch4_window7_224", "mobilevitv2_050", "repvit_m0_9")
WORDS, LENGTH, CHANNELS = 1000, 64, 128
OUTLIERS, FACTOR = (5, 40, 77), 50.0


class Encoder(nn.Module):
    """A small BERT: embeddings and post-norm layers."""

    def __init__(self, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, CHANNELS), nn.Embedding(LENGTH, CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(CHANNELS, heads, 4 * CHANNELS, activation="gelu", batch_first=True, dropout=0.0)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        return x


def bert() -> nn.Module:
    """An encoder whose sums have outliers in a few channels, which the norms behind them take back."""
    model = Encoder()
    with torch.no_grad():
        for name, module in model.named_modules():
            for channel in OUTLIERS:
                if isinstance(module, nn.Embedding):
                    module.weight[:, channel] *= FACTOR
                elif isinstance(module, nn.LayerNorm):
                    module.weight[channel] /= FACTOR
                elif name.endswith(("linear2", "out_proj")):
                    module.weight[channel] *= FACTOR
    return model


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        return bert().eval()
    import timm

    return timm.create_model(name, pretrained=False).eval()


def inputs(name: str, model: nn.Module, batch: int) -> Tensor:
    if name == "bert":
        return torch.randint(0, WORDS, (batch, LENGTH))
    return torch.randn(batch, *model.default_cfg["input_size"])


def without_streams(config: QuantConfig) -> QuantConfig:
    return config.model_copy(update={"rules": tuple(rule for rule in config.rules if not rule.match.feeds)})


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def float_products(model: fx.GraphModule) -> Iterator[str]:
    """The products of the simulation that read a value which no quantizer has made."""
    nested = {id(graph) for node in model.graph.nodes for graph in nested_graphs(node).values()}
    for module in graphs(model).values():
        flow = Flow(module.graph)
        for node in module.graph.nodes:
            row = flow.row(node)
            if row is None or not row.multiplies or maker(node) is not node or flow.is_static(node):
                continue
            for port in (*flow.data_ports(node), *flow.weight_ports(node)):
                source = flow.root(port.value)
                if not (source.op == "placeholder" and id(module) in nested) and not is_quantized(source):
                    yield f"{node} reads {source}"


def is_quantized(value: fx.Node) -> bool:
    """Whether a quantizer made the value, or the last one inside the composite that did."""
    inner = list(nested_graphs(value).values())
    if not inner:
        return quantizer_called(value) is not None
    results = inner[-1].graph.output_node().all_input_nodes
    return all(quantizer_called(Flow(inner[-1].graph).root(result)) for result in results)


def measure(model: nn.Module, config: QuantConfig, data: list[Tensor], reference: Tensor) -> tuple[float, int]:
    """The cosine, and the number of products in float."""
    sim = qtk.QuantSim(model, data[0], config=config)
    sim.compute_encodings(data, progress=False)
    with torch.no_grad():
        return cosine(reference, sim.model(data[-1])), len(list(float_products(sim.model)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=(*TIMM, "bert"))
    parser.add_argument("--configs", nargs="+", default=("default", "onnxruntime"))
    parser.add_argument("--quick", action="store_true", help="the BERT alone, to see that the script runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    variants: dict[str, Callable[[QuantConfig], QuantConfig]] = {"before": without_streams, "after": lambda each: each}
    table = Table(title="W8A8, cosine of the outputs with the float model's", title_justify="left")
    for heading in ("model", "config", *variants, "in float"):
        table.add_column(heading)
    for name in ("bert",) if arguments.quick else arguments.models:
        model = build(name)
        data = [inputs(name, model, 2) for _ in range(3)]
        with torch.no_grad():
            reference = model(data[-1])
        for config in arguments.configs:
            configs = [change(load_config(config)) for change in variants.values()]
            results = [measure(model, each, data, reference) for each in configs]
            row = (name, config, *(f"{value:.4f}" for value, _ in results), str(results[-1][1]))
            print(*row, flush=True)
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
