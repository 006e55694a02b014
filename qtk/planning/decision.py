"""A setting of one tensor, as defaults and rules decide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qtk.config.tensor_setting import TensorSetting

ENABLED = "enabled"


@dataclass(frozen=True, slots=True)
class Decision:
    """A setting, whether the tensor is quantized at all (``enabled``), and the last rule that changed either.

    ``is_final``: no rule changes it, for the caller of ``QuantSim`` passed ``None`` as the width.
    ``origins``: field of the setting, or ``enabled`` → index of the rule that set it; what no rule set is missing.
    """

    setting: TensorSetting
    enabled: bool
    reason: str
    is_final: bool = False
    origins: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def rules(self) -> frozenset[int]:
        """The indices of the rules that it follows, as far as it follows them."""
        return frozenset(index for name, index in self.origins.items() if self.enabled or name == ENABLED)

    def overlaid(self, value: TensorSetting | str | None, reason: str, index: int | None = None) -> Decision:
        """The decision overlaid by a later setting, field by field; one with a width undoes an earlier ``float``.

        Args:
            value: the setting.
            reason: where it comes from.
            index: of its rule, if it comes from one.
        """
        if self.is_final or value is None:
            return self
        if isinstance(value, TensorSetting):
            setting, enabled = self.setting.overlaid(value), self.enabled or value.names_width
            changed = {name for name, given in value if given is not None} | ({ENABLED} if value.names_width else set())
        else:
            setting, enabled, changed = self.setting, value == "quantized", {ENABLED}
        origins = {
            name: origin for name, origin in self.origins.items()
            if name not in changed and getattr(setting, name, True) is not None
        }
        origins |= {} if index is None else dict.fromkeys(changed, index)
        return Decision(setting, enabled, reason if enabled or ENABLED in changed else self.reason, origins=origins)
