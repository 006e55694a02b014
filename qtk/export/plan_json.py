"""A quantization plan as JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping

from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, SpecError


def plan_to_json(plan: QuantPlan) -> dict[str, object]:
    """The plan as JSON values; a site is a list of owner, op and port."""
    return {
        "sites": [
            {
                "site": _site_to_json(site),
                "spec": decided.spec.to_json(),
                "scheme": decided.scheme,
                "static": decided.static,
                "range": None if decided.range is None else list(decided.range),
                **({} if not decided.min_fill else {"min_fill": decided.min_fill}),
                "bounds": None if decided.bounds is None else list(decided.bounds),
                "leader": None if decided.leader is None else _site_to_json(decided.leader),
                **({} if decided.factors is None else {"factors": [_site_to_json(site) for site in decided.factors]}),
                **({"is_cache": True} if decided.is_cache else {}),
                "reason": decided.reason,
            }
            for site, decided in plan.items()
        ],
        "unquantized": [[_site_to_json(site), reason] for site, reason in plan.unquantized.items()],
    }


def plan_from_json(data: Mapping[str, object]) -> QuantPlan:
    """Inverse of ``plan_to_json``. Raises: EncodingError on a malformed record."""
    match data:
        case {"sites": list(sites), "unquantized": list(unquantized)}:
            return QuantPlan(
                dict(map(_site_plan, sites)), dict(map(_unquantized, unquantized))
            )
    raise EncodingError(f"not a plan: {data!r:.120}")


def _unquantized(record: object) -> tuple[Site, str]:
    match record:
        case [site, str(reason)]:
            return _site(site), reason
    raise EncodingError(f"not a site and the reason why it is not quantized: {record!r:.120}")


def _site_plan(record: object) -> tuple[Site, SitePlan]:
    match record:
        case {
            "site": list(site), "spec": dict(spec), "scheme": str(scheme), "static": bool(static),
            "range": list() | None as known, "bounds": list() | None as bounds, "leader": list() | None as leader,
            "reason": str(reason), **rest,
        }:
            factors = rest.get("factors")
        case _:
            raise EncodingError(f"not a plan for a site: {record!r:.120}")
    try:
        return _site(site), SitePlan(
            QuantSpec.from_json(spec), scheme, static,
            range=None if known is None else (float(known[0]), float(known[1])),
            min_fill=float(str(rest.get("min_fill", 0.0))),
            bounds=None if bounds is None else (_bound(bounds[0]), _bound(bounds[1])),
            leader=None if leader is None else _site(leader), factors=_factors(factors),
            is_cache=rest.get("is_cache") is True, reason=reason,
        )
    except (SpecError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EncodingError(f"not a plan for a site: {error}") from error


def _factors(value: object) -> tuple[Site, Site] | None:
    match value:
        case None:
            return None
        case [of_input, of_weight]:
            return _site(of_input), _site(of_weight)
    raise EncodingError(f"not the sites of an input and a weight: {value!r}")


def _bound(value: object) -> float | None:
    return None if value is None else float(str(value))


def _site_to_json(site: Site) -> list[str]:
    return [site.owner, site.op, site.port]


def _site(data: object) -> Site:
    match data:
        case [str(owner), str(op), str(port)]:
            return Site(owner, op, port)
    raise EncodingError(f"not a site: {data!r:.120}")
