"""Writes docs/api.md: every public name with its signature and docstring. Run by ``make docs``."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
MODULES = (
    "solver_plugins",
    "solver_plugins.blocks",
    "solver_plugins.solve",
    "solver_plugins.prox",
    "solver_plugins.operators",
    "solver_plugins.surgery",
    "solver_plugins.proxprop",
    "solver_plugins.equilibrium",
    "solver_plugins.dropblock",
    "solver_plugins.integrations",
    "solver_plugins.train",
    "solver_plugins.studies",
    "solver_plugins.errors",
)


def api_page() -> str:
    """Returns the page."""
    parts = [
        "# API reference\n\nMade from the docstrings by `make docs`; do not edit it. A name is described where it is "
        "first listed.\n\n" + "\n".join(f"- [{name}](#{name.replace('.', '')})" for name in MODULES)
    ]
    described: dict[int, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{_text(module)}")
        again = []
        for public in _public(module):
            target = getattr(module, public)
            if id(target) in described and callable(target):
                again.append(f"`{public}`")
            else:
                described[id(target)] = name
                parts.append(_entry(public, target))
        if again:
            parts.append(f"Also here, and described above: {', '.join(again)}.")
    return "\n\n".join(parts) + "\n"


def _public(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.casefold)
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return sorted((name for name in own if not name.startswith("_")), key=str.casefold)


def _entry(name: str, target: Any) -> str:
    if inspect.isclass(target):
        methods = [_method(key, value) for key, value in vars(target).items() if _is_method(key, value)]
        return "\n\n".join([f"### class `{name}{_signature(target)}`", _text(target), *methods])
    if callable(target) and hasattr(target, "__qualname__"):
        return f"### `{name}{_signature(target)}`\n\n{_text(target)}"
    # A value has no docstring of its own, and the one of its class says nothing about it.
    return f"### `{name}`\n\nA value of `{type(target).__name__}`."


def _is_method(name: str, value: Any) -> bool:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    documented = (inspect.isfunction(function) or isinstance(function, property)) and bool(function.__doc__)
    return documented and not name.startswith("_")


def _method(name: str, value: Any) -> str:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    signature = "" if isinstance(value, property) else _signature(function)
    return f"**`{name}{signature}`**\n\n{_text(function)}"


def _signature(target: Any) -> str:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return ""
    # Types are left out: they are in the code, and they differ between versions of Python and torch.
    parameters = []
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, None | bool | int | float | str | tuple):
            # Its text may hold an address.
            parameter = parameter.replace(default=_Shown("..."))
        parameters.append(parameter.replace(annotation=parameter.empty))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


class _Shown(str):
    """A text that a signature shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _text(target: Any) -> str:
    """Returns an object's own docstring as Markdown: sections in bold, references and code as code."""
    text = inspect.cleandoc(target.__doc__ or "")
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    lines: list[str] = []
    in_section = False
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields|Example|Examples):", line)
        if heading:
            in_section = True
            lines += [f"*{heading[1]}*", ""]
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            entry = re.fullmatch(r"(\*{0,2}\w+): (.*)", line.strip())
            lines.append(f"- `{entry[1]}`: {entry[2]}" if entry else f"- {line.strip()}")
        elif in_section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line
            lines.append(line)
    return "\n".join(lines).strip()


if __name__ == "__main__":
    page = api_page()
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: {page.count(chr(10))} lines", file=sys.stderr)
