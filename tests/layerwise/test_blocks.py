import torch
from torch import nn

import qtk
from qtk.layerwise.blocks import block_starts
from qtk.layerwise.path_evaluator import PathEvaluator


class PreNorm(nn.Module):
    """Two blocks with residual sums, and a table that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = x[:, :1].cos()
        x = self.layers[0](x)
        for index, norm in enumerate(self.norms):
            y = norm(x)
            x = x + self.layers[2 * index + 2]((self.layers[2 * index + 1](y) * table).relu())
        return x


class Memory(nn.Module):
    """One value that all ten later layers read, as an encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x = self.encoder(x)
        for layer in self.layers:
            x = layer(x * memory)
        return x


def blocks_of(model: nn.Module, x: torch.Tensor) -> list[list[str]]:
    """The weighted layers of every block."""
    sim = qtk.QuantSim(model.eval(), x, weight_bits=4)
    graph = sim.model
    paths, nodes = PathEvaluator(graph, (False, True)), list(graph.graph.nodes)
    last = {read: index for index, node in enumerate(nodes) for read in (node, *paths.reads(node))}
    site = {node: paths.quantizers[read].site for node in nodes if not paths.is_parameter(node)
            for read in node.all_input_nodes if read in paths.quantizers and paths.is_parameter(read)}
    starts = block_starts(nodes, site, last, paths.is_parameter)
    ends = [*starts[1:], len(nodes)]
    return [[site[node].removesuffix(".weight") for node in nodes[begin:end] if node in site]
            for begin, end in zip(starts, ends, strict=True)]


def test_blocks_lie_between_residual_sums():
    assert blocks_of(PreNorm(), torch.randn(4, 8)) == [
        ["layers.0"], ["layers.1", "layers.2"], ["layers.3", "layers.4"]]


def test_a_value_that_outlives_many_layers_joins_no_blocks():
    assert blocks_of(Memory(), torch.randn(4, 8))[:3] == [["encoder"], ["layers.0"], ["layers.1"]]
