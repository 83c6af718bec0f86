"""One config with several seeds: a run for each, and their mean, spread and paired differences."""

import html
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from solver_plugins.train import outputs
from solver_plugins.train.comparison import STYLE, problem_of
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.finetune import finetune
from solver_plugins.train.launch import first_process


def measures_of(models: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns what is compared over the seeds, and what tables call it, from the results of one seed."""
    found = problem_of(models).headings
    first = next(iter(models.values()))
    kept = {key: heading for key, heading in found.items() if key != "top5" and first.get(key) is not None}
    return {**kept, "loss": "eval loss", "seconds": "seconds"}


def finetune_seeds(config: FinetuneConfig, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Finetunes once for each of ``config.seeds``, in folders of their own below the output folder.

    Args:
        config: The run.
        resume: Whether to continue: finished seeds are kept as they are.
        overwrite: Whether to replace the runs in the output folder.

    Returns:
        The results of every seed, and over all of them, as in ``results.json``.

    Raises:
        SolverPluginsError: As :func:`~solver_plugins.train.finetune.finetune` does.
    """
    assert config.seeds is not None
    place = Path(config.output).expanduser()
    held = {path.name for path in place.iterdir()} if place.is_dir() else set()
    # A run that was killed during its first seed has no config yet; the seeds' own folders are checked by their runs.
    if not (resume or overwrite) or not all(name.startswith("seed-") for name in held):
        outputs.check_output(config, resume, overwrite)
    if overwrite and first_process():
        outputs.remove_run(place, *(name for name in held if name.startswith("seed-")))
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in config.seeds:
        own = config.model_copy(update={"seed": seed, "seeds": None, "output": str(place / f"seed-{seed}")})
        runs[str(seed)] = finetune(own, resume=resume, overwrite=overwrite)
        if first_process():
            outputs.write_whole(place / outputs.CONFIG, config.to_yaml())
    results = {"seeds": runs, "summary": summary_of(runs), "differences": differences_of(runs)}
    if first_process():
        outputs.write_whole(place / outputs.RESULTS, json.dumps(results, indent=2))
        outputs.write_whole(place / outputs.REPORT, _report(config, results))
    return results


def summary_of(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns mean and standard deviation over the seeds, for each model and measure."""
    models = next(iter(runs.values()))
    keys = measures_of(models)
    return {name: {key: _mean_and_spread([run[name][key] for run in runs.values()]) for key in keys} for name in models}


def differences_of(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, tuple[float, float]]:
    """Returns solver minus baseline, paired by seed, with the standard error of the mean; empty without a baseline."""
    models = next(iter(runs.values()))
    if "baseline" not in models:
        return {}
    made = {}
    for key in measures_of(models):
        mean, spread = _mean_and_spread([run["solver"][key] - run["baseline"][key] for run in runs.values()])
        made[key] = (mean, spread / math.sqrt(len(runs)))
    return made


def _mean_and_spread(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values)


def rows_of(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of the table: a row for each model, then the paired difference."""
    rows = [
        (name, *(f"{one[key][0]:.2f} ± {one[key][1]:.2f}" for key in one)) for name, one in results["summary"].items()
    ]
    if results["differences"]:
        cells = (f"{mean:+.2f} ± {error:.2f}" for mean, error in results["differences"].values())
        rows.append(("solver - baseline (standard error)", *cells))
    return rows


def seeds_table(config: FinetuneConfig, results: dict[str, Any]) -> Table:
    """Returns the comparison over all seeds for a terminal."""
    made = Table(title=f"{config.model.spec} on {config.data.name}: {len(results['seeds'])} seeds, mean ± deviation")
    for heading in ("model", *measures_of(next(iter(results["seeds"].values()))).values()):
        made.add_column(heading, justify="left" if heading == "model" else "right")
    for cells in rows_of(results):
        made.add_row(*cells)
    return made


def _report(config: FinetuneConfig, results: dict[str, Any]) -> str:
    title = html.escape(f"{config.model.spec} on {config.data.name}")
    first = next(iter(results["seeds"].values()))
    head = "".join(f"<th>{html.escape(text)}</th>" for text in ("model", *measures_of(first).values()))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows_of(results)
    )
    links = ", ".join(f'<a href="seed-{seed}/{outputs.REPORT}">seed {seed}</a>' for seed in results["seeds"])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n"
        f"<h1>{title}</h1>\n<p>Mean and standard deviation over {len(results['seeds'])} seeds. The last row, where "
        "there is a baseline, is the mean difference of pairs with the same seed, and its standard error.</p>\n"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'
        f"<p>Reports of the runs: {links}.</p>\n<h2>Config</h2>\n<pre>{html.escape(config.to_yaml())}</pre>\n"
        "</body></html>\n"
    )
