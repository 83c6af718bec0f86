"""What the patched training scripts call: a solver file is read, a model converted as it says.

A solver file is YAML (or JSON) with keyword arguments of :func:`solver_plugins.convert_model`, options of the solver
among them::

    solver: proxsg
    iters: 10
    targets: [head.fc]
    eval_mode: stochastic
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery import convert_model

Names = str | list[str]


class SolverFile(StrictConfig):
    """Arguments of :func:`solver_plugins.convert_model` that can be written down.

    In a file the solver's own options stand beside the others; here they are in ``options_of_solver``.
    """

    solver: str = pydantic.Field("proxsg", description="A registered solver.")
    iters: int = pydantic.Field(10, ge=1, description="How many proximal steps each block takes.")
    targets: Names | None = pydantic.Field(None, description="Layers to convert: names or their ends, or one regex.")
    exclude: Names | None = pydantic.Field(None, description="Layers to leave alone, in the same forms.")
    pattern: Names | None = pydantic.Field(
        None, description="Patterns, 'strict' or 'all'; the solver's own by default."
    )
    p: float | None = pydantic.Field(None, description="A dropout rate for a solver that samples.")
    nonprox: Literal["keep", "skip"] = pydantic.Field("keep", description="Where an activation is no proximal map.")
    last: bool | None = pydantic.Field(None, description="Always, or never, convert the classifier.")
    blend: float = pydantic.Field(1.0, ge=0, le=1, description="0 is the original network, 1 the solver.")
    options_of_solver: dict[str, Any] = pydantic.Field({}, description="Options of the solver itself.")

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, owner: str | None = None) -> Self:
        """Reads the arguments of a conversion, those of its solver among them, and checks both.

        Raises:
            OptionError: For an option that neither has, or a value that does not fit.
            UnknownNameError: If the solver is not registered.
        """
        owner = owner or "A conversion"
        if not isinstance(options, Mapping):
            raise OptionError(f"{owner} takes a mapping of options; found {type(options).__name__}.")
        fields = cls.model_fields.keys() - {"options_of_solver"}
        read = super().parse({name: value for name, value in options.items() if name in fields}, owner=owner)
        solver = SOLVERS.get(read.solver)
        known = {*fields, *solver.Config.model_fields}
        unknown = [str(name) for name in options if name not in known]
        if unknown:
            raise OptionError(
                "\n".join(f"{owner} has no option {name!r}.{did_you_mean(name, known)}" for name in unknown)
            )
        own = {name: value for name, value in options.items() if name not in fields}
        # Told now, and not after a model was built and walked.
        solver.from_options(iters=read.iters, **own)
        return read.model_copy(update={"options_of_solver": own})

    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of :func:`solver_plugins.convert_model`."""
        shared = {name: getattr(self, name) for name in type(self).model_fields if name != "options_of_solver"}
        return {**shared, **self.options_of_solver}


def convert_from_file(model: nn.Module, path: str | Path) -> nn.Module:
    """Converts a model in place, as a solver file says.

    Raises:
        OptionError: If the file cannot be read, or holds an option or value that does not fit.
        SolverPluginsError: If the model cannot be converted so; it is as it was then.
    """
    return convert_model(model, **SolverFile.from_file(path).arguments())
