"""The command ``solver-plugins``: one file per command, each imported when it is needed."""

from solver_plugins.cli.app import main

__all__ = ["main"]
