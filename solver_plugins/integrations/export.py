"""Programs and plain networks out of converted models, checked by running what was written."""

import copy
import importlib.util
import inspect
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from solver_plugins.blocks import blocks_of
from solver_plugins.errors import SolverPluginsError, SolverPluginsWarning, did_you_mean, warn
from solver_plugins.integrations.errors import SavingError
from solver_plugins.integrations.folder import new_file
from solver_plugins.integrations.saving import save
from solver_plugins.surgery import merge_model
from solver_plugins.surgery.inputs import Inputs, example_inputs_for, read_inputs
from solver_plugins.wrappers import wrapper_of

Format = Literal["onnx", "pt2", "plain"]
TOLERANCE = 1e-4
"""How far a program's outputs may be from the model's, relative to the largest."""
_LOWER = 2e-2
"""The same for half precision."""
_ENDLESS = 2**31
"""A size without an upper end, as torch.export writes it, is above this one."""


class ExportError(SolverPluginsError, ValueError):
    """A model cannot be exported, or what was exported computes something else; nothing was written."""


@dataclass(frozen=True)
class Exported:
    """What :func:`export_model` wrote.

    Attributes:
        path: The file.
        format: Its format.
        blocks: How many layers are solvers in it.
        differences: For each batch size that was tried the largest difference from the model's outputs, relative to
            the largest output. Empty if there was nothing to run the file with.
    """

    path: Path
    format: Format
    blocks: int
    differences: dict[int, float]

    def __str__(self) -> str:
        checked = ", ".join(f"{gap:.1e} at batch size {size}" for size, gap in self.differences.items())
        solvers = f"{self.blocks} solver block{'s' * (self.blocks != 1)}"
        return f"{self.path}: {self.format}, {solvers}; difference from the model: {checked or 'not checked'}"


def export_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    to: Format = "onnx",
    *,
    example_inputs: Any = None,
    dynamic_batch: bool = True,
    overwrite: bool = False,
) -> Exported:
    """Writes a model in evaluation as a program that runs without this package, and checks it against the model.

    Args:
        model: A converted or plain model. It is only read.
        path: The file, or for "plain" the folder, to write.
        to: "onnx" (by torch's current exporter; needs the extra ``export``), "pt2" (``torch.export``, for
            ``torch.export.load`` and AOTInductor), or "plain": a folder with the merged network, which its library
            loads as it loads any other. Every block has to be affine for it.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments; models of timm and
            transformers need none. The first dimension of tensors is the batch, of two samples or more.
        dynamic_batch: Whether the program takes any batch size; it is then checked with a second one.
        overwrite: Whether to replace a file that is there.

    Raises:
        ExportError: If a part of the model cannot be exported, or the result computes something else.
        ConversionError: If "plain" is asked for, and a block has no plain layer that computes the same.
        SavingError: If the file exists, or cannot be written.
    """
    if to not in get_args(Format):
        raise ExportError(f"Expected a format of export; found {to!r}.{did_you_mean(str(to), get_args(Format))}")
    place, plain = Path(os.path.abspath(path)), to == "plain"
    _check(model, plain)
    if not plain and (place.is_dir() or (place.exists() and not overwrite)):
        what = "is a folder" if place.is_dir() else "exists; pass overwrite=True to replace it"
        raise SavingError(f"Expected a file to write; {str(path)!r} {what}.")
    made = copy.deepcopy(model).eval()
    made = made if plain else made.cpu()
    inputs = example_inputs_for(made) if example_inputs is None else read_inputs(example_inputs)
    inputs = Inputs(*inputs.to(next((one.device for one in made.parameters()), torch.device("cpu"))))
    batch = _batch_of(inputs)
    tried = [inputs] if plain or batch is None or not dynamic_batch else [inputs, _resized(inputs)]
    with torch.no_grad():
        expected = [_expected(made, one) for one in tried]
        if blocks_of(made):
            # A plain layer is the smallest program of a block that has one.
            merge_model(made, strict=plain)
        if plain:
            found = {batch or 0: _difference(_expected(made, inputs), expected[0])}
            _judge(found, made)
            save(made, place, overwrite=overwrite)
            return Exported(place, to, 0, found)
        for block in blocks_of(made).values():
            block.cache_gram()
        program = _program(made, inputs, batch if dynamic_batch else None)
    with new_file(place) as temporary:
        run = _write_onnx(program, temporary) if to == "onnx" else _write_pt2(program, temporary)
        sizes = [_batch_of(one) or 0 for one in tried]
        cases = zip(sizes, tried, expected, strict=True)
        found = {} if run is None else {size: _difference(run(one), there) for size, one, there in cases}
        _judge(found, made)
    return Exported(place, to, len(blocks_of(made)), found)


