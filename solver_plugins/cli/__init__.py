"""The command ``solver-plugins``: one file per subcommand, imported when that subcommand is used."""

from solver_plugins.cli.app import main

__all__ = ["main"]
