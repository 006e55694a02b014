"""Computes the encodings of a simulation, plans merges of uneven operands apart, and warns of what is not held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from qtk.calibration.calibrate import CalibrationData, calibrate, sites_to_calibrate
from qtk.calibration.site_samples import SiteSamples
from qtk.calibration.uneven_merges import uneven_inputs, uneven_values
from qtk.calibration.unheld_steps import unheld_steps, with_float_steps
from qtk.calibration.width_check import warn_of_unheld
from qtk.config.load import precise_in
from qtk.config.schema import Match, Rule
from qtk.config.tensor_setting import TensorSetting
from qtk.core.needs import concerned
from qtk.graph.graphs import contents_of
from qtk.graph.insert import drop_sites, insert, remove
from qtk.graph.simulation import Simulation
from qtk.nn.mapped_weights import bounded, is_large
from qtk.observers.ranks import exchanged, several_ranks
from qtk.quantizers.quantizer import Mode
from qtk.transforms.rewrite import Configurable, Rewritable, replan_simulation
from qtk.workflow.check import check


def compute_encodings(
    sim: Configurable, data: CalibrationData, *, sites: Iterable[str] | str | None, only_missing: bool
) -> None:
    """Computes every encoding that is not frozen: of weights from their values, of activations from data.

    >>> import qtk, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    >>> batches = [torch.randn(16, 8) for _ in range(4)]
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> sim.compute_encodings(batches, progress=False)
    >>> list(sim.encodings())
    ['input:input', '0.weight', '1:out']

    A loader of (image, label) pairs:

    >>> pairs = [(batch, 0) for batch in batches]
    >>> sim.compute_encodings(pairs, forward=lambda model, batch: model(batch[0]), progress=False)

    Some sites only, or sites whose encoding is missing:

    >>> sim.compute_encodings(batches, sites="*:out", num_batches=2, progress=False)
    >>> sim.forget("0.weight")
    >>> sim.compute_encodings(batches, only_missing=True, progress=False)

    Under ``torchrun`` every rank passes its share of the data, and all get the same encodings.

    Where all are computed, from data that can be run again, merges whose operands differ too much in range get rules
    of their own (``uneven_values``), in front of all rules, and what these change is calibrated again; so do inputs
    whose range is taken by markers that the model replaces, such as −9999 (``marked_inputs``), or by an index beside
    features (``uneven_inputs``). Layers of recurrent nets whose input 8 bits do not hold are computed in float
    (``unheld_steps``).

    Args:
        sim: a ``QuantSim``; its simulation changes.
        data: what activations are observed on.
        sites: names of the sites to calibrate, or globs over names; ``None``: all.
        only_missing: compute only encodings that are missing.

    Raises: CalibrationError for NaN or +inf, naming the site, for missing data, or for a name of no site; CheckError,
        if ``sites`` is ``None``, as ``check``.
    """
    computes_all = sites is None and not only_missing
    putting_back = _dropped_sites_back(sim) if computes_all and sim.simulation.dropped else nullcontext()
    if data.progress and data.batches is not None and is_large(sim.model):
        from qtk.workflow.forecast import say_forecast  # loaded here: it knows all layer-wise methods

        say_forecast(sim.simulation)
    with bounded(sim.model), putting_back:
        selected = sites_to_calibrate(sim.simulation, sites, only_missing=only_missing)
        sim.simulation, samples = calibrate(sim.simulation, selected, data)
    rules = _rules_of_data(samples, sim.simulation) if computes_all else []
    new = [rule for rule in rules if rule not in sim.config.rules]
    if computes_all and (new := _agreed(new, runs_again=not isinstance(data.batches, Iterator))):
        inside = [rule for rule in new if rule.inside is not None]
        first = tuple(rule for rule in new if rule.inside is None)
        config = with_float_steps(sim.config, inside)
        replan_simulation(sim, config.model_copy(update={"rules": (*first, *config.rules)}))
        missing = sites_to_calibrate(sim.simulation, only_missing=True)
        missing = {site: plan for site, plan in missing.items() if not plan.spec.dynamic}  # these have been watched
        sim.simulation, later = calibrate(sim.simulation, missing, data)
        samples |= later
    if unheld := samples.unheld(sim.simulation):
        warn_of_unheld(unheld)
    if sites is None:
        check(sim.simulation)


def _agreed(rules: list[Rule], *, runs_again: bool) -> list[Rule]:
    """The rules that the data of any rank ask for, in the order of the ranks.

    Where the data of one run once alone, sites that need no other run: what they quantize less needs no range.
    """
    shares = exchanged((rules, runs_again), None) if several_ranks() else [(rules, runs_again)]
    union: list[Rule] = []
    for found, _ in shares:
        union += [rule for rule in found if rule not in union]
    runs_again = all(again for _, again in shares)
    return [rule for rule in union if runs_again or rule.inside is not None]


def _rules_of_data(samples: SiteSamples, simulation: Simulation) -> list[Rule]:
    found = concerned(RULES_OF_DATA, lambda: contents_of(simulation.model))
    return [rule for each in found for rule in each.rules(samples, simulation)]


def _rules_apart(samples: SiteSamples, simulation: Simulation) -> list[Rule]:
    """The rules that give uneven values the width for what loses too much, and slices of them ranges of their own."""
    uneven = uneven_values(samples, simulation)
    precise = precise_in(simulation.target)
    output = TensorSetting(bits=16) if precise == 16 else precise
    bits = {site.name: decided.spec.dtype.bits for site, decided in simulation.plan.items()}
    paths = [name.partition(":")[0] for name in uneven.outputs if precise == "float" or bits[name] < precise]
    rules = [Rule(match=Match(path=(path,)), output=output, optional=True) for path in paths]
    if precise == "float":
        rules += [Rule(match=Match(path=(path,)), input="quantized", optional=True) for path in uneven.readers]
    return rules


def _rules_of_inputs(samples: SiteSamples, simulation: Simulation) -> list[Rule]:
    """The rules for inputs that their range does not hold: more bits or float, and codes of what is read of them."""
    precise, rules = precise_in(simulation.target), list[Rule]()
    marked = {each.site: each for each in samples.marked_inputs(simulation)}
    for unheld in ({each.site: each for each in uneven_inputs(samples, simulation)} | marked).values():
        width = unheld.step.precise(simulation.plan[unheld.site].spec.dtype.bits, precise)
        output = width if width == "float" else TensorSetting(bits=width)
        path, *others = (site.name.partition(":")[0] for site in (unheld.site, *unheld.between))
        matches = [Match(op=("input",), path=(path,)), *(Match(path=(other,)) for other in others)]
        rules += [Rule(match=match, output=output, optional=True) for match in matches]
        if width == "float":
            rules += [Rule(match=Match(path=(path,)), input="quantized", optional=True) for path in unheld.readers]
    return rules


@dataclass(frozen=True, slots=True)
class RulesOfData:
    """Rules that follow from the values of a calibration.

    Args:
        rules: (samples, simulation) → the rules.
        needs: what the graphs of a model hold that gets any; empty: every model may.
    """

    rules: Callable[[SiteSamples, Simulation], list[Rule]]
    needs: frozenset[object]


RULES_OF_DATA = (
    RulesOfData(_rules_apart, frozenset()), RulesOfData(unheld_steps, frozenset({"recurrent"})),
    RulesOfData(_rules_of_inputs, frozenset()),
)


@contextmanager
def _dropped_sites_back(sim: Rewritable) -> Iterator[None]:
    """Plans the sites again that an earlier calibration dropped; an exception takes them out again."""
    before, model = sim.simulation, sim.model
    remove(model)
    plan = sim.plan_of(model)
    sim.simulation = Simulation(model, plan, insert(model, plan, known=before.quantizers), target=before.target)
    for site, quantizer in sim.simulation.quantizers.items():
        if site not in before.quantizers:
            quantizer.mode = Mode.SIMULATE
    try:
        yield
    except BaseException:
        sim.simulation = drop_sites(sim.simulation, before.dropped)
        raise
