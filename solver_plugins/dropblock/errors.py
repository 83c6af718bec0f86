"""Errors of structured dropout."""

from solver_plugins.errors import OptionError, SolverPluginsError


class BlockSizeError(OptionError):
    """A block size is not a positive whole number, or does not divide the width."""


class ClassifierError(SolverPluginsError, LookupError):
    """The last linear layer of a model is not found."""


class RegularizerError(SolverPluginsError, RuntimeError):
    """A regulariser was called when it had no value."""


class FactorisationError(SolverPluginsError, ArithmeticError):
    """No balanced factorisation was found at this width."""
