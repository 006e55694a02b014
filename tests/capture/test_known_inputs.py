"""Integer inputs whose values sizes follow from: written into the graph, and no other values taken for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qtk
from qtk.calls.calls import Call
from qtk.capture.known_inputs import known_inputs
from qtk.errors import CaptureError


class Packed(nn.Module):
    """Images of several sizes in one tensor [patches, 8], as models that see and read have them: rows of one mix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.patch, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, pixels: Tensor, grid: Tensor) -> Tensor:
        parts = self.patch(pixels).split(grid.prod(-1).tolist())
        mixed = torch.cat([part - part.mean(0) for part in parts])
        rows = torch.cat([torch.arange(height * width) // (width if height > width else height)
                          for height, width in grid.tolist()])
        return self.head(self.tokens(ids) + (mixed * rows[:, None].cos()).sum(0))


def example(grid: list[list[int]]) -> dict[str, Tensor]:
    return {"ids": torch.randint(20, (3, 5)), "pixels": torch.randn(10, 8), "grid": torch.tensor(grid)}


@pytest.mark.medium
def test_the_grid_of_images_is_a_constant_of_a_graph_and_each_grid_a_variant() -> None:
    model, first, second = Packed().eval(), example([[2, 3], [1, 4]]), example([[1, 4], [3, 2]])
    prepared = qtk.prepare_model(model, first, variants=[second], dynamic_shapes=None)
    assert prepared.report.rung == "export"
    assert "sizes follow from the values of grid" in str(prepared.report)
    for call in (second, first, {**second, "ids": torch.randint(20, (3, 5)), "pixels": torch.randn(10, 8)}):
        assert torch.equal(prepared(**call), model(**call))
    for _ in range(2):
        with pytest.raises(CaptureError, match="grid has other values"):
            prepared(**{**first, "grid": torch.tensor([[2, 2], [3, 2]])})


@pytest.mark.medium
def test_compiled_code_compares_the_values() -> None:
    model, first, second = Packed().eval(), example([[2, 3], [1, 4]]), example([[1, 4], [3, 2]])
    prepared = qtk.prepare_model(model, first, dynamic_shapes=None)
    run = torch.compile(prepared, backend="aot_eager")
    torch.testing.assert_close(run(**first), model(**first))
    with pytest.raises(RuntimeError, match="grid has other values"):
        run(**second)
    with pytest.raises(CaptureError, match="keeps no check of input grid"):
        torch.jit.trace(prepared, example_kwarg_inputs=first, check_trace=False)


class Lengths(nn.Module):
    """Means of sequences [batch, time, 8] over their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([self.linear(row[:length]).mean(0) if length > 4 else row[0]
                            for row, length in zip(x, lengths.tolist(), strict=True)])


@pytest.mark.medium
def test_lengths_that_may_be_others_are_no_constants() -> None:
    model, x = Lengths().eval(), torch.randn(2, 9, 8)
    prepared = qtk.prepare_model(model, (x, torch.tensor([9, 4])))
    assert prepared.report.rung == "python"
    other = torch.tensor([5, 7])
    assert torch.equal(prepared(x, other), model(x, other))


class Chosen(Packed):
    """Only the images that ``mask`` names count."""

    def forward(self, ids: Tensor, pixels: Tensor, grid: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, pixels * mask[:, None], grid)


def test_a_mask_of_bool_beside_a_grid_is_no_constant() -> None:
    call = Call((), {**example([[2, 3], [1, 4]]), "mask": torch.rand(10) > 0.5}, None)
    assert known_inputs(Chosen().eval(), call, lambda known: 2 in known) == (2,)
