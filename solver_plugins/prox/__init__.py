"""Priors ``g``, their proximal maps, and the table from activations to priors."""

from solver_plugins.prox.activations import declare_activation, prox_for
from solver_plugins.prox.barriers import SigmoidBarrier, SoftplusBarrier, SquaredHinge, TanhBarrier
from solver_plugins.prox.boxes import HardtanhPrior, IdentityPrior, Relu6Prior, ReluPrior
from solver_plugins.prox.exponential import CeluPrior, EluPrior
from solver_plugins.prox.leaky import LeakyReluPrior, PreluPrior
from solver_plugins.prox.matrix import nuclear_norm, prox_nuclear_norm, prox_psd, psd_indicator
from solver_plugins.prox.monotone import Monotone, check_monotone
from solver_plugins.prox.prior import PRIORS, Prior, Step, list_priors, make_prior, register_prior
from solver_plugins.prox.shrink import SoftshrinkPrior, TanhshrinkPrior
from solver_plugins.prox.sigmoids import AtanPrior, HardsigmoidPrior, SigmoidPrior, SoftsignPrior, TanhPrior
from solver_plugins.prox.softmax import SoftmaxPrior
from solver_plugins.prox.softplus import LogSigmoidPrior, SoftplusPrior, SqrtSoftplusPrior
from solver_plugins.registry import import_all

__all__ = [
    "PRIORS",
    "AtanPrior",
    "CeluPrior",
    "EluPrior",
    "HardsigmoidPrior",
    "HardtanhPrior",
    "IdentityPrior",
    "LeakyReluPrior",
    "LogSigmoidPrior",
    "Monotone",
    "PreluPrior",
    "Prior",
    "Relu6Prior",
    "ReluPrior",
    "SigmoidBarrier",
    "SigmoidPrior",
    "SoftmaxPrior",
    "SoftplusBarrier",
    "SoftplusPrior",
    "SoftshrinkPrior",
    "SoftsignPrior",
    "SqrtSoftplusPrior",
    "SquaredHinge",
    "Step",
    "TanhBarrier",
    "TanhPrior",
    "TanhshrinkPrior",
    "check_monotone",
    "declare_activation",
    "list_priors",
    "make_prior",
    "nuclear_norm",
    "prox_for",
    "prox_nuclear_norm",
    "prox_psd",
    "psd_indicator",
    "register_prior",
]

import_all(__name__, __path__)
