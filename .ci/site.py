"""Builds the documentation site from docs/, files of the repository's root, and the docstrings.

    python .ci/site.py [--output site]

Links between pages are written as they work in the repository (``../CONTRIBUTING.md``). The pages are copied to a
folder of their own, where such links become the site's; zensical builds it from there, and every warning is an error.
"""

import argparse
import ast
import base64
import importlib
import inspect
import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import yaml
import zensical

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "configs/README.md": "recipes.md",
    "patches/README.md": "scripts.md",
}
"""Pages that do not stand in docs/, and their places on the site."""
REFERENCE = {
    "solver_plugins": "What most people need, importable from `solver_plugins` itself.",
    "solver_plugins.surgery": "Finding, converting, merging and reverting the blocks of whole models.",
    "solver_plugins.blocks": "Layers that run a solver.",
    "solver_plugins.solve": "Solvers, the problem they solve, and the kernel that runs them.",
    "solver_plugins.prox": "Activations as proximal maps.",
    "solver_plugins.operators": "Layers as linear operators, Lipschitz constants, samplings.",
    "solver_plugins.proxprop": "Implicit steps for the weights.",
    "solver_plugins.equilibrium": "Layers and heads defined by an equilibrium.",
    "solver_plugins.dropblock": "Structured dropout: layers, regularisers, closed forms.",
    "solver_plugins.integrations": "Saving, loading, timm, transformers, the Trainer.",
    "solver_plugins.integrations.heads": "Equilibrium heads on the models of libraries, and how they are written down.",
    "solver_plugins.train": "Finetuning on Accelerate.",
    "solver_plugins.studies": "The papers' experiments.",
    "solver_plugins.studies.figures": "What studies draw with.",
    "solver_plugins.errors": "Every error and warning of the package.",
}


