"""Small networks of torch alone: processes that import nothing else start fast."""

from torch import Tensor, nn


class SharedReLU(nn.Module):
    """A residual block as torchvision writes it: one ReLU module for all activations, dropout before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.drop, self.fc1, self.fc2 = nn.Dropout(0.3), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)) + x)
        x = self.relu(self.fc1(self.drop(x.mean((2, 3)))))
        return self.fc2(x)


class Functional(nn.Module):
    """Activations that are functions, also one with an argument, and one that is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.fc1, self.drop, self.fc2, self.fc3 = nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.conv(x))).mean((2, 3))
        x = nn.functional.leaky_relu(self.fc1(x), 0.2)
        return self.fc3(self.fc2(self.drop(x)).tanh())


class ResidualNet(nn.Module):
    """Every kind of block in little: conv-norm-act, conv-norm-skip-act, conv-act, dropout-linear(-act)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = (
            nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        )
        self.conv2, self.bn2, self.act2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv3, self.act3 = nn.Conv2d(4, 6, 3), nn.Tanh()
        self.drop1, self.fc1, self.act4 = nn.Dropout(0.5), nn.Linear(6, 5), nn.PReLU()
        self.drop2, self.fc2 = nn.Dropout(0.2), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)) + x)
        x = self.act3(self.conv3(x)).mean((2, 3))
        x = self.act4(self.fc1(self.drop1(x)))
        return self.fc2(self.drop2(x))


def still(made: nn.Module) -> nn.Module:
    """Sets the rate of every dropout to zero: what is left is a function."""
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "drop_prob", None), float):
            module.drop_prob = 0.0
    for module in made.modules():
        # Attention, and timm's heads, read their rate as a number.
        for name in ("attention_dropout", "dropout_prob", "dropout", "drop_rate"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return made
