"""Table 1 of the ProxProp paper: the step sizes at which training stays finite."""

from typing import Any, Self

import pydantic
from pydantic import Field

from solver_plugins.studies import proxprop_convergence as networks
from solver_plugins.studies.figures import label, legend, line, nan_for_none, new_figure
from solver_plugins.studies.images import ImageConfig, ImageStudy
from solver_plugins.studies.proxprop_convergence import BACKPROP, REFERENCE, Training, label_of, train_network
from solver_plugins.studies.study import Cell, Context, Results, Table, mean, register_study, shown

_RATES = (50, 10, 5, 1, 0.5, 0.1, 0.05, 5e-3, 5e-4)
_PRINTED: dict[str, tuple[float | None, ...]] = {
    BACKPROP: (None, None, None, None, None, 0.524, 0.091, 0.637, 1.531),
    "cg1": (77.9, 0.079, 0.145, 0.667, 0.991, 1.481, 1.593, 1.881, 2.184),
    "cg3": (94.7, 0.644, 0.031, 2e-3, 0.012, 1.029, 1.334, 1.814, 2.175),
    "cg5": (66.5, 0.190, 0.027, 3e-4, 2e-3, 0.399, 1.049, 1.765, 2.175),
}
PAPER = {arm: dict(zip(_RATES, losses, strict=True)) for arm, losses in _PRINTED.items()}
"""Table 1 as printed: the loss after 50 epochs by step size; None where it diverged."""


class StabilityConfig(ImageConfig):
    """Settings of Table 1."""

    hidden: list[int] = Field([4000, 1000, 4000], min_length=1, description="Widths of the hidden layers.")
    training: Training = Training()
    tau_theta: float = Field(1.0, gt=0, description="Step size of the implicit step.")
    arms: list[networks.Arm] = Field(
        [BACKPROP, "cg1", "cg3", "cg5"], min_length=1, description="'backprop', 'exact' or 'cgN'."
    )
    rates: list[float] = Field(list(PAPER[BACKPROP]), min_length=1, description="Step sizes tau.")

    @pydantic.model_validator(mode="after")
    def _known(self) -> Self:
        if min(self.rates) <= 0 or min(self.hidden) < 1:
            raise ValueError("expected rates above zero and hidden layers of at least one unit")
        return self


@register_study
class ProxPropStability(ImageStudy[StabilityConfig]):
    """The step sizes at which ProxProp and plain gradients stay finite."""

    name = "proxprop-stability"
    tags = ("proxprop", "images")
    reference = f"Table 1 {REFERENCE}"
    Config = StabilityConfig

    def cells(self) -> list[Cell]:
        return Cell.grid(arm=self.config.arms, lr=self.config.rates, seed=self.config.seeds)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        model = networks.mlp(self._images.shape, self.config.hidden, self._images.classes)
        values = train_network(
            model, self._images, self.config.training, cell.arm, float(cell["lr"]), self.config.tau_theta, cell.seed,
            context,
        )  # fmt: skip
        return {**values, "trained": values["loss"] is not None and values["loss"] < values["curves"]["loss"][0]}

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for arm in self.config.arms:
            rows.append((label_of(arm), *(self._entry(results.of(arm=arm, lr=rate)) for rate in self.config.rates)))
            if arm in PAPER:
                texts = {rate: shown(loss, ".3g", "-") for rate, loss in PAPER[arm].items()}
                rows.append((f"{label_of(arm)}, paper", *(texts.get(rate, "") for rate in self.config.rates)))
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
                    (label_of(arm), *(shown(limits[arm][key], "g", "none") for key in
                                      ("finite", "trains", "finite_over_backprop", "trains_over_backprop")))
                    for arm in self.config.arms
                ],
                "'trains': all seeds end below the loss that they began with.",
            ),
        ]  # fmt: skip

    def _entry(self, found: Results) -> str:
        gone = sum(loss is None for loss in found.each("loss"))
        part = f" (- in {gone} of {len(found)})" if 0 < gone < len(found) else ""
        return shown(found.mean("loss"), ".3g", "-") + part

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
        figure, axes = new_figure(1, 2, width=5.0, height=3.6)
        ours, printed = axes[0]
        for panel in (ours, printed):
            label(panel, r"step size $\tau$ (crosses: diverged)", "full-batch training loss", log="xy")
        rates = sorted(self.config.rates)
        for index, arm in enumerate(self.config.arms):
            found = {rate: results.of(arm=arm, lr=rate).each("loss") for rate in rates}
            # If one seed diverged, the panel shows a cross.
            _draw(ours, {rate: None if None in losses else mean(losses) for rate, losses in found.items()}, index, arm)
            if arm in PAPER:
                _draw(printed, dict(sorted(PAPER[arm].items())), index, arm)
        label(ours, title=f"this run, {self.config.training.epochs} epochs")
        label(printed, title="paper, 50 epochs")
        for panel in (ours, printed):
            # Leaves room for the crosses.
            low, high = panel.get_ylim()
            panel.set_ylim(low, high * (high / low) ** 0.25)
            legend(panel)
        return figure


def _draw(panel: Any, losses: dict[float, float | None], index: int, arm: str) -> None:
    style = line(index, marker="o", markersize=4, label=label_of(arm))
    # Larger losses are cut off: they would stretch the axis and hide the crosses.
    heights = [None if loss is None else min(loss, 1e3) for loss in losses.values()]
    panel.plot(list(losses), nan_for_none(heights), **style)
    gone = [rate for rate, loss in losses.items() if loss is None]
    height = 0.98 - 0.05 * index
    panel.plot(gone, [height] * len(gone), "x", color=style["color"], transform=panel.get_xaxis_transform())
