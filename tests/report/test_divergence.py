"""The result of a divergence."""

from qtk.report.divergence import Divergence


def test_it_is_a_number_and_says_where_the_worst_token_is():
    found = Divergence(0.5, 2.0, (1, 2, 3), 40)
    assert float(found) == 0.5
    assert str(found) == "0.5 nats per token over 40 tokens; worst 2 (batch 1, sample 2, position 3)"
