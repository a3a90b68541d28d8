"""Pathfinder and Path-X as tasks; the drawings themselves are tested in test_snakes.py."""

import shutil
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from longlens.data.paddles import PATH_X, PATHFINDER_32
from longlens.errors import BadInput
from longlens.tasks.base import create_task

SMALL = {"size": 16, "contour": 5, "distractors": 1, "sizes": (20, 6, 6)}


def test_the_sets_of_the_arena():
    for name, size, style in (("pathfinder", 32, PATHFINDER_32), ("path-x", 128, PATH_X)):
        task = create_task(name)
        assert task.sizes == (160_000, 20_000, 20_000)
        assert task.drawn_style() == style
        assert (task.spec.inputs, task.spec.size, task.spec.max_length) == ("real", 1, size**2)
        assert (task.spec.outputs, task.spec.metric) == (2, "accuracy")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pathfinder", "path-x"])
def test_splits_are_balanced_and_disjoint(name):
    options = SMALL if name == "pathfinder" else {"sizes": (20, 6, 6), "size": 48, "contour": 4}
    task = create_task(name, **options)
    images = []
    for split, size in zip(("train", "valid", "test"), (20, 6, 6), strict=True):
        samples = task.split(split).take(np.arange(size))
        assert samples.targets.sum() == size // 2
        assert samples.inputs.shape == (size, task.size**2, 1)
        assert samples.inputs.min() == 0
        assert 0.7 < samples.inputs.max() <= 1
        images += [image.tobytes() for image in samples.inputs]
    assert len(set(images)) == 32


@pytest.mark.slow
def test_processes_do_not_matter(home, monkeypatch):
    digests = []
    for workers in (1, 2):
        monkeypatch.setenv("LONGLENS_HOME", str(home / str(workers)))
        task = create_task("pathfinder", **SMALL | {"sizes": (1800, 100, 100)})
        task.prepare(workers=workers)
        digests.append([facts["sha256"] for facts in task.prepared.meta["files"].values()])
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_repeated_images_leave_with_their_partners():
    task = create_task("pathfinder", size=11, contour=2, distractors=0, sizes=(3000, 300, 300))
    for split, size in zip(("train", "valid", "test"), task.sizes, strict=True):
        assert task.split(split).targets.sum() == size // 2


def release(folder, count=12, size=16):
    """A folder in the form of the arena's release, image i having the shade i."""
    root = folder / f"pathfinder{size}" / "curv_contour_length_14"
    (root / "metadata").mkdir(parents=True)
    for group in range(2):
        (root / "imgs" / str(group)).mkdir(parents=True)
        lines = []
        for i in range(group, count, 2):
            Image.fromarray(np.full((size, size), i, np.uint8)).save(root / "imgs" / str(group) / f"sample_{i}.png")
            lines.append(f"imgs/{group} sample_{i}.png {i} {i % 2} 1.0 14")
        (root / "metadata" / f"{group}.npy").write_text("\n".join(lines) + "\n")
    return root


def test_the_images_of_the_release_are_imported(tmp_path):
    release(tmp_path)
    task = create_task("pathfinder", size=16, sizes=(8, 2, 2), release=True)
    task.prepare(tmp_path)
    shades = []
    for split in ("train", "valid", "test"):
        samples = task.split(split).take(np.arange(len(task.split(split))))
        found = np.rint(samples.inputs[:, 0, 0] * 255).astype(int)
        assert (found % 2 == samples.targets).all()
        shades += found.tolist()
    assert sorted(shades) == list(range(12))
    assert shades != list(range(12))


def bomb(size):
    """A small PNG that says it has so many pixels on a side."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["tar", "gz", "zip"])
def test_the_release_may_be_packed(tmp_path, home, kind):
    release(tmp_path / "lra_release")
    expected = create_task("pathfinder", size=16, sizes=(8, 2, 2), release=True)
    expected.prepare(tmp_path)
    path = tmp_path / ("lra_release.gz" if kind == "gz" else f"x.{kind}")
    if kind == "zip":
        shutil.make_archive(tmp_path / "x", "zip", tmp_path, "lra_release")
    else:
        with tarfile.open(path, "w:gz" if kind == "gz" else "w") as archive:
            archive.add(tmp_path / "lra_release", "lra_release")
    task = create_task("pathfinder", size=16, sizes=(8, 2, 2), release=True)
    before = expected.fingerprint()
    task.prepare(path, force=True)
    assert task.fingerprint() == before
    assert not [file for file in task.folder().iterdir() if file.suffix not in (".npy", ".json")]


def test_a_release_that_is_damaged_is_refused(tmp_path, home):
    root = release(tmp_path)

    def refused(message, source=tmp_path, **options):
        task = create_task("pathfinder", **{"size": 16, "sizes": (8, 2, 2), "release": True} | options)
        with pytest.raises(ValueError, match=message):
            task.prepare(source)
        assert not task.is_prepared()

    refused("has 12 images, and sizes ask for 14", sizes=(10, 2, 2))
    refused("has 0 images, and no folder pathfinder32/curv_contour_length_14/metadata", size=32)
    refused("run 'longlens data prepare pathfinder .*--release.* --from DIR'", source=None)
    (root / "imgs" / "0" / "sample_2.png").write_bytes(b"no image")
    refused(r"sample_2.png in .* cannot be read as an image: unknown format")
    (root / "imgs" / "0" / "sample_2.png").write_bytes(bomb(30_000))
    refused(r"sample_2.png in .* cannot be read as an image: .* exceeds limit")
    (root / "imgs" / "0" / "sample_2.png").write_bytes(bomb(12_000))
    refused("must have 16 × 16 pixels, got 12000 × 12000")
    (root / "imgs" / "0" / "sample_2.png").unlink()
    refused("there is no image imgs/0/sample_2.png in")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(root / "imgs" / "0" / "sample_2.png")
    refused("must have 16 × 16 pixels, got 8 × 8")
    (root / "metadata" / "0.npy").write_text("imgs/0 sample_2.png\n")
    refused("the fourth column must be the label")
    np.save(root / "metadata" / "0.npy", np.array([["imgs/0", "sample_2.png", "0", "1"]]))
    refused(r"metadata/0.npy in .* is not text: the arena's metadata are")
    (root / "metadata" / "0.npy").write_text("../../.. secret.png 0 1\n")
    refused("points outside")


def test_impossible_options():
    with pytest.raises(ValueError, match="sizes must be 3 values, each an even number of at least 2"):
        create_task("pathfinder", sizes=(3, 2, 2))
    with pytest.raises(ValueError, match="contour shapes generated samples only"):
        create_task("pathfinder", contour=9, release=True)
    for name, value in (("size", 0), ("size", 100_000), ("size", 10**400), ("contour", 65), ("distractors", 101)):
        with pytest.raises(BadInput, match=f"{name} must be a whole number from"):
            create_task("pathfinder", **{name: value})
