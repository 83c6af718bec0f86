"""Named errors: each one is also the built-in exception that a caller would expect."""

import inspect

import pytest

from solver_plugins import errors
from solver_plugins.errors import SolverPluginsError, SolverPluginsWarning, did_you_mean

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
ERRORS = [cls for cls in CLASSES if not issubclass(cls, Warning) and cls is not SolverPluginsError]
WARNINGS = [cls for cls in CLASSES if issubclass(cls, Warning) and cls is not SolverPluginsWarning]


@pytest.mark.parametrize("cls", ERRORS)
def test_error_is_ours_and_a_builtin(cls):
    builtin = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    assert issubclass(cls, SolverPluginsError)
    assert builtin[0] not in (Exception, BaseException, object)
    assert cls.__doc__


@pytest.mark.parametrize("cls", WARNINGS)
def test_warning_is_ours(cls):
    assert issubclass(cls, SolverPluginsWarning)
    assert issubclass(cls, UserWarning)
    assert cls.__doc__


def test_the_two_families_are_apart():
    assert ERRORS and WARNINGS
    assert not issubclass(SolverPluginsWarning, SolverPluginsError)


def test_lookup_message_is_readable():
    # KeyError would print the repr of its message, quotes and all.
    assert str(errors.UnknownNameError("no 'x'")) == "no 'x'"


@pytest.mark.parametrize(
    ("found", "near"),
    [("proxsd", "'proxsg'"), ("FISTA", "'fista'"), ("Proxgd", "'proxgd'"), ("fist", "'fista'")],
)
def test_did_you_mean_names_near_options(found, near):
    message = did_you_mean(found, ["proxsg", "proxgd", "fista"])
    assert message.startswith(" Did you mean ")
    assert near in message
    assert message.endswith(" Options: fista, proxgd, proxsg.")


def test_did_you_mean_without_near_options():
    assert did_you_mean("zzz", ["b", "a"]) == " Options: a, b."
    assert did_you_mean("zzz", []) == " Options: none."


def test_did_you_mean_with_options_that_differ_by_case():
    assert did_you_mean("A_B", iter(["a_b", "A_b"])) == " Did you mean 'A_b' or 'a_b'? Options: A_b, a_b."
