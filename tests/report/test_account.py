"""An account names the trial that counts, whether the drop is met, and every trial in its table."""

import math

import pytest

from qtk.report.account import Account, Trial

KEPT = Trial("plain calibration", 1.25, 20.0, 0.5, kept=True, size_bytes=1_234_567, latency_ms=0.5, run_time=0.25)
WORSE = Trial("ranges by mse", 0.04, 19.96, None, reason="the error of the outputs does not fall")
FAILED = Trial("equalize", 0.0, reason="failed: ValueError: no luck")


def account(*trials, max_drop=0.5):
    return Account("top1", max_drop, list(trials), "over")


@pytest.mark.parametrize(("trials", "best"), [
    ([], None), ([FAILED], None), ([WORSE, FAILED], None), ([KEPT], KEPT), ([KEPT, WORSE, FAILED], KEPT),
    ([KEPT, Trial("gptq", 2.0, 10.0, 0.75, kept=True), FAILED], Trial("gptq", 2.0, 10.0, 0.75, kept=True)),
])
def test_the_last_trial_that_was_kept_is_the_best(trials, best):
    assert account(*trials).best == best


@pytest.mark.parametrize(("drop", "max_drop", "reached"), [
    (0.5, 0.5, True), (math.nextafter(0.5, 1.0), 0.5, False), (-0.25, 0.0, True), (0.0, -1.0, False),
    (math.nan, 0.5, False), (None, math.inf, False),
])
def test_a_drop_is_met_up_to_the_bound_itself(drop, max_drop, reached):
    assert account(Trial("mse", 1.0, 10.0, drop, kept=True), FAILED, max_drop=max_drop).reached is reached


def test_without_a_kept_trial_nothing_is_met():
    assert not account(max_drop=math.inf).reached
    assert not account(Trial("mse", 1.0, 10.0, 0.0), max_drop=math.inf).reached


def test_every_trial_has_its_row():
    equal = Trial("float", 0.0, math.inf, 0.0, kept=True)
    table = account(KEPT, WORSE, FAILED, equal, max_drop=0.01).table()
    assert table.rows == (
        ("plain calibration", "0.5", "20.0", "1.23", "0.25", "0.5", "1.2", "kept"),
        ("ranges by mse", "–", "20.0", "–", "–", "–", "0.0", "the error of the outputs does not fall"),
        ("equalize", "–", "–", "–", "–", "–", "0.0", "failed: ValueError: no luck"),
        ("float", "0", "∞", "–", "–", "–", "0.0", "kept"),
    )
    assert table.title == "drop of top1, at most 0.01 asked"


def test_it_prints_the_table_and_how_it_ended():
    text = str(account(KEPT))
    assert text.endswith("\nover")
    assert "plain calibration" in text
    assert str(Account("loss", 1.0)).startswith("drop of loss, at most 1 asked")


def test_a_promised_drop_is_met_by_its_bound_alone():
    def promised(bound):
        return Account("top1", 0.01, [Trial("mse", 1.0, 10.0, 0.0, kept=True, bound=bound)], "over", confidence=0.95,
                       classes=((7, 0.25, 8), (1, 0.0, 9)))

    assert [promised(bound).reached for bound in (None, 0.02, 0.01)] == [False, False, True]
    table = promised(0.0075).table()
    assert table.columns[2].heading == "at most, 0.95"
    assert table.rows[0][2] == "0.0075"
    assert str(promised(0.0075)).endswith("over\nworst class 7: drop 0.25 of 8 samples")
