"""Objects whose attributes are settled by their constructor."""

from __future__ import annotations

import inspect

from qtk.errors import ConfigError


class Settled:
    """Refuses to be given attributes that nothing would read: those of the constructor again, and unknown ones.

    >>> class Circle(Settled):
    ...     def __init__(self, radius: float) -> None:
    ...         self.radius = radius
    >>> circle = Circle(radius=1.0)
    >>> circle.radius = 2.0  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    qtk.errors.ConfigError: setting 'radius' would have no effect: it is settled when the Circle is made; make ...
    >>> circle.diameter = 2.0
    Traceback (most recent call last):
    qtk.errors.ConfigError: setting 'diameter' would have no effect: Circle has no such attribute; it has radius

    Properties with a setter, private attributes and those that a subclass annotates are set as usual.
    """

    def __setattr__(self, name: str, value: object) -> None:
        """Raises: ConfigError if the attribute is settled, or unknown."""
        reason = None if name.startswith("_") else self._why_not(name)
        if reason is not None:
            raise ConfigError(f"setting {name!r} would have no effect: {reason}")
        super().__setattr__(name, value)

    def _why_not(self, name: str) -> str | None:
        """Why an attribute cannot be set; ``None`` if it can."""
        kind = type(self)
        above = [each for each in kind.__mro__ if issubclass(each, Settled) and each is not Settled]
        parameters = {each: None for base in above for each in inspect.signature(base).parameters}
        member = getattr(kind, name, None)
        if isinstance(member, property) or any(name in inspect.get_annotations(base) for base in above):
            return None
        if name in parameters:
            is_first = name not in self.__dict__
            return None if is_first else (f"it is settled when the {kind.__name__} is made; make a new one, "
                                          f"{kind.__name__}(…, {name}=…)")
        if member is not None:
            return f"it is a method of {kind.__name__}; call it"
        known = ", ".join(each for each in parameters if each in vars(self))
        return f"{kind.__name__} has no such attribute; it has {known}"
