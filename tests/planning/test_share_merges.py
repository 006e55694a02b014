import torch
from torch import nn

from tests.planning.plans import by_name, leaders, plan_of


class Concats(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return self.head(torch.cat([a, b], dim=1)), b


def test_concat_shares_one_encoding_and_a_tapped_producer_keeps_its_own():
    quant_plan = plan_of(Concats(), torch.randn(3, 4))
    assert leaders(quant_plan) == {"a:out": "concat:out", "concat:in[1]": "concat:out"}
    assert by_name(quant_plan)["b:out"].leader is None


def test_concat_of_a_value_with_itself_shares_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return torch.cat([y, y], dim=1)

    assert leaders(plan_of(Net(), torch.randn(3, 4))) == {"a:out": "concat:out"}


def test_chained_concats_end_at_one_leader():
    class Net(nn.Module):
        def forward(self, x, y, z):
            return torch.cat([torch.cat([x, y], 1), z], 1)

    quant_plan = plan_of(Net(), (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)))
    assert set(leaders(quant_plan).values()) == {"concat_1:out"}
    assert set(leaders(quant_plan)) == {"x:input", "y:input", "z:input", "concat:out"}


def test_split_pieces_share_their_source_and_merge_on_edges():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x):
            left, right = self.a(x).chunk(2, dim=1)
            return torch.cat([left, self.b(right)], dim=1)

    quant_plan = plan_of(Net(), torch.randn(3, 4))
    assert leaders(quant_plan) == {"concat:in[0]": "concat:out", "b:out": "concat:out"}
    assert by_name(quant_plan)["a:out"].leader is None
