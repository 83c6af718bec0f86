"""One config with several seeds: a run for each, and their mean, spread and paired differences."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm.auto import tqdm

from solver_plugins.train import outputs
from solver_plugins.train.comparison import html_page, html_table, problem_of
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.finetune import finetune
from solver_plugins.train.launch import first_process


def measures_of(models: dict[str, dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Returns what is compared over the seeds, from the results of one: heading and digits of each."""
    problem, first = problem_of(models), next(iter(models.values()))
    kept = (key for key in problem.headings if key != "top5" and first.get(key) is not None)
    return {
        **{key: (problem.headings[key], problem.digits) for key in kept}, "loss": ("eval loss", 4),
        "seconds": ("seconds", 1),
    }  # fmt: skip


def finetune_seeds(config: FinetuneConfig, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Finetunes once for each of ``config.seeds``, in folders of their own below the output folder.

    Returns:
        The results of every seed, and over all of them, as in ``results.json``.
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
        if first_process():
            tqdm.write(f"Seed {seed}:")
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


def _cells(results: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the heading of the table, and its rows: one for each model, then the paired difference."""
    measures = measures_of(next(iter(results["seeds"].values())))

    def cells(found: dict[str, tuple[float, float]], sign: str = "") -> list[str]:
        digits = {key: measures[key][1] for key in found}
        return [f"{mean:{sign}.{digits[key]}f} ± {other:.{digits[key]}f}" for key, (mean, other) in found.items()]

    rows = [(name, *cells(one)) for name, one in results["summary"].items()]
    if results["differences"]:
        rows.append(("solver - baseline (standard error)", *cells(results["differences"], "+")))
    return ("model", *(heading for heading, _ in measures.values())), rows


def seeds_table(config: FinetuneConfig, results: dict[str, Any]) -> Table:
    """Returns the comparison over all seeds for a terminal."""
    made = Table(title=f"{config.model.spec} on {config.data.name}: {len(results['seeds'])} seeds, mean ± deviation")
    head, rows = _cells(results)
    for heading in head:
        made.add_column(heading, justify="left" if heading == "model" else "right")
    for cells in rows:
        made.add_row(*cells)
    return made


def _report(config: FinetuneConfig, results: dict[str, Any]) -> str:
    links = ", ".join(f'<a href="seed-{seed}/{outputs.REPORT}">seed {seed}</a>' for seed in results["seeds"])
    return html_page(
        config,
        f"<p>Mean and standard deviation over {len(results['seeds'])} seeds. The last row, where there is a baseline, "
        "is the mean difference of pairs with the same seed, and its standard error.</p>\n"
        f"{html_table(*_cells(results))}<p>Reports of the runs: {links}.</p>\n",
    )
