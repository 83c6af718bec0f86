"""The comparison of a run's models: a table for the terminal, and a self-contained HTML report."""

import base64
import html
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.outputs import write_whole
from solver_plugins.train.problems import PROBLEMS, SINGLE, Problem, shown
from solver_plugins.train.reading import given_options

Rows = list[dict[str, Any]]
_COLOURS = {"solver": "#1f6fb4", "baseline": "#d1701f", "plain": "#444444"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .9rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { width: 460px; max-width: 100%; } pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 13px; }
"""
MOST_CLASSES = 30
"""How many classes a report lists."""
_BLOCKS = """<p><b>L</b> is the Lipschitz constant that sets a block's step size: the largest eigenvalue of
A A<sup>T</sup> for its weight A. The <b>residual</b> is the relative change that one further iteration would make: it
is small where the solve has converged.</p>
"""
_WILSON = """In brackets the 95% interval of the accuracy (Wilson) that this number of examples allows; two models on
the same examples can differ by less and still truly differ."""


def problem_of(results: dict[str, dict[str, Any]]) -> Problem:
    """Returns what the models of a run predict."""
    return PROBLEMS[next(iter(results.values())).get("problem_type", SINGLE)]


def headings(problem: Problem) -> tuple[str, ...]:
    """Returns the columns of the comparison."""
    measures = (heading for key, heading in problem.headings.items() if key != "top5")
    return ("model", *measures, "eval loss", "train loss", "steps", "time")


def table_rows(config: FinetuneConfig, results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the cells of the comparison, the baseline first."""
    rows: list[tuple[str, ...]] = []
    problem = problem_of(results)
    for name in ("plain", "baseline", "solver"):
        if name not in results:
            continue
        one = results[name]
        cells = {key: shown(one[key], problem.digits) for key in problem.headings if key != "top5"}
        if one["trials"] > 1:
            cells[problem.main] += f" ± {one[f'{problem.main}_std']:.{problem.digits}f} ({one['trials']} trials)"
        if problem.main == "accuracy":
            low, high = wilson(one["accuracy"] / 100, one["count"])
            cells["accuracy"] += f" [{100 * low:.1f}, {100 * high:.1f}]"
        rest = (f"{one['loss']:.4f}", f"{one['train_loss']:.4f}", str(one["steps"]), f"{one['seconds']:.1f} s")
        rows.append((_title(config, name), *cells.values(), *rest))
    return rows


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Returns Wilson's interval for a share that was observed in this many examples; 95% by default."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _title(config: FinetuneConfig, name: str) -> str:
    if name != "solver":
        return name
    parts = []
    if config.solver is not None:
        parts.append(f"{config.solver.solver}, iters={config.solver.iters}")
    if config.proxprop is not None:
        parts.append(f"proxprop, {config.proxprop.mode}")
    if config.head is not None:
        parts.append(f"opteq head, {config.head.layers} layers")
    if config.regularizer is not None:
        parts.append(f"{config.regularizer.how} {config.regularizer.scheme}, theta={config.regularizer.theta:g}")
    return f"solver ({'; '.join(parts)})"


def result_table(config: FinetuneConfig, results: dict[str, dict[str, Any]]) -> Table:
    """Returns the comparison for a terminal."""
    count = next(iter(results.values()))["count"]
    made = Table(title=f"{config.model.spec} on {config.data.name}: {count} examples of {config.data.eval_name}")
    # A terminal of 80 columns holds these; the report has them all.
    problem = problem_of(results)
    columns = headings(problem)
    chosen = [columns.index(name) for name in ("model", problem.headings[problem.main], *columns[-4:-2], "time")]
    for place in chosen:
        made.add_column(columns[place], justify="right" if place else "left")
    for cells in table_rows(config, results):
        made.add_row(*(cells[place] for place in chosen))
    return made


