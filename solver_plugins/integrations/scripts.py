"""What the patched training scripts call: a solver file is read, a model converted as it says.

A solver file is YAML (or JSON) with the fields of a :class:`~solver_plugins.surgery.ConversionSpec`, options of the
solver among them::

    solver: proxsg
    iters: 10
    targets: [head.fc]
    eval_mode: stochastic
"""

from pathlib import Path

from torch import nn

from solver_plugins.surgery import ConversionSpec, convert_model


def convert_from_file(model: nn.Module, path: str | Path) -> nn.Module:
    """Converts a model in place, as a solver file says.

    Raises:
        OptionError: If the file cannot be read, or holds an option or value that does not fit.
        SolverPluginsError: If the model cannot be converted that way; it is as it was then.
    """
    return convert_model(model, ConversionSpec.from_file(path))
