"""Merges the affine blocks of many models, and compares the outputs: ``python -m tests.coverage.merging [--all]``.

Without ``--all`` it is the sample of CI. Each line is a model: how many of its blocks are merged, and how far the
outputs lie apart.
"""

import argparse
import contextlib
import warnings

import torch

from solver_plugins import convert_model, merge_model
from solver_plugins.blocks import blocks_of
from solver_plugins.blocks.shell import Shell
from solver_plugins.surgery import ConversionError
from tests.coverage import passes
from tests.coverage.result import CheckError
from tests.coverage.run import Task
from tests.coverage.sample import tasks
from tests.coverage.weights import fill_weights, measured_statistics

CLOSE = 1e-5
"""Largest difference of the outputs in float32, relative to their scale."""


def merged(task: Task) -> tuple[int, int, float]:
    """Returns how many blocks of a model are merged, how many it has, and how far its outputs lie apart.

    Raises:
        CheckError: If that is too far, or a merged layer is not of its plain class.
    """
    from tests.coverage import timm_models, transformers_models

    cases = timm_models if task.library == "timm" else transformers_models
    case = cases.case(task.name, task.family)
    model = case.model or case.build()
    fill_weights(model)
    with measured_statistics(model), torch.no_grad():
        passes.train(model, case.inputs)
    kinds = {name: type(module) for name, module in model.named_modules()}
    example = case.inputs if case.native is not None or case.given else None
    # Two iterations: a random network is blown up by many of them, and rounding with it.
    convert_model(model, "proxgd", 2, pattern="all", example_inputs=example)
    count, expected = len(blocks_of(model)), passes.evaluate(model, case.inputs)
    with contextlib.suppress(ConversionError):
        merge_model(model, strict=False)
    error = passes.apart(expected, passes.evaluate(model, case.inputs))
    if not error <= CLOSE:
        raise CheckError(f"{task.name}: merged outputs are {error:.2g} of the scale apart")
    left = blocks_of(model)
    wrong = [name for name, module in model.named_modules() if type(module) is not kinds[name]]
    if any(not isinstance(model.get_submodule(name), Shell) for name in wrong) or (wrong and not left):
        raise CheckError(f"{task.name}: {wrong[:3]} are not of their class")
    return count - len(left), count, error


def main() -> None:
    """Runs all models and ends with an error if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="All models in place of the sample of CI.")
    everything, failed = parser.parse_args().all, 0
    warnings.simplefilter("ignore")
    for task in tasks(["timm", "transformers"], None if everything else "ci"):
        try:
            some, count, error = merged(task)
            print(f"{task.name}: {some} of {count} blocks merged, {error:.1e} apart", flush=True)
        except Exception as error:
            failed += 1
            print(f"{task.name}: FAILED, {type(error).__name__}: {error}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
