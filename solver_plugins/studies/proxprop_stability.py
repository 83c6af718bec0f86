"""Table 1 of the ProxProp paper: which step sizes training survives."""

import math
from typing import Any, ClassVar, Self

import pydantic
from pydantic import Field

from solver_plugins.proxprop.proxprop import cg_steps
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.images import ImageData, Images
from solver_plugins.studies.networks import BACKPROP, Training, mlp, train_network
from solver_plugins.studies.registry import register_study

_RATES = (50, 10, 5, 1, 0.5, 0.1, 0.05, 5e-3, 5e-4)
_PRINTED: dict[str, tuple[float | None, ...]] = {
    BACKPROP: (None, None, None, None, None, 0.524, 0.091, 0.637, 1.531),
    "cg1": (77.9, 0.079, 0.145, 0.667, 0.991, 1.481, 1.593, 1.881, 2.184),
    "cg3": (94.7, 0.644, 0.031, 2e-3, 0.012, 1.029, 1.334, 1.814, 2.175),
    "cg5": (66.5, 0.190, 0.027, 3e-4, 2e-3, 0.399, 1.049, 1.765, 2.175),
}
PAPER = {arm: dict(zip(_RATES, losses, strict=True)) for arm, losses in _PRINTED.items()}
"""Table 1 as printed: the loss after 50 epochs by step size; None where it diverged."""


def check_arms(arms: list[str]) -> None:
    """Raises for an arm that is neither "backprop" nor a mode of ProxProp."""
    for arm in arms:
        if arm != BACKPROP:
            cg_steps(arm)


class StabilityConfig(StudyConfig):
    """Settings of Table 1."""

    data: ImageData = ImageData()
    hidden: list[int] = Field([4000, 1000, 4000], min_length=1, description="Widths of the hidden layers.")
    training: Training = Training()
    tau_theta: float = Field(1.0, gt=0, description="Step size of the implicit step.")
    arms: list[str] = Field([BACKPROP, "cg1", "cg3", "cg5"], min_length=1, description="'backprop', 'exact' or 'cgN'.")
    rates: list[float] = Field(list(PAPER[BACKPROP]), min_length=1, description="Step sizes tau.")

    @pydantic.model_validator(mode="after")
    def _known(self) -> Self:
        check_arms(self.arms)
        if min(self.rates) <= 0 or min(self.hidden) < 1:
            raise ValueError("expected rates above zero and hidden layers of at least one unit")
        return self


