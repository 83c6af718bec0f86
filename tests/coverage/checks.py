"""All checks of one model, with the reason for each that does not hold."""

import contextlib
import fcntl
import gc
import pathlib
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks import blocks_of
from solver_plugins.surgery import (
    Block,
    Conversion,
    ConversionSpec,
    apply_conversion,
    conversion_of,
    convert_model,
    match,
    record,
    revert_model,
    select,
)
from solver_plugins.surgery.clone import clone
from tests.coverage import passes
from tests.coverage.files import load_weights, save_weights
from tests.coverage.reference import Watch
from tests.coverage.result import ITERS, TOLERANCE, Case, CheckError, NotBuiltError, NotFedError, Row, told
from tests.coverage.same import network_id
from tests.coverage.steps import rough_steps
from tests.coverage.weights import (
    buffers_of,
    drop_nothing,
    fill_weights,
    measured_statistics,
    put_back,
)

LARGE = 350_000_000
"""Only one model with more parameters than this is in memory at a time."""
SMALL = 5_000_000


def check(
    make: Callable[[], Case], library: str, name: str, family: str, known: Mapping[str, str] | None = None
) -> Row:
    """Runs all checks of one model; never raises.

    Args:
        make: Finds a case for the model: how it is built, and the smallest inputs that it takes.
        library: "timm" or "transformers".
        name: The model's name.
        family: Its family.
        known: Names of checked models by their network. A model that is one of these networks is only walked.
    """
    row = Row(library, name, family)
    start, wall = time.process_time(), time.perf_counter()
    with warnings.catch_warnings(), rough_steps():
        warnings.simplefilter("ignore")
        checks = _Check(row, known or {})
        try:
            checks.run(make)
        except Exception as error:
            row.failures.setdefault("check", told(error))
        if checks.turn is not None:
            checks.turn.close()
    del checks
    if row.parameters > SMALL:
        # Of all that transformers imports, this takes longer than the checks of a small model.
        gc.collect()
    row.seconds, row.wall_seconds = round(time.process_time() - start, 2), round(time.perf_counter() - wall, 2)
    row.stages = {stage: round(seconds, 2) for stage, seconds in row.stages.items()}
    return row


