"""Structured dropout: layers, their average effect, closed forms, and dropout without sampling."""

from solver_plugins.dropblock.classifier import ClassifierDropout, find_classifier
from solver_plugins.dropblock.convert import convert_dropout, inspect_dropout, revert_dropout
from solver_plugins.dropblock.errors import BlockSizeError, ClassifierError, FactorisationError, RegularizerError
from solver_plugins.dropblock.estimate import Estimate
from solver_plugins.dropblock.layers import (
    AveragedDropout,
    DropBlock1d,
    DropBlock2d,
    DropConnectLinear,
    StructuredDropout,
    averaged_dropout,
    drop_block_1d,
    drop_block_2d,
    drop_connect_linear,
    structured_dropout,
)
from solver_plugins.dropblock.minimum import GlobalMinimum, global_minimum
from solver_plugins.dropblock.regularizer import StructuredDropoutRegularizer
from solver_plugins.dropblock.report import DropoutReport, DropoutRow
from solver_plugins.dropblock.retain import seed_retain_probability, theta_bar_of, theta_of_width
from solver_plugins.dropblock.schemes import (
    Dropout,
    GridBlocks,
    OverlappingBlocks,
    SampledScheme,
    Sampler,
    Scheme,
    make_scheme,
)
from solver_plugins.dropblock.support_norm import k_support_norm_sq, prox_k_support_norm_sq
from solver_plugins.dropblock.theory import (
    characteristic_matrix,
    deterministic_objective,
    dropconnect_omega,
    estimate_characteristic_matrix,
    omega,
)

__all__ = [
    "AveragedDropout",
    "BlockSizeError",
    "ClassifierDropout",
    "ClassifierError",
    "DropBlock1d",
    "DropBlock2d",
    "DropConnectLinear",
    "Dropout",
    "DropoutReport",
    "DropoutRow",
    "Estimate",
    "FactorisationError",
    "GlobalMinimum",
    "GridBlocks",
    "OverlappingBlocks",
    "RegularizerError",
    "SampledScheme",
    "Sampler",
    "Scheme",
    "StructuredDropout",
    "StructuredDropoutRegularizer",
    "averaged_dropout",
    "characteristic_matrix",
    "convert_dropout",
    "deterministic_objective",
    "drop_block_1d",
    "drop_block_2d",
    "drop_connect_linear",
    "dropconnect_omega",
    "estimate_characteristic_matrix",
    "find_classifier",
    "global_minimum",
    "inspect_dropout",
    "k_support_norm_sq",
    "make_scheme",
    "omega",
    "prox_k_support_norm_sq",
    "revert_dropout",
    "seed_retain_probability",
    "structured_dropout",
    "theta_bar_of",
    "theta_of_width",
]
