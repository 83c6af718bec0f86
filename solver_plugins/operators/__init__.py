"""Linear layers as operators ``A``: application and adjoint, Lipschitz constants, and sampling of their features."""

from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.layers import (
    Reader,
    at_rest,
    geometry_of,
    kernel_of,
    operator_for,
    read_layer,
    reader_for,
    register_layer,
)
from solver_plugins.operators.lipschitz import lipschitz_constant, lipschitz_from_kernel
from solver_plugins.operators.operator import ConvMap, LinearMap, LinearOperator, operator_from_kernel
from solver_plugins.operators.precision import autocast_off, autocasts, is_eager, is_faked, match_dtype, product_dtype
from solver_plugins.operators.private import check_torch
from solver_plugins.operators.sampling import (
    expected_smoothness,
    importance_mask,
    importance_weights,
    inclusion_probabilities,
    tau_nice_indices,
    tau_nice_mask,
    tau_nice_masks,
    tau_of,
    uniform,
)
from solver_plugins.operators.small import solve_small
from solver_plugins.operators.standardized import standardized
from solver_plugins.operators.tracking import follow, image_of, power_steps, rescaled_bound, start_vectors

__all__ = [
    "ConvMap",
    "Geometry",
    "LinearMap",
    "LinearOperator",
    "Reader",
    "at_rest",
    "autocast_off",
    "autocasts",
    "expected_smoothness",
    "follow",
    "geometry_of",
    "image_of",
    "importance_mask",
    "importance_weights",
    "inclusion_probabilities",
    "is_eager",
    "is_faked",
    "kernel_of",
    "lipschitz_constant",
    "lipschitz_from_kernel",
    "match_dtype",
    "operator_for",
    "operator_from_kernel",
    "power_steps",
    "product_dtype",
    "read_layer",
    "reader_for",
    "register_layer",
    "rescaled_bound",
    "solve_small",
    "standardized",
    "start_vectors",
    "tau_nice_indices",
    "tau_nice_mask",
    "tau_nice_masks",
    "tau_of",
    "uniform",
]

check_torch()
