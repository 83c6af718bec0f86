"""Training scripts of other libraries: run as they are, or patched; a solver file says how their model is converted.

A solver file is YAML (or JSON) with the fields of a :class:`~solver_plugins.surgery.ConversionSpec`, options of the
solver among them::

    solver: proxsg
    iters: 10
    targets: [head.fc]
    eval_mode: stochastic
"""

import contextlib
import functools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from solver_plugins.errors import OptionError
from solver_plugins.surgery import ConversionSpec, convert_model


def convert_from_file(model: nn.Module, path: str | Path) -> nn.Module:
    """Converts a model in place, as a solver file says; errors are those of ``convert_model`` and of the file."""
    return convert_model(model, ConversionSpec.from_file(path))


def run_script(script: str | Path, arguments: Sequence[str] = (), solver_config: str | Path | None = None) -> None:
    """Runs a training script unchanged, as ``python SCRIPT ARGUMENTS`` would; it knows the models of this package.

    Args:
        script: The script.
        arguments: What it is given.
        solver_config: A solver file. The first model that the script makes with ``timm.create_model``, or with
            ``from_pretrained`` or ``from_config`` of transformers, is converted as it says; a Trainer for it gets a
            :class:`~solver_plugins.integrations.trainer.SolverCallback`.
    """
    place = Path(script).expanduser()
    if not place.is_file():
        raise OptionError(f"Expected the path of a Python script; there is no file {str(place)!r}.")
    spec = None if solver_config is None else ConversionSpec.from_file(solver_config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(sys, "argv", [str(place), *arguments]))
        stack.enter_context(_replaced(sys, "path", [str(place.resolve().parent), *sys.path]))
        converted = None if spec is None else stack.enter_context(_converting(spec))
        runpy.run_path(str(place), run_name="__main__")
    if converted is not None and not converted:
        raise OptionError(
            f"{str(place)!r} made no model with timm.create_model, from_pretrained or from_config, so nothing was "
            "converted: call solver_plugins.convert_model in it."
        )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another attribute meanwhile."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _converting(spec: ConversionSpec) -> Iterator[list[nn.Module]]:
    """Converts the first model that either library makes meanwhile; yields a list that then holds it."""
    import timm
    import transformers

    from solver_plugins.integrations.trainer import SolverCallback

    made: list[nn.Module] = []
    busy: list[bool] = []

    def converts(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def run(*args: Any, **options: Any) -> Any:
            # One library's function may call another one of these; the outermost call hands out the model.
            busy.append(True)
            try:
                model = make(*args, **options)
            finally:
                busy.pop()
            if not busy and not made and isinstance(model, nn.Module):
                made.append(convert_model(model, spec))
            return model

        return run

    start = transformers.Trainer.__init__

    @functools.wraps(start)
    def begin(trainer: Any, *args: Any, **options: Any) -> None:
        start(trainer, *args, **options)
        if made and trainer.model is made[0]:
            SolverCallback().add_to(trainer)

    base: Any = transformers.PreTrainedModel
    with contextlib.ExitStack() as stack:
        for module in (timm, timm.models, timm.models._factory):
            stack.enter_context(_replaced(module, "create_model", converts(timm.models.create_model)))
        for name in ("from_pretrained", "_from_config"):
            bound = vars(base)[name].__func__
            stack.enter_context(_replaced(base, name, classmethod(converts(bound))))
        stack.enter_context(_replaced(transformers.Trainer, "__init__", begin))
        yield made
