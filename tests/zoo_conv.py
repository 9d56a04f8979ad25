"""Convolutional and fully connected nets."""

from torch import Tensor, nn
from zoo_base import add, rand

B, T = 2, 5  # batch and sequence length used throughout


add(
    "mlp",
    lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)).eval(),
    rand(B, 10),
    params=10 * 20 + 20 + 20 * 5 + 5,
    macs=B * (10 * 20 + 20 * 5),
    calls={"": 1, "0": 1, "1": 1, "2": 1},
)


def convbn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


CONVBN_PARAMS = 3 * 8 * 9 + 2 * 8 + 8 * 4 + 4
CONVBN_MACS = B * (8 * 8 * 8 * 3 * 9 + 8 * 4)
add(
    "convbn_train",
    lambda: convbn().train(),
    rand(B, 3, 8, 8),
    params=CONVBN_PARAMS,
    macs=CONVBN_MACS,
)


class BasicBlock(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or i != o:
            self.downsample = nn.Sequential(
                nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        h += skip
        return self.relu(h)


def resnetish() -> nn.Sequential:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(
        nn.Sequential(*stem),
        BasicBlock(8, 8, 1),
        BasicBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


add(
    "resnetish",
    lambda: resnetish().eval(),
    rand(B, 3, 8, 8),
    params=(3 * 8 * 9 + 16)
    + (2 * 8 * 8 * 9 + 2 * 16)
    + (8 * 16 * 9 + 32 + 16 * 16 * 9 + 32 + 8 * 16 + 32)
    + (16 * 10 + 10),
    macs=B
    * (64 * 3 * 8 * 9 + 64 * 2 * 8 * 8 * 9 + 16 * (8 * 16 * 9 + 16 * 16 * 9 + 8 * 16) + 16 * 10),
    calls={"1.relu": 2, "2.relu": 2, "2.downsample.0": 1},
    tags={"inplace"},
)
