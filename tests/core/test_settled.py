import pytest

from qtk.core.settled import Settled
from qtk.errors import ConfigError


class Engine(Settled):
    running: bool

    def __init__(self, power, fuel="diesel"):
        self.power, self.fuel = power, fuel
        self._hours = 0
        self.running = False

    @property
    def hours(self):
        return self._hours

    @hours.setter
    def hours(self, value):
        self._hours = value

    def start(self):
        self.running = True


@pytest.mark.parametrize(("name", "reason"), [
    ("fuel", r"it is settled when the Engine is made; make a new one, Engine\(…, fuel=…\)"),
    ("start", "it is a method of Engine; call it"),
    ("colour", "Engine has no such attribute; it has power, fuel"),
])
def test_what_would_have_no_effect_is_refused(name, reason):
    engine = Engine(3)
    before = dict(vars(engine))
    with pytest.raises(ConfigError, match=f"setting '{name}' would have no effect: {reason}"):
        setattr(engine, name, 1)
    assert vars(engine) == before


def test_what_acts_can_be_set():
    engine = Engine(3)
    engine.start()
    engine.hours = 7
    assert (engine.running, engine.hours, engine.power) == (True, 7, 3)


def test_a_subclass_may_have_a_constructor_of_its_own():
    class Racer(Engine):
        def __init__(self, *args, team, **settings):
            self.team = team
            super().__init__(*args, **settings)

    racer = Racer(3, team="blue")
    assert (racer.power, racer.fuel, racer.team) == (3, "diesel", "blue")
    with pytest.raises(ConfigError, match="settled when the Racer is made"):
        racer.team = "red"
