"""Random numbers are those of ``torch.manual_seed``, without its look at the stack."""

import traceback

import pytest
import torch

from qtk.nn.seed import set_seed


def test_numbers_are_those_of_manual_seed():
    torch.manual_seed(5)
    expected = torch.randn(4), torch.nn.functional.dropout(torch.ones(20))
    torch.rand(3)
    set_seed(5)
    assert torch.equal(torch.randn(4), expected[0])
    assert torch.equal(torch.nn.functional.dropout(torch.ones(20)), expected[1])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its generator is seeded")
def test_no_stack_is_formatted(monkeypatch):
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("the stack is formatted"))
    set_seed(5)
