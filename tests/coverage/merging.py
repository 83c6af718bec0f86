"""Merges the affine blocks of many models, and loads them where this package is not installed.

    python -m tests.coverage.merging [--all] [--filter GLOB] [--seconds S] [--output FILE]

Without ``--all`` it is the sample of CI. Each line is a model: how many of its blocks are merged, and how far its
outputs lie apart. Then the plain libraries load them, in a process that cannot import ``solver_plugins``. A run
continues where the last one stopped: models that ``--output`` holds already are left out.
"""

import argparse
import contextlib
import datetime
import fnmatch
import importlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
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
from tests.coverage.result import Case, CheckError, NotBuiltError, NotFedError, told
from tests.coverage.run import Task, append, done, still_to_do, versions, when_and_with_what
from tests.coverage.sample import tasks
from tests.coverage.weights import fill_weights, measured_statistics

CLOSE = 1e-5
"""Largest difference of the outputs in float32, relative to their scale."""
ITERS = 2
"""A random network is blown up by many iterations, and rounding with it."""
SEVERAL = 20
"""How many models one other process loads."""


class NotRunError(Exception):
    """The plain model does not run here, or gives numbers that are not finite."""


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
        NotRunError: If the plain model does not run.
    """
    case = importlib.import_module(f"tests.coverage.{task.library}_models").case(task.name, task.family)
    model = case.model or case.build()
    fill_weights(model)
    try:
        with measured_statistics(model), torch.no_grad():
            passes.train(model, case.inputs)
        finite = passes.all_finite(passes.evaluate(model, case.inputs))
    except Exception as error:
        raise NotRunError(told(error)) from error
    if not finite:
        raise NotRunError("outputs of the plain model are not finite")
    kinds = {name: type(module) for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    example = case.inputs if case.native is not None or case.given else None
    convert_model(model, "proxgd", ITERS, pattern="all", example_inputs=example)
    blocks, expected = blocks_of(model), passes.evaluate(model, case.inputs)
    with contextlib.suppress(ConversionError):
        merge_model(model, strict=False)
    apart, left = _apart(task, expected, model, case), blocks_of(model)
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
        apart = max(apart, _apart(task, expected, model, case))
        wrong = [name for name, module in model.named_modules() if type(module) is not kinds[name]]
        if wrong:
            raise CheckError(f"{task.name}: {wrong[:3]} are not of their class")
    plain = model if len(left) < len(blocks) else None
    return Merged(case, plain, expected, len(blocks) - len(left), len(blocks), apart)


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


def main() -> int:
    """Runs the models that are left, prints what all results say, and returns 1 if a model fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="all models in place of the sample of CI")
    parser.add_argument("--filter", metavar="GLOB", default="*", help="only names like this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin with no further model after this time")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("runs/merging.jsonl"), help="results (%(default)s)"
    )
    options, start = parser.parse_args(), time.monotonic()
    warnings.simplefilter("ignore")
    by_library = [tasks([library], None if options.all else "ci") for library in ("timm", "transformers")]
    # One of each library in turn, so that what a run that was stopped has done is a sample of all.
    turns = [task for pair in itertools.zip_longest(*by_library) for task in pair if task is not None]
    chosen = [task for task in turns if fnmatch.fnmatch(task.name, options.filter)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    left = iter(still_to_do(chosen, options.output, retry_failed=False))
    while several := [task for task in itertools.islice(left, SEVERAL) if time.monotonic() - start < options.seconds]:
        for row in rows_of(several):
            print(f"{row['name']}: {row['merged']} of {row['blocks']} blocks merged{_how(row)}", flush=True)
            append(options.output, row)
    rows = [found for task in chosen if (found := done(options.output).get((task.library, task.name)))]
    print(summary(rows, len(chosen)))
    return int(any(row["failures"] for row in rows))


def rows_of(several: Sequence[Task]) -> list[dict[str, Any]]:
    """Merges some models, loads them elsewhere, and returns a result for each."""
    made_with, rows = {"date": datetime.date.today().isoformat(), "versions": versions()}, []
    with tempfile.TemporaryDirectory() as place:
        folders: list[pathlib.Path] = []
        for task in several:
            row: dict[str, Any] = {
                "library": task.library,
                "name": task.name,
                "blocks": 0,
                "merged": 0,
                "error": 0.0,
                **made_with,
            }
            row |= {"loaded": None, "failures": {}, "foreign": None}
            rows.append(row)
            try:
                one = merged(task)
                row |= {"blocks": one.blocks, "merged": one.merged, "error": one.error}
                if one.model is not None:
                    folders.append(pathlib.Path(place) / task.name)
                    write(one, folders[-1])
            except (NotBuiltError, NotFedError, NotRunError) as error:
                row["foreign"] = told(error)
            except Exception as error:
                row["failures"] = {"merged": told(error)}
        try:
            apart = loaded(folders) if folders else {}
        except CheckError:
            apart = {}
        for row in rows:
            folder = pathlib.Path(place) / row["name"]
            if folder in folders:
                try:
                    row["loaded"] = apart[row["name"]] if apart else loaded([folder])[row["name"]]
                except CheckError as error:
                    row["failures"]["loaded"] = told(error)
    return rows


def summary(rows: Sequence[dict[str, Any]], asked: int) -> str:
    """Returns what some results say, in a few lines."""
    whole = [row for row in rows if row["merged"]]
    errors = [row["error"] for row in whole] + [row["loaded"] or 0.0 for row in whole]
    made_with, when = when_and_with_what(list(rows))
    lines = [
        f"{len(rows)} of {asked} models, {when}, {', '.join(' '.join(pair) for pair in sorted(made_with.items()))}",
        f"{len(whole)} have affine blocks: {sum(row['merged'] for row in whole)} of "
        f"{sum(row['blocks'] for row in whole)} blocks merged, outputs at most {max(errors, default=0.0):.1e} apart",
        f"{sum(row['loaded'] is not None for row in rows)} loaded without this package",
        f"{sum(row['foreign'] is not None for row in rows)} do not run here as plain models",
        f"{sum(bool(row['failures']) for row in rows)} failed",
    ]
    return "\n".join([*lines, *(f"  {row['name']}: {row['failures']}" for row in rows if row["failures"])])


def _how(row: dict[str, Any]) -> str:
    if row["foreign"] or row["failures"]:
        return f": {row['foreign'] or row['failures']}"
    return f", {row['error']:.1e} apart" + ("" if row["loaded"] is None else f", {row['loaded']:.1e} elsewhere")


if __name__ == "__main__":
    sys.exit(main())
