"""The block view against the simulation it was made of: same bits, same tensors, and modules that are called."""

import copy
import io
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qtk
from qtk.demo.small_vit import SmallViT
from qtk.errors import CaptureError
from qtk.torch_private import pytree
from tests import fresh
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair

RANKS, BATCH = 2, 4


@cache
def prepared_vit(depth):
    torch.manual_seed(0)
    return qtk.prepare_model(SmallViT(depth=depth).eval(), torch.randn(BATCH, 1, 8, 8))


def vit(depth=3, **settings):
    prepared = prepared_vit(depth)  # the first time it draws numbers
    torch.manual_seed(0)
    sim = qtk.QuantSim(prepared, torch.randn(BATCH, 1, 8, 8), **settings)
    sim.compute_encodings([torch.randn(BATCH, 1, 8, 8)], progress=False)
    return sim


def learn(sim):
    for quantizer in sim.quantizers.values():
        quantizer.learn_range()


def step(model, run, parameters, seed=3):
    """The output leaves and the gradients of one step."""
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    leaves = [leaf for leaf in pytree.tree_leaves(run(model)) if isinstance(leaf, Tensor)]
    losses = [leaf.double().square().sum() for leaf in leaves if leaf.requires_grad]
    if losses:
        sum(losses).backward()
    return [leaf.detach() for leaf in leaves], [None if p.grad is None else p.grad.clone() for p in parameters]


def same(some, others):
    return len(some) == len(others) and all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_outputs_and_gradients_are_those_of_the_simulation_bit_for_bit(train, recompute):
    sim = vit()
    learn(sim)
    view = qtk.block_view(sim, "blocks.*", checkpoint=recompute)
    assert list(view.named_blocks()) == ["blocks.0", "blocks.1", "blocks.2"]
    view.train(train)
    assert sim.model.training is train
    parameters, x = list(sim.model.parameters()), torch.randn(BATCH, 1, 8, 8)
    outputs, gradients = step(sim.model, lambda model: model(x), parameters)
    assert sum(gradient is not None for gradient in gradients) > 100
    for _ in range(2):
        seen, found = step(view, lambda model: model(x), parameters)
        assert same(outputs, seen)
        assert same(gradients, found)
    other, _ = step(view, lambda model: model(x), parameters, seed=4)
    assert same(outputs, other) is not train  # dropout


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("entry", ZOO.values(), ids=str)
def test_every_model_cut_at_all_its_modules_before_it_is_calibrated(entry):
    """One graph each, where it is one, with masks, several outputs, shared modules, batch norms in train mode."""
    sim = qtk.QuantSim(pair(entry.name)[1], entry.inputs(), config={"version": 1, "fold_batch_norms": False})
    if entry.name == "functional":
        with pytest.raises(CaptureError, match=r"'weights', the match of '.', computes nothing"):
            qtk.block_view(sim, "*")
        return
    made = [qtk.block_view(sim, "*", checkpoint=recompute) for recompute in (False, True)]
    sim.compute_encodings([entry.inputs()], progress=False)
    parameters = list(sim.model.parameters())
    state = {name: buffer.clone() for name, buffer in sim.model.named_buffers()}
    results = []
    for model in (sim.model, *made):
        model.train()
        outputs, gradients = step(model, entry.run, parameters)
        results.append((outputs, gradients, [buffer.clone() for buffer in sim.model.buffers()]))
        with torch.no_grad():
            for name, buffer in sim.model.named_buffers():
                buffer.copy_(state[name])
    for result in results[1:]:
        assert all(same(mine, theirs) for mine, theirs in zip(result, results[0], strict=True))


@pytest.mark.medium
def test_members_are_those_of_the_simulation():
    sim = vit()
    view = qtk.block_view(sim, "blocks.*")
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        mine, theirs = list(of(view)), list(of(sim.model))
        assert [name for name, _ in mine] == [name for name, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(mine, theirs, strict=True))
    assert list(view.state_dict()) == list(sim.model.state_dict())
    other = qtk.block_view(vit(weight_bits=4), ["blocks.1"])
    zeros = {name: torch.zeros_like(value) for name, value in sim.model.state_dict().items()}
    other.load_state_dict(zeros)
    assert not any(parameter.any() for parameter in other._model.parameters())
    view.get_submodule("blocks.1.mlp.0").weight = nn.Parameter(torch.zeros(96, 48))
    assert not sim.model.get_submodule("blocks.1.mlp.0").weight.any()
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(view(x), sim.model(x))


