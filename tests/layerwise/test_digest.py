import torch

from qtk.layerwise.digest import digest


def test_every_bit_dtype_and_shape_counts_and_strides_do_not():
    x = torch.randn(4, 6)
    same = torch.empty(6, 4).mT.copy_(x)
    assert digest([x]) == digest([same.requires_grad_()])
    changed = x.clone()
    changed.view(torch.int32)[3, 5] ^= 1
    others = [changed, x.double(), x.reshape(6, 4), x.mT.reshape(4, 6)]
    assert len({digest([each]) for each in (x, *others)}) == 5
    assert digest([x, None]) != digest([None, x])
    assert digest([torch.zeros(0)]) != digest([torch.zeros(0, 1)])
