"""Patches for training scripts of timm and transformers: diffs that only insert lines, applied where their context is.

A patch is a header and a unified diff with a line or two of context::

    Package: timm
    Target: train.py
    Tested: 1.0.28 1fb02d26fe16536b...

Line numbers are not looked at: each insertion goes to the one place of the file that has its context, so a patch fits
every version of a script in which these places are. The result has to compile before it is written. ``Tested`` names
the files that the patch was tried with, by version and sha256; any other one is patched with a note.
"""

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from solver_plugins.errors import SolverPluginsError
from solver_plugins.integrations.errors import SavingError
from solver_plugins.integrations.folder import new_file
from solver_plugins.shipped import shipped_folders

FIELDS = ("Package", "Target", "Tested")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_TESTED = re.compile(r"(\S+) ([0-9a-f]{64})")


class PatchError(SolverPluginsError, ValueError):
    """A patch is damaged or does not fit a file, which is as it was."""


@dataclass(frozen=True)
class Hunk:
    """Lines to insert, and the lines before and after them; without their line ends."""

    before: tuple[bytes, ...]
    lines: tuple[bytes, ...]
    after: tuple[bytes, ...]

    @property
    def place(self) -> str:
        """Where the lines go, in words."""
        side, line = ("before", self.after[0]) if self.after else ("after", self.before[-1])
        return f"{side} the line {line.decode('utf-8', 'replace').strip()!r}"

    def found_in(self, content: bytes, *, inserted: bool) -> list[int]:
        """Returns every place of the lines in a script that has their context, with them or without them."""
        lines, middle = content.splitlines(), self.lines if inserted else ()
        wanted = [*self.before, *middle, *self.after]
        ends = range(len(lines) - len(wanted) + 1)
        return [place + len(self.before) for place in ends if lines[place : place + len(wanted)] == wanted]


@dataclass(frozen=True)
class Patch:
    """A diff that only inserts lines, and the script that it is for.

    Attributes:
        name: The name of the patch's file, without its ending.
        package: The distribution whose source holds the script.
        target: The script's path there.
        tested: The versions of the script that the patch was tried with: sha256 -> version.
        hunks: The lines to insert.
    """

    name: str
    package: str
    target: str
    tested: dict[str, str]
    hunks: tuple[Hunk, ...]

    @property
    def label(self) -> str:
        """The script in a few words."""
        return f"{Path(self.target).name} of {self.package}"

    @property
    def count(self) -> int:
        """How many lines it inserts."""
        return sum(len(hunk.lines) for hunk in self.hunks)


@dataclass(frozen=True)
class Patched:
    """What was done to a file, and the version of the script if the patch was tried with this very file."""

    patch: Patch
    version: str | None


def patch_folder() -> Path:
    """Returns the folder with the patches: in the source tree, or among the data of the installed package."""
    places = shipped_folders("patches")
    for place in places:
        if any(place.glob("*.patch")):
            return place
    raise PatchError(f"Expected patches in {' or '.join(map(str, places))}; found none. Install solver_plugins again.")


def list_patches(folder: Path | None = None) -> list[Patch]:
    """Returns all patches of a folder, ours by default, by name."""
    return [read_patch(path) for path in sorted((folder or patch_folder()).glob("*.patch"))]


