"""The README of a saved model: what it is, and how to load it with this package and without. And its way to the Hub."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from solver_plugins.integrations.errors import SavingError
from solver_plugins.integrations.folder import NOTICE
from solver_plugins.integrations.heads import HeadRecord
from solver_plugins.surgery import Conversion

CARD = "README.md"
_SHOWN = 40
"""How many blocks a card lists."""
_PLAIN = {
    "timm": """model = timm.create_model("local-dir:{place}", pretrained=True)""",
    "transformers": """model = transformers.{kind}.from_pretrained("{place}")""",
    "torch": """model.load_state_dict(safetensors.torch.load_file("{place}/model.safetensors"))""",
}
_ALONE = {
    "timm": "timm refuses this folder until `solver_plugins` is imported.",
    "transformers": (
        "Without `import solver_plugins`, transformers logs an unknown quantization type and loads the plain network."
    ),
    "torch": "Nothing in `model.safetensors` says that solvers belong to it.",
}


def write_card(
    model: nn.Module,
    folder: Path,
    kind: str,
    conversion: Conversion | None,
    head: HeadRecord | None,
    metrics: Mapping[str, float],
) -> None:
    """Writes the README of a saved model, and beside solvers a file whose name says that they need this package."""
    converted = conversion is not None or head is not None
    base = _base_of(model)
    published = kind != "timm" or (getattr(model, "pretrained_cfg", None) or {}).get("hf_hub_id")
    front = [
        *(["library_name: " + kind] if kind in ("timm", "transformers") else []),
        *([f"base_model: {base}"] if base and published else []),
        *(["tags:", "- solver_plugins"] if converted else []),
    ]
    parts = ["---", *front, "---"] if front else []
    parts += ["", f"# {base or type(model).__name__}", "", _summary(model, conversion, head, base), ""]
    if conversion is not None:
        parts += _blocks(conversion)
    if metrics:
        parts += ["## Metrics", "", "| metric | value |", "|---|---:|"]
        parts += [*(f"| {name} | {value:.4g} |" for name, value in metrics.items()), ""]
    parts += ["## Load it", "", "```python"]
    place, own = "FOLDER", _PLAIN[kind].format(place="FOLDER", kind=type(model).__name__)
    if converted:
        given = ", model=build_the_plain_model()" if kind == "torch" else ""
        parts += ["import solver_plugins", "", f'model = solver_plugins.load("{place}"{given})', "```", ""]
        parts += [_warning(kind), ""]
        (folder / NOTICE).write_text(f"{_warning(kind)} See {CARD}.\n", encoding="utf-8")
    else:
        library = f"import {'safetensors.torch' if kind == 'torch' else kind}"
        ours = kind == "timm" and type(model).__module__.startswith("solver_plugins.")
        parts += ["import solver_plugins  # for its architecture"] if ours else []
        parts += [library, "", own, "```"]
        parts += [] if ours else ["", "It is a plain network: nothing of `solver_plugins` is needed."]
    (folder / CARD).write_text("\n".join(parts).strip() + "\n", encoding="utf-8")


def push(folder: Path, repository: str) -> None:
    """Uploads a folder to a repository of the Hugging Face Hub, made if there is none; a SavingError if it fails."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        name = api.create_repo(repository, exist_ok=True).repo_id
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model with solver_plugins")
    except Exception as error:
        raise SavingError(
            f"{str(folder)!r} is saved, but could not be uploaded to {repository!r} at {api.endpoint}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _base_of(model: nn.Module) -> str:
    """Returns the name of the network that a model was built as or loaded from, if it is known."""
    cfg = getattr(model, "pretrained_cfg", None)
    if isinstance(cfg, dict) and cfg.get("architecture"):
        tag = cfg.get("tag")
        return f"timm/{cfg['architecture']}" + (f".{tag}" if tag else "")
    name = getattr(model, "name_or_path", "")
    # A folder of somebody's own machine is nobody else's business.
    return name if isinstance(name, str) and name.count("/") == 1 and not Path(name).exists() else ""


def _summary(model: nn.Module, conversion: Conversion | None, head: HeadRecord | None, base: str) -> str:
    what = f"A `{type(model).__name__}`" + (f" made from `{base}`" if base else "")
    if conversion is not None:
        what += f", {len(conversion.blocks)} of whose layers are optimisation solvers"
    if head is not None:
        what += f"{' and' if conversion is not None else ','} with an equilibrium head at `{head.name}`"
    return f"{what}."


def _blocks(conversion: Conversion) -> list[str]:
    lines = ["## Blocks", "", "| layer | solver | iterations | activation's prior | |", "|---|---|---:|---|---|"]
    for block in conversion.blocks[:_SHOWN]:
        notes = [f"blend {block.blend:g}"] if block.blend != 1 else []
        notes += ["calibrated"] if block.gain is not None else []
        notes += [{"channel": "a gate per channel", "scalar": "one gate"}[block.gate]] if block.gate is not None else []
        iters = block.settings.get("iters", "")
        lines.append(f"| {block.layer} | {block.solver} | {iters} | {block.prior} | {', '.join(notes)} |")
    more = len(conversion.blocks) - _SHOWN
    lines += [f"| and {more} more | | | | |"] if more > 0 else []
    cost = "Each iteration after the first multiplies by the layer's weight and by its transpose at most once."
    return [*lines, "", cost, ""]


def _warning(kind: str) -> str:
    return (
        f"`model.safetensors` holds the weights of the plain network. Without its solvers it computes something else. "
        f"{_ALONE[kind]} For a network without solvers that computes the same, where there is one, save "
        "`solver_plugins.merge_model(model)`."
    )
