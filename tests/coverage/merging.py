"""Merges the affine blocks of many models, and loads them where this package is not installed.

    python -m tests.coverage.merging [--all] [--filter GLOB]

Without ``--all`` it is the sample of CI. Each line is a model: how many of its blocks are merged, and how far its
outputs lie apart. Then the plain libraries load them, in a process that cannot import ``solver_plugins``.
"""

import argparse
import contextlib
import fnmatch
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from solver_plugins import convert_model, merge_model
from solver_plugins.blocks import blocks_of
from solver_plugins.blocks.shell import Shell
from solver_plugins.surgery import ConversionError
from tests.coverage import passes
from tests.coverage.result import Case, CheckError
from tests.coverage.run import Task
from tests.coverage.sample import tasks
from tests.coverage.weights import fill_weights, measured_statistics

CLOSE = 1e-5
"""Largest difference of the outputs in float32, relative to their scale."""
ITERS = 2
"""A random network is blown up by many iterations, and rounding with it."""
SEVERAL = 20
"""How many models one other process loads."""


@dataclass(frozen=True)
class Merged:
    """A model whose affine blocks became plain layers.

    Attributes:
        case: The model.
        model: The merged one, without any solver; None if none of its blocks is affine.
        expected: Outputs of the solvers.
        merged: How many blocks are merged.
        blocks: How many it has, with those that are not affine.
        error: How far the outputs lie apart.
    """

    case: Case
    model: nn.Module | None
    expected: list[Tensor]
    merged: int
    blocks: int
    error: float


def merged(task: Task) -> Merged:
    """Merges every affine block of a model.

    Raises:
        CheckError: If the outputs lie too far apart, or a merged layer is not of its plain class.
    """
    case = importlib.import_module(f"tests.coverage.{task.library}_models").case(task.name, task.family)
    model = case.model or case.build()
    fill_weights(model)
    with measured_statistics(model), torch.no_grad():
        passes.train(model, case.inputs)
    kinds = {name: type(module) for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    example = case.inputs if case.native is not None or case.given else None
    convert_model(model, "proxgd", ITERS, pattern="all", example_inputs=example)
    blocks, expected = blocks_of(model), passes.evaluate(model, case.inputs)
    with contextlib.suppress(ConversionError):
        merge_model(model, strict=False)
    error, left = _apart(task, expected, model, case), blocks_of(model)
    wrong = [name for name, module in model.named_modules() if type(module) is not kinds[name]]
    if any(not isinstance(model.get_submodule(name), Shell) for name in wrong) or (wrong and not left):
        raise CheckError(f"{task.name}: {wrong[:3]} are not of their class")
    if left and len(left) < len(blocks):
        # The affine blocks alone, so that the whole network becomes plain.
        model = case.build()
        model.load_state_dict(weights)
        convert_model(model, "proxgd", ITERS, pattern="all", exclude=list(left), example_inputs=example)
        if blocks_of(model).keys() != blocks.keys() - left.keys():
            raise CheckError(f"{task.name}: without {list(left)[:3]} other blocks are converted")
        expected = passes.evaluate(model, case.inputs)
        merge_model(model)
        error = max(error, _apart(task, expected, model, case))
        wrong = [name for name, module in model.named_modules() if type(module) is not kinds[name]]
        if wrong:
            raise CheckError(f"{task.name}: {wrong[:3]} are not of their class")
    plain = model if len(left) < len(blocks) else None
    return Merged(case, plain, expected, len(blocks) - len(left), len(blocks), error)


def _apart(task: Task, expected: list[Tensor], model: nn.Module, case: Case) -> float:
    error = passes.apart(expected, passes.evaluate(model, case.inputs))
    if not error <= CLOSE:
        raise CheckError(f"{task.name}: merged outputs are {error:.2g} of the scale apart")
    return error


def write(one: Merged, folder: pathlib.Path) -> None:
    """Writes a merged model as its library's users save it, and what it computes."""
    assert one.model is not None
    folder.mkdir()
    about: dict[str, Any] = {"library": one.case.library, "name": one.case.name}
    if one.case.library == "timm":
        _, options, _ = one.case.build.args  # type: ignore[attr-defined]
        about["options"] = {"num_classes": 10, **options}
        state = {name: value.contiguous() for name, value in one.model.state_dict().items()}
        safetensors.torch.save_file(state, folder / "model.safetensors")
    else:
        one.model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "about.json").write_text(json.dumps(about))
    kept = {"args": one.case.inputs.args, "kwargs": dict(one.case.inputs.kwargs), "expected": one.expected}
    torch.save({**kept, "seed": passes.SEED}, folder / "expected.pt")


def loaded(folders: Sequence[pathlib.Path]) -> dict[str, float]:
    """Returns how far the outputs of the plain library lie apart, by the name of each folder.

    Raises:
        CheckError: If one cannot be loaded, or lies too far apart.
    """
    script = pathlib.Path(__file__).with_name("elsewhere.py")
    command = [sys.executable, "-W", "ignore", "-P", str(script), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folders[0].parent)
    if done.returncode:
        raise CheckError(done.stderr.strip().splitlines()[-1])
    found: dict[str, float] = json.loads(done.stdout)
    wrong = [f"{name}: {error:.2g}" for name, error in found.items() if not error <= CLOSE]
    if wrong:
        raise CheckError(f"loaded without this package, outputs lie apart: {', '.join(wrong)}")
    return found


def main() -> None:
    """Runs all models and ends with an error if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="All models in place of the sample of CI.")
    parser.add_argument("--filter", metavar="GLOB", default="*", help="only names like this")
    options, failed, several, plain = parser.parse_args(), 0, 0, 0
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folders: list[pathlib.Path] = []
        found = [task for task in tasks(["timm", "transformers"], None if options.all else "ci")]
        found = [task for task in found if fnmatch.fnmatch(task.name, options.filter)]
        for number, task in enumerate(found):
            try:
                one = merged(task)
                several += 1
                print(f"{task.name}: {one.merged} of {one.blocks} blocks merged, {one.error:.1e} apart", flush=True)
                if one.model is not None:
                    folders.append(pathlib.Path(place) / task.name)
                    write(one, folders[-1])
                if folders and (len(folders) == SEVERAL or number == len(found) - 1):
                    apart = loaded(folders)
                    plain += len(apart)
                    print(
                        f"{len(apart)} loaded by their libraries: at most {max(apart.values()):.1e} apart", flush=True
                    )
                    folders = []
            except Exception as error:
                failed += 1
                print(f"{task.name}: FAILED, {type(error).__name__}: {error}", flush=True)
    print(f"{several} of {len(found)} models merged, {plain} loaded without this package, {failed} failed.")
    raise SystemExit(min(failed, 1))


if __name__ == "__main__":
    main()