def read_patch(path: Path) -> Patch:
    """Reads a patch; PatchError if it has another form, or removes a line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PatchError(f"Cannot read the patch {str(path)!r}: {error.strerror}.") from None
    start = next((number for number, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = [_field(line) for line in lines[:start] if b": " in line]
    missing = [name for name in FIELDS if not any(key == name and value for key, value in header)]
    if missing:
        raise PatchError(f"The header of the patch {path.name!r} lacks {', '.join(missing)}.")
    tested = {}
    for value in (value for key, value in header if key == "Tested"):
        match = _TESTED.fullmatch(value)
        if match is None:
            raise PatchError(
                f"The patch {path.name!r}: expected a version and 64 hexadecimal digits for Tested; found {value!r}."
            )
        tested[match[2]] = match[1]
    fields = dict(header)
    return Patch(path.stem, fields["Package"], fields["Target"], tested, _hunks(lines[start + 2 :], path.name))


def apply_patch(file: str | Path, folder: Path | None = None) -> Patched:
    """Inserts the lines of the patch whose context a file has."""
    place, content = _read(file)
    patches = list_patches(folder)
    for patch in patches:
        there = [bool(hunk.found_in(content, inserted=True)) for hunk in patch.hunks]
        if all(there):
            raise PatchError(f"{str(file)!r} is patched already, with {patch.name!r}. Nothing to do.")
        if any(there):
            raise PatchError(f"{str(file)!r} holds a part of the patch {patch.name!r}, and was changed since.")
    named = [patch for patch in patches if Path(patch.target).name == Path(file).name]
    obstacles = {patch.name: _obstacle(content, patch) for patch in named or patches}
    patch_ = next((patch for patch in named or patches if obstacles[patch.name] is None), None)
    if patch_ is None:
        if not named:
            raise PatchError(
                f"No patch fits {Path(file).name!r}. There are patches for "
                f"{'; '.join(patch.label for patch in patches)}. {_INSTEAD}"
            )
        raise PatchError(f"{str(file)!r} is not a {named[0].label} that can be patched: {obstacles[named[0].name]}. "
                         f"{_INSTEAD}")  # fmt: skip
    made = changed(content, patch_, insert=True)
    for text, what in ((content, "as it is"), (made, f"with the patch {patch_.name!r}")):
        try:
            compile(text, str(file), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise PatchError(f"{str(file)!r} does not compile {what}: {error}. Nothing was written.") from None
    _write(place, made)
    return Patched(patch_, patch_.tested.get(_hash(content)))


_INSTEAD = (
    "Nothing was written. `solver-plugins run SCRIPT ...` needs no patch; or call convert_model and refresh_steps in "
    "the script, as the patch does."
)


def revert_patch(file: str | Path, folder: Path | None = None) -> Patched:
    """Removes the lines of a patch from a file, which is then byte for byte what it was."""
    place, content = _read(file)
    patches = list_patches(folder)
    for patch in patches:
        there = [len(hunk.found_in(content, inserted=True)) for hunk in patch.hunks]
        if not any(there):
            continue
        if there != [1] * len(there):
            raise PatchError(
                f"{str(file)!r} holds {sum(map(bool, there))} of the {len(there)} insertions of {patch.name!r} as they "
                "were made. Undo your changes to the others, or remove the lines of the patch by hand."
            )
        made = changed(content, patch, insert=False)
        if changed(made, patch, insert=True) != content:
            raise PatchError(f"{str(file)!r}: {patch.name!r} cannot be taken out without a change of other lines.")
        _write(place, made)
        return Patched(patch, patch.tested.get(_hash(made)))
    raise PatchError(
        f"{str(file)!r} is not patched: it holds none of {', '.join(patch.name for patch in patches)}. Nothing to do."
    )


def changed(content: bytes, patch: Patch, *, insert: bool) -> bytes:
    """Returns a script with the lines of a patch, which get its own line ends, or a patched one without them."""
    lines = content.splitlines(keepends=True)
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    places = [(hunk.found_in(content, inserted=not insert)[0], hunk.lines) for hunk in patch.hunks]
    for place, inside in sorted(places, key=lambda pair: -pair[0]):
        lines[place : place + len(inside) * (not insert)] = [line + end for line in inside] * insert
    return b"".join(lines)


def _obstacle(content: bytes, patch: Patch) -> str | None:
    """Says which insertion of a patch has no place in a script, or several; None where all have one."""
    for hunk in patch.hunks:
        count = len(hunk.found_in(content, inserted=False))
        if count != 1:
            return f"the place {hunk.place} is " + ("not there" if not count else f"there {count} times")
    return None


def _field(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode("utf-8", "replace").partition(": ")
    return name.strip(), value.strip()


def _hunks(lines: list[bytes], name: str) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    place = 0
    while place < len(lines):
        match = _HUNK.match(lines[place].decode("utf-8", "replace"))
        if match is None:
            text = lines[place].decode("utf-8", "replace")
            raise PatchError(f"The patch {name!r}: expected '@@ -LINE,COUNT +LINE,COUNT @@'; found {text!r}.")
        old, new = int(match[1] or 1), int(match[2] or 1)
        body = lines[place + 1 : place + 1 + new]
        kinds = "".join(line[:1].decode("utf-8", "replace") for line in body)
        form = re.fullmatch(r"( *)(\++)( *)", kinds)
        if form is None or len(body) < new or len(form[1]) + len(form[3]) != old:
            raise PatchError(
                f"The patch {name!r}: expected {match[0]!r} to announce context, inserted lines and context, and "
                "nothing else: a patch only inserts."
            )
        texts = [line[1:] for line in body]
        first, last = len(form[1]), len(form[1]) + len(form[2])
        if not old:
            raise PatchError(f"The patch {name!r}: {match[0]!r} has no line of context, so its place is not known.")
        hunks.append(Hunk(tuple(texts[:first]), tuple(texts[first:last]), tuple(texts[last:])))
        place += 1 + new
    if not hunks:
        raise PatchError(f"The patch {name!r} inserts nothing.")
    return tuple(hunks)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(file: str | Path) -> tuple[Path, bytes]:
    # A link stays a link: the file that it points to is patched.
    place = Path(file).expanduser().resolve()
    try:
        return place, place.read_bytes()
    except OSError as error:
        raise PatchError(f"Cannot read {str(file)!r}: {error.strerror}.") from None


def _write(place: Path, content: bytes) -> None:
    """Replaces a file's content and keeps its mode."""
    try:
        with new_file(place) as made:
            made.write_bytes(content)
            shutil.copymode(place, made)
    except (OSError, SavingError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PatchError(f"Cannot write {str(place)!r}: {why}. It is as it was.") from None
