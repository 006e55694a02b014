"""Does what each process would do first, for the helper of ``tests/fresh.py``: captures and plans one small model."""

import torch

import qtk

qtk.QuantSim(torch.nn.Linear(2, 2), torch.zeros(1, 2))
