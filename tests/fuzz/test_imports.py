"""Imports, ``data prepare TASK --from``: folders and archives that are damaged, incomplete, encrypted or hostile.

The official sets are replaced by tiny ones of the same form, so that an import that is right succeeds.
"""

import gzip
import hashlib
import io
import json
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from fuzz.cases import fuzz, new_case
from fuzz.damage import PLACES, WAYS, Damage, damages, make_beside, wild_texts
from hypothesis import strategies as st

from longlens.tasks import images, language, text

WORDS = ["the", "cat", "sat", "<unk>", "on", "mat"]
ARCHIVES = ("folder", "x.zip", "x.tar", "x.tar.gz", "x.tgz", "x.tar.bz2", "x.tar.xz")
BOMB = 300 << 20  # bytes, of zeros; more than any file here may have


def _idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def _png(value: int, size: int = 4) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (size, size), value).save(file, "png")
    return file.getvalue()


def _members() -> dict[str, dict[str, bytes]]:
    """The files of each task."""
    pixels, digits = np.arange(12 * 784, dtype=np.uint8).reshape(12, 28, 28), np.arange(12, dtype=np.uint8) % 10
    found: dict[str, dict[str, bytes]] = {"text8": {"text8": b"the quick brown fox " * 30}}
    found["enwik8"] = {"enwik8": bytes(range(256)) * 3}
    found["smnist"] = {
        f"{split}-{kind}-ubyte": _idx(array[:count])
        for split, count in (("train", 12), ("t10k", 6))
        for kind, array in (("images-idx3", pixels), ("labels-idx1", digits))
    }
    cifar = b"".join(bytes([label]) + bytes([40 * label]) * 3072 for label in (1, 2))
    found["image"] = {f"cifar-10-batches-bin/{name}": cifar for names in images.CIFAR_FILES.values() for name in names}
    found["text"] = {
        f"aclImdb/{split}/{label}/{i}_7.txt": f"{label} film number {i}".encode() * 3
        for split in ("train", "test")
        for label in ("neg", "pos")
        for i in range(4)
    }
    line = " ".join(WORDS) + "\n"
    found["wikitext-2"] = {f"wikitext-2/wiki.{split}.tokens": line.encode() * 3 for split in ("train", "valid", "test")}
    pairs = "1.0\t'a'\t'b'\t\"one text\"\tanother\n0\t'c'\t'd'\tthird\tfourth\n"
    found["retrieval"] = {f"new_aan_pairs.{split}.tsv": pairs.encode() * 12 for split in ("train", "eval", "test")}
    expressions = "Source\tTarget\n" + "( ( ( [MAX 2 ) 9 ) ] )\t9\n( ( ( [MIN 2 ) 4 ) ] )\t2\n"
    found["listops"] = {f"basic_{split}.tsv": expressions.encode() for split in ("train", "val", "test")}
    folder = "pathfinder4/curv_contour_length_14"
    found["pathfinder"] = {f"{folder}/imgs/0/{i}.png": _png(40 * i) for i in range(6)}
    lines = "".join(f"imgs/0 {i}.png 0 {i % 2} 1\n" for i in range(6))
    found["pathfinder"][f"{folder}/metadata/0.npy"] = lines.encode()
    return found


MEMBERS = _members()
FLAGS = {
    "text8": ["--stand-in"],
    "enwik8": ["--stand-in"],
    "smnist": ["--valid-size", "2"],
    "image": ["--valid-size", "2"],
    "text": ["--valid-size", "2", "--min-count", "1"],
    "wikitext-2": [],
    "retrieval": ["--stand-in", "--min-count", "1"],
    "listops": ["--release", "--sizes", "2", "2", "2", "--max-length", "64"],
    "pathfinder": ["--release", "--sizes", "2", "2", "2", "--size", "4"],
}
OFFICIAL = ("smnist", "image")  # what is accepted is what it is


