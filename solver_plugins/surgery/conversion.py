"""A conversion as data: enough to convert a plain model without walking it."""

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from solver_plugins.config import StrictConfig
from solver_plugins.prox import PRIORS, Prior, make_prior
from solver_plugins.solve import Solver
from solver_plugins.surgery.errors import ConversionError
from solver_plugins.surgery.spec import ConversionSpec

FORMAT: Literal[2] = 2
"""Version of the written form. Version 1 called the outlet of a block its host, and held no spec."""
Role = Literal["layer", "norm", "norm-activation", "activation"]
ROWS = ("gain", "shift", "gates")
"""The fields of a block with a number for each output feature."""


class BlockRecord(StrictConfig):
    """One converted block."""

    layer: str = Field(description="Name of the linear layer.")
    outlet: str = Field(description="Name of the module where the result comes out: the layer, its norm or activation.")
    role: Role = Field(description="What the outlet is.")
    norm: str | None = Field(None, description="Name of the folded norm, where it is not the outlet.")
    solver: str = Field(description="Registered name of the solver.")
    settings: dict[str, Any] = Field(description="The solver's options, all of them.")
    prior: str | None = Field(description="Registered name of the prior; None for a function of the user's.")
    parameters: dict[str, int | float | Literal["inf", "-inf"]] = Field(
        default_factory=dict, description="The prior's parameters; JSON has no infinite numbers, so these are words."
    )
    partner: str | None = Field(None, description="Name of the activation module whose parameters the prior reads.")
    scope: str | None = Field(
        None, description="Name of the innermost module that runs both layer and outlet, where these are two."
    )
    routed: bool = Field(False, description="Whether the block undoes a dropout that serves other layers, too.")
    blend: float = Field(1.0, ge=0, le=1, description="How much of the solver there is.")
    gate: Literal["channel", "scalar"] | None = Field(
        None, description="Which gate there is: one per output feature, or one."
    )
    gates: tuple[float, ...] | None = Field(None, description="Its numbers; null for a closed one.")
    gain: tuple[float, ...] | None = Field(None, description="Calibrated factors, one per output feature.")
    shift: tuple[float, ...] | None = Field(None, description="What is added to them, one per output feature.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rows_from_text(cls, data: Any) -> Any:
        texts = {name: data[name] for name in ROWS if isinstance(data.get(name), str)} if isinstance(data, dict) else {}
        return {**data, **{name: _row_from(text) for name, text in texts.items()}} if texts else data

    def make_prior(self) -> Prior:
        """Returns the prior that this record names."""
        assert self.prior is not None
        given = {key: float(one) if isinstance(one, str) else one for key, one in self.parameters.items()}
        return make_prior(self.prior, **given)


class Conversion(StrictConfig):
    """A whole conversion; ``to_json`` and ``from_json`` write and read it."""

    format: Literal[2] = Field(FORMAT, description="Version of this form.")
    spec: ConversionSpec | None = Field(None, description="What was asked for; null where that cannot be written down.")
    blocks: tuple[BlockRecord, ...] = Field(description="The converted blocks.")
    passed_over: tuple[str, ...] = Field((), description="Names of the dropouts that solvers replace.")
    routed: tuple[str, ...] = Field((), description="Names of the dropouts that solvers share with layers.")
    rates: dict[str, float] = Field(
        {}, description="Attributes that give functional dropouts their rates, and the rates that solvers took over."
    )
    trained: bool = Field(False, description="Whether weights were trained with these solvers.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_this_format(cls, data: Any) -> Any:
        found = data.get("format", FORMAT) if isinstance(data, Mapping) else FORMAT
        if found != FORMAT:
            newer = isinstance(found, int) and found > FORMAT
            remedy = "upgrade solver_plugins" if newer else "convert the plain model again and save it anew"
            raise ValueError(
                f"expected a conversion of format {FORMAT}; found format {found!r}, of another version: {remedy}"
            )
        return data

    @property
    def names(self) -> set[str]:
        """The names of all modules that the conversion is about."""
        parts = [(block.layer, block.outlet, block.norm, block.partner, block.scope) for block in self.blocks]
        named = {name for part in parts for name in part if name is not None}
        return named.union(self.passed_over, self.routed, (path.rpartition(".")[0] for path in self.rates))

    def options(self) -> dict[str, Any]:
        """Returns the conversion as plain JSON-ready values; raises ConversionError for a prior that has no name."""
        for block in self.blocks:
            if block.prior is None:
                raise ConversionError(f"{block.layer}: its prior has no registered name, so it cannot be written down.")
        return super().options()

    def short(self) -> dict[str, Any]:
        """Returns the same with rows of numbers as texts, which :meth:`parse` reads, too."""
        data = self.options()
        for block in data["blocks"]:
            block.update({name: _text_of(block[name]) for name in ROWS if block[name] is not None})
        return data


def _text_of(row: list[float]) -> str:
    exact = np.array(row, "<f8")
    short = exact.astype("<f4")
    kept, kind = (short, "float32") if np.array_equal(short.astype("<f8"), exact) else (exact, "float64")
    return f"{kind}:{base64.b64encode(kept.tobytes()).decode()}"


def _row_from(text: str) -> tuple[float, ...]:
    kind, _, numbers = text.partition(":")
    try:
        dtype = {"float32": "<f4", "float64": "<f8"}[kind]
        return tuple(np.frombuffer(base64.b64decode(numbers, validate=True), dtype).tolist())
    except (KeyError, ValueError):
        raise ValueError(f"expected numbers, or 'float32:' or 'float64:' and base64; found {text[:20]!r}") from None


def record_block(
    layer: str, outlet: str, role: Role, solver: Solver, prior: Prior, *, partner: str | None, **more: Any
) -> BlockRecord:
    """Writes one block down; a prior without a registered name, or with other parameters than numbers, is left out."""
    parameters = None if partner is not None or prior.learnable else _parameters(prior)
    name = prior.name if partner is not None or parameters is not None else None
    return BlockRecord(
        layer=layer, outlet=outlet, role=role, solver=solver.name, settings=solver.config.options(), prior=name,
        parameters=parameters or {}, partner=partner, **more,
    )  # fmt: skip


def _parameters(prior: Prior) -> dict[str, Any] | None:
    """Returns the parameters that make a registered prior, or None if there are none that can be written down."""
    if prior.name not in PRIORS or PRIORS.get(prior.name) is not type(prior):
        return None
    if not dataclasses.is_dataclass(prior):
        # What another class keeps for itself is not known to be its parameters.
        return None if vars(prior) else {}
    found = {field.name: getattr(prior, field.name) for field in dataclasses.fields(prior)}
    if not all(isinstance(value, (int, float)) for value in found.values()):
        return None
    words = {math.inf: "inf", -math.inf: "-inf"}
    return {key: words.get(value, value) for key, value in found.items()}
