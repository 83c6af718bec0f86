"""Errors of this room."""

from solver_plugins.errors import SolverPluginsError


class BlockSizeError(SolverPluginsError, ValueError):
    """A block size that is no positive whole number, or that does not divide the width."""


class ClassifierError(SolverPluginsError, LookupError):
    """A model without a last linear layer that can be recognised."""


class RegularizerError(SolverPluginsError, RuntimeError):
    """A regulariser was asked for its value at a moment when it has none."""


class FactorisationError(SolverPluginsError, ArithmeticError):
    """No balanced factorisation was found at this width."""
