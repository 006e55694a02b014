"""``QatSchedule``: when, in a training, ranges are observed, when they are learned, when batch norms are frozen."""

from __future__ import annotations

from collections.abc import Mapping

from qtk.errors import ConfigError, NotCalibratedError
from qtk.graph.simulation import HasSimulation
from qtk.nn.batch_norm import freeze_batch_norms
from qtk.public import public
from qtk.training.learned_ranges import learn_ranges

MOMENTUM = 0.01
"""Weight of a batch in a range that is observed while training, as in torch's observers for training."""


@public
class QatSchedule:
    """Observes ranges of activations until one step, learns all ranges from another, freezes batch norms at a third.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
    >>> schedule = qtk.QatSchedule(sim, observe_until=2, learn_ranges_from=3, freeze_batch_norms_at=4)
    >>> optimizer = torch.optim.Adam([{"params": sim.weight_parameters()}, {"params": sim.range_parameters()}])
    >>> for _ in range(5):
    ...     schedule.step()
    ...     sim.model(torch.randn(8, 4)).square().sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Make it before the optimizer: the parameters of the ranges are there from the first step, so that optimizers,
    learning-rate schedulers and ``DistributedDataParallel`` know them, with gradients of 0 until they are learned. Let
    their learning rate rise from 0 then: after zeros, Adam's first steps are several times the learning rate.

    Args:
        sim: a calibrated simulation. The ranges that it learns already are scheduled, else the ranges of all sites.
        observe_until: while fewer steps were made, ranges of activations follow their batches, frozen ones apart.
        learn_ranges_from: from how many steps on ranges are learned; ``None``: never.
        freeze_batch_norms_at: from how many steps on batch norms stay in eval mode, whatever ``sim.model.train()`` does
            to the others; ``None``: never.

    Raises: ConfigError if a step is negative, or ranges would be observed and learned at once; NotCalibratedError
        naming sites without an encoding.
    """

    def __init__(
        self, sim: HasSimulation, *, observe_until: int = 0, learn_ranges_from: int | None = None,
        freeze_batch_norms_at: int | None = None,
    ) -> None:
        steps = {"observe_until": observe_until, "learn_ranges_from": learn_ranges_from,
                 "freeze_batch_norms_at": freeze_batch_norms_at}
        for name, step in steps.items():
            if step is not None and step < 0:
                raise ConfigError(f"QatSchedule: {name} counts steps, got {step}")
        if learn_ranges_from is not None and learn_ranges_from < observe_until:
            raise ConfigError(f"QatSchedule: ranges cannot be learned from step {learn_ranges_from} and observed until "
                              f"{observe_until}; learn them after they were observed")
        simulation = sim.simulation
        quantizers = dict.fromkeys(simulation.quantizers.values())
        missing = [quantizer.site for quantizer in quantizers if not quantizer.ready]
        if missing:
            raise NotCalibratedError(f"{len(missing)} sites have no encoding to train with, {', '.join(missing[:5])}; "
                                     "run sim.compute_encodings(data) first")
        self._observe_until, self._learn_from, self._freeze_at = observe_until, learn_ranges_from, freeze_batch_norms_at
        if learn_ranges_from is not None and not any(quantizer.learns_range for quantizer in quantizers):
            learn_ranges(simulation, "*")
        self._learned = [quantizer for quantizer in quantizers if quantizer.learns_range]
        self._observed = [
            simulation.quantizers[site] for site, decided in simulation.plan.items()
            if observe_until and not decided.static and not decided.spec.dynamic and decided.leader is None
            and decided.factors is None and decided.range is None and decided.bounds is None
        ]
        self._model = simulation.model
        self.steps = 0
        self._set_modes()

    def step(self) -> None:
        """Counts a training step and applies the schedule; call it at the start of each step, or all comes late."""
        self._set_modes()
        self.steps += 1

    def _set_modes(self) -> None:
        for quantizer in self._observed:
            quantizer.momentum = MOMENTUM if self.steps < self._observe_until else None
        for quantizer in self._learned:
            quantizer.range_gradients_off = self._learn_from is not None and self.steps < self._learn_from
        freeze_batch_norms(self._model, self._freeze_at is not None and self.steps >= self._freeze_at)

    def state_dict(self) -> dict[str, int]:
        """Returns the number of steps made, which a resumed training needs."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where another schedule of the same settings was. Raises: ConfigError if there is no step count."""
        if "steps" not in state:
            raise ConfigError(f"QatSchedule: the state has no 'steps', only {', '.join(state) or 'nothing'}")
        self.steps = state["steps"]
        self._set_modes()
