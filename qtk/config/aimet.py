"""Translates AIMET's quantsim JSON config into qtk's schema, with AIMET's semantics.

1. Later sections win: ``defaults``, ``params``, ``op_type``, ``supergroups``, ``model_input``, ``model_output``.
2. A tensor is float unless the file turns its quantization on. An op type maps to several op kinds or none
   (``aimet_ops``).
3. AIMET ignores foldable batch norms when it matches supergroups: each also matches with a batch norm after its first
   op, and a convolution or linear with its batch norm has one quantizer.
4. Two bounds in ``encoding_constraints`` become a range; a single one a bound, unless the op implies it.
5. Widths come from the arguments of ``QuantSim``, so ``supported_kernels`` is ignored, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NoReturn

from qtk.config.aimet_ops import IMPLIED_BOUNDS, OP_KINDS
from qtk.config.mistakes import shown
from qtk.errors import ConfigError
from qtk.registry import nearest

Json = dict[str, object]

SECTIONS = ("defaults", "params", "op_type", "supergroups", "supergroup_pass_list", "model_input", "model_output")
DEFAULT_KEYS = ("ops", "params", "strict_symmetric", "unsigned_symmetric", "per_channel_quantization",
                "supported_kernels", "hw_version")
OP_KEYS = ("is_input_quantized", "is_output_quantized", "is_symmetric", "params", "per_channel_quantization",
           "encoding_constraints", "supported_kernels")
PARAM_KEYS = ("is_quantized", "is_symmetric")
PARAM_NAMES = ("weight", "bias")
FOLDABLE = ("conv", "conv_transpose", "linear")
BIAS_BITS = 16


def is_aimet(value: Mapping[str, object]) -> bool:
    """Says whether a mapping is an AIMET config: it has AIMET's sections, and no key that only qtk's schema has.

    >>> is_aimet({"defaults": {"ops": {}, "params": {}}}), is_aimet({"version": 1})
    (True, False)
    """
    if value.keys() & {"version", "rules", "io"}:
        return False
    if value.keys() & {"params", "op_type", "model_input", "model_output", "supergroup_pass_list"}:
        return True
    defaults = value.get("defaults")
    return isinstance(defaults, Mapping) and bool(defaults.keys() & set(DEFAULT_KEYS))


def from_aimet(value: Mapping[str, object], *, source: str) -> Json:
    """The same configuration in qtk's schema, for ``QuantConfig`` to validate.

    Args:
        value: the parsed JSON.
        source: where it comes from, for messages.

    Raises: ConfigError with the path of a key that is unknown or has a value of the wrong type.
    """
    return _Reader(source).config(value)


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.strict_symmetric: bool | None = None
        self.ignored: dict[str, list[str]] = {}

    def config(self, value: Mapping[str, object]) -> Json:
        self._known_keys(value, SECTIONS, "")
        defaults = self._mapping(value, "defaults", DEFAULT_KEYS, "")
        rules: list[Json] = [{"match": {"op": "batch_norm"}, "weight": "float", "optional": True}]  # 3
        config: Json = {
            "version": 1,
            "defaults": self._defaults(defaults, self._mapping(value, "params", None, ""), rules),
            "rules": rules,
        }
        op_types = self._mapping(value, "op_type", None, "")
        for name in sorted(op_types, key=lambda name: -len(self._kinds(name, "op_type"))):  # narrower ones later
            rules += self._op_rules(name, self._mapping(op_types, name, OP_KEYS, "op_type"))
        config["supergroups"] = self._supergroups(value.get("supergroups", []))
        if "supergroup_pass_list" in value:
            self._ignore("supergroup_pass_list", "it names passes over ONNX graphs")
        inputs = self._mapping(value, "model_input", ("is_input_quantized",), "")
        self._mapping(value, "model_output", ("is_output_quantized",), "")
        config["io"] = {"inputs": "quantized" if self._flag(inputs, "is_input_quantized", "model_input") else "float"}
        self._warn()
        return config

    # defaults and params

    def _defaults(self, defaults: Mapping[str, object], params: Mapping[str, object], rules: list[Json]) -> Json:
        if "supported_kernels" in defaults:
            self._ignore("defaults.supported_kernels", KERNELS)
        if "hw_version" in defaults:
            self._ignore("defaults.hw_version", "it names a version of the hardware; its kernels are not known here")
        self.strict_symmetric = self._flag(defaults, "strict_symmetric", "defaults")
        if self._flag(defaults, "unsigned_symmetric", "defaults"):
            self._ignore("defaults.unsigned_symmetric", "symmetric codes are signed here")
        ops = self._mapping(defaults, "ops", ("is_output_quantized", "is_symmetric"), "defaults")
        common = self._mapping(defaults, "params", PARAM_KEYS, "defaults")
        weight, bias = ({**common, **self._param(params, name, "")} for name in PARAM_NAMES)
        per_channel = self._flag(defaults, "per_channel_quantization", "defaults")
        activation_setting: Json | str = self._symmetry(ops, "defaults.ops", missing=False)
        weight_setting: Json | str = {
            **self._symmetry(weight, "params.weight", missing=False),
            "granularity": "per_channel" if per_channel else "per_tensor",
        }
        off: Json = {}  # settings of tensors that only an op type turns on
        if not self._flag(weight, "is_quantized", "params.weight"):
            off["weight"], weight_setting = weight_setting, "float"
        if not self._flag(ops, "is_output_quantized", "defaults.ops"):
            off["output"], activation_setting = activation_setting, "float"
        if off:
            rules.append({"match": {"path": "*"}, **off, "optional": True})
        return {
            "weight": weight_setting,
            "activation": activation_setting,
            "bias": self._bias(bias, "params.bias") or "float",
        }

    def _param(self, params: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
        where = f"{where}.params".removeprefix(".")
        for other in sorted(params.keys() - set(PARAM_NAMES)):
            self._ignore(f"{where}.{other}", f"parameters are told apart as {' and '.join(PARAM_NAMES)} here")
        return self._mapping(params, name, PARAM_KEYS, where)

    def _bias(self, flags: Mapping[str, object], where: str) -> Json | str | None:
        """The bias setting; ``None`` if the flags have no ``is_quantized``."""
        if (quantized := self._flag(flags, "is_quantized", where)) is None:
            return None
        if not quantized:
            return "float"
        return {"bits": BIAS_BITS, **self._symmetry(flags, where, missing=True)}

    # op_type

    def _op_rules(self, name: str, entry: Mapping[str, object]) -> list[Json]:
        where = f"op_type.{name}"
        if "supported_kernels" in entry:
            self._ignore(f"{where}.supported_kernels", KERNELS)
        params = self._mapping(entry, "params", None, where)
        weight, bias = (self._param(params, param, where) for param in PARAM_NAMES)
        switches: Json = {
            "weight": self._switch(weight, "is_quantized", f"{where}.params.weight"),
            "bias": self._bias(bias, f"{where}.params.bias"),
            "input": self._switch(entry, "is_input_quantized", where),
            "output": self._switch(entry, "is_output_quantized", where),
        }
        symmetry = self._symmetry(entry, where, missing=None)
        weight_setting = self._symmetry(weight, f"{where}.params.weight", missing=None)
        if (per_channel := self._flag(entry, "per_channel_quantization", where)) is not None:
            weight_setting["granularity"] = "per_channel" if per_channel else "per_tensor"
        settings: Json = {
            "weight": weight_setting,
            "input": symmetry if switches["input"] == "quantized" else {},
            "output": symmetry | self._constraint(name, entry, where),
        }
        kinds = self._kinds(name, "op_type")
        rules = [{key: value for key, value in rule.items() if value} for rule in (switches, settings)]
        return [{"match": {"op": list(kinds)}, **rule, "optional": True} for rule in rules if rule and kinds]

    def _constraint(self, name: str, entry: Mapping[str, object], where: str) -> Json:
        bounds = self._mapping(entry, "encoding_constraints", ("min", "max"), where)
        for key, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                self._wrong(f"{where}.encoding_constraints.{key}", bound, "a number")
        if len(bounds) == 2:
            return {"range": [bounds["min"], bounds["max"]]}
        implied = dict(zip(("min", "max"), IMPLIED_BOUNDS.get(name, (None, None)), strict=True))
        if any(implied[key] != bound for key, bound in bounds.items()):
            return {"bounds": [bounds.get("min"), bounds.get("max")]}
        return {}

    # supergroups

    def _supergroups(self, value: object) -> list[object]:
        if not isinstance(value, list):
            self._wrong("supergroups", value, "a list")
        patterns: list[object] = [[list(FOLDABLE), "batch_norm"]]  # 3
        for index, group in enumerate(value):
            where = f"supergroups[{index}]"
            if not isinstance(group, Mapping):
                self._wrong(where, group, "an object with an op_list")
            self._known_keys(group, ("op_list",), where)
            names = group.get("op_list")
            if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
                self._wrong(f"{where}.op_list", names, "a list of two or more op types")
            chain = [list(self._kinds(name, f"{where}.op_list")) for name in names]
            if not all(chain):
                continue
            patterns.append(chain)
            if (foldable := [kind for kind in chain[0] if kind in FOLDABLE]) and chain[1] != ["batch_norm"]:
                patterns.append([foldable, "batch_norm", *chain[1:]])
        return patterns

    # values

    def _kinds(self, name: str, where: str) -> tuple[str, ...]:
        if name not in OP_KINDS:
            self._ignore(f"{where}.{name}", f"an op type not known here; {nearest(name, OP_KINDS)}")
        return OP_KINDS.get(name, ())

    def _symmetry(self, flags: Mapping[str, object], where: str, *, missing: bool | None) -> Json:
        """The symmetry setting; ``missing`` replaces an absent flag, and if that is ``None`` the setting is empty."""
        symmetric = self._flag(flags, "is_symmetric", where)
        symmetric = missing if symmetric is None else symmetric
        if symmetric is None:
            return {}
        narrow = {} if self.strict_symmetric is None else {"narrow_range": symmetric and self.strict_symmetric}
        return {"symmetric": symmetric, **narrow}

    def _switch(self, flags: Mapping[str, object], key: str, where: str) -> str | None:
        flag = self._flag(flags, key, where)
        return None if flag is None else "quantized" if flag else "float"

    def _flag(self, flags: Mapping[str, object], key: str, where: str) -> bool | None:
        match flags.get(key):
            case None:
                return None
            case True | "True" | "true":
                return True
            case False | "False" | "false":
                return False
            case other:
                self._wrong(f"{where}.{key}", other, '"True" or "False"')

    def _mapping(
        self, parent: Mapping[str, object], key: str, known: tuple[str, ...] | None, where: str
    ) -> Mapping[str, object]:
        value = parent.get(key, {})
        path = f"{where}.{key}" if where else key
        if not isinstance(value, Mapping):
            self._wrong(path, value, "an object")
        if known is not None:
            self._known_keys(value, known, path)
        return value

    def _known_keys(self, value: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
        for key in value:
            if key not in known:
                path = f"{where}.{key}" if where else key
                raise ConfigError(f"{self.source}: {path}: unknown key in an AIMET config; {nearest(str(key), known)}")

    def _wrong(self, path: str, given: object, wanted: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {path}: got {shown(given)}; must be {wanted}")

    def _ignore(self, path: str, why: str) -> None:
        paths = self.ignored.setdefault(why, [])
        if path not in paths:
            paths.append(path)

    def _warn(self) -> None:
        for why, paths in self.ignored.items():
            warnings.warn(f"{self.source}: ignored: {', '.join(paths)} ({why})", UserWarning, stacklevel=6)


KERNELS = "widths come from QuantSim(weight_bits=…, activation_bits=…)"
