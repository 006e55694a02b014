"""Quantization-aware training on several processes with DistributedDataParallel.

Run: ``torchrun --nproc-per-node 2 examples/qat_ddp.py --epochs 10``.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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

    # Each process calibrates on its share; ranges are those of all shares together.
    sim = qtk.QuantSim(build("digits_vit"), digits.train_images[:8], weight_bits=4, activation_bits=4)
    share = digits.train_images[:512].split(64)[dist.get_rank() :: dist.get_world_size()]
    sim.compute_encodings(share, progress=dist.get_rank() == 0)

    def top1() -> float:
        sim.model.eval()
        with torch.no_grad():
            return float((sim.model(digits.test_images).argmax(1) == digits.test_labels).double().mean())

    calibrated = top1()
    sim.learn_ranges()  # before DDP looks which parameters there are
    model = DistributedDataParallel(sim.model)
    weights = {"params": sim.weight_parameters(), "weight_decay": 0.01}
    ranges = {"params": sim.range_parameters(), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([weights, ranges], lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(batches), pct_start=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    if dist.get_rank() == 0:
        print(f"W4A4, calibrated: {calibrated:.2%}")
        print(f"W4A4, trained: {top1():.2%}")
        sim.save("digits-w4a4-trained", force=True)  # ranks have the same parameters: one of them saves
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