@pytest.mark.medium
def test_an_optimizer_of_either_trains_both():
    sim = vit()
    view, x = qtk.block_view(sim, "blocks.*", checkpoint=True), torch.randn(BATCH, 1, 8, 8)
    before = sim.model(x)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    view(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(sim.model(x), before)
    assert torch.equal(view(x), sim.model(x))


@pytest.mark.slow
def test_hooks_on_blocks_fire_once_with_what_enters_and_leaves():
    sim, x, calls = vit(), torch.randn(BATCH, 1, 8, 8), []
    view = qtk.block_view(sim, "blocks.*", checkpoint=True)
    for path, block in view.named_blocks().items():
        assert view.get_submodule(path) is block
        block.register_forward_pre_hook(lambda _, args, path=path: calls.append((path, "in", args)))
        block.register_forward_hook(lambda _, args, output, path=path: calls.append((path, "out", output)))
        block.register_full_backward_hook(lambda _, grads, outs, path=path: calls.append((path, "grad", grads)))
    view(x).sum().backward()
    order = [(path, kind) for path, kind, _ in calls]
    assert order == [(f"blocks.{i}", kind) for i in range(3) for kind in ("in", "out")] + [
        (f"blocks.{i}", "grad") for i in (2, 1, 0)]
    values = {(path, kind): value for path, kind, value in calls}
    shapes = {tuple(leaf.shape) for leaf in pytree.tree_leaves(values)}
    assert shapes == {(BATCH, 16, 48)}  # nothing else enters or leaves a block
    assert torch.equal(view.get_submodule("blocks.2")(*values["blocks.2", "in"]), values["blocks.2", "out"])
    scale = sim.quantizers["blocks.1.add_1:out"].scale
    codes = values["blocks.1", "out"] / scale
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    half = view.get_submodule("blocks.1").register_forward_hook(lambda _, args, output: output * 0)
    assert not torch.equal(view(x), sim.model(x))
    half.remove()
    assert torch.equal(view(x), sim.model(x))


@pytest.mark.slow
def test_a_hook_beside_the_cut_is_a_warning():
    view = qtk.block_view(vit(), "blocks.*")
    for path in ("blocks", "blocks.0.attn"):
        with pytest.warns(UserWarning, match=f"register_forward_hook on '{path}': .*qtk.block_view"):
            view.get_submodule(path).register_forward_hook(print)


class Saved:
    """Counts the bytes that autograd saves: in all, and while blocks run."""

    def __init__(self, blocks):
        self.bytes, self.in_blocks, self.block = 0, {}, None
        self.seen = set()
        for path, block in blocks.items():
            block.register_forward_pre_hook(lambda *_, path=path: setattr(self, "block", path))
            block.register_forward_hook(lambda *_: setattr(self, "block", None))

    def pack(self, tensor):
        if tensor.untyped_storage() not in self.seen and not isinstance(tensor, nn.Parameter):
            self.seen.add(tensor.untyped_storage())
            if self.block is None:
                self.bytes += tensor.nbytes
            else:
                self.in_blocks[self.block] = self.in_blocks.get(self.block, 0) + tensor.nbytes
        return tensor

    def run(self, model, x):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return model(x)


@pytest.mark.medium
def test_recomputation_saves_the_inputs_of_blocks_and_what_lies_outside():
    sim, x = vit(), torch.randn(64, 1, 8, 8)
    views = [qtk.block_view(sim, "blocks.*", checkpoint=recompute).train() for recompute in (False, True)]
    keeping, recomputing = [Saved(view.named_blocks()) for view in views]
    keeping.run(views[0], x)
    output = recomputing.run(views[1], x)
    inside = max(keeping.in_blocks.values())
    assert recomputing.in_blocks == dict.fromkeys(keeping.in_blocks, 64 * 16 * 48 * 4)  # the inputs alone
    assert recomputing.bytes == keeping.bytes  # outside the blocks
    assert recomputing.bytes + 3 * 64 * 16 * 48 * 4 < inside
    assert 3 * inside == sum(keeping.in_blocks.values())
    output.sum().backward()


@pytest.mark.medium
def test_what_enters_beside_the_main_input_is_a_further_argument():
    entry, calls = ZOO["language_model"], []
    sim = qtk.QuantSim(entry.model(), entry.inputs(), config="onnxruntime")
    view = qtk.block_view(sim, "block")
    view.get_submodule("block").register_forward_pre_hook(lambda _, args: calls.append(args))
    sim.compute_encodings([entry.inputs()], progress=False)
    assert torch.equal(entry.run(view), entry.run(sim.model))
    (args,) = calls
    assert args[0].is_floating_point()


class Twice(nn.Module):
    """One block in two calls of its list and one by another path, and a table that it shares with its surroundings."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
        self.blocks = nn.ModuleList([self.block, self.block])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.block(torch.sigmoid(self.block(x)))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_called_several_times_reads_its_own_parameters_each_time(recompute, learned):
    torch.manual_seed(0)
    x, calls = torch.randn(16, 6), []
    sim = qtk.QuantSim(Twice().eval(), x, config={"version": 1, "fold_batch_norms": False})
    sim.compute_encodings([x], progress=False)
    if learned:
        learn(sim)
    view = qtk.block_view(sim, "block*", checkpoint=recompute)
    (block,) = view.named_blocks().values()
    assert view.get_submodule("blocks.0") is view.get_submodule("blocks.1") is view.get_submodule("block") is block
    block.register_forward_pre_hook(lambda _, args: calls.append(len(args)))
    state = copy.deepcopy(sim.model.state_dict())
    view.train()
    parameters = list(view.parameters())
    expected = step(sim.model, lambda model: model(x), parameters), list(sim.model.state_dict().values())
    expected = copy.deepcopy(expected)
    sim.model.load_state_dict(state)
    seen = step(view, lambda model: model(x), parameters), list(view.state_dict().values())
    assert calls == [1, 1, 1, 1]
    assert same(expected[0][0], seen[0][0])
    assert same(expected[1], seen[1])
    if learned:  # its weights' ranges get a sum of sums
        torch.testing.assert_close(expected[0][1], seen[0][1])
    else:
        assert same(expected[0][1], seen[0][1])
    assert int(view.state_dict()["block.1.num_batches_tracked"]) == 4


@pytest.mark.slow
def test_the_view_follows_calibration_that_drops_sites_and_transforms_that_rewrite():
    entry = ZOO["fused_attention"]
    sim = qtk.QuantSim(entry.model(), entry.inputs())
    view = qtk.block_view(sim, ["q", "k"], checkpoint=True)
    sim.compute_encodings([entry.inputs()], progress=False)
    assert torch.equal(entry.run(view), entry.run(sim.model))
    sim, calls = vit(), []
    view, x = qtk.block_view(sim, "blocks.*"), torch.randn(BATCH, 1, 8, 8)
    view.get_submodule("blocks.2").register_forward_hook(lambda *_: calls.append(1))
    assert qtk.apply_smooth_quant(sim, [x], progress=False).applied
    assert all(a is b for a, b in zip(view.parameters(), sim.model.parameters(), strict=True))
    assert all(a is b for a, b in zip(view.buffers(), sim.model.buffers(), strict=True))
    assert list(view.state_dict()) == list(sim.model.state_dict())
    sim.compute_encodings([x], only_missing=True, progress=False)
    assert torch.equal(view(x), sim.model(x))
    assert calls == [1]


@pytest.mark.slow
def test_copies_are_separate_and_moves_reach_both():
    sim, x = vit(), torch.randn(BATCH, 1, 8, 8)
    view = qtk.block_view(sim, "blocks.*")
    view.get_submodule("blocks.0").register_forward_hook(lambda _, args, output: output * 2)
    twin = copy.deepcopy(view)
    expected = view(x)
    with torch.no_grad():
        for parameter in view.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), expected)
    assert not torch.equal(view(x), expected)
    view.double()
    assert {parameter.dtype for parameter in sim.model.parameters()} == {torch.float64}
    assert torch.equal(view(x.double()), sim.model(x.double()))  # all zeros, hook or not


@pytest.mark.slow
def test_a_pickled_view_shares_with_the_model_it_brings_along():
    view, x, file = qtk.block_view(vit(), "blocks.*", checkpoint=True), torch.randn(BATCH, 1, 8, 8), io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(x), view(x))
    assert list(twin.named_blocks()) == list(view.named_blocks())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert torch.equal(twin(x), twin._model(x))
    assert not torch.equal(twin(x), view(x))


@pytest.mark.medium
def test_ranges_that_become_learned_are_learned_in_the_view():
    sim = vit()
    view, x, before = qtk.block_view(sim, "blocks.*"), torch.randn(BATCH, 1, 8, 8), len(list(sim.model.parameters()))
    learn(sim)
    parameters = list(view.parameters())
    assert len(parameters) > before + 20
    assert all(a is b for a, b in zip(parameters, sim.model.parameters(), strict=True))
    (_, seen), (_, expected) = (step(model, lambda model: model(x), parameters) for model in (view, sim.model))
    assert same(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranges_that_follow_their_batches_follow_each_once(compiled):
    """A second computation quantizes with the ranges of the first, and moves none."""
    depth = 1 if compiled else 3
    sims, x, seen = [vit(depth), vit(depth)], torch.randn(BATCH, 1, 8, 8), []
    views = [qtk.block_view(sim, "blocks.*", checkpoint=again) for sim, again in zip(sims, (False, True), strict=True)]
    for sim, view in zip(sims, views, strict=True):
        schedule = qtk.QatSchedule(sim, observe_until=2)
        run = torch.compile(view, backend="aot_eager") if compiled else view
        view.train()
        for factor in (1.0, 3.0):
            schedule.step()
            result = step(view, lambda _, run=run, factor=factor: run(factor * x), list(view.parameters()))
        seen.append((*result, [quantizer.scale for quantizer in sim.quantizers.values()]))
    assert all(same(*parts) for parts in zip(*seen, strict=True))


@pytest.mark.medium
def test_an_observer_sees_a_batch_once_however_often_it_is_computed():
    sim, x = vit(scheme="percentile"), torch.randn(BATCH, 1, 8, 8)
    (site,) = (quantizer for name, quantizer in sim.quantizers.items() if name == "blocks.0.norm1:out")
    view, counted = qtk.block_view(sim, "blocks.*", checkpoint=True), []

    class Counts:
        def observe(self, values):
            counted.append(values.shape)

    site.observer, site.mode = Counts(), qtk.Mode.OBSERVE
    view(x).sum().backward()
    assert len(counted) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_view(recompute):
    sim, x = vit(depth=1), torch.randn(BATCH, 1, 8, 8)
    view = qtk.block_view(sim, "blocks.*", checkpoint=recompute)
    compiled = torch.compile(view, backend="eager", fullgraph=True)
    parameters = list(view.parameters())
    expected, seen = (step(model, lambda model: model(x), parameters) for model in (sim.model, compiled))
    assert same(expected[0], seen[0])
    assert same(expected[1], seen[1])


@pytest.mark.slow
def test_a_compiled_view_follows_rewrites():
    sim, x = vit(depth=1), torch.randn(BATCH, 1, 8, 8)
    compiled = torch.compile(qtk.block_view(sim, "blocks.*", checkpoint=True), backend="eager")
    compiled(x)
    assert qtk.apply_smooth_quant(sim, [x], progress=False).applied
    sim.compute_encodings([x], only_missing=True, progress=False)
    assert torch.equal(compiled(x), sim.model(x))


class MaybeMasked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        return self.inner(x) if mask is None else self.inner(x * mask)


def test_each_kind_of_call_has_its_own_cut():
    model, x, mask = MaybeMasked().eval(), torch.randn(3, 4), torch.rand(3, 4)
    prepared = qtk.prepare_model(model, x, variants=[(x, mask)])
    calls = []
    view = qtk.block_view(prepared, "inner")
    view.get_submodule("inner").register_forward_hook(lambda _, args, output: calls.append(args[0]))
    assert torch.equal(view(x), model(x))
    assert torch.equal(view(x, mask), model(x, mask))
    assert torch.equal(calls[0], x)
    assert torch.equal(calls[1], x * mask)


class Interleaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.middle, self.idle = nn.ReLU(), nn.Identity()

    def forward(self, x):
        return self.idle(self.parts["b"](self.middle(self.parts["a"](x))))


@pytest.mark.medium
def test_bad_input():
    sim = qtk.QuantSim(Interleaved().eval(), torch.randn(2, 4))
    for blocks, message in (
        ("parts", r"cut at 'parts' is not convex: parts.a:out leaves it, .* middle:out .* enters it again, at parts.b"),
        ("part.a", r"'part.a' matches no module of the model; did you mean 'parts.a'"),
        (["parts.a", "zzz*"], r"'zzz\*' matches no module of the model; known: middle, parts, parts.a, parts.b"),
        ("idle", "'idle', the match of 'idle', computes nothing"),
        ([], r"one or more, got \[\]"),
        (range(2), r"one or more, got \[0, 1\]"),
    ):
        with pytest.raises(CaptureError, match=message):
            qtk.block_view(sim, blocks)
    sim = vit()
    dropout = next(path for path, module in sim.model.named_modules() if "Dropout" in type(module).__name__)
    with pytest.raises(CaptureError, match="is a module that the graph uses as it is"):
        qtk.block_view(sim, dropout)
    with pytest.raises(CaptureError, match="traced without inputs"):
        qtk.block_view(qtk.prepare_model(nn.Linear(2, 2)), "weight")
    with pytest.raises(CaptureError, match="got Linear"):
        qtk.block_view(nn.Linear(2, 2), "weight")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if float(x.sum()) > 0 else self.b(self.a(x))


@pytest.mark.medium
def test_islands_are_modules_that_are_called():
    x, calls = -torch.rand(2, 4), []
    sim = qtk.QuantSim(Branches().eval(), x)
    with pytest.raises(CaptureError, match=r"keeps its Python.*fully_shard act as they are: a, b"):
        qtk.block_view(sim, "a")
    sim.compute_encodings([x], progress=False)
    sim.model.get_submodule("a").register_forward_hook(lambda *_: calls.append(1))
    sim.model(x)
    assert calls == [1]


def on_a_rank(directory, kinds):
    """What each process of the FSDP test runs."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    views = [sharded(rank, recompute=recompute) for recompute in kinds]
    torch.save({"views": views, "islands": sharded_islands()}, Path(directory, f"{rank}.pt"))
    distributed.barrier()
    os._exit(0)  # torch's own threads now and then abort the interpreter's shutdown


def sharded(rank, *, recompute):
    """One step of a view whose blocks are sharded, and of a simulation that is not."""
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    sim, plain = vit(depth=2), vit(depth=2)
    learn(sim)
    learn(plain)
    generator = torch.Generator().manual_seed(5)
    batches = torch.randn(RANKS, BATCH, 1, 8, 8, generator=generator)
    view = qtk.block_view(sim, "blocks.*", checkpoint=recompute)
    seen = []
    for block in view.named_blocks().values():
        fully_shard(block, mesh=mesh)
        block.register_forward_pre_hook(lambda block, args: seen.append(type(block.get_submodule("mlp.0").weight)))
    fully_shard(view, mesh=mesh)
    all_sharded = all(isinstance(parameter, DTensor) for parameter in view.parameters())
    optimizer = torch.optim.SGD(view.parameters(), lr=0.01)
    output = view(batches[rank])
    output.square().sum().backward()
    resharded = isinstance(view.get_submodule("blocks.0.mlp.0").weight, DTensor)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in view.named_parameters()}
    optimizer.step()
    state = {name: value.full_tensor() if isinstance(value, DTensor) else value
             for name, value in view.state_dict().items()}

    mean = {}
    expected = plain.model(batches[rank])
    for batch in batches:
        plain.model.zero_grad()
        plain.model(batch).square().sum().backward()
        for name, parameter in plain.model.named_parameters():
            mean[name] = mean.get(name, 0) + parameter.grad / RANKS
    fresh = vit(depth=2)
    learn(fresh)
    fresh.model.load_state_dict(state)
    return {
        "all_sharded": all_sharded, "seen": [kind.__name__ for kind in seen], "resharded": resharded,
        "equal": torch.equal(output, expected), "gradients": gradients, "mean": mean,
        "after": torch.equal(fresh.model(batches[rank]), view(batches[rank])),
    }


