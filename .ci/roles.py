"""Turns the roles of docstrings (``:func:`name```) into links of the site, or into code where there is no such page."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`(~?)([\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites every docstring as it is read.

    Args:
        places: The identifier on the site of each public name.
    """

    def __init__(self, places: dict[str, str]) -> None:
        super().__init__()
        self.places = places

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(self._linked, obj.docstring.value)

    def _linked(self, role: re.Match[str]) -> str:
        short, name = role.groups()
        last = name.rpartition(".")[2]
        shown = f"`{last if short else name}`"
        return f"[{shown}][{self.places[last]}]" if last in self.places else shown
