"""Makes the operator of a layer, or of a kernel and its geometry."""

from collections.abc import Sequence

from torch import Tensor, nn

from solver_plugins.errors import ShapeError
from solver_plugins.operators.conv import ConvMap
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.layers import read_layer
from solver_plugins.operators.linear import LinearMap
from solver_plugins.operators.operator import LinearOperator


def operator_for(layer: nn.Module, input_shape: Sequence[int], *, diagonal: Tensor | None = None) -> LinearOperator:
    """Returns the operator that a layer applies to inputs of one shape, with or without batch dimensions; no bias.

    ``diagonal`` is a scale per output feature (a folded norm).

    Raises:
        UnsupportedLayerError: If the layer cannot be read.
        ShapeError: If the shape does not fit the layer.
    """
    kernel, geometry = read_layer(layer)
    return operator_from_kernel(kernel, geometry, input_shape, diagonal)


def operator_from_kernel(
    kernel: Tensor, geometry: Geometry, input_shape: Sequence[int], diagonal: Tensor | None = None
) -> LinearOperator:
    """Returns the operator of a kernel ``[n2, n1/groups, *k]``; arguments and errors as in :func:`operator_for`."""
    dims = geometry.dims
    operator: LinearOperator
    if dims == 0:
        operator = LinearMap(kernel, diagonal)
    elif len(input_shape) <= dims:
        raise ShapeError(f"Expected an input of shape (..., channels, {dims} of space); found {tuple(input_shape)}.")
    else:
        operator = ConvMap(kernel, diagonal, geometry, tuple(input_shape[-dims:]))
    if not input_shape or input_shape[operator.feature_dim] != operator.in_features:
        raise ShapeError(
            f"Expected an input with {operator.in_features} features in dimension {operator.feature_dim}; "
            f"found shape {tuple(input_shape)}."
        )
    return operator
