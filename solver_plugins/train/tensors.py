"""Data sets that fit into memory as tensors: a split, its training batches, and random changes of images."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.train.data import Batch, Order
from solver_plugins.train.randomness import seed_for


@dataclass(frozen=True)
class Part:
    """One split: images (N, C, H, W), or other inputs of a model, and their class numbers."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | Tensor) -> Batch:
        return {"image": self.images[rows], "labels": self.labels[rows]}

    def channels_last(self) -> "Part":
        """Returns the split in channels-last memory format, in which convolutions are faster."""
        return Part(self.images.contiguous(memory_format=torch.channels_last), self.labels)

    def resized(self, size: int | None) -> "Part":
        """Returns the split with square images of this side; None keeps the size."""
        if size is None:
            return self
        images = functional.interpolate(self.images, (size, size), mode="bilinear", antialias=True)
        return Part(images, self.labels)

    def to(self, device: torch.device) -> "Part":
        """Returns the split on a device."""
        return Part(self.images.to(device), self.labels.to(device))


class Shuffled:
    """Training batches of a split, shuffled anew in each epoch.

    Order and changes depend only on the seed and the place in training, so all models of a seed see the same images.

    Args:
        part: The split.
        batch_size: Examples of a step; at most the whole split.
        seed: The seed of order and changes.
        rest: Whether leftover examples of an epoch make a smaller step.
        shift: Images are shifted by up to this many pixels, both ways.
        flip: Whether every other image is mirrored.
    """

    def __init__(
        self, part: Part, batch_size: int, seed: int, *, rest: bool = False, shift: int = 0, flip: bool = False
    ):
        self.part, self.seed, self.shift, self.flip = part, seed, shift, flip
        self.order = Order(len(part), min(batch_size, len(part)), seed, rest)

    @property
    def steps(self) -> int:
        """How many steps an epoch has."""
        return self.order.steps

    def start(self, epoch: int, step: int) -> Iterator[Batch]:
        """Yields the batches of an epoch that are left after this many steps of it."""
        rows = self.order.numbers(epoch).split(self.order.batch_size)
        for number in range(step, len(rows)):
            batch = self.part[rows[number]]
            if self.shift or self.flip:
                generator = torch.Generator().manual_seed(seed_for(self.seed, "augmentation", epoch, number))
                batch["image"] = changed(batch["image"], self.shift, self.flip, generator)
            yield batch


def changed(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Returns images (N, C, H, W) mirrored and shifted at random; missing borders are reflected.

    Random numbers come from the generator, on the CPU, whatever the device of the images.
    """
    count = len(images)
    if flip:
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(images.device)
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    if shift == 0:
        return images
    height, width = images.shape[-2:]
    windows = functional.pad(images, (shift,) * 4, mode="reflect").unfold(2, height, 1).unfold(3, width, 1)
    down, right = (torch.randint(2 * shift + 1, (count,), generator=generator).to(images.device) for _ in range(2))
    return windows[torch.arange(count, device=images.device), :, down, right]
