"""``RangeTraining``: the methods of a simulation that are about ranges while the model is trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

from qtk.graph.simulation import HasSimulation
from qtk.ops.gradient_scale import GradientScale
from qtk.public import public


@public
class RangeTraining(HasSimulation):
    """Base of ``QuantSim``: what is done with ranges while the model is trained. Every method calls one function."""

    def learn_ranges(
        self, sites: Iterable[str] | str = "*", *, gradient_scale: Literal["lsq"] | None = "lsq"
    ) -> list[str]:
        """Makes ranges trainable, to be trained with the weights (LSQ, LSQ+); returns the sites taken.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4), weight_bits=4)
        >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
        >>> sim.learn_ranges()
        ['input:input', 'weight', 'linear:out']
        >>> optimizer = torch.optim.AdamW([
        ...     {"params": sim.weight_parameters()},
        ...     {"params": sim.range_parameters(), "lr": 1e-3, "weight_decay": 0.0},
        ... ])
        >>> sim.model(torch.randn(8, 4)).sum().backward()
        >>> optimizer.step()

        Scales and zero points are trained relative to where learning starts, so one learning rate suits all sites:
        1e-3 moves a scale by about 0.1 % a step of Adam. A symmetric site learns its scale only. The mode stays through
        ``compute_encodings``, which gives learning a new start, and is part of the ``state_dict``.

        Args:
            sites: names of sites, or globs over names. Dynamic and frozen ones are skipped, and those whose scales are
                stored in few bits.
            gradient_scale: ``"lsq"``: gradients of ranges are divided by √(N · q_max), with N the elements of a sample
                that share a scale (arXiv 1902.08153); ``None``: they are not.

        Raises: CalibrationError if there is no such site, or none whose range can be learned; NotCalibratedError naming
            sites without an encoding. EncodingError in the next step of an optimizer that was made before, in the next
            forward pass of a DistributedDataParallel that was, and in the forward pass after a scale has become 0,
            negative or not finite, on a GPU some steps later.
        """
        from qtk.training.learned_ranges import learn_ranges

        return learn_ranges(self.simulation, sites, GradientScale.NONE if gradient_scale is None else GradientScale.LSQ)

    def fix_ranges(self, sites: Iterable[str] | str = "*") -> list[str]:
        """Makes learned ranges fixed ones, zero points rounded to codes; returns the sites that were learned.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
        >>> _ = sim.learn_ranges("weight")
        >>> sim.fix_ranges()
        ['weight']

        Raises: CalibrationError if there is no such site; EncodingError naming a site whose scale is not positive and
            finite.
        """
        from qtk.training.learned_ranges import fix_ranges

        return fix_ranges(self.simulation, sites)

    def range_parameters(self) -> list[nn.Parameter]:
        """The parameters of the learned ranges, for an optimizer's group without weight decay.

        Raises: CalibrationError if no range is learned.
        """
        from qtk.training.learned_ranges import range_parameters

        return range_parameters(self.simulation)

    def weight_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model without those of learned ranges."""
        from qtk.training.learned_ranges import weight_parameters

        return weight_parameters(self.simulation)

    def track_weights(self, sites: Iterable[str] | str = "*.weight") -> list[str]:
        """Lets ranges of weights follow their weights' extremes while the model trains; returns the sites taken.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
        >>> sim.track_weights("weight")
        ['weight']

        Every forward pass in training mode sets them as the scheme ``min_max`` does. ``sim.freeze`` ends it.

        Raises: CalibrationError if there is no such site, or none is one of a parameter; NotCalibratedError naming
            sites without an encoding.
        """
        from qtk.training.learned_ranges import track_weights

        return track_weights(self.simulation, sites)
