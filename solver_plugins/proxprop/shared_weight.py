"""One weight with the biases of its layers: the unknowns of one linear system."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solver_plugins.operators import read_layer
from solver_plugins.proxprop.capture import Tally
from solver_plugins.proxprop.rows import Rows
from solver_plugins.solve import working_dtype

_PROBES: dict[tuple[int, ...], Tensor] = {}


@dataclass(eq=False)
class SharedWeight:
    """A weight and the layers that share it; usually a single layer.

    ``biases`` are the trainable ones of the layers, each once, and ``bias_of`` has the index of each tally's bias, or
    None. ``transposed``: the weight is stored as ``[n1, n2]``.
    """

    tallies: list[Tally]
    weight: Tensor
    biases: list[Tensor]
    bias_of: list[int | None]
    transposed: bool

    @property
    def name(self) -> str:
        return ", ".join(tally.name for tally in self.tallies)

    @property
    def rows(self) -> Rows:
        shape = self.tallies[0].shape
        assert shape is not None
        return shape

    @property
    def columns(self) -> int:
        """The number of unknowns per output: those of the weight, and one per bias."""
        return self.rows.columns + len(self.biases)

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.weight.dtype)

    def weight_gradient(self) -> Tensor:
        """Returns the gradient in the layout of the kernel: a view of it, or the whole of a sharded one."""
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
        """Returns fixed signs ``[g, 1, columns]`` to multiply gradients by; the global random state does not change."""
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

        # Every process has computed the whole direction, so nothing is sent.
        value = distribute_tensor(
            value.to(grad.dtype).contiguous(), grad.device_mesh, grad.placements, src_data_rank=None
        )
    grad.copy_(value)


def shared_weights(tallies: list[Tally]) -> list[SharedWeight]:
    """Returns the trainable weights of layers, each with all layers that share it; gives calls their bias column."""
    found: dict[int, SharedWeight] = {}
    for tally in tallies:
        weight = tally.weight()
        if not weight.requires_grad:
            continue
        shared = found.get(id(weight))
        if shared is None:
            kernel = read_layer(tally.layer)[0]
            own = tally.layer._parameters["weight"]
            found[id(weight)] = shared = SharedWeight([], weight, [], [], kernel is not own)
        bias = tally.layer._parameters.get("bias")
        place: int | None = None
        if bias is not None and bias.requires_grad and bias.grad is not None:
            known = [index for index, one in enumerate(shared.biases) if one is bias]
            place = known[0] if known else len(shared.biases)
            if not known:
                shared.biases.append(bias)
        shared.tallies.append(tally)
        shared.bias_of.append(place)
        for call in tally.kept:
            call.bias = place
    return list(found.values())