class _Check:
    """The checks of one model, and what they pass on to each other."""

    def __init__(self, row: Row, known: Mapping[str, str]):
        self.row = row
        self.known = known
        self.turn: IO[bytes] | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Notes whether the check within it holds."""
        start = time.process_time()
        try:
            yield
        except Exception as error:
            self.row.failures.setdefault(name, told(error))
            if name in self.row.passed:
                self.row.passed.remove(name)
        else:
            if name not in self.row.failures and name not in self.row.passed:
                self.row.passed.append(name)
        self.row.stages[name] = self.row.stages.get(name, 0.0) + time.process_time() - start

    def within(self, name: str, error: float, what: str = "", tolerance: float = TOLERANCE) -> None:
        """Raises CheckError for an error above the tolerance, NaN included."""
        before = self.row.errors.get(name, 0.0)
        self.row.errors[name] = float(f"{max(error, before) if error == error else error:.3g}")
        if not error <= tolerance:
            raise CheckError(f"error {error:.3g} of the scale, above {tolerance:g}{what and f': {what}'}")

    def run(self, make: Callable[[], Case]) -> None:
        row, start = self.row, time.process_time()
        try:
            self.case = make()
            self.model = self.case.model or self.case.build()
            row.parameters = sum(parameter.numel() for parameter in self.model.parameters())
            if self.case.native is not None:
                row.network = network_id(self.model, self.case.inputs)
            row.same_as = self.known.get(row.network or "")
            if row.same_as is None:
                self.turn = _one_at_a_time() if row.parameters > LARGE else None
                self._plain_passes()
        except Exception as error:
            row.foreign = told(error)
            row.missing = {NotBuiltError: "built", NotFedError: "fed"}.get(type(error), "ran")
            return
        row.stages["plain"] = time.process_time() - start
        row.reduced, row.automatic = self.case.reduced, not self.case.given
        shapes = [tuple(t.shape) for t in (*self.case.inputs.args, *self.case.inputs.kwargs.values()) if _is_tensor(t)]
        row.input = ", ".join("x".join(map(str, shape)) for shape in shapes)
        self._walk()
        if not self.blocks or row.same_as is not None:
            return
        twin, _ = clone(self.model, lambda tensor: tensor)
        self._once()
        if "converted" in row.failures:
            return
        self._several(twin)
        with self.stage("reverted"):
            revert_model(self.model)
            self._check_plain_again()

    def _plain_passes(self) -> None:
        """Notes what the plain model computes in both modes."""
        model, inputs = self.model, self.case.inputs
        fill_weights(model)
        with measured_statistics(model), torch.no_grad(), without_drops(model):
            passes.train(model, inputs)
        self.buffers = buffers_of(model)
        self.config = _config(model)
        self.eval_output = passes.evaluate(model, inputs)
        with without_drops(model):
            outputs = passes.train(model, inputs)
            self.train_output = [tensor.detach() for tensor in outputs]
            self.gradients = passes.backward(model, outputs)
        if not passes.all_finite(self.eval_output + self.train_output):
            raise CheckError("the plain model's output is not finite with random weights")
        self.statistics = buffers_of(model)
        put_back(model, self.buffers)
        can_generate: Any = getattr(model, "can_generate", None)
        if can_generate is not None and can_generate():
            try:
                self.text = passes.generated(model, inputs)
                self.row.generates = "yes"
            except Exception as error:
                self.row.generates = told(error)
        # What a model notes on its modules while it runs is there from now on.
        self.classes = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
        self.state = {key: (tuple(t.shape), t.dtype) for key, t in model.state_dict().items()}
        self.parameters = {name: id(parameter) for name, parameter in model.named_parameters()}

    def _walk(self) -> None:
        row = self.row
        self.blocks: list[Block] = []
        # A model that was built for another size than its pretrained weights need not say so.
        self.example = self.case.inputs if self.case.native is not None or self.case.given else None
        with self.stage("walked"):
            if self.case.native is not None:
                self._walk_native(self.case.native)
            start = time.process_time()
            made = record(self.model, self.example)
            found = match(made, self.model)
            if self.case.native is None:
                row.walk_seconds, row.device = round(time.process_time() - start, 3), made.device
        if "walked" in row.failures:
            return
        selection = select(found, ConversionSpec(solver="proxgd", pattern="all"), self.model)
        row.layers = len(found)
        self.blocks = selection.blocks
        row.blocks = dict(Counter(block.pattern for block in self.blocks))
        row.left = dict(Counter(selection.rejected.values()))

    def _walk_native(self, build: Callable[[bool], nn.Module]) -> None:
        for weights in (False, True):
            start = time.process_time()
            try:
                model = build(weights)
                start = time.process_time()
                made = record(model)
                break
            except Exception:
                if weights:
                    raise
        match(made, model)
        self.row.walk_seconds, self.row.device = round(time.process_time() - start, 3), made.device

    def _once(self) -> None:
        """Checks that one iteration is the plain model."""
        model, inputs = self.model, self.case.inputs
        with self.stage("converted"):
            convert_model(model, solver="proxgd", iters=1, pattern="all", example_inputs=self.example)
            self.conversion = conversion_of(model)
        if "converted" in self.row.failures:
            return
        with self.stage("keys"):
            self._check_keys()
        with self.stage("generated"):
            if self.row.generates == "yes":
                self.within("generated", passes.apart(self.text, passes.generated(model, inputs)))
        with self.stage("eval"):
            self.within("eval", passes.apart(self.eval_output, passes.evaluate(model, inputs)))
        outputs: list[Tensor] = []
        with without_drops(model):
            with self.stage("train"):
                outputs = passes.train(model, inputs)
                self.within("train", passes.apart(self.train_output, outputs))
            with self.stage("statistics"):
                after = buffers_of(model)
                for name, expected in self.statistics.items():
                    if expected.is_floating_point():
                        # Bounds may be infinite on purpose.
                        same = passes.same_bits([expected], [after[name]])
                        self.within("statistics", 0.0 if same else passes.apart([expected], [after[name]]), name)
            with self.stage("gradients"):
                compared = passes.backward(model, outputs, self.gradients)
                name, error = compared.worst()
                self.within("gradients", error, name)
        del outputs, self.gradients
        put_back(model, self.buffers)
        revert_model(model)

    def _check_keys(self) -> None:
        state = {key: (tuple(t.shape), t.dtype) for key, t in self.model.state_dict().items()}
        if list(state) != list(self.state) or state != self.state:
            raise CheckError(f"state-dict keys, shapes or dtypes changed: {_changed(state, self.state)}")
        parameters = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        if parameters != self.parameters:
            raise CheckError(f"Parameters are other objects: {_changed(parameters, self.parameters)}")
        wrong = [
            name
            for name, module in self.model.named_modules()
            if not isinstance(module, self.classes[name][0]) and "Parametrized" not in self.classes[name][0].__name__
        ]
        if wrong:
            raise CheckError(f"modules are no longer of their class: {wrong[:3]}")

    def _several(self, twin: nn.Module) -> None:
        """Checks that several iterations are what the reference computes."""
        model, inputs = self.model, self.case.inputs
        records = [
            block.model_copy(update={"settings": {**block.settings, "iters": ITERS}})
            for block in self.conversion.blocks
        ]
        self.conversion = self.conversion.model_copy(update={"blocks": tuple(records)})
        apply_conversion(model, self.conversion)
        if any(block.norm is not None for block in self.blocks):
            # Without a folded norm a block computes the same in both modes.
            with self.stage("reference"):
                watch = Watch(model, twin, self.blocks)
                try:
                    twin.eval()
                    passes.evaluate(model, inputs)
                finally:
                    result = watch.remove()
                self._judge("eval", result.errors)
        outputs: list[Tensor] = []
        with without_drops(model):
            with self.stage("reference"):
                watch = Watch(model, twin, self.blocks)
                try:
                    twin.train()
                    outputs = passes.train(model, inputs)
                finally:
                    result = watch.remove()
                self._judge("train", result.errors)
            with self.stage("backward"):
                bad = passes.unfinite(model, outputs)
                if bad or not passes.all_finite(outputs):
                    raise CheckError(f"gradients that are not finite: {', '.join(bad[:3]) or 'none, but the output'}")
        del outputs
        put_back(model, self.buffers)
        with self.stage("saved"):
            self._check_saved()

    def _judge(self, mode: str, errors: dict[str, float]) -> None:
        missing = {block.name for block in self.blocks} - errors.keys()
        if missing:
            raise CheckError(f"in {mode} mode blocks were never called: {sorted(missing)[:3]}")
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        wrong = sum(not error <= TOLERANCE for error in errors.values())
        patterns = {block.name: block.pattern for block in self.blocks}
        what = f"{mode} mode, {worst} ({patterns.get(worst)}), {wrong} of {len(errors)} blocks"
        self.within("reference", errors[worst], what)

    def _check_saved(self) -> None:
        """Checks that plain weights in safetensors and the conversion as JSON give the same network again."""
        expected = passes.evaluate(self.model, self.case.inputs)
        text = conversion_of(self.model).to_json()
        constants = {name: block.L.clone() for name, block in blocks_of(self.model).items()}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            shared = save_weights(self.model, path)
            fresh = self.case.build()
            missing, unexpected = load_weights(fresh, path)
            if missing - shared or unexpected:
                raise CheckError(f"a plain model did not take the weights: missing {missing}, unexpected {unexpected}")
        apply_conversion(fresh, Conversion.from_json(text))
        again = {name: block.L for name, block in blocks_of(fresh).items()}
        if constants.keys() != again.keys() or any(not torch.allclose(constants[k], again[k], 1e-5) for k in again):
            raise CheckError("other blocks or constants after loading")
        found = passes.evaluate(fresh, self.case.inputs)
        if not passes.all_finite(expected):
            self.row.notes.append(f"with {ITERS} iterations and no calibration the output overflows float32")
        if not passes.same_bits(expected, found):
            self.within("saved", passes.apart(expected, found))

    def _check_plain_again(self) -> None:
        for name, module in self.model.named_modules():
            before = self.classes[name]
            if type(module) is not before[0]:
                raise CheckError(f"{name} is a {type(module).__name__}, and was a {before[0].__name__}")
            if set(vars(module)) != before[1]:
                raise CheckError(f"{name} has other attributes: {sorted(set(vars(module)) ^ before[1])}")
        self._check_keys()
        if _config(self.model) != self.config:
            raise CheckError(f"the config has changed: {_changed(_config(self.model), self.config)}")
        if not passes.same_bits(self.eval_output, passes.evaluate(self.model, self.case.inputs)):
            raise CheckError("the output is not bit for bit that of the model before it was converted")


def _one_at_a_time() -> IO[bytes]:
    """Waits until no other process holds a large model; closing the file lets the next process continue."""
    file = (pathlib.Path(tempfile.gettempdir()) / "solver_plugins_coverage.lock").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _config(model: nn.Module) -> dict[str, Any]:
    """Returns the config of a transformers model."""
    config = getattr(model, "config", None)
    return {} if config is None or not hasattr(config, "to_dict") else dict(config.to_dict())


def _changed(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Names the first entries that differ, or says that only their order does."""
    names = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return ", ".join(names[:3]) or "their order"


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, Tensor)


@contextlib.contextmanager
def without_drops(model: nn.Module) -> Iterator[None]:
    """Within it, training drops nothing."""
    undo = drop_nothing(model)
    try:
        yield
    finally:
        for module, name, value in undo:
            setattr(module, name, value)