@register_study
class ProxPropStability(Study[StabilityConfig]):
    """Which step sizes ProxProp and plain gradients survive."""

    name = "proxprop-stability"
    tags = ("proxprop", "images")
    reference = "Table 1 of *Proximal Backpropagation* (Frerix, Möllenhoff, Moeller and Cremers, ICLR 2018)"
    Config: ClassVar[Any] = StabilityConfig
    _images: Images

    def prepare(self) -> None:
        self._images = self.config.data.load()

    def cells(self) -> list[Cell]:
        return [
            Cell(arm, seed, (("lr", rate),))
            for arm in self.config.arms
            for rate in self.config.rates
            for seed in self.config.seeds
        ]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        model = mlp(self._images.shape, self.config.hidden, self._images.classes)
        done = train_network(
            model, self._images, self.config.training, cell.arm, float(cell["lr"]), self.config.tau_theta, cell.seed,
            context,
        )  # fmt: skip
        values = done.values()
        first = done.loss[0] if done.loss else math.log(self._images.classes)
        return {**values, "trained": values["loss"] is not None and values["loss"] < first}

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for arm in self.config.arms:
            rows.append((_label(arm), *(self._entry(results.of(arm=arm, lr=rate)) for rate in self.config.rates)))
            if arm in PAPER:
                printed = (PAPER[arm].get(rate, math.nan) for rate in self.config.rates)
                rows.append((f"{_label(arm)}, paper", *(_number(value) for value in printed)))
        limits = self.summary(results)["limits"]
        settings = self.config.training
        return [
            Table(
                f"Full-batch training loss after {settings.epochs} epochs, by step size",
                ("tau", *(f"{rate:g}" for rate in self.config.rates)),
                rows,
                f"Ours: {'-'.join(map(str, self.config.hidden))} hidden units, {self.config.data.train!r} "
                f"of {self.config.data.name!r}, batches of {settings.batch_size}, seeds {self.config.seeds}. Paper: "
                "4000-1000-4000, 45000 images of CIFAR-10, batches of 500, 50 epochs. '-': not finite any more.",
            ),
            Table(
                "Largest step size",
                ("", "that stays finite", "that trains", "finite, x backprop's", "trains, x backprop's"),
                [
                    (_label(arm), *(_limit(limits[arm][key]) for key in
                                    ("finite", "trains", "finite_over_backprop", "trains_over_backprop")))
                    for arm in self.config.arms
                ],
                "'trains': all seeds end below the loss that they began with.",
            ),
        ]  # fmt: skip

    def _entry(self, found: Results) -> str:
        losses = [loss for loss in found.each("loss") if loss is not None]
        gone = len(found) - len(losses)
        if not losses:
            return "-"
        return _number(sum(losses) / len(losses)) + (f" (- in {gone} of {len(found)})" if gone else "")

    def summary(self, results: Results) -> dict[str, Any]:
        limits: dict[str, dict[str, float | None]] = {}
        for arm in self.config.arms:
            by_rate = {rate: results.of(arm=arm, lr=rate) for rate in self.config.rates}
            finite = [rate for rate, found in by_rate.items() if not any(found.each("diverged"))]
            trains = [rate for rate, found in by_rate.items() if all(found.each("trained"))]
            limits[arm] = {"finite": max(finite, default=None), "trains": max(trains, default=None)}
        plain = limits.get(BACKPROP, {})
        for found in limits.values():
            for key in ("finite", "trains"):
                own, theirs = found[key], plain.get(key)
                found[f"{key}_over_backprop"] = None if own is None or theirs is None else own / theirs
        return {"limits": limits}

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, STYLES, legend, new_figure

        figure, axes = new_figure(1, 2, width=5.0, height=3.6)
        ours, printed = axes[0]
        for panel in (ours, printed):
            panel.set_xscale("log")
            panel.set_yscale("log")
        rates = sorted(self.config.rates)
        for index, arm in enumerate(self.config.arms):
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "marker": "o",
                     "markersize": 4, "label": _label(arm)}  # fmt: skip
            _line(ours, rates, [_mean(results.of(arm=arm, lr=rate)) for rate in rates], index, style)
            if arm in PAPER:
                theirs = sorted(PAPER[arm])
                _line(printed, theirs, [PAPER[arm][rate] for rate in theirs], index, style)
        ours.set_title(f"this run, {self.config.training.epochs} epochs", fontsize=11)
        printed.set_title("paper, 50 epochs", fontsize=11)
        for panel in (ours, printed):
            # Room for the crosses.
            low, high = panel.get_ylim()
            panel.set_ylim(low, high * (high / low) ** 0.25)
            panel.set_xlabel(r"step size $\tau$ (crosses: diverged)", fontsize=9)
            panel.set_ylabel("full-batch training loss", fontsize=9)
            legend(panel)
        return figure


def _line(panel: Any, rates: list[float], losses: list[float | None], index: int, style: dict[str, Any]) -> None:
    from solver_plugins.studies.figures import nan_for_none

    # A million is worth no axis: what is above has not trained, and the cross on the edge would hide.
    shown = [None if loss is None else min(loss, 1e3) for loss in losses]
    panel.plot(rates, nan_for_none(shown), **style)
    gone = [rate for rate, loss in zip(rates, losses, strict=True) if loss is None]
    height = 0.98 - 0.05 * index
    panel.plot(gone, [height] * len(gone), "x", color=style["color"], transform=panel.get_xaxis_transform())


def _mean(found: Results) -> float | None:
    losses: list[float | None] = found.each("loss")
    numbers = [loss for loss in losses if loss is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(losses) else None


def _label(arm: str) -> str:
    return "BackProp" if arm == BACKPROP else f"ProxProp ({arm})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "" if math.isnan(value) else f"{value:.3g}"


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
