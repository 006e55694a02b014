import pytest
import torch
from torch import nn

from qtk.nn.dropout import Dropout

TORCH = {
    "dropout": nn.Dropout,
    "feature_dropout": nn.Dropout2d,
    "alpha_dropout": nn.AlphaDropout,
    "feature_alpha_dropout": nn.FeatureAlphaDropout,
}


@pytest.mark.parametrize("kind", TORCH)
def test_drops_what_torch_drops(kind):
    x = torch.randn(4, 8, 3, 3)
    torch.manual_seed(1)
    expected = TORCH[kind](0.4)(x)
    torch.manual_seed(1)
    assert torch.equal(Dropout(kind, 0.4)(x), expected)
    assert not torch.equal(expected, x)


@pytest.mark.parametrize("kind", TORCH)
def test_is_off_in_eval_mode_unless_always_on(kind):
    x = torch.randn(4, 8, 3, 3)
    assert Dropout(kind, 0.4).eval()(x) is x
    assert not torch.equal(Dropout(kind, 0.4, always=True).eval()(x), x)


def test_says_what_it_is():
    assert str(Dropout("dropout", 0.25)) == "Dropout(dropout, p=0.25)"
    assert str(Dropout("alpha_dropout", 0.5, always=True)) == "Dropout(alpha_dropout, p=0.5, always on)"