def sharded_islands():
    """Whether the model of ``test_islands_are_modules_that_are_called`` computes the same with its islands sharded."""
    torch.manual_seed(0)
    x = -torch.rand(2, 4)
    sim = qtk.QuantSim(Branches().eval(), x)
    sim.compute_encodings([x], progress=False)
    expected = sim.model(x)
    for module in (sim.model.get_submodule("a"), sim.model.get_submodule("b"), sim.model):
        fully_shard(module, mesh=distributed.init_device_mesh("cpu", (RANKS,)))
    output = sim.model(x)
    output.sum().backward()
    return torch.equal(output, expected) and all(isinstance(p.grad, DTensor) for p in sim.model.parameters())


@pytest.mark.slow
def test_fsdp_shards_every_block(tmp_path, pytestconfig):
    kinds = (False, True) if pytestconfig.getoption("door") == "all" else (True,)
    fresh.run_ranks(on_a_rank, RANKS, str(tmp_path), kinds)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    assert all(rank["islands"] for rank in ranks)
    for result in (view for rank in ranks for view in rank["views"]):
        assert result["all_sharded"]
        assert result["seen"] == ["Parameter"] * 2  # gathered when the block runs
        assert result["resharded"]
        assert result["equal"]
        assert result["after"]
        assert result["gradients"].keys() == result["mean"].keys()
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, result["mean"][name], rtol=1e-4, atol=1e-5)
