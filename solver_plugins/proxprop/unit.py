"""One weight with the biases that go with it: what a single linear system is solved for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.operators import read_layer
from solver_plugins.proxprop.capture import Record, Tally, working_dtype
from solver_plugins.proxprop.rows import Rows

_PROBES: dict[tuple[int, ...], Tensor] = {}


def rows_of(layer: torch.nn.Module) -> Rows:
    """Returns how a layer turns its input into rows.

    Raises:
        UnsupportedLayerError: If the package cannot read the layer, or its kernel is not simply its weight.
    """
    kernel, geometry = read_layer(layer)
    weight = layer._parameters.get("weight")
    if weight is None:
        raise UnsupportedLayerError("its weight is computed (a parametrisation), not a Parameter")
    if weight.is_complex():
        raise UnsupportedLayerError("its weight is complex")
    if kernel is not weight and not _is_transposed(kernel, weight):
        raise UnsupportedLayerError("its kernel is computed from its weight, so their gradients differ")
    return Rows(tuple(kernel.shape), geometry)


def _is_transposed(kernel: Tensor, weight: Tensor) -> bool:
    other = weight.t() if weight.dim() == 2 else weight
    return kernel.shape == other.shape and kernel.stride() == other.stride() and kernel._base is weight


@dataclass(eq=False)
class Unit:
    """Layers that share a weight; usually one.

    Attributes:
        tallies: What each of them heard.
        weight: The shared weight.
        biases: Their trainable biases, each once.
        bias_of: Per tally the index of its bias, or None.
        transposed: Whether the weight is stored as ``[n1, n2]``.
    """

    tallies: list[Tally]
    weight: Tensor
    biases: list[Tensor]
    bias_of: list[int | None]
    transposed: bool

    @property
    def name(self) -> str:
        """The names of the layers."""
        return ", ".join(tally.name for tally in self.tallies)

    @property
    def rows(self) -> Rows:
        """How inputs become rows."""
        shape = self.tallies[0].shape
        assert shape is not None
        return shape

    @property
    def columns(self) -> int:
        """How many unknowns there are per output: the weight's and one per bias."""
        return self.rows.columns + len(self.biases)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the solve."""
        return working_dtype(self.weight.dtype)

    def weight_gradient(self) -> Tensor:
        """Returns the gradient in the layout of the kernel: the very tensor, or all of a sharded one."""
        grad = _whole(self.weight.grad)
        return grad.t() if self.transposed else grad

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Returns the gradients of weight and biases as one ``[g, m, columns]``."""
        shape = (self.rows.groups, self.rows.outputs)
        parts = [self.weight_gradient().reshape(*shape, -1)]
        parts += [_whole(bias.grad).reshape(*shape, 1) for bias in self.biases]
        return torch.cat([part.to(dtype) for part in parts], 2) if self.biases else parts[0].to(dtype)

    def write(self, direction: Tensor) -> None:
        """Replaces the gradients by a direction ``[g, m, columns]``."""
        columns = self.rows.columns
        self.write_weight(direction[..., :columns].reshape(self.rows.kernel_shape))
        self.write_biases(direction[..., columns:])

    def write_weight(self, direction: Tensor) -> None:
        """Replaces the gradient of the weight by a direction in the layout of the kernel."""
        _assign(self.weight, direction.t() if self.transposed else direction)

    def write_biases(self, direction: Tensor) -> None:
        """Replaces the gradients of the biases by ``[g, m, biases]``."""
        for index, bias in enumerate(self.biases):
            _assign(bias, direction[..., index].reshape(-1))

    def probe(self) -> Tensor:
        """Returns fixed signs ``[g, 1, columns]`` to multiply gradients with; no random numbers are drawn."""
        key = (self.rows.groups, self.columns)
        if key not in _PROBES:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, (self.rows.groups, 1, self.columns), generator=generator) * 2 - 1
            _PROBES[key] = signs.to(torch.int8)
        return _PROBES[key].to(device=self.weight.device, dtype=self.dtype)

    def probed_gradient(self) -> Tensor:
        """Returns the gradient times the probe, ``[g, m]``."""
        shape, probe = (self.rows.groups, self.rows.outputs), self.probe()
        columns = self.rows.columns
        weight = self.weight_gradient().reshape(*shape, -1).to(self.dtype)
        result = torch.matmul(weight, probe[..., :columns].mT)[..., 0]
        for index, bias in enumerate(self.biases):
            result = result + _whole(bias.grad).reshape(shape).to(self.dtype) * probe[..., columns + index]
        return result

    @property
    def sharded(self) -> bool:
        """Whether the gradient is spread over processes (FSDP2)."""
        return hasattr(self.weight.grad, "full_tensor")


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _assign(parameter: Tensor, value: Tensor) -> None:
    grad: Any = parameter.grad
    if hasattr(grad, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        # Every process has computed all of it, so none has to send anything.
        value = distribute_tensor(
            value.to(grad.dtype).contiguous(), grad.device_mesh, grad.placements, src_data_rank=None
        )
    grad.copy_(value)


def group(tallies: list[Tally]) -> list[Unit]:
    """Returns the units of layers that run on trainable weights; layers that share a weight are one unit."""
    units: dict[int, Unit] = {}
    for tally in tallies:
        weight = tally.weight()
        if not weight.requires_grad:
            continue
        unit = units.get(id(weight))
        if unit is None:
            kernel = read_layer(tally.layer)[0]
            own = tally.layer._parameters["weight"]
            units[id(weight)] = unit = Unit([], weight, [], [], kernel is not own)
        bias = tally.layer._parameters.get("bias")
        place: int | None = None
        if bias is not None and bias.requires_grad and bias.grad is not None:
            known = [index for index, one in enumerate(unit.biases) if one is bias]
            place = known[0] if known else len(unit.biases)
            if not known:
                unit.biases.append(bias)
        unit.tallies.append(tally)
        unit.bias_of.append(place)
    return list(units.values())


@dataclass(frozen=True)
class Call:
    """A call with the column of its bias."""

    record: Record
    bias: int | None
