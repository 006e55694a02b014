"""The cells of recurrent nets, one module for each op, so that every intermediate value has a site name.

The caller computes the input projection ``W_ih x + b_ih`` of all time steps in one GEMM. Formulas as in
``torch.nn.LSTM``, ``GRU`` and ``RNN``. N: batch, H: hidden size, P: projection size.
"""

from __future__ import annotations

from torch import Tensor, nn

from qtk.nn.elementwise import Add, Blend, Linear, Multiply, SumOfProducts

PARTIAL_PRODUCTS = frozenset({"projection", "hidden_projection", "reset_hidden"})
"""Names of the modules whose results are only summed, in front of gates; ``projection`` is a module of ``Step``."""

SUMS = frozenset({"gates", "reset_sum", "update_sum", "new_sum", "sum"})
"""Of the modules that compute these sums."""

CELL_STATES = frozenset({"cell"})
"""Of the modules that compute a state that nothing bounds."""


class LstmCell(nn.Module):
    """c' = f ∘ c + i ∘ g; h' = o ∘ tanh(c'), projected if there is a ``weight_hr`` (arXiv 1402.1128)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_projection = Linear()
        self.gates = Add()
        self.input_gate, self.forget_gate, self.output_gate = nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid()
        self.cell_gate, self.cell_tanh = nn.Tanh(), nn.Tanh()
        self.cell = SumOfProducts()
        self.hidden = Multiply()
        self.output_projection = Linear()

    def forward(
        self,
        projected: Tensor,
        hidden: Tensor,
        cell: Tensor,
        weight_hh: Tensor,
        bias_hh: Tensor | None = None,
        weight_hr: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Shape: projected [N, 4H], hidden [N, P or H], cell [N, H]; returns hidden and cell of the next step."""
        gates = self.gates(projected, self.hidden_projection(hidden, weight_hh, bias_hh))
        input_sum, forget_sum, cell_sum, output_sum = gates.chunk(4, -1)
        cell = self.cell(
            self.forget_gate(forget_sum), cell, self.input_gate(input_sum), self.cell_gate(cell_sum)
        )
        hidden = self.hidden(self.output_gate(output_sum), self.cell_tanh(cell))
        return hidden if weight_hr is None else self.output_projection(hidden, weight_hr), cell


class GruCell(nn.Module):
    """n = tanh(x_n + r ∘ (W_hn h + b_hn)); h' = (1 - z) ∘ n + z ∘ h: the reset gate r is applied after W_hn h."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_projection = Linear()
        self.reset_sum, self.update_sum, self.new_sum = Add(), Add(), Add()
        self.reset_gate, self.update_gate = nn.Sigmoid(), nn.Sigmoid()
        self.reset_hidden = Multiply()
        self.new_gate = nn.Tanh()
        self.hidden = Blend()

    def forward(
        self, projected: Tensor, hidden: Tensor, weight_hh: Tensor, bias_hh: Tensor | None = None
    ) -> tuple[Tensor]:
        """Shape: projected [N, 3H], hidden [N, H]; returns the hidden state of the next step, in a tuple."""
        x_reset, x_update, x_new = projected.chunk(3, -1)
        h_reset, h_update, h_new = self.hidden_projection(hidden, weight_hh, bias_hh).chunk(3, -1)
        reset = self.reset_gate(self.reset_sum(x_reset, h_reset))
        update = self.update_gate(self.update_sum(x_update, h_update))
        new = self.new_gate(self.new_sum(x_new, self.reset_hidden(reset, h_new)))
        return (self.hidden(new, hidden, update),)


class RnnCell(nn.Module):
    """h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.

    Args:
        activation: the function.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.hidden_projection = Linear()
        self.sum = Add()
        self.hidden = activation

    def forward(
        self, projected: Tensor, hidden: Tensor, weight_hh: Tensor, bias_hh: Tensor | None = None
    ) -> tuple[Tensor]:
        """Shape: projected [N, H], hidden [N, H]; returns the hidden state of the next step, in a tuple."""
        return (self.hidden(self.sum(projected, self.hidden_projection(hidden, weight_hh, bias_hh))),)
