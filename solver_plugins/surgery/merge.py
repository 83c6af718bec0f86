"""Plain layers that compute what solver blocks compute in evaluation: the iterations become one weight and one bias.

Without a prior a solve is affine: ``v_K = W_K u + b_K``, gains, shifts, blends and gates included, which the solve
forms in float64 (``affine_map``). Behind a BatchNorm of diagonal ``d`` and mean ``m`` the norm stays where it is:

    d (W_K/d u + b - m) + (b_K - d (b - m)) = W_K u + b_K,

the weight is ``W_K / d`` (where ``d = 0`` the row does not matter and is kept), and the norm's shift
``b_K - d (b - m)``.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from solver_plugins.blocks import Outlet, SolverBlock, blocks_of
from solver_plugins.blocks.fold import is_frozen, running_diagonal
from solver_plugins.blocks.outlet import folded_norm
from solver_plugins.operators import autocast_off, operator_from_kernel, rescaled_bound
from solver_plugins.prox import IdentityPrior
from solver_plugins.solve import Constants, affine_map
from solver_plugins.solve.layout import is_matrix
from solver_plugins.surgery.apply import refuse_sharded, restore_plain
from solver_plugins.surgery.errors import ConversionError
from solver_plugins.wrappers import wrapper_of


class Merged(NamedTuple):
    """What a block's layer and the norm behind it become.

    Attributes:
        kernel: ``[n2, n1/groups, *k]``; None where the weight stays.
        shift: The layer's bias, or the shift of the norm; None where it stays.
    """

    kernel: Tensor | None = None
    shift: Tensor | None = None


def merge_model(model: nn.Module, strict: bool = True) -> nn.Module:
    """Turns solver blocks into plain layers with the same outputs in evaluation.

    This works for every block that is affine in evaluation: blocks without a prior (before GELU, SiLU or no
    activation) of linear layers and of convolutions whose windows do not overlap. They may have a gain, a shift or a
    blend, and a BatchNorm after them. The plain layers have the classes and Parameters from before the conversion, with
    new numbers. Dropouts that solvers replaced are active again in training.

    Args:
        model: A converted model.
        strict: Whether a block that cannot be merged is an error; False keeps such blocks as solvers.

    Returns:
        The same object.

    Raises:
        ConversionError: If there is no solver block, the model is wrapped or sharded, or a block cannot be merged, with
            the reason for each. The model is as it was then.
    """
    _refuse_wrapped(model)
    blocks = blocks_of(model)
    if not blocks:
        raise ConversionError(f"Expected a converted model; found {type(model).__name__} without a solver block.")
    owners = Counter(_places_of_weights(model))
    adapters = {id(inside): one for one in model.modules() if (inside := one._modules.get("base_layer")) is not None}
    merged: dict[SolverBlock, Merged] = {}
    refused: dict[str, str] = {}
    for name, block in blocks.items():
        found = _obstacle(block, adapters.get(id(block)), owners) or _merged(block)
        if isinstance(found, str):
            refused[name] = found
        else:
            merged[block] = found
    if strict and refused:
        lines = "".join(f"\n  - {name or 'the model'}: {reason}" for name, reason in refused.items())
        raise ConversionError(
            f"Expected blocks that are affine in evaluation; {len(refused)} of {len(blocks)} have no plain layer that "
            f"computes the same:{lines}\nmerge_model(model, strict=False) merges the others and keeps these."
        )
    for block, found in merged.items():
        _write(block, found)
    restore_plain(model, merged.keys())
    return model


def _refuse_wrapped(model: nn.Module) -> None:
    refuse_sharded(model, "merge")
    for name, module in model.named_modules():
        wrapper = wrapper_of(module)
        if wrapper is not None:
            raise ConversionError(wrapper.refusal("merge", name))


def _places_of_weights(model: nn.Module) -> Iterator[int]:
    """Yields where each Parameter of each module lies in memory: several times where weights are tied."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta and not hasattr(parameter, "device_mesh"):
                yield parameter.untyped_storage().data_ptr()


def _obstacle(block: SolverBlock, adapter: nn.Module | None, owners: Counter[int]) -> str | None:
    """Says why a block cannot become a plain layer; None where it can, as far as that is known without its solution."""
    solver, link = block.solver, block.link
    kernel = block._kernel_at_rest().detach()
    if not block._in_reach(kernel):
        return "its weight has no values here (it is on the meta device, or a shard)"
    if block.computes_its_layer and block.output == "argument":
        return None
    if solver.recursion is None:
        return f"the iterations of {solver.name} depend on the data"
    if solver.samples != "nothing" and solver.samples_in_evaluation:
        return "it samples in evaluation, too (eval_mode='stochastic'); call set_eval_mode(model, 'deterministic')"
    if solver.recursion.momenta(solver.config.iters) is None:
        return f"{solver.name} restarts its momentum where the data asks for it (restart=False does not)"
    if not isinstance(block.prior, IdentityPrior):
        return f"its activation is part of the solver ({block.prior.name})"
    if link is not None and link.role == "activation":
        return "it solves behind a skip connection"
    shape, geometry = _window(block, kernel), block.geometry
    # Padding that depends on the size of the input is none for some sizes only.
    dynamic = isinstance(geometry.padding, str) and any(extent > 1 for extent in shape[1:])
    if dynamic or not is_matrix(operator_from_kernel(kernel, geometry, shape)):
        return "the windows of its convolution overlap, or are padded"
    weight = next(iter(block._parameters.values()), None)
    if parametrize.is_parametrized(block) or not _is_view(kernel, weight):
        return "its weight is computed from other tensors (a parametrisation, weight standardisation)"
    shifted: Any = block if link is None else folded_norm(link)
    for what, tensor in (("weight", kernel), ("bias" if link is None else "norm's shift", shifted.bias)):
        if tensor is not None and owners[tensor.untyped_storage().data_ptr()] > 1:
            return f"its {what} is tied to another one"
    reason = None if adapter is None else _obstacle_of_adapter(adapter, linked=link is not None)
    return reason if reason is not None or link is None else _obstacle_of_norm(folded_norm(link), link)