@contextmanager
def tiny_sets() -> Iterator[None]:
    """The sizes and checksums of the tiny sets in place of the official ones."""
    gray = {}
    for split, names in images.CIFAR_FILES.items():
        digest = hashlib.sha256()
        for name in names:
            records = np.frombuffer(MEMBERS["image"][f"cifar-10-batches-bin/{name}"], np.uint8).reshape(-1, 3073)
            digest.update(images.gray(records[:, 1:].reshape(-1, 3, 1024)).tobytes() + records[:, 0].tobytes())
        gray[split] = digest.hexdigest()
    digits = {}
    for split, prefix in images.PREFIX.items():
        pixels, labels = (MEMBERS["smnist"][f"{prefix}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
        digits[split] = hashlib.sha256(pixels[16:] + labels[8:]).hexdigest()
    words = 3 * (len(WORDS) + 1)
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(images.Cifar, "checksums", gray),
            mock.patch.object(images.Mnist, "checksums", digits),
            mock.patch.object(images, "CIFAR_FILE", 2 * images.CIFAR_RECORD),
            mock.patch.object(images.Cifar, "sizes", {"train": 10, "test": 2}),
            mock.patch.object(images.Mnist, "sizes", {"train": 12, "test": 6}),
            mock.patch.object(text.Text, "sizes", {"train": 8, "test": 8}),
            mock.patch.object(language.WikiText2, "sizes", dict.fromkeys(("train", "valid", "test"), words)),
            mock.patch.object(language.WikiText2, "symbols", len(WORDS) + 1),
        ):
            stack.enter_context(patch)
        yield


@dataclass(frozen=True)
class Packed:
    """How the files of a task are packed, and what is wrong with them."""

    form: str = "folder"
    members: tuple[tuple[int, Damage], ...] = ()  # which one, and what is done to it
    renamed: str | None = None  # another name of a member
    special: str | None = None  # a member of another kind
    archive: Damage | None = None  # what is done to the archive itself

    def write(self, folder: Path, files: dict[str, bytes], beside: Path) -> Path:
        root = folder / "files"
        for name, data in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        names = sorted(files)
        for which, damage in self.members:
            damage.apply(root / names[which % len(names)], beside)
        if self.form == "folder":
            if self.renamed and (root / names[0]).exists():
                (root / names[0]).replace(root / (self.renamed.replace("/", "_").strip(".")[:60] or "x"))
            return root
        path = folder / self.form
        (self._zip if self.form == "x.zip" else self._tar)(path, root, names)
        if self.archive is not None:
            self.archive.apply(path, beside)
        return path

    def _zip(self, path: Path, root: Path, names: list[str]) -> None:
        kind = zipfile.ZIP_LZMA if self.special == "lzma" else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(path, "w", kind) as archive:
            for i, name in enumerate(names):
                if (root / name).is_file() and not (root / name).is_symlink():
                    archive.writestr(self.renamed if self.renamed and i == 0 else name, (root / name).read_bytes())
            if self.special == "twice":
                with warnings.catch_warnings(action="ignore"):  # of a duplicate name
                    archive.writestr(names[-1], b"x")
        if self.special == "encrypted":
            data = bytearray(path.read_bytes())
            for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
                if mark in data:
                    data[data.index(mark) + place] |= 1
            path.write_bytes(data)

    def _tar(self, path: Path, root: Path, names: list[str]) -> None:
        mode = {"bz2": "w:bz2", "xz": "w:xz", "tar": "w"}.get(path.name.rpartition(".")[2], "w:gz")
        with tarfile.open(path, mode) as archive:
            for i, name in enumerate(names):
                member = tarfile.TarInfo(self.renamed if self.renamed and i == 0 else name)
                file = root / name
                data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
                member.size = len(data)
                if self.special in SPECIALS and i == len(names) - 1:
                    member.type, member.linkname, member.size = SPECIALS[self.special], "/etc/passwd", 0
                archive.addfile(member, io.BytesIO(data))


SPECIALS = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE}
names = st.one_of(
    st.sampled_from(["../evil", "/etc/evil", "a/../../b", "C:\\evil", "x" * 300, "é", "a//b", "."]), wild_texts
)


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    form = draw(st.sampled_from(ARCHIVES))
    members = draw(st.lists(st.tuples(PLACES, damages(to_json=False)), max_size=2).map(tuple))
    renamed = draw(st.one_of(st.none(), st.none(), names.filter(lambda name: name and "\0" not in name)))
    special = draw(st.sampled_from([None, None, None, *SPECIALS, "encrypted", "lzma", "twice"]))
    ways = [way for way in WAYS if "deep" not in way and way != "json"]
    archive = draw(st.one_of(st.none(), st.builds(Damage, st.sampled_from(ways), PLACES)))
    return Packed(form, members, renamed, special, archive if form != "folder" else None)


def _files(folder: Path) -> object:
    """The files of a set and their checksums."""
    return json.loads((folder / "meta.json").read_text())["files"]


@pytest.fixture(scope="module")
def right() -> dict[str, object]:
    """The official sets as they are."""
    found = {}
    for task in OFFICIAL:
        with new_case("imports") as case, tiny_sets():
            path = Packed().write(case.folder, MEMBERS[task], case.folder)
            assert case.longlens("data", "prepare", task, *FLAGS[task], "--from", path).code == 0
            found[task] = _files(next(case.home.glob("sets/*/meta.json")).parent)
    return found


@pytest.mark.parametrize("task", MEMBERS)
@fuzz(60, packed=packed())
def test_an_import(right, task, packed):
    with new_case("imports") as case, tiny_sets():
        beside = make_beside(case.folder / "beside")
        path = packed.write(case.folder, MEMBERS[task], beside)
        said = case.longlens("data", "prepare", task, *FLAGS[task], "--from", path)
        sets = [folder for folder in case.home.glob("sets/*") if folder.is_dir()]
        assert len(sets) == (said.code == 0), said
        assert (beside / "mine.txt").read_text() == "mine"
        if said.code == 0:
            assert task not in OFFICIAL or _files(sets[0]) == right[task], said
            assert case.longlens("data", "verify").code == 0
            assert case.longlens("data", "show", task, *FLAGS[task]).code == 0


@pytest.mark.parametrize("task", MEMBERS)
@fuzz(7, form=st.sampled_from(ARCHIVES))
def test_what_is_right_is_imported(task, form):
    """Otherwise the cases above would show nothing."""
    with new_case("imports") as case, tiny_sets():
        path = Packed(form).write(case.folder, MEMBERS[task], case.folder)
        said = case.longlens("data", "prepare", task, *FLAGS[task], "--from", path)
        assert said.code == 0, said


@pytest.fixture(scope="module")
def bombs(tmp_path_factory) -> Path:
    """Zeros that take little room as long as they are packed."""
    folder = tmp_path_factory.mktemp("bombs")
    with gzip.open(folder / "zeros.gz", "wb", 1) as file:
        for _ in range(BOMB >> 20):
            file.write(bytes(1 << 20))
    return folder / "zeros.gz"


@pytest.mark.parametrize("task", MEMBERS)
@fuzz(2, which=PLACES)
def test_a_bomb(bombs, task, which):
    """A file that unpacks to much more than it should have: refused before it is in memory."""
    with new_case("imports") as case, tiny_sets():
        files = MEMBERS[task]
        path = Packed().write(case.folder, files, case.folder)
        name = sorted(files)[which % len(files)]
        (path / name).unlink()
        (path / f"{name}.gz").symlink_to(bombs)
        said = case.longlens("data", "prepare", task, *FLAGS[task], "--from", path)
        assert said.code == 2, said
