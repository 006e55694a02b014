"""Quantization-aware training with parameters in shards: ``fully_shard`` block by block, on a block view.

Run: ``torchrun --nproc-per-node 2 examples/qat_fsdp.py --epochs 10``.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    dist.init_process_group("gloo")  # "nccl" where each process has a GPU
    torch.manual_seed(0)
    digits = load_digits_split()
    data = TensorDataset(digits.train_images, digits.train_labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    batches = DataLoader(data, batch_size=32 // dist.get_world_size(), sampler=sampler)

    def top1(model: torch.nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float((model(digits.test_images).argmax(1) == digits.test_labels).double().mean())

    # Each process calibrates on its share; ranges are those of all shares together.
    sim = qtk.QuantSim(build("digits_vit"), digits.train_images[:8], weight_bits=4, activation_bits=4)
    share = digits.train_images[:512].split(64)[dist.get_rank() :: dist.get_world_size()]
    sim.compute_encodings(share, progress=dist.get_rank() == 0)
    calibrated, whole = top1(sim.model), copy.deepcopy(sim)

    # The view is the same model, cut at its blocks, which can be sharded, recomputed and hooked.
    view = qtk.block_view(sim, "blocks.*")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in view.named_blocks().values():
        fully_shard(block, mesh=mesh)
    fully_shard(view, mesh=mesh)
    optimizer = torch.optim.AdamW(view.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(batches), pct_start=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        view.train()
        for images, labels in batches:
            loss = cross_entropy(view(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    # The gathered state, names as ever, is loaded into a simulation of whole parameters.
    state = get_model_state_dict(view, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        whole.model.load_state_dict(state)
        print(f"W4A4, calibrated: {calibrated:.2%}")
        print(f"W4A4, trained: {top1(whole.model):.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
