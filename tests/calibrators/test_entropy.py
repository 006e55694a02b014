"""Against a search that builds P and Q bin by bin, in float64."""

import math

import numpy as np
import pytest
import torch

import qtk
from qtk.calibrators.entropy import Entropy
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from tests.calibrators.data import DATA, data, histogram

SPECS = {name: QuantSpec(dtype(name), symmetric=name.startswith("i")) for name in ("uint4", "int4", "uint2")}
BINS, STEPS = 64, 40


def divergence(middles, counts, low, high, spec):
    scale, zero = choose_range(*torch.tensor([[low], [high]], dtype=torch.float64), spec)
    scale, zero = float(scale), 0 if zero is None else int(zero)
    code = np.floor(middles / scale + zero + 0.5)
    inside = (code >= spec.qmin) & (code <= spec.qmax)
    occupied = np.nonzero(inside & (counts > 0))[0]
    if not len(occupied):
        return math.inf
    p = np.where(inside, counts, 0).astype(float)
    p[occupied[0]] += counts[code < spec.qmin].sum()
    p[occupied[-1]] += counts[code > spec.qmax].sum()
    q, chance = np.zeros(len(counts)), 0.0
    for own in range(int(spec.qmin), int(spec.qmax) + 1):
        bins = [i for i in occupied if code[i] == own]
        for i in bins:
            q[i] = counts[bins].sum() / len(bins)
        chance += max(len(bins) - 1, 0) / 2
    n = counts.sum()
    p, q = p / p.sum(), q / q.sum()
    return float((p[occupied] * np.log(p[occupied] / q[occupied])).sum()) - chance / n


def brute_force(x, spec):
    middles, counts, _ = histogram(x, BINS)
    low, high = float(x.min()), float(x.max())
    if low <= 0 <= high:
        zero = min(int((middles < 0).sum()), 2 * BINS - 1)
        beside = [counts[i] for i in (zero - 1, zero + 1) if 0 <= i < len(counts)]
        counts[zero] = min(counts[zero], max(beside))
    levels = int(spec.qmax - spec.qmin) + 1
    fractions = [i / STEPS for i in range(STEPS, 0, -1) if i / STEPS >= max(levels / BINS, 1 / 16)]
    return fractions, [divergence(middles, counts, low * f, high * f, spec) for f in fractions]


@pytest.mark.medium
@pytest.mark.sample(34)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", [name for name in DATA if name not in ("zero", "constant")])
@pytest.mark.parametrize("static", [False, True])
def test_the_least_divergence_of_all(name, spec, static):
    x = data(name)
    scheme = Entropy(bins=BINS, steps=STEPS)
    observer = scheme.observer(PerTensor(), static=static)
    observer.observe(x)
    encoding = scheme.encodings([observer], [spec])[0]
    fractions, divergences = brute_force(x, spec)
    least = min(divergences)
    possible = [f for f, found in zip(fractions, divergences, strict=True) if found <= least + 1e-12]
    low, high = (torch.tensor([float(x.min()), float(x.max())], dtype=torch.float64) * possible[0]).split(1)
    scale, _ = choose_range(low, high, spec)
    assert torch.equal(encoding.scale, scale)


@pytest.mark.medium
@pytest.mark.parametrize("bits", [4, 8])
def test_gates_that_are_open_or_shut_keep_both(bits):
    pytest.importorskip("sklearn")
    from qtk.demo.digits import load_digits_split
    from qtk.demo.models import build

    images = load_digits_split().train_images[:512].split(64)
    sim = qtk.QuantSim(build("digits_lstm"), images[0], scheme="entropy", activation_bits=bits)
    sim.compute_encodings(images, progress=False)
    gates = {name: float(each.encoding.maximum) for name, each in sim.quantizers.items() if "_gate:out" in name}
    assert len(gates) == 16
    assert min(gates.values()) > 0.5, gates


def test_sites_searched_together_get_what_each_gets_alone():
    scheme, spec = Entropy(bins=BINS, steps=STEPS), SPECS["uint4"]
    observers = []
    for name in DATA:
        observers.append(scheme.observer(PerTensor()))
        observers[-1].observe(data(name))
    for own, observer in zip(scheme.encodings(observers, [spec] * len(observers)), observers, strict=True):
        assert own.equals(scheme.encodings([observer], [spec])[0])


@pytest.mark.parametrize("name", ["uint8", "int16"])
def test_too_few_elements_or_bins_keep_the_whole_range(name):
    spec = QuantSpec(dtype(name), PerChannel(0), symmetric=name == "int16")
    x = torch.stack([data("outlier")[-100:], data("skewed")[:100]])
    scheme = Entropy()
    for static in (False, True):
        observer = scheme.observer(PerChannel(0), static=static)
        observer.observe(x)
        encoding = scheme.encodings([observer], [spec])[0]
        assert torch.equal(encoding.scale, choose_range(x.amin(1), x.amax(1), spec)[0])


def test_the_zeros_of_a_relu_do_not_decide():
    scheme, spec = Entropy(), QuantSpec(dtype("uint8"))
    found = []
    for x in (data("random").repeat(50).relu(), data("random").repeat(50).abs()):
        observer = scheme.observer(PerTensor())
        observer.observe(x)
        found.append(float(scheme.encodings([observer], [spec])[0].maximum))
    assert found[0] == pytest.approx(found[1], rel=0.2)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(CalibrationError):
        Entropy(steps=0)
