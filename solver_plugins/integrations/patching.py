"""Patches for training scripts of timm and transformers: insert-only diffs, applied to the very file they are for.

A patch is a header and a unified diff without context lines, so that it holds no line of the script itself::

    Package: timm
    Versions: 1.0.27, 1.0.28
    Target: train.py
    Target-SHA256: ...
    Patched-SHA256: ...

Its line numbers are right in one file only, so the file's hash is compared before anything is written, and again
afterwards.
"""

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from solver_plugins.errors import SolverPluginsError
from solver_plugins.integrations.folder import new_file
from solver_plugins.shipped import shipped_folders

FIELDS = ("Package", "Versions", "Target", "Target-SHA256", "Patched-SHA256")
_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class PatchError(SolverPluginsError, ValueError):
    """A patch is damaged or does not fit a file, which is as it was."""


@dataclass(frozen=True)
class Hunk:
    """Lines to insert.

    Attributes:
        after: Number of the target's line that they follow.
        lines: The lines, with their line ends.
    """

    after: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class Patch:
    """An insert-only diff and the file that it is for.

    Attributes:
        name: The name of the patch's file, without its ending.
        package: The distribution that holds the target.
        versions: Its versions that have exactly this file.
        target: The target's path in the source of the package.
        sha256: The target's hash.
        patched_sha256: Its hash with the patch.
        hunks: The lines to insert.
    """

    name: str
    package: str
    versions: tuple[str, ...]
    target: str
    sha256: str
    patched_sha256: str
    hunks: tuple[Hunk, ...]

    @property
    def label(self) -> str:
        """The target's name, package and versions in a few words."""
        first, last = self.versions[0], self.versions[-1]
        shown = first if first == last else f"{first} to {last}"
        return f"{Path(self.target).name} of {self.package} {shown}"


def patch_folder() -> Path:
    """Returns the folder with the patches: in the source tree, or among the data of the installed package.

    Raises:
        PatchError: If neither has patches.
    """
    places = shipped_folders("patches")
    for place in places:
        if any(place.glob("*.patch")):
            return place
    raise PatchError(f"Expected patches in {' or '.join(map(str, places))}; found none. Install solver_plugins again.")


def list_patches(folder: Path | None = None) -> list[Patch]:
    """Returns all patches of a folder, ours by default, by name."""
    return [read_patch(path) for path in sorted((folder or patch_folder()).glob("*.patch"))]


