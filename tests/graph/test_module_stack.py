import pytest
import torch
from torch import nn

from qtk.graph.module_stack import MODULE_STACK, module_calls


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x):
        return self.block(self.block(x)) + 1


@pytest.mark.medium
@pytest.mark.parametrize("strict", [False, True])
def test_modules_that_are_called_twice(strict):
    graph = torch.export.export(Twice(), (torch.zeros(2, 4),), strict=strict).graph
    around = [module_calls(node) for node in graph.nodes if node.op == "call_function"]
    once = [["", "block", "block.0"], ["", "block", "block.1", "block.1.0"], ["", "block", "block.1", "block.1.1"]]
    assert [[call.path for call in calls] for calls in around] == [*once, *once, [""]]
    assert [calls[-1].is_first for calls in around] == [True] * 3 + [False] * 3 + [True]
    blocks = [calls[1].key for calls in around[:6]]
    assert len(set(blocks[:3])) == len(set(blocks[3:])) == 1
    assert len(set(blocks)) == 2


def test_marks_in_paths_and_frames_of_functions():
    node = torch.fx.Graph().placeholder("x")
    assert module_calls(node) == []
    node.meta[MODULE_STACK] = {"a": ("", nn.Module), "_empty_nn_module_stack_from_metadata_hook": ("", ""),
                               "b": ("block@1.layer@2", nn.Linear)}
    outer, inner = module_calls(node)
    assert (outer.path, outer.key, outer.is_first) == ("", "a", True)
    assert (inner.path, inner.key, inner.is_first) == ("block.layer", "b", False)
