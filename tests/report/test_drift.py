import random

from qtk.report.drift import Drift


def test_noise_around_a_level_is_bounded_and_a_slope_through_it_is_not():
    noise = random.Random(0)
    level = [40 + noise.gauss(0, 4) for _ in range(200)]
    assert Drift(tuple(level)).is_bounded
    sinking = [db - step / 20 for step, db in enumerate(level)]
    assert not Drift(tuple(sinking)).is_bounded
    assert Drift(tuple(sinking)).verdict.startswith("grows: +")


def test_the_first_steps_in_which_the_error_builds_up_do_not_count():
    assert Drift((60.0, 55.0, 50.0, 45.0, 42.0, *[40.0] * 40)).growth_db == 0