def read_patch(path: Path) -> Patch:
    """Reads a patch.

    Raises:
        PatchError: If it has another form, or removes a line.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise PatchError(f"Cannot read the patch {str(path)!r}: {error.strerror}.") from None
    start = next((number for number, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = dict(_field(line) for line in lines[:start] if b": " in line)
    missing = [name for name in FIELDS if not header.get(name)]
    if missing:
        raise PatchError(f"The header of the patch {path.name!r} lacks {', '.join(missing)}.")
    for name in ("Target-SHA256", "Patched-SHA256"):
        if not _SHA256.fullmatch(header[name]):
            raise PatchError(
                f"The patch {path.name!r}: expected 64 hexadecimal digits for {name}; found {header[name]!r}."
            )
    return Patch(
        name=path.stem,
        package=header["Package"],
        versions=tuple(version.strip() for version in header["Versions"].split(",")),
        target=header["Target"],
        sha256=header["Target-SHA256"],
        patched_sha256=header["Patched-SHA256"],
        hunks=_hunks(lines[start + 2 :], path.name),
    )


def apply_patch(file: str | Path, folder: Path | None = None) -> Patch:
    """Inserts the lines of the patch that is for a file, and returns the patch.

    Raises:
        PatchError: If no patch was made for this file, or it is patched already. The file is as it was then.
    """
    place, content = _read(file)
    patches, found = list_patches(folder), _hash(content)
    patch = next((patch for patch in patches if patch.sha256 == found), None)
    if patch is None:
        done = next((patch for patch in patches if patch.patched_sha256 == found), None)
        if done is not None:
            raise PatchError(f"{str(file)!r} is patched already, with {done.name!r}. Nothing to do.")
        raise PatchError(_no_patch_for(file, content, patches, found))
    made = insert(content, patch)
    if _hash(made) != patch.patched_sha256:
        raise PatchError(f"The patch {patch.name!r} is damaged: its result has another hash than its header says.")
    _write(place, made)
    return patch


def revert_patch(file: str | Path, folder: Path | None = None) -> Patch:
    """Removes the lines of a patch from a file, which is then byte for byte what it was, and returns the patch.

    Raises:
        PatchError: If the file is not patched, or was changed since. The file is as it was then.
    """
    place, content = _read(file)
    patches, found = list_patches(folder), _hash(content)
    patch = next((patch for patch in patches if patch.patched_sha256 == found), None)
    if patch is None:
        if any(patch.sha256 == found for patch in patches):
            raise PatchError(f"{str(file)!r} is not patched. Nothing to do.")
        changed = _changed_since(content, patches)
        if changed is not None:
            raise PatchError(
                f"{str(file)!r} was changed after the patch {changed.name!r}; taking it back could lose that. Undo "
                f"your changes, or remove the {_count(changed)} lines of the patch by hand."
            )
        raise PatchError(f"{str(file)!r} holds none of the patches ({', '.join(patch.name for patch in patches)}).")
    made = take_out(content, patch)
    if _hash(made) != patch.sha256:
        raise PatchError(f"The patch {patch.name!r} is damaged: without it the file has another hash than it should.")
    _write(place, made)
    return patch


def insert(content: bytes, patch: Patch) -> bytes:
    """Returns a target with the lines of a patch."""
    lines = content.splitlines(keepends=True)
    for hunk in reversed(patch.hunks):
        if hunk.after > len(lines):
            raise PatchError(f"The patch {patch.name!r} inserts behind line {hunk.after} of {len(lines)}.")
        lines[hunk.after : hunk.after] = hunk.lines
    return b"".join(lines)


def take_out(content: bytes, patch: Patch) -> bytes:
    """Returns a patched target without the lines of its patch."""
    lines = content.splitlines(keepends=True)
    for hunk in patch.hunks:
        # Earlier hunks are already removed, so the line numbers are those of the target.
        if tuple(lines[hunk.after : hunk.after + len(hunk.lines)]) != hunk.lines:
            raise PatchError(f"The lines of the patch {patch.name!r} are not behind line {hunk.after}.")
        del lines[hunk.after : hunk.after + len(hunk.lines)]
    return b"".join(lines)


def _field(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode("utf-8", "replace").partition(": ")
    return name.strip(), value.strip()


def _hunks(lines: list[bytes], name: str) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    inserted, place = 0, 0
    while place < len(lines):
        match = _HUNK.match(lines[place].decode("utf-8", "replace"))
        if match is None:
            raise PatchError(
                f"The patch {name!r}: expected '@@ -LINE,0 +LINE,COUNT @@', as it may only insert; found "
                f"{lines[place].decode('utf-8', 'replace').rstrip()!r}."
            )
        after, new, count = int(match[1]), int(match[2]), int(match[3] or 1)
        body = lines[place + 1 : place + 1 + count]
        in_order = not hunks or after > hunks[-1].after
        if len(body) < count or not all(line.startswith(b"+") for line in body) or new != after + inserted + 1:
            raise PatchError(f"The patch {name!r}: the lines behind {match[0]!r} are not those that it announces.")
        if not in_order:
            raise PatchError(f"The patch {name!r}: {match[0]!r} stands behind a later line.")
        hunks.append(Hunk(after, tuple(line[1:] for line in body)))
        inserted += count
        place += 1 + count
    if not hunks:
        raise PatchError(f"The patch {name!r} inserts nothing.")
    return tuple(hunks)


def _no_patch_for(file: str | Path, content: bytes, patches: list[Patch], found: str) -> str:
    """Says why a file cannot be patched."""
    unix = _hash(content.replace(b"\r\n", b"\n"))
    for patch in patches:
        if unix in (patch.sha256, patch.patched_sha256):
            return f"{str(file)!r} is {patch.label} with Windows line ends; convert them to Unix ones (\\n) first."
    changed = _changed_since(content, patches)
    if changed is not None:
        return f"{str(file)!r} holds the patch {changed.name!r} already, and was changed since. Nothing was written."
    named = [patch for patch in patches if Path(patch.target).name == Path(file).name]
    if not named:
        return (
            f"No patch is for a file called {Path(file).name!r}. There are patches for "
            f"{'; '.join(patch.label for patch in patches)}."
        )
    return (
        f"Expected {' or '.join(patch.label for patch in named)}, unchanged; {str(file)!r} (sha256 {found[:12]}...) is "
        "of another version, or was changed. Take the file of one of these versions; or call convert_model and "
        "refresh_steps in yours, as the patch does."
    )


def _changed_since(content: bytes, patches: list[Patch]) -> Patch | None:
    """Returns the patch whose hunks are all in a file that is not the patched target."""
    for patch in patches:
        if all(b"".join(hunk.lines) in content for hunk in patch.hunks):
            return patch
    return None


def _count(patch: Patch) -> int:
    return sum(len(hunk.lines) for hunk in patch.hunks)


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
    except OSError as error:
        raise PatchError(f"Cannot write {str(place)!r}: {error.strerror}. It is as it was.") from None
