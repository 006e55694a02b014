"""The models of ``bench_deploy.py``, with random weights: image nets of timm and torchvision, a BERT and an LSTM."""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
import torchvision
from torch import Tensor, nn

WORDS, LENGTH = 1000, 64


class Bert(nn.Module):
    """Embeddings, post-norm encoder layers, and a classifier on the first token."""

    def __init__(self, layers: int = 4, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True, dropout=0.0)
            for _ in range(layers)
        )
        self.classifier = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x[:, 0])


class LstmClassifier(nn.Module):
    """Embedded words, two LSTM layers, and a classifier on the last step."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, width), nn.LSTM(width, hidden, 2, batch_first=True)
        self.classifier = nn.Linear(hidden, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        steps, _ = self.lstm(self.words(tokens))
        return self.classifier(steps[:, -1])


TIMM = ("resnet50", "mobilenetv2_100", "mobilenetv3_small_100", "efficientnet_b0", "convnext_atto",
        "vit_small_patch16_224", "swin_tiny_patch4_window7_224", "mobilevitv2_100")
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "torchvision vit_b_16": lambda: torchvision.models.vit_b_16(weights=None),
    "bert_4x384": Bert,
    "lstm_classifier": LstmClassifier,
}
MODELS = (*TIMM, *OTHERS)


def build(name: str) -> nn.Module:
    """The model, its norms away from the identity, in eval mode."""
    torch.manual_seed(0)
    model = OTHERS[name]() if name in OTHERS else timm.create_model(name, pretrained=False)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
    if name == "torchvision vit_b_16":  # its head starts at zero
        nn.init.trunc_normal_(model.heads.head.weight, std=0.02)  # type: ignore[union-attr]
    return model.eval()


def inputs(name: str, model: nn.Module, batch: int, seed: int) -> Tensor:
    """Images or tokens for the model."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("bert_4x384", "lstm_classifier"):
        return torch.randint(0, WORDS, (batch, LENGTH), generator=generator)
    size = model.default_cfg["input_size"] if hasattr(model, "default_cfg") else (3, 224, 224)
    return torch.randn(batch, *size, generator=generator)