def _check(model: nn.Module, plain: bool) -> None:
    if not isinstance(model, nn.Module):
        raise ExportError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise ExportError(wrapper.refusal("export"))
    kinds = {name: f"{type(module).__module__}." for name, module in model.named_modules()}
    equilibrium = next((name for name, kind in kinds.items() if kind.startswith("solver_plugins.equilibrium.")), None)
    if plain and equilibrium is not None:
        raise ExportError(
            f"Expected a model that has a plain form; {equilibrium!r} is an equilibrium, and no plain layer computes "
            "the same: export it with to='onnx' or to='pt2'."
        )
    drawing = [name for name, block in blocks_of(model).items() if block.solver.samples_in_evaluation]
    if drawing:
        raise ExportError(
            f"Expected solvers that draw nothing in evaluation; {', '.join(drawing[:5])} do, and a program would give "
            "other outputs at every call: set_eval_mode(model, 'deterministic')."
        )


def _batch_of(inputs: Inputs) -> int | None:
    sizes = {one.shape[0] for one in pytree.tree_leaves((inputs.args, inputs.kwargs)) if _has_batch(one)}
    return sizes.pop() if len(sizes) == 1 else None


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _resized(inputs: Inputs) -> Inputs:
    """Returns inputs with one sample more, in another order."""

    def longer(leaf: Any) -> Any:
        return torch.cat([leaf.flip(0), leaf[:1]]) if _has_batch(leaf) else leaf

    return Inputs(*pytree.tree_map(longer, (inputs.args, inputs.kwargs)))


def _outputs(returned: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(returned) if isinstance(one, Tensor)]


def _expected(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    try:
        with torch.no_grad():
            return _outputs(model(*inputs.args, **inputs.kwargs))
    except Exception as error:
        raise ExportError(
            f"This {type(model).__name__} does not run on a batch of {_batch_of(inputs)}: {type(error).__name__}: "
            f"{_first(error)} Pass other example_inputs, or dynamic_batch=False for one batch size."
        ) from error


def _program(model: nn.Module, inputs: Inputs, batch: int | None) -> torch.export.ExportedProgram:
    dynamic = torch.export.Dim.DYNAMIC

    def shape(leaf: Any) -> Any:
        return {0: dynamic} if batch is not None and _has_batch(leaf) else None

    if batch is not None and batch < 2:
        raise ExportError(f"Expected example inputs with two samples or more; found {batch}.")
    bound = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments
    try:
        program = torch.export.export(
            model, inputs.args, inputs.kwargs, dynamic_shapes=pytree.tree_map(shape, dict(bound))
        )
    except SolverPluginsError:
        raise
    except Exception as error:
        hint = "" if batch is None else " Does it export with dynamic_batch=False?"
        raise ExportError(
            f"torch.export cannot export this {type(model).__name__}: {type(error).__name__}: {_first(error)}{hint}"
        ) from error
    limits = {str(name): found for name, found in program.range_constraints.items() if found.upper < _ENDLESS}
    if batch is not None and limits:
        raise ExportError(
            f"This {type(model).__name__} exports for sizes within {limits} only; pass dynamic_batch=False for the "
            "batch size of the example inputs alone."
        )
    return program


Run = Callable[[Inputs], list[Tensor]]


def _write_pt2(program: torch.export.ExportedProgram, path: Path) -> Run:
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    return lambda inputs: _outputs(loaded(*inputs.args, **inputs.kwargs))


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> Run | None:
    for needed in ("onnx", "onnxscript"):
        if importlib.util.find_spec(needed) is None:
            raise ExportError(f"Exporting to ONNX needs {needed}: pip install 'solver-plugins[export]'.")
    try:
        with warnings.catch_warnings():
            # About the exporter's own parts, on which nobody can act here.
            warnings.simplefilter("ignore")
            made = torch.onnx.export(program, dynamo=True, verbose=False)
            assert made is not None
            made.save(path)
    except Exception as error:
        raise ExportError(f"torch.onnx cannot translate this program: {_reason(error)}") from error
    if importlib.util.find_spec("onnxruntime") is None:
        warn(
            "The ONNX file was written but not checked, because onnxruntime is not installed: pip install "
            "'solver-plugins[export]'.",
            SolverPluginsWarning,
        )
        return None
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(inputs: Inputs) -> list[Tensor]:
        given = [one.numpy() for one in _outputs((inputs.args, inputs.kwargs))]
        return [torch.from_numpy(one) for one in session.run(None, dict(zip(names, given, strict=True)))]

    return run


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of all outputs, each relative to its largest number."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return math.inf
    gaps = [0.0]
    for one, other in zip(found, expected, strict=True):
        apart, scale = (one.detach().double() - other.detach().double()).abs(), other.detach().double().abs()
        gaps.append(float(apart.max() / scale.max().clamp_min(1e-30)) if apart.numel() else 0.0)
    # A NaN is the largest of all, wherever it stands.
    return max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)


def _judge(found: dict[int, float], model: nn.Module) -> None:
    half = any(one.is_floating_point() and one.dtype.itemsize < 4 for one in model.state_dict().values())
    allowed = _LOWER if half else TOLERANCE
    for size, gap in found.items():
        if not gap <= allowed:
            raise ExportError(
                f"The program does not compute what the model does: with a batch of {size} its outputs differ by "
                f"{gap:.1e} of the largest one (allowed: {allowed:.0e}). Nothing was written."
            )


def _reason(error: BaseException) -> str:
    """Returns the innermost cause, in which the exporter names what it lacks."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {_first(error)}"


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