def _is_view(kernel: Tensor, weight: Tensor | None) -> bool:
    if weight is None or kernel.numel() != weight.numel():
        return False
    return kernel.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def _obstacle_of_adapter(adapter: Any, linked: bool) -> str | None:
    """Says why the layer inside of an adapter (PEFT) cannot change its weight."""
    kind = type(adapter).__name__
    if linked:
        return f"an adapter ({kind}) adds to what its solver is given; merge_and_unload() or unload() it first"
    if not type(adapter).__module__.startswith("peft.tuners.lora.") or getattr(adapter, "lora_variant", None):
        return f"it is part of an adapter ({kind}) that may read its weight; unload() it first"
    if getattr(adapter, "merged", False):
        return f"an adapter ({kind}) is merged into its weight; unmerge_adapter() first, or unload() it"
    return None


def _obstacle_of_norm(norm: Any, link: Any) -> str | None:
    """Says why a folded norm cannot take over the shift."""
    if not is_frozen(norm) and norm.running_var is None:
        return "its norm keeps no running statistics, so it depends on the batch in evaluation, too"
    if norm.bias is None:
        return "its norm has no shift (affine=False) that could take over the bias"
    if isinstance(norm, Outlet) and len(norm.links) > 1:
        return "its norm serves several layers"
    return None


def _window(block: SolverBlock, kernel: Tensor) -> tuple[int, ...]:
    """Returns the shape of an input with a single place: one window of the convolution, or a vector."""
    extents = [d * (k - 1) + 1 for d, k in zip(block.geometry.dilation, kernel.shape[2:], strict=True)]
    return (kernel.shape[1] * block.geometry.groups, *extents)


@torch.no_grad()
def _merged(block: SolverBlock) -> Merged | str:
    """Returns what a block's layer becomes, or says why it becomes nothing."""
    if block.computes_its_layer:
        return Merged()
    kernel = block._kernel_at_rest().detach()
    dtype = torch.float32 if kernel.device.type == "mps" else torch.float64
    bias = None if block.bias is None else block.bias.detach().to(dtype)
    with autocast_off(kernel.device):
        constant = _constant(block, kernel)
        if block.link is None:
            given = kernel.new_zeros(len(kernel), dtype=dtype) if bias is None else bias
            weight, shift = _map_of(block, kernel.to(dtype), constant, None, given)
            if bias is None and bool(shift.any()):
                return "it has a shift, and its layer no bias that could take it over"
            merged = Merged(weight, None if bias is None else shift)
        else:
            norm: Any = folded_norm(block.link)
            diagonal = running_diagonal(norm, dtype)
            constant = rescaled_bound(constant, diagonal, block.diagonal_reference.to(dtype))
            centred = -norm.running_mean.to(dtype) if bias is None else bias - norm.running_mean
            offset = diagonal * centred
            weight, shift = _map_of(block, kernel.to(dtype), constant, diagonal, norm.bias.to(dtype) + offset)
            rows = diagonal.reshape(-1, *(1,) * (weight.dim() - 1))
            weight = torch.where(rows == 0, kernel.to(dtype), weight / torch.where(rows == 0, 1.0, rows))
            merged = Merged(weight, shift - offset)
    finite = all(bool(torch.isfinite(one.to(kernel.dtype)).all()) for one in merged if one is not None)
    return merged if finite else f"its merged weight is not finite in {kernel.dtype}"


def _constant(block: SolverBlock, kernel: Tensor) -> Tensor:
    """Returns the constant that evaluation uses."""
    if not block.solver.needs_constant:
        return block.L
    training, block.training = block.training, False
    try:
        return block._current_L(kernel)
    finally:
        block.training = training


def _map_of(
    block: SolverBlock, kernel: Tensor, constant: Tensor, diagonal: Tensor | None, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns ``W_K``, shaped as the kernel, and ``b_K``."""
    operator = operator_from_kernel(kernel, block.geometry, _window(block, kernel), diagonal)
    weight, shift = affine_map(block.solver, block.prior, operator, bias, Constants(constant), block._scale())
    assert shift is not None
    return weight, shift


@torch.no_grad()
def _write(block: SolverBlock, merged: Merged) -> None:
    """Writes new numbers into the Parameters of a layer and of the norm behind it."""
    if merged.kernel is not None:
        # The kernel is the weight itself, or a view of it.
        block._kernel_at_rest().copy_(merged.kernel)
    if merged.shift is not None:
        owner: Any = block if block.link is None else folded_norm(block.link)
        owner.bias.copy_(merged.shift)
