import torch

from qtk.moments.gram_products import PANEL, GramProducts, mirrored


def test_groups_are_summed_apart_and_the_lower_half_is_copied():
    rows = [torch.randn(1, 1, count, PANEL + 3, dtype=torch.float64) for count in (5, 2)]
    products = GramProducts(rows[0], None, groups=3)
    products.add(rows[0], None, 0)
    products.add(rows[1], None, 2)
    total = mirrored(products.total.clone())
    for group, x in ((0, rows[0]), (2, rows[1])):
        torch.testing.assert_close(total[group, 0], x[0, 0].mT @ x[0, 0])
    assert not total[1].any()
