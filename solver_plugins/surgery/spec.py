"""How a model is converted, as data.

``convert_model`` and ``inspect_model`` parse their arguments into a :class:`ConversionSpec`; the section ``solver:`` of
a finetune config is one, and so is a solver file; the options of ``solver-plugins inspect`` are made from its fields;
a saved conversion remembers it. A new option of a conversion is one field here, and its use.
"""

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.blocks.calibration import read_batches
from solver_plugins.blocks.gate import check_blend
from solver_plugins.config import InvalidOptionsError, OptionProblem, StrictConfig, unknown_option
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.prox import IdentityPrior
from solver_plugins.registry import DEFAULT_SOLVER, SOLVERS
from solver_plugins.solve import RateConfig, Solver, SolverConfig, check_gate
from solver_plugins.surgery.errors import option
from solver_plugins.surgery.parts import PATTERNS, Samples
from solver_plugins.surgery.targets import read_targets

Names = str | tuple[str, ...]
_Layers = Names | Callable[[str, nn.Module], bool]


class ConversionSpec(StrictConfig):
    """How layers become solvers: the arguments of ``convert_model``.

    Options of the solver may stand beside the fields: ``ConversionSpec.parse({"solver": "proxgd", "lam": 0.1})``. What
    needs no model to be checked is checked here, the solver's name and options included.
    """

    solver: str = Field(DEFAULT_SOLVER, description="A registered solver (in a config, 'name' means the same).")
    iters: int = Field(
        SolverConfig.model_fields["iters"].default, ge=1, description="How many proximal steps each block takes."
    )
    pattern: Names | None = Field(None, description="Patterns, 'strict' or 'all'; by default those of the solver.")
    targets: _Layers | None = Field(None, description="Layers to convert: names or their endings, or one regex.")
    exclude: _Layers | None = Field(None, description="Layers to leave alone, in the same forms.")
    p: float | None = Field(None, description="A rate for sampling solvers that replaces those of the dropouts.")
    nonprox: Literal["keep", "skip"] = Field(
        "keep", description="If an activation is not a proximal map: 'keep' it after the block, or 'skip' the block."
    )
    last: bool | None = Field(None, description="Whether to convert the classifier: always (true) or never (false).")
    blend: float = Field(1.0, description="0 is the original network, 1 the solver.")
    gate: Literal["channel", "scalar"] | None = Field(
        None, description="A trained gate that starts closed: one per output 'channel', or one per block ('scalar')."
    )
    calibrate: int | None = Field(
        None, ge=1, description="How many batches to calibrate on: each block gets the scale of its plain layer."
    )
    args: dict[str, Any] = Field(
        {}, description="Options of the solver itself, such as lam; a config may list them above, too."
    )

    hints: ClassVar[Mapping[str, str]] = {
        "options": "The solver's own options stand beside the others, or under 'args'.",
    }

    @classmethod
    def of(
        cls, solver: "str | ConversionSpec", options: Mapping[str, Any], near: Iterable[str] = ()
    ) -> "ConversionSpec":
        """Returns the spec that the arguments of a function mean; errors are those of :func:`convert_model`.

        ``solver`` is its name, or a ready spec, beside which all options have their defaults. ``options`` are the other
        fields, and options of the solver; ``calibrate`` may be the batches themselves. ``near`` are further arguments
        of that function, for messages about an unknown option.
        """
        if not isinstance(solver, ConversionSpec):
            return cls.parse({"solver": solver, **options}, owner=f"solver {solver!r}", context=tuple(near))
        beside = [name for name, value in options.items() if value != getattr(DEFAULTS, name, None)]
        if beside:
            raise OptionError(
                f"Expected a ConversionSpec alone; found {', '.join(beside)} beside it. Change the spec instead."
            )
        return solver

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sorted(cls, given: Any) -> Any:
        """Sorts a mapping into fields and options of the solver, wherever they stand."""
        if not isinstance(given, Mapping):
            return given
        flat: dict[str, Any] = {}
        for name, value in given.items():
            nested = name == "args" and isinstance(value, Mapping)
            inner = value if nested else {"solver" if name == "name" else name: value}
            twice = [OptionProblem(str(key), " is given twice; expected it once.") for key in inner if key in flat]
            if twice:
                raise InvalidOptionsError("", twice)
            flat |= inner
        fields = {name: flat.pop(name) for name in cls.model_fields if name in flat}
        return {"args": flat, **fields}

    @pydantic.field_validator("pattern", mode="before")
    @classmethod
    def _known_patterns(cls, given: Any) -> Any:
        if given is None:
            return None
        if not isinstance(given, Iterable):
            raise OptionError(f"Expected names of patterns, 'strict' or 'all'; found {given!r}.")
        names = (given,) if isinstance(given, str) else tuple(given)
        for name in names:
            if name not in (*PATTERNS, *_WORDS):
                raise OptionError(f"Unknown pattern {name!r}.{did_you_mean(str(name), [*PATTERNS, *_WORDS])}")
            if name in _WORDS and len(names) > 1:
                raise OptionError(f"Expected the pattern {name!r} alone; found it beside {len(names) - 1} more.")
        return names[0] if len(names) == 1 else names

    @pydantic.field_validator("targets", "exclude", mode="before")
    @classmethod
    def _readable_targets(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        if given is None or isinstance(given, str) or callable(given):
            names = given
        else:
            # Read once: an iterator has nothing left afterwards.
            names = tuple(given) if isinstance(given, Iterable) else given
        if names is not None:
            read_targets(names, str(info.field_name))
        return names

    @pydantic.field_validator("p", mode="before")
    @classmethod
    def _is_rate(cls, p: Any) -> Any:
        if p is not None and (isinstance(p, bool) or not isinstance(p, numbers.Real) or not 0 <= float(p) < 1):
            raise OptionError(f"Expected a rate p in [0, 1); found {p!r} ({type(p).__name__}).")
        return p

    @pydantic.field_validator("last", mode="before")
    @classmethod
    def _is_flag(cls, last: Any) -> Any:
        if last is not None and not isinstance(last, bool):
            raise OptionError(f"Expected last to be True, False or None; found {last!r}.")
        return last

    @pydantic.field_validator("blend", mode="before")
    @classmethod
    def _is_share(cls, blend: Any) -> Any:
        check_blend(blend)
        return blend

    @pydantic.field_validator("calibrate", mode="before")
    @classmethod
    def _counted(cls, given: Any) -> Any:
        """Counts batches, which Python code gives themselves."""
        return given if given is None or isinstance(given, (bool, int, float, str)) else len(read_batches(given))

    @pydantic.model_validator(mode="after")
    def _fits_solver(self, info: pydantic.ValidationInfo) -> Self:
        made = self.solver_class
        unknown = [name for name in self.args if name not in made.Config.model_fields]
        if unknown:
            near = {*type(self).model_fields, *(info.context or ())} - {"args", *unknown}
            raise InvalidOptionsError(
                "", [unknown_option(str(name), [type(self), made.Config], near) for name in unknown]
            )
        solver = made.from_options(iters=self.iters, **self.args)
        if self.gate is not None:
            # What depends on the prior of a block is checked when blocks are known.
            check_gate(solver, IdentityPrior(), self.gate)
        if self.p is not None and self.samples == "nothing":
            raise OptionError(f"A deterministic solver draws nothing, so {option('p')} has no meaning for it; drop it.")
        return self

    @property
    def solver_class(self) -> type[Solver]:
        """The class of the solver."""
        made: type[Solver] = SOLVERS.get(self.solver)
        return made

    @property
    def samples(self) -> Samples:
        """What the solver draws: ``"nothing"``, ``"inputs"`` or ``"outputs"``."""
        return self.solver_class.samples

    @property
    def storable(self) -> bool:
        """Whether the spec can be written down: a function that chooses layers cannot."""
        return not (callable(self.targets) or callable(self.exclude))

    def make_solver(self, p: float | None = None) -> Solver:
        """Returns the solver with its options, with the rate p if it takes one."""
        rate = {"p": p} if p is not None and issubclass(self.solver_class.Config, RateConfig) else {}
        return self.solver_class.from_options(iters=self.iters, **self.args, **rate)

    def options(self) -> dict[str, Any]:
        """Returns the fields as plain JSON-ready values; OptionError if targets are a function."""
        if not self.storable:
            name = "targets" if callable(self.targets) else "exclude"
            raise OptionError(f"Expected {name} as names or a regular expression to write them down; found a function.")
        return super().options()


_WORDS = ("strict", "all")
"""What stands for several patterns."""
DEFAULTS: ConversionSpec = ConversionSpec.model_construct()
"""The default of every field; not validated, as that would load every installed plugin."""
