"""Turns a model's own dropout modules into structured dropout in place, and back."""

import copy
from typing import Any

from torch import Tensor, nn

from solver_plugins.blocks.shell import Shell, take_off
from solver_plugins.dropblock.layers import structured_dropout
from solver_plugins.dropblock.report import DropoutReport, DropoutRow
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.dropblock.schemes import GridBlocks, Sampler, Scheme, make_scheme
from solver_plugins.dropblock.sites import Site, find_sites
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.surgery.apply import refuse_wrapped
from solver_plugins.surgery.errors import ConversionError, TargetError
from solver_plugins.surgery.record import record
from solver_plugins.surgery.targets import Target, TargetList, Targets, read_targets


class StructuredShell(Shell):
    """Mixin in front of the class of a dropout, which then drops by ``structured_scheme``.

    A mask reaches over the last ``structured_dims`` dimensions; ``structured_coupled`` lets all channels share one.
    """

    structured_scheme: Scheme
    structured_dims: int
    structured_coupled: bool

    prefix = "Structured"

    def forward(self, input: Tensor) -> Tensor:
        settings: dict[str, Any] = {"couple_channels": self.structured_coupled, "training": self.training}
        if self.structured_dims == 2 and input.shape[-2:] == (1, 1):
            # A pooled map has no neighbours in space, so its units are its channels.
            settings["couple_channels"] = False
            return structured_dropout(input.flatten(-3), self.structured_scheme, **settings).view_as(input)
        return structured_dropout(input, self.structured_scheme, dims=self.structured_dims, **settings)

    def extra_repr(self) -> str:
        coupled = ", couple_channels=True" if self.structured_coupled else ""
        return f"{self.structured_scheme}, dims={self.structured_dims}{coupled}"


_OWN = ("structured_scheme", "structured_dims", "structured_coupled")


def convert_dropout(
    model: nn.Module,
    scheme: str | Scheme = "dropblock",
    block_size: int | None = None,
    theta: float | None = None,
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    dims: int | None = None,
    couple_channels: bool | None = None,
    example_inputs: Any = None,
    inplace: bool = True,
) -> nn.Module:
    """Turns a model's dropout modules into structured dropout.

    Modules keep their place, name and class. They have no state, so checkpoints do not change. One recorded forward
    pass shows the input of each dropout: vectors and tokens are dropped in blocks of features, maps in blocks of
    pixels, pooled maps in blocks of channels. Attention weights are not converted. See :func:`inspect_dropout` for a
    dry run.

    Args:
        model: Any model whose forward pass can be recorded; timm's and transformers' need no example inputs.
        scheme: "dropblock" (on a grid), "overlapping", "dropout", or a :class:`Scheme`.
        block_size: The number of neighbours that are dropped together; by default that of the model's DropBlock.
        theta: The probability that a unit is kept; by default one minus each module's own rate.
        targets: Dropouts to convert: a list of names or their ends, one regular expression for the whole name, or a
            function of name and module. Named dropouts are converted even if their rate is zero. By default all with
            a rate above zero.
        exclude: Dropouts to leave out, in the same forms.
        dims: 1 or 2: the number of last dimensions that blocks reach over, if the recorded pass does not show it.
        couple_channels: Whether all channels of a map share a mask; by default that of the model's DropBlock, and False
            for plain dropout.
        example_inputs: A tensor, tuple or mapping for the recorded forward pass.
        inplace: False converts a copy.

    Returns:
        The converted model: the same object, unless ``inplace=False``.

    Raises:
        ConversionError: If nothing can be converted, with the reason for each dropout, or if the model is wrapped or
            already converted. After this and every other error the model is unchanged.
        BlockSizeError: If blocks of a grid do not divide the input of a dropout.
        UnknownNameError: If the scheme is unknown.
        OptionError: If an option is missing or out of range.
        TargetError: If a target converts nothing.
        RecordError: If the forward pass cannot be recorded.
    """
    chosen, report = _plan(model, scheme, block_size, theta, targets, exclude, dims, example_inputs)
    if not chosen:
        reasons = "".join(f"\n  - {row.name}: {row.reason}" for row in report.rows)
        raise ConversionError(
            f"No dropout of this {type(model).__name__} can be converted"
            + (f":{reasons}" if reasons else "; it has none. Many models take their rate when they are made.")
        )
    if not inplace:
        model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for site, made in chosen:
        module = modules[site.name]
        coupled = site.coupled if couple_channels is None else couple_channels
        module.__dict__.update(zip(_OWN, (made, dims or site.dims or 1, coupled), strict=True))
        module.__class__ = StructuredShell.class_for(type(module))
    return model


def inspect_dropout(
    model: nn.Module,
    scheme: str | Scheme = "dropblock",
    block_size: int | None = None,
    theta: float | None = None,
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    dims: int | None = None,
    couple_channels: bool | None = None,
    example_inputs: Any = None,
) -> DropoutReport:
    """Returns what :func:`convert_dropout` would do, without changing the model: ``print`` it, or take ``to_dict()``.

    Arguments and errors are the same, except that it reports a model in which nothing would be converted.
    """
    return _plan(model, scheme, block_size, theta, targets, exclude, dims, example_inputs)[1]


