import sys
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import qtk
from qtk.data.forward_pass import length_of, outputs, run_all, run_batch
from qtk.errors import CalibrationError, CaptureError, InternalError
from qtk.observers.min_max import MinMax
from tests.zoo.python import PYTHON


class Add(nn.Module):
    def forward(self, a, b=1):
        return a + b


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ONE, 2.0), ((ONE, TWO), 3.0), ([ONE, TWO], 3.0), ({"a": TWO, "b": TWO}, 4.0),
        (UserDict(a=TWO, b=TWO), 4.0),  # as Hugging Face's BatchEncoding is
    ],
)
def test_the_type_of_a_batch_decides_how_it_is_passed(batch, expected):
    assert torch.equal(run_batch(Add(), batch), torch.full((2,), expected))


def test_other_batches_need_a_forward():
    with pytest.raises(CalibrationError, match=r"got str; pass forward="):
        run_batch(Add(), "batch")


def test_any_mapping_calibrates_a_simulation():
    batch = UserDict(a=torch.randn(4, 2), b=torch.randn(4, 2))
    sim = qtk.QuantSim(Add(), batch)
    sim.compute_encodings([batch], progress=False)
    assert sim.encodings().keys() == {"a:input", "b:input", "add:out"}


def test_a_forward_unpacks_what_the_loader_yields():
    found = list(outputs(Add(), [(ONE, "label")], forward=lambda model, batch: model(batch[0])))
    assert torch.equal(found[0], TWO)


def test_num_batches_stops_early():
    assert len(list(outputs(Add(), iter([ONE] * 5), num_batches=3))) == 3


def endless():
    while True:
        yield torch.ones(2, 2)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("verb", ["compute_encodings", "apply_gptq", "reestimate_batch_norms"])
def test_a_calibration_without_an_end_is_refused(verb):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    sim = qtk.QuantSim(model, torch.ones(2, 2), config={"version": 1, "fold_batch_norms": False})
    if verb == "reestimate_batch_norms":
        sim.compute_encodings([torch.ones(2, 2)], progress=False)
    act = sim.compute_encodings if verb == "compute_encodings" else lambda *args, **options: getattr(qtk, verb)(
        sim, *args, **options)
    with pytest.raises(CalibrationError, match=r"the generator has no length and gave more than 2048 batches, .*"
                                               r"pass num_batches"):
        act(endless(), progress=False)


def test_a_source_without_a_length_may_have_so_many_batches_and_no_more():
    run_all(Add(), iter([ONE] * 3), most_uncounted=3)
    run_all(Add(), [ONE] * 4, most_uncounted=3)
    run_all(Add(), iter([ONE] * 4), most_uncounted=3, num_batches=4)
    with pytest.raises(CalibrationError, match="gave more than 3 batches"):
        run_all(Add(), iter([ONE] * 4), most_uncounted=3)
    assert len(list(outputs(Add(), iter([ONE] * 4)))) == 4  # an evaluation may be of any length


def test_no_batches_is_an_error():
    with pytest.raises(CalibrationError, match="no batches"):
        run_all(Add(), [])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (7, {}, "data must be an iterable of batches.*got int"),
        ([ONE], {"num_batches": 0}, "num_batches must be at least 1"),
        ([(ONE, TWO, ONE)], {}, r"batch 0 \(tuple of float32 \[2\], .*as model\(\*batch\): TypeError.*pass forward="),
        ([{"b": ONE}], {}, r"batch 0 \(dict of float32 \[2\]\).*model\(\*\*batch\).*pass forward="),
        ([UserDict(b=ONE)], {}, r"batch 0 \(UserDict of float32 \[2\]\).*model\(\*\*batch\).*pass forward="),
        ([ONE], {"forward": lambda model, batch: model(*[batch] * 3)}, r"batch 0 .*your forward\(model, batch\)"),
        ([ONE, torch.ones(3)], {"forward": lambda model, batch: model(batch, TWO)}, r"batch 1 \(Tensor of float32"),
    ],
)
def test_what_does_not_run_is_named_with_a_way_out(data, options, message):
    with pytest.raises(CalibrationError, match=message):
        run_all(Add(), data, **options)


def test_a_callable_runs_the_model_itself():
    seen = []
    run_all(Add(), lambda model: seen.append((model(ONE), torch.is_grad_enabled(), model.training)))
    assert torch.equal(seen[0][0], TWO)
    assert seen[0][1:] == (False, False)


def test_data_runs_in_eval_without_grad_and_training_flags_return():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    model.train()
    model[1].eval()
    states = []

    def forward(module, batch):
        states.append((torch.is_grad_enabled(), [m.training for m in module.modules()]))

    run_all(model, [ONE], forward=forward)
    assert states == [(False, [False, False, False])]
    assert [m.training for m in model.modules()] == [True, True, False]


def test_a_calibration_error_names_its_batch():
    def forward(module, batch):
        if batch is TWO:
            raise CalibrationError("somewhere: the tensor holds NaN")

    with pytest.raises(CalibrationError, match="batch 2: somewhere"):
        run_all(Add(), [ONE, ONE, TWO], forward=forward)


def test_a_loader_that_fails_names_its_batch():
    def loader():
        yield torch.zeros(2, 4)
        raise KeyError("no such image")

    with pytest.raises(CalibrationError, match="batch 1 of the data cannot be read: KeyError: 'no such image'"):
        list(outputs(nn.Linear(4, 2), loader()))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 4))


class CountedStream(Stream):
    def __len__(self):
        return 6


class Unstarted:
    """As a loader whose workers cannot start."""

    def __iter__(self):
        raise OSError("too many open files")

    def __len__(self):
        return 3


