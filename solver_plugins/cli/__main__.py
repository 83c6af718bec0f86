"""Makes ``python -m solver_plugins.cli`` and ``accelerate launch -m solver_plugins.cli`` the same command."""

from solver_plugins.cli.app import main

main()
