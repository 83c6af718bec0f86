"""One forward pass of a model, written down: which tensor went where."""

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from solver_plugins.surgery.clone import clone, shorten_recurrence, to_meta, to_own
from solver_plugins.surgery.errors import RecordError
from solver_plugins.surgery.inputs import Inputs, candidate_inputs, example_for, read_inputs
from solver_plugins.surgery.trace import Argument, Call, Ref, Tracer, Value, ValueKind
from solver_plugins.surgery.untouched import left_as_it_was, unnoticed
from solver_plugins.wrappers import wrapper_of

__all__ = ["Argument", "Call", "Record", "Ref", "Value", "record"]


@dataclass(frozen=True)
class Record:
    """What one forward pass did.

    Attributes:
        outputs: Ids of the values that the model returned.
        device: The device that the pass ran on: "meta", or the model's own.
        seconds: How long it took, failed attempts included.
        call_counts: How often each module was called; modules that never were are missing.
        aliases: For a module registered under several names: its first name, and the others.
        shared_parameters: For a Parameter that several modules hold: its first name, and the others.
    """

    calls: list[Call]
    values: list[Value]
    outputs: tuple[int, ...]
    device: str
    seconds: float
    call_counts: dict[str, int]
    aliases: dict[str, tuple[str, ...]]
    shared_parameters: dict[str, tuple[str, ...]]


def record(
    model: nn.Module,
    example_inputs: Any = None,
    attributes: Mapping[tuple[str, str], float] | None = None,
    training: bool = True,
) -> Record:
    """Runs a model once and writes down what it did.

    A copy of the module tree without weights runs on the meta device, which costs no arithmetic. A model that looks at
    its data runs on its own device instead, as a copy that shares its Parameters. Dropout is on, and BatchNorm uses its
    running statistics. The model stays as it is, and so do the random number generators.

    Args:
        model: The model.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments; by default they are
            made from what the model says about itself (see :func:`~solver_plugins.surgery.inputs.example_inputs_for`).
        attributes: What attributes of the copy's modules are set to, by the module's name and their own.
        training: Whether the pass is one of training, with dropout.

    Raises:
        RecordError: If there are no inputs, or the forward pass fails on both devices. The message says what to do.
    """
    start = time.perf_counter()
    _check(model)
    failures: list[tuple[str, Exception]] = []
    own = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    for device in dict.fromkeys((torch.device("meta"), own)):
        given = None if example_inputs is None else read_inputs(example_inputs)
        for inputs in candidate_inputs(model, small=device.type != "meta") if given is None else [given]:
            # Tensors that a model creates without a device: some models need them on meta, others read their values.
            for everywhere in (True, False) if device.type == "meta" else (False,):
                try:
                    return _attempt(model, inputs, device, everywhere, start, attributes or {}, training)
                except Exception as error:
                    failures.append((device.type, error))
    raise _failure(model, failures, example_inputs is not None) from failures[-1][1]


def _attempt(
    model: nn.Module,
    inputs: Inputs,
    device: torch.device,
    everywhere: bool,
    start: float,
    attributes: Mapping[tuple[str, str], float],
    training: bool,
) -> Record:
    names = {module: name for name, module in model.named_modules()}
    # On its own device the pass could reach buffers of the model through a closure.
    untouched = unnoticed() if device.type == "meta" else left_as_it_was(model)
    with untouched, contextlib.ExitStack() as stack:
        made, originals = clone(model, to_meta if device.type == "meta" else to_own)
        _set_modes(made, training)
        copies = {names[original]: copy for copy, original in originals.items()}
        for (owner, attribute), value in attributes.items():
            vars(copies[owner])[attribute] = value
        # What a model draws decides the same in every pass.
        torch.default_generator.manual_seed(0)
        random.seed(0)
        if device.type == "meta":
            shorten_recurrence(made)
        tracer = Tracer(originals, names, _named_tensors(made))
        args, kwargs = inputs.to(device)
        tracer.mark((args, kwargs), "input")
        stack.enter_context(torch.no_grad())
        if everywhere:
            stack.enter_context(torch.device(device))
        with tracer.watching():
            result = made(*args, **kwargs)
        tracer.mark_outputs(result)
    return Record(
        calls=tracer.calls,
        values=tracer.values,
        outputs=tuple(value.id for value in tracer.values if value.is_output),
        device=device.type,
        seconds=time.perf_counter() - start,
        call_counts=tracer.call_counts,
        aliases=_others((module, name) for name, module in model.named_modules(remove_duplicate=False)),
        shared_parameters=_others(
            # A module with two names is one module: only the first is looked at.
            (parameter, f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ),
    )


def _others(pairs: Iterator[tuple[Any, str]]) -> dict[str, tuple[str, ...]]:
    """Groups names by object and keeps the objects with several."""
    groups: dict[int, list[str]] = {}
    for thing, name in pairs:
        groups.setdefault(id(thing), []).append(name)
    return {first: tuple(rest) for first, *rest in groups.values() if rest}


def _named_tensors(made: nn.Module) -> dict[int, tuple[ValueKind, str]]:
    tensors: dict[int, tuple[ValueKind, str]] = {id(one): ("buffer", name) for name, one in made.named_buffers()}
    return tensors | {id(one): ("parameter", name) for name, one in made.named_parameters()}


def _set_modes(made: nn.Module, training: bool) -> None:
    """Puts a copy in a mode: training, so that dropout is seen. Norms and layer dropping stay independent of data.

    BatchNorm in training mode refuses one value per channel, and the graph is the same.
    """
    for module in made.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        module.__dict__["training"] = training and not isinstance(module, _BatchNorm)
        # A whole layer skipped by the throw of a coin would look as if it were never called.
        for owner in (module, vars(module).get("config")):
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if isinstance(getattr(owner, "__dict__", {}).get(name), float):
                    owner.__dict__[name] = 0.0


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise RecordError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    wrapper = wrapper_of(model)
    if wrapper is not None and wrapper.inside is not None:
        raise RecordError(f"Expected a plain model; found {wrapper.label}: pass model.{wrapper.inside}.")
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise RecordError(f"{lazy[0]!r} is lazy and has no shape yet; run one forward pass of the model first.")


def _failure(model: nn.Module, failures: list[tuple[str, Exception]], given: bool) -> RecordError:
    label = type(model).__name__
    # An error that both devices raise is said once.
    seen = dict.fromkeys(f"on {device}, {type(error).__name__}: {error}" for device, error in failures)
    lines = "".join(f"\n  - {line[:400]}" for line in seen)
    advice = (
        "Check that model(*inputs) runs by itself in training mode with these inputs."
        if given
        else f"Pass example_inputs= that the model's forward takes: a tensor, a tuple, or a dict.{example_for(model)}"
    )
    return RecordError(f"The forward pass of {label} failed, so its blocks cannot be found. {advice} Tried:{lines}")
