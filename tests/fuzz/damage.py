"""Ways to damage a file: what a bad disk, a careless hand or a stranger does to it."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DEEP = 100_000  # levels of brackets, more than Python can stack
PLACES = st.integers(0, 2**20)  # of a byte or an entry, modulo how many there are

wild_texts = st.one_of(
    st.sampled_from(["", "[/red]", "[/", "\0", "\x1b[31m", "none", "../..", "/", "~nobody", "a\nb", "é", "nan", "%s"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
wild_numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**23, -(10**400), 0.5, -0.0, 1e308, float("nan"), float("inf"), 5e-324]),
    st.integers(-3, 300),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), wild_numbers, wild_texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(wild_texts, inner, max_size=3)),
    max_leaves=4,
)


@dataclass(frozen=True)
class Damage:
    """What is done to a file. ``beside`` is a folder of somebody else, which must stay as it is."""

    how: str
    at: int = 0
    value: Any = None

    def apply(self, path: Path, beside: Path) -> None:
        if os.path.lexists(path):  # it may be deleted already
            WAYS[self.how](self, path, beside)


def _rewrite(change: Callable[[Damage, bytes], bytes]) -> Callable[[Damage, Path, Path], None]:
    def rewrite(damage: Damage, path: Path, beside: Path) -> None:
        if path.is_file() and not path.is_symlink():  # not what was replaced already
            path.write_bytes(change(damage, path.read_bytes()))

    return rewrite


def _replace(make: Callable[[Damage, Path, Path], None]) -> Callable[[Damage, Path, Path], None]:
    def replace(damage: Damage, path: Path, beside: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(damage, path, beside)

    return replace


def _flip(damage: Damage, content: bytes) -> bytes:
    changed = bytearray(content or b"\0")
    changed[damage.at // 8 % len(changed)] ^= 1 << damage.at % 8
    return bytes(changed)


def _link_to_file(damage: Damage, path: Path, beside: Path) -> None:
    path.symlink_to(beside / "mine.txt")


def _link_to_folder(damage: Damage, path: Path, beside: Path) -> None:
    path.symlink_to(beside)


def _folder(damage: Damage, path: Path, beside: Path) -> None:
    path.mkdir()
    if damage.at % 2:
        (path / "thesis.txt").write_text("mine")


def _mutate(damage: Damage, content: bytes) -> bytes:
    """Other JSON: an entry somewhere in it is another value, missing, or new."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # lines of JSON: one of them; or damaged before
        lines = content.splitlines() or [b"{}"]
        lines[damage.at % len(lines)] = json.dumps(damage.value).encode()
        return b"\n".join(lines) + b"\n"
    return json.dumps(_mutated(tree, damage.at, damage.value), indent=1).encode()


def _mutated(tree: Any, at: int, value: Any) -> Any:
    """The tree with another value at one of its places."""
    entries = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    if not entries or at % 11 == 10:
        return value
    at //= 11
    key, inner = entries[at % len(entries)]
    at //= len(entries)
    action = at % 5
    at //= 5
    if isinstance(inner, dict | list) and inner and action:
        new = _mutated(inner, at, value)
    elif action == 1:
        changed = [entry for entry in entries if entry[0] != key]
        return dict(changed) if isinstance(tree, dict) else [entry for _, entry in changed]
    elif action == 2 and isinstance(tree, dict):
        return {**tree, str(value): inner}
    else:
        new = value
    return {**tree, key: new} if isinstance(tree, dict) else [new if i == key else e for i, e in entries]


WAYS: dict[str, Callable[[Damage, Path, Path], None]] = {
    "flip a bit": _rewrite(_flip),
    "cut": _rewrite(lambda damage, content: content[: damage.at % max(len(content), 1)]),
    "empty": _rewrite(lambda damage, content: b""),
    "zeros": _rewrite(lambda damage, content: bytes(len(content))),
    "append": _rewrite(lambda damage, content: content + (damage.value or b"\xff")),
    "garbage": _rewrite(lambda damage, content: damage.value or b"\xff\xfe\0"),
    "insert": _rewrite(
        lambda d, content: (
            content[: d.at % (len(content) + 1)] + (d.value or b"\0") + content[d.at % (len(content) + 1) :]
        )
    ),
    "deep": _rewrite(lambda damage, content: (b"[", b'{"a":')[damage.at % 2] * DEEP),
    "deep entry": _rewrite(
        lambda damage, content: content.rstrip()[:-1] + b', "deep": ' + b"[" * DEEP + b"]" * DEEP + b"}"
    ),
    "digits": _rewrite(lambda damage, content: b'{"a": ' + b"1" * 5_000 + b"}"),
    "json": _rewrite(_mutate),
    "delete": _replace(lambda damage, path, beside: None),
    "folder": _replace(_folder),
    "link to a file": _replace(_link_to_file),
    "link to a folder": _replace(_link_to_folder),
    "link to nothing": _replace(lambda damage, path, beside: path.symlink_to(beside / "nothing")),
    "link to itself": _replace(lambda damage, path, beside: path.symlink_to(path)),
    "pipe": _replace(lambda damage, path, beside: os.mkfifo(path)),
    "device": _replace(lambda damage, path, beside: path.symlink_to("/dev/zero" if damage.at % 2 else "/dev/null")),
}
OF_BYTES = {"append", "garbage", "insert"}  # whose value is bytes
OF_JSON = {"json", "deep", "deep entry", "digits"}
OF_FOLDERS = ("delete", "link to a file", "link to a folder", "link to nothing", "link to itself", "pipe")


@st.composite
def damages(draw: st.DrawFn, *, to_json: bool = True) -> Damage:
    """Of a file."""
    how = draw(st.sampled_from([*WAYS, *["flip a bit"] * 3, *["json"] * (8 if to_json else 0)]))
    if how in OF_JSON and not to_json:
        how = "flip a bit"
    value = (
        draw(st.binary(min_size=1, max_size=12)) if how in OF_BYTES else draw(json_values) if how == "json" else None
    )
    return Damage(how, draw(PLACES), value)


def make_beside(folder: Path) -> Path:
    """A folder of somebody else."""
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    (folder / "00000099").mkdir()
    (folder / "00000099" / "thesis.txt").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """What is in a folder: the bytes of files, the targets of links."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found
