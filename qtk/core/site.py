"""Sites: the values of a model that can be quantized, by name."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.public import public


@public
@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Names a value by the module that makes it, the op inside that module, and the port of the op.

    ``owner`` is the module path, with ``@1`` behind it from the second call of a module on. ``op`` is the op's
    kind with its ordinal inside the owner (``add_1``), empty when the module is that one op. ``port`` is ``out``,
    ``out[1]``, ``in[0]`` (the edge into one consumer) or ``input`` (of the model, or a buffer that forward writes); a
    parameter has no port.

    >>> Site("blocks.0", "add_1", "out").name
    'blocks.0.add_1:out'
    >>> Site("blocks.0.attn.qkv", "", "out").name
    'blocks.0.attn.qkv:out'
    >>> Site.parameter("blocks.0.attn.qkv.weight").name
    'blocks.0.attn.qkv.weight'
    """

    owner: str
    op: str
    port: str

    @classmethod
    def parameter(cls, name: str) -> Site:
        """The parameter or buffer with this state_dict key."""
        owner, _, leaf = name.rpartition(".")
        return cls(owner, leaf, "")

    @property
    def name(self) -> str:
        path = ".".join(filter(None, (self.owner, self.op)))
        return f"{path}:{self.port}" if self.port else path

    def __str__(self) -> str:
        return self.name