def html_page(config: FinetuneConfig, body: str) -> str:
    """Returns a page about a run, which needs no other file; the config stands at its end."""
    title = html.escape(f"{config.model.spec} on {config.data.name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body>\n<h1>{title}</h1>\n{body}<h2>Config</h2>\n<pre>{html.escape(given_options(config))}</pre>\n"
        f"<details><summary>All options</summary><pre>{html.escape(config.to_yaml())}</pre></details>\n</body></html>\n"
    )


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table that a narrow screen can scroll."""

    def row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table></div>\n'


def write_report(path: Path, config: FinetuneConfig, results: dict[str, dict[str, Any]], rows: dict[str, Rows]) -> None:
    """Writes ``report.html``: table, learning curves, the blocks' constants and residuals, the config."""
    problem, count = problem_of(results), next(iter(results.values()))["count"]
    body = f"<p>{count} examples of {html.escape(config.data.eval_name)}, seed {config.seed}, {config.epochs} epochs. "
    body += f"{_WILSON if problem.main == 'accuracy' else ''}</p>\n"
    body += html_table(headings(problem), table_rows(config, results))
    body += _pictures(_curves(rows, problem), "Learning curves")
    if any(row.get("blocks") for row in rows.get("solver", [])):
        body += _pictures(_blocks(rows["solver"]), "The solver blocks while training") + _BLOCKS
    write_whole(path, html_page(config, body + _by_class(results)))


def _by_class(results: dict[str, dict[str, Any]]) -> str:
    """Returns a table of the number for each class: all of them, or the hardest ones."""
    first, problem = next(iter(results.values())), problem_of(results)
    if len(first["classes"]) == 1:
        return ""
    known = [place for place, value in enumerate(first["per_class"]) if value is not None]
    known = sorted(known, key=lambda place: float(first["per_class"][place]))
    kind = "target" if problem.name == "regression" else "class"
    # Of errors the largest are the hardest.
    chosen = (known[::-1] if problem.main in problem.smaller else known)[:MOST_CLASSES]
    whole = len(chosen) == len(known)
    title = f"Each {kind} by itself" if whole else f"The {len(chosen)} hardest of {len(known)}"
    body = [
        (first["classes"][place], *(shown(one["per_class"][place], problem.digits - 1) for one in results.values()))
        for place in chosen
    ]
    return f"<h2>{title}</h2>\n" + html_table((kind, *(f"{name}: {problem.each}" for name in results)), body)


def _pictures(figures: Iterable[Figure], title: str) -> str:
    """Returns pictures beside each other, or below each other on a narrow screen."""
    made = f"<h2>{html.escape(title)}</h2>\n"
    for figure in figures:
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=140)
        data = base64.b64encode(written.getvalue()).decode("ascii")
        made += f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">\n'
    return made


def _axes(label: str, rows: Rows) -> Any:
    """Returns the axes of a new figure, over the epochs of these rows."""
    figure = Figure(figsize=(4.6, 3.4))
    figure.subplots_adjust(left=0.17, right=0.97, bottom=0.14, top=0.93)
    # pyplot would need a display and keep the figure in memory.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    # Whole epochs, also where there is a single one.
    axes.set_xlim(rows[0]["epoch"] - 0.5, rows[-1]["epoch"] + 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _curves(rows: dict[str, Rows], problem: Problem) -> list[Figure]:
    longest = max(rows.values(), key=len)
    loss, main = _axes("loss", longest), _axes(problem.headings[problem.main], longest)
    for name, points in rows.items():
        epochs = [row["epoch"] for row in points]
        style = {"color": _COLOURS[name], "marker": "o", "markersize": 3}
        loss.plot(epochs, [row["train_loss"] for row in points], label=f"{name}, train", linestyle="--", **style)
        loss.plot(epochs, [row["eval_loss"] for row in points], label=f"{name}, eval", **style)
        values = [row[f"eval_{problem.main}"] for row in points]
        main.plot(epochs, [math.nan if value is None else value for value in values], label=name, **style)
    for axes in (loss, main):
        axes.legend(frameon=False, fontsize=8)
    return [loss.figure, main.figure]


def _blocks(rows: Rows) -> list[Figure]:
    points = [row for row in rows if "blocks" in row]
    names, figures = list(points[0]["blocks"]), []
    for key, label in (("L", r"$L = \lambda_{\max}(A A^\top)$"), ("residual", "residual")):
        axes, positive = _axes(label, points), []
        for name in names:
            values = [row["blocks"].get(name, {}).get(key) for row in points]
            axes.plot([row["epoch"] for row in points], [math.nan if v is None else v for v in values],
                      label=name, marker="o", markersize=3)  # fmt: skip
            positive += [v for v in values if v is not None and v > 0]
        if positive and max(positive) > 10 * min(positive):
            axes.set_yscale("log")
        if len(names) <= 12:
            axes.legend(frameon=False, fontsize=7)
        figures.append(axes.figure)
    return figures