def prepare(folder: Path) -> None:
    """Writes all pages of the site into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("README.md", "ruff.toml", "figures.py", ".*")
    shutil.copytree(ROOT / "docs", folder, ignore=ignored)
    for notebook in sorted(folder.rglob("*.ipynb")):
        notebook.with_suffix(".md").write_text(as_page(notebook), encoding="utf-8")
    sources = {f"docs/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*.md"))}
    sources |= {source: folder / place for source, place in PAGES.items()}
    sources["docs/examples/README.md"] = folder / "examples" / "index.md"
    places = {source: path.relative_to(folder).as_posix() for source, path in sources.items()}
    places |= {"docs/README.md": "index.md", "docs/examples": "examples/index.md"}
    for source, path in sources.items():
        text = (ROOT / source if (ROOT / source).is_file() else path).read_text(encoding="utf-8")
        path.write_text(with_links(text, source, places), encoding="utf-8")
    for name, about in REFERENCE.items():
        page = folder / "reference" / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# {name}\n\n{about}\n\n{described(name)}", encoding="utf-8")


def as_page(notebook: Path) -> str:
    """Returns a notebook with its outputs as Markdown, and writes its pictures beside it."""
    parts = []
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            found = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in found:
                picture = notebook.with_name(f"{notebook.stem}_{number}.png")
                picture.write_bytes(base64.b64decode(found["image/png"]))
                parts.append(f"![Output of the cell above]({picture.name})")
            elif output.get("name") != "stderr":
                printed = "".join(found["text/plain"]).strip()
                parts += [f"```text\n{printed}\n```"] if printed else []
    download = f"\n\nThis page is a notebook: `docs/notebooks/{notebook.name}`.\n"
    return "\n\n".join(parts) + download


def search_in_a_folder() -> str:
    """Returns a script that lets search work in pages opened without a server.

    Browsers start no worker from a file. They do from a text, so the script has the worker in it.
    """
    (worker,) = (Path(zensical.__file__).parent / "templates/assets/javascripts/workers").glob("search.*.js")
    return (
        f'if (location.protocol === "file:") {{\n  const text = {json.dumps(worker.read_text(encoding="utf-8"))};\n'
        "  const Native = Worker;\n"
        "  window.Worker = function () { return new Native(URL.createObjectURL(new Blob([text]))); };\n}\n"
    )


def from_elsewhere(site: Path) -> set[str]:
    """Returns what pages load from other servers: the site works without a network, and tells no one who reads it."""
    loaded = r"""<(?:script|img|iframe)\b[^>]*\bsrc="?(https?://[^"\s>]+)|<link\b[^>]*rel="?stylesheet[^>]*href="?(https?://[^"\s>]+)"""
    return {
        "".join(found)
        for page in site.rglob("*.html")
        for found in re.findall(loaded, page.read_text(encoding="utf-8"))
    }


def undocumented() -> list[str]:
    """Returns the public modules, classes, functions and methods of the package that have no docstring."""
    found = []
    for path in sorted((ROOT / "solver_plugins").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in [tree, *tree.body]:
            name = getattr(node, "name", "")
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and not name.startswith("_")
            if documented and ast.get_docstring(node) is None:
                found.append(f"{path.relative_to(ROOT)}: {name or 'the module'}")
    for package in REFERENCE:
        module = importlib.import_module(package)
        for one in (getattr(module, name) for name in getattr(module, "__all__", ())):
            members = vars(one) if inspect.isclass(one) else {}
            # What overrides a documented method has its text.
            found += [
                f"{package}.{one.__name__}.{name}"
                for name, member in members.items()
                if isinstance(member, FunctionType | property) and not name.startswith("_")
                if not inspect.getdoc(getattr(one, name))
            ]
    return found


def described(name: str) -> str:
    """Returns the directive that describes the public names of a package."""
    listed = getattr(importlib.import_module(name), "__all__", None)
    if listed is None:
        return f"::: {name}\n"
    return f"::: {name}\n    options:\n      members:\n" + "".join(f"        - {one}\n" for one in sorted(listed))


def identifiers() -> dict[str, str]:
    """Returns where the site describes each public name: in its own package, not where it is passed on."""
    packages = reversed(REFERENCE)
    return {name: f"{one}.{name}" for one in packages for name in getattr(importlib.import_module(one), "__all__", ())}


def with_links(text: str, source: str, places: dict[str, str]) -> str:
    """Turns the links of a page of the repository into links of the site.

    Args:
        text: The page.
        source: Its path in the repository.
        places: Where each path of the repository is on the site.
    """
    here = posixpath.dirname(places[source])

    def moved(match: re.Match[str]) -> str:
        mark, label, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target) or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = places.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None:
            # A file that is not a page. The site does not know where the repository is, so it only names it.
            return label if label.startswith("`") else f"`{path}`"
        if label.endswith(".md"):
            label = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"{mark}[{label}]({posixpath.relpath(place, here or '.')}{anchor or ''})"

    return re.sub(r"(!?)\[([^\]\n]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", moved, text)


def main() -> int:
    """Builds the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="where the site is written")
    output = parser.parse_args().output.resolve()
    if missing := undocumented():
        print("Without a docstring:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    build = ROOT / "build" / "docs"
    prepare(build / "pages")
    config = yaml.safe_load((ROOT / ".ci" / "site.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": "pages", "site_dir": "site"}
    python = next(one for one in config["plugins"] if "mkdocstrings" in one)["mkdocstrings"]["handlers"]["python"]
    python["options"]["extensions"] = [{"../../.ci/roles.py": {"places": identifiers()}}]
    config["nav"].insert(-1, {"Reference": [{name: f"reference/{name}.md"} for name in REFERENCE]})
    # The name is how zensical knows that it need not load such a script from elsewhere.
    (build / "pages" / "iframe-worker.js").write_text(search_in_a_folder(), encoding="utf-8")
    shutil.copy(ROOT / ".ci" / "site.css", build / "pages")
    (build / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    code = subprocess.call([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=build)
    if code == 0 and (foreign := from_elsewhere(build / "site")):
        print("Loaded from elsewhere:", *sorted(foreign), sep="\n  ", file=sys.stderr)
        return 1
    if code == 0:
        shutil.rmtree(output, ignore_errors=True)
        shutil.move(build / "site", output)
        print(f"Open {output / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