def revert_dropout(model: nn.Module) -> nn.Module:
    """Restores every dropout that :func:`convert_dropout` converted; ConversionError if there is none."""
    found = [module for module in model.modules() if isinstance(module, StructuredShell)]
    if not found:
        raise ConversionError(f"Expected converted dropout; found {type(model).__name__} without any.")
    for module in found:
        take_off(module)
        for name in _OWN:
            del module.__dict__[name]
    return model


def _plan(
    model: nn.Module,
    scheme: str | Scheme | Sampler,
    block_size: int | None,
    theta: float | None,
    targets: Targets | None,
    exclude: Targets | None,
    dims: int | None,
    example_inputs: Any,
) -> tuple[list[tuple[Site, Scheme]], DropoutReport]:
    refuse_wrapped(model)
    for name, module in model.named_modules():
        if isinstance(module, StructuredShell):
            raise ConversionError(f"{name or 'The model'} is converted already; call revert_dropout(model) first.")
    if dims not in (None, 1, 2):
        raise OptionError(f"Expected dims to be 1, 2 or None; found {dims!r}.")
    if isinstance(scheme, str):
        # Raises for wrong options before a large model is walked.
        make_scheme(scheme, 0.5 if theta is None else theta, 1 if block_size is None else block_size)
    elif not isinstance(scheme, Scheme):
        raise OptionError(f"Expected the name of a scheme or a Scheme, such as SampledScheme; found {scheme!r}.")
    wanted = None if targets is None else read_targets(targets, "targets")
    unwanted = None if exclude is None else read_targets(exclude, "exclude")
    chosen: list[tuple[Site, Scheme]] = []
    rows: list[DropoutRow] = []
    # The call of a wanted dropout with rate zero would leave no trace in the recorded pass.
    silent = {
        (name, "p"): 0.5
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p == 0 and wanted is not None and wanted.matches(name, module)
    }
    sites = find_sites(model, record(model, example_inputs, silent))
    for site in sites:
        reason = _reason_against(site, wanted, unwanted, dims)
        made = None
        if reason is None:
            made = _scheme_of(site, scheme, block_size, theta)
            _check_size(site, made, dims or site.dims or 1)
            chosen.append((site, made))
        rows.append(
            DropoutRow(
                site.name, site.kind, made is not None, reason or "", site.shape, site.p, dims or site.dims, repr(made)
            )
        )
    _check_targets(wanted, [site for site, _ in chosen], sites, rows)
    _check_targets(unwanted, sites, sites, rows)
    label = scheme if isinstance(scheme, str) else repr(scheme)
    return chosen, DropoutReport(type(model).__name__, label, tuple(rows))


def _named(given: TargetList | Target, site: Site) -> bool:
    return site.module is not None and given.matches(site.name, site.module)


def _reason_against(site: Site, wanted: TargetList | None, unwanted: TargetList | None, dims: int | None) -> str | None:
    if site.p == 0 and site.module is not None and wanted is None:
        return "its rate is 0; name it in targets= and give theta= to convert it"
    if site.reason is not None:
        return site.reason
    if wanted is not None and not _named(wanted, site):
        return "not among the targets"
    if unwanted is not None and _named(unwanted, site):
        return "excluded"
    if site.dims is None and dims is None:
        return "its input has four dimensions, and it is not clear which are space: say so with dims=1 or dims=2"
    return None


def _scheme_of(site: Site, scheme: str | Scheme | Sampler, block_size: int | None, theta: float | None) -> Scheme:
    if not isinstance(scheme, str):
        return make_scheme(scheme, theta, block_size)
    size = None if scheme == "dropout" else site.block_size if block_size is None else block_size
    if theta is None and site.p == 0:
        raise OptionError(f"{site.name!r} has the rate 0: give theta= to convert it.")
    if theta is None and site.p >= 1:
        raise OptionError(f"{site.name!r} has the rate {site.p:g} and keeps nothing: give theta= to convert it.")
    return make_scheme(scheme, 1 - site.p if theta is None else theta, size)


def _check_size(site: Site, scheme: Scheme, dims: int) -> None:
    if not isinstance(scheme, GridBlocks):
        return
    for shape in site.shapes:
        size = shape[-3:-2] if dims == 2 and shape[-2:] == (1, 1) else shape[-dims:]
        try:
            check_divides(scheme.block_size, *size)
        except ValueError as error:
            raise type(error)(f"{site.name!r}: {error}") from None


def _check_targets(given: TargetList | None, met: list[Site], sites: list[Site], rows: list[DropoutRow]) -> None:
    if given is None:
        return
    reasons = {row.name: row.reason for row in rows}
    for target in given.targets:
        if any(_named(target, site) for site in met):
            continue
        near = [f"{site.name}: {reasons[site.name]}" for site in sites if _named(target, site)]
        if near:
            raise TargetError(f"{given.option}: {target.label} matches, but nothing to convert: {'; '.join(near[:5])}.")
        names = [site.name for site in sites if site.module is not None]
        raise TargetError(f"{given.option}: {target.label} matches no dropout.{did_you_mean(target.text or '', names)}")