@pytest.mark.parametrize(("dataset", "length"), [(Stream(), None), (CountedStream(), 3), (torch.ones(6, 4), 3)])
def test_a_loader_calibrates_with_and_without_a_length(dataset, length):
    data = DataLoader(dataset, batch_size=2)
    assert length_of(data) == length
    sim = qtk.QuantSim(nn.Linear(4, 2), torch.ones(2, 4))
    sim.compute_encodings(data, progress=False)
    assert len(list(outputs(nn.Linear(4, 2), data, num_batches=2))) == 2
    assert len(list(outputs(nn.Linear(4, 2), data, progress=True))) == 3


class Lengthless(Dataset):
    def __getitem__(self, index):
        return torch.ones(4)

    def __len__(self):
        raise NotImplementedError


def test_a_length_that_is_not_implemented_is_none():
    assert length_of(Lengthless()) is None
    assert length_of(iter([1])) is None


class Miscounted(Dataset):
    """A mistake in its ``__len__``; also what a wrapper does of data without a length."""

    def __init__(self, of):
        self.of = of

    def __getitem__(self, index):
        return torch.ones(4)

    def __len__(self):
        return len(self.of)


@pytest.mark.parametrize(("data", "name"), [
    (Miscounted(None), "Miscounted"), (DataLoader(Miscounted(None)), "DataLoader"),
    (Miscounted(DataLoader(Stream())), "Miscounted"),
])
def test_a_mistake_in_a_length_is_a_warning(data, name):
    with pytest.warns(UserWarning, match=f"the {name} is taken to have no length, for its __len__ raised Type"):
        assert length_of(data) is None


def test_no_length_at_all_is_none_without_a_warning(recwarn):
    assert length_of(DataLoader(Stream(), batch_size=2)) is None
    assert length_of(iter([1])) is None
    assert not list(recwarn)


def test_a_loader_that_ends_the_process_names_its_batch():
    """A worker that calls ``sys.exit`` would end the run without a word."""
    def loader():
        yield ONE
        sys.exit(3)

    with pytest.raises(CalibrationError, match="batch 1 of the data cannot be read: SystemExit: 3"):
        run_all(Add(), loader())


def test_a_model_that_ends_the_process_may():
    for data in ([ONE], lambda model: model(ONE)):
        with pytest.raises(SystemExit):
            run_all(Fails(SystemExit(3)), data)


def test_a_loader_that_cannot_start_is_no_defect_of_qtk():
    sim = qtk.QuantSim(nn.Linear(4, 2), torch.ones(2, 4))
    with pytest.raises(CalibrationError, match="batch 0 of the data cannot be read: OSError: too many open files"):
        sim.compute_encodings(Unstarted(), progress=False)


def test_a_model_that_raises_anything_names_its_batch():
    def forward(model, batch):
        raise KeyError("cache")

    with pytest.raises(CalibrationError, match=r"batch 0 .* does not run as your forward\(model, batch\): KeyError"):
        list(outputs(nn.Linear(4, 2), [torch.zeros(2, 4)], forward=forward))


def test_a_function_of_data_that_raises_is_named():
    with pytest.raises(CalibrationError, match=r"data\(model\) raised TypeError: int\(\) argument must be"):
        run_all(nn.Linear(4, 2), int)


def test_more_batches_than_there_can_be_are_all():
    assert len(list(outputs(nn.Linear(4, 2), [torch.zeros(2, 4)], num_batches=10**400))) == 1


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("CUDA out of memory"), Warning("odd")])
def test_what_is_nobodys_fault_keeps_its_own_error(error):
    def loader():
        raise error
        yield

    for run in (lambda: run_all(Fails(error), [ONE]), lambda: run_all(Fails(error), lambda model: model(ONE)),
                lambda: run_all(Add(), loader())):
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error


class Own:
    def __call__(self, model):
        model(torch.ones(2, 4))


def test_a_mistake_of_qtk_is_not_blamed_on_the_data(monkeypatch):
    def observe(self, x):
        raise KeyError("scale")

    sim = qtk.QuantSim(nn.Linear(4, 2), torch.ones(2, 4))
    monkeypatch.setattr(MinMax, "observe", observe)
    monkeypatch.setitem(globals(), "__name__", "qtk.somewhere")
    for data in ([torch.ones(2, 4)], Own()):
        with pytest.raises(InternalError, match="KeyError: 'scale'; this is a defect of qtk"):
            sim.compute_encodings(data, progress=False)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("data", "forward"), [
    ([torch.ones(2, 5)], lambda model, batch: model.linear_(batch)), ([torch.ones(2, 4)], lambda model: model),
    ([torch.ones(2, 4)], int), ([torch.ones(2, 4).double()], None), (int, None),
])
def test_a_mistake_in_the_data_is_not_blamed_on_qtk(data, forward):
    for model in (nn.Linear(4, 2), PYTHON["deep"].model()):
        inputs = torch.ones(2, 4) if isinstance(model, nn.Linear) else PYTHON["deep"].inputs()
        sim = qtk.QuantSim(model, inputs)
        with pytest.raises((CalibrationError, CaptureError), match=r"batch 0|raised TypeError"):
            sim.compute_encodings(data, forward=forward, progress=False)


@pytest.mark.parametrize("run", [
    lambda sim, data: sim.compute_encodings(data, progress=False),
    lambda sim, data: qtk.apply_gptq(sim, data, progress=False),
])
def test_an_index_out_of_range_names_batch_and_site(run):
    ids = torch.zeros(2, 3, dtype=torch.long)
    sim = qtk.QuantSim(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval(), ids)
    words = r"batch 1 \(.*\) does not run.* at 0:out .*int64 \[2, 3\] of 30…30\): IndexError: index out of range"
    with pytest.raises(CalibrationError, match=words):
        run(sim, [ids, ids + 30])
