import torch
from torch import nn

from qtk.nn.train_only import train_only


def test_calls_the_module_with_its_hooks():
    drop, x, seen = nn.Dropout(1.0), torch.ones(3), []
    drop.register_forward_hook(lambda module, args, output: seen.append(output))
    assert not train_only(x, drop, False).any()
    assert train_only(x, drop.eval(), False) is x
    assert len(seen) == 2


def test_what_it_writes_into_its_input_nobody_else_sees():
    x = torch.ones(100)
    assert not torch.equal(train_only(x, nn.Dropout(0.5, inplace=True), True), torch.ones(100))
    assert torch.equal(x, torch.ones(100))
