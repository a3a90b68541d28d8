"""Real sets: the published counts and vocabularies, and imports that refuse what is not the set."""

import csv
import gzip
import io
import os
import shutil
import tarfile
import tracemalloc
import urllib.error
import urllib.request
import zipfile
from collections import Counter

import numpy as np
import pytest

from longlens.errors import BadInput
from longlens.tasks.base import create_task
from longlens.tasks.images import bit_reversal

pytestmark = pytest.mark.slow

SOURCES = {
    "smnist": ("mnist", {}),
    "pmnist": ("mnist", {}),
    "image": ("cifar10", {}),
    "text": ("imdb", {}),
    "retrieval": ("aan", {"stand_in": True}),
    "text8": ("text8", {"stand_in": True}),
    "enwik8": ("enwik8", {"stand_in": True}),
    "wikitext-2": ("wikitext-2", {}),
}
SPLITS = ("train", "valid", "test")


@pytest.fixture
def real(real_data, real_home, monkeypatch):
    """A real task by its name, prepared from its folder."""

    def prepared(name, **options):
        folder, defaults = SOURCES[name]
        source = real_data(folder)
        monkeypatch.setenv("LONGLENS_HOME", str(real_home))
        task = create_task(name, **defaults | options)
        task.prepare(source)
        return task

    return prepared


def sizes(task):
    return [len(task.split(name)) for name in SPLITS]


def one(task, split="train", index=0):
    samples = task.split(split).take(np.array([index]))
    return samples.inputs[0], samples.lengths[0], samples.targets[0]


@pytest.mark.parametrize(
    ("name", "size", "length", "outputs", "counts"),
    [
        ("smnist", 1, 784, 10, [54_000, 6_000, 10_000]),
        ("pmnist", 1, 784, 10, [54_000, 6_000, 10_000]),
        ("image", 1, 1024, 10, [45_000, 5_000, 10_000]),
        ("text", 134, 4096, 2, [22_500, 2_500, 25_000]),
        ("retrieval", 365, 4000, 2, [4_430, 553, 553]),
    ],
)
def test_counts_and_vocabularies(real, name, size, length, outputs, counts):
    task = real(name)
    spec = task.spec
    assert (spec.size, spec.max_length, spec.outputs, spec.metric) == (size, length, outputs, "accuracy")
    assert sizes(task) == counts
    assert task.prepared.verify() == []


@pytest.mark.parametrize("name", ["smnist", "image", "text"])
def test_validation_is_held_out_of_training_by_seed(real, name):
    task = real(name)
    train, valid = task.split("train").indices, task.split("valid").indices
    assert len(np.intersect1d(train, valid)) == 0
    assert len(np.union1d(train, valid)) == len(train) + len(valid)
    assert (valid == real(name).split("valid").indices).all()
    assert (valid != real(name, seed=1).split("valid").indices).any()


def test_classes_are_balanced(real):
    for name, classes in (("image", 10), ("text", 2)):
        labels = real(name).split("test").targets
        assert np.bincount(labels).tolist() == [len(labels) // classes] * classes


def test_mnist_pixels(real, real_data):
    raw = gzip.decompress((real_data("mnist") / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    task = real("smnist")
    index = int(task.split("train").indices[5])
    inputs, _, target = one(task, index=5)
    np.testing.assert_allclose(inputs[:, 0] * 255, np.frombuffer(raw, np.uint8)[index * 784 :][:784], atol=1e-4)
    labels = gzip.decompress((real_data("mnist") / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    assert target == labels[index]
    assert (task.picture(task.split("train").take(np.array([5])), 0).ravel() == inputs[:, 0]).all()


@pytest.mark.parametrize(("name", "size"), [("smnist", 14), ("smnist", 7), ("image", 16), ("image", 8), ("pmnist", 14)])
def test_a_smaller_image_has_the_means_of_squares(real, name, size):
    whole, small = real(name), real(name, size=size)
    assert small.spec.max_length == size**2
    assert small.spec.shape == (None if name == "pmnist" else (size, size))
    assert small.folder() == whole.folder(), "the stored set is the same"
    side, samples = whole.side, whole.split("test").take(np.array([3, 77]))
    pictures = np.stack([whole.picture(samples, row) for row in range(2)])
    means = pictures.reshape(2, size, side // size, size, side // size).mean(axis=(2, 4))
    found = small.split("test").take(np.array([3, 77]))
    for row in range(2):
        np.testing.assert_allclose(small.picture(found, row), means[row], atol=1e-6)
    assert found.targets.tolist() == samples.targets.tolist()
    assert small.split("test").lengths.tolist()[:2] == [size**2] * 2


def test_a_size_that_does_not_divide(real):
    with pytest.raises(BadInput, match="size must be one of 2, 4, 7, 14, 28, got 5"):
        real("smnist", size=5)


def test_pmnist_is_the_bit_reversal(real):
    plain, permuted = one(real("smnist"))[0][:, 0], one(real("pmnist"))[0][:, 0]
    backwards = sorted(range(784), key=lambda number: f"{number:010b}"[::-1])
    assert permuted.tolist() == [plain[number] for number in backwards]
    task = real("pmnist")
    assert (task.picture(task.split("train").take(np.array([0])), 0).ravel() == plain).all()


@pytest.mark.parametrize("count", [1, 2, 5, 8, 784, 1024])
def test_bit_reversal_is_a_permutation(count):
    order = bit_reversal(count)
    assert sorted(order.tolist()) == list(range(count))
    if count == 8:
        assert order.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_gray_is_what_pillow_makes_of_it(real, real_data):
    from PIL import Image

    record = (real_data("cifar10") / "cifar-10-batches-bin" / "test_batch.bin").read_bytes()[: 20 * 3073]
    for index in range(20):
        label, pixels = record[index * 3073], np.frombuffer(record, np.uint8)[index * 3073 + 1 :][:3072]
        gray = np.asarray(Image.fromarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0)).convert("L"), dtype=np.float32)
        inputs, _, target = one(real("image"), "test", index)
        np.testing.assert_allclose(inputs[:, 0], (gray.ravel() - 122.6) / 61.0, atol=1e-5)
        assert target == label


def test_characters_equal_a_naive_loop(real, real_data):
    task = real("text")
    symbols = task.vocabulary()
    files = sorted((real_data("imdb") / "aclImdb" / "test" / "neg").iterdir(), key=lambda f: int(f.stem.split("_")[0]))
    for index in (0, 1, 777):
        text = files[index].read_text(encoding="utf-8")[:4095]
        expected = [symbols.index(c) if c in symbols else 1 for c in text] + [2]
        inputs, length, target = one(task, "test", index)
        assert inputs[:length].tolist() == expected
        assert target == 0


def test_the_vocabulary_of_text_is_that_of_the_training_set(real, real_data):
    files = (real_data("imdb") / "aclImdb" / "train").glob("*/*.txt")
    counts = Counter("".join(file.read_text(encoding="utf-8")[:4095] for file in files))  # as S4 counts
    expected = {character for character, count in counts.items() if count >= 15}
    assert set(real("text").vocabulary()[3:]) == expected


def test_text_by_bytes_and_other_options(real, real_data):
    task = real("text", level="bytes", max_length=100, validation="test")
    assert task.spec.size == 259
    assert sizes(task) == [25_000, 25_000, 25_000]
    inputs, length, _ = one(task, "test")
    first = min((real_data("imdb") / "aclImdb" / "test" / "neg").iterdir(), key=lambda f: int(f.stem.split("_")[0]))
    assert bytes((inputs[: length - 1] - 3).tolist()) == first.read_bytes()[:99]
    assert length == 100
    assert task.render(task.split("test").take(np.array([0])), 0).endswith("negative")


def test_retrieval_gives_the_pairs_of_the_file(real, real_data):
    task = real("retrieval")
    assert task.title == "retrieval (stand-in)"
    assert task.prepared.details["stand_in"] == "stand-in of 4,430 pairs"
    assert "stand-in" in task.folder().name
    symbols = task.vocabulary()
    with open(real_data("aan") / "new_aan_pairs.eval.tsv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    for index in (0, 100, 552):
        inputs, lengths, target = one(task, "valid", index)
        assert target == float(rows[index][0])
        for tokens, length, text in zip(inputs, lengths, rows[index][3:], strict=True):
            assert tokens[:length].tolist() == [symbols.index(c) if c in symbols else 1 for c in text[:3999]] + [2]


@pytest.mark.parametrize(("name", "size", "total"), [("text8", 27, 6_877_825), ("enwik8", 256, 4_154_392)])
def test_bytes_of_wikipedia(real, real_data, name, size, total):
    task = real(name)
    assert task.title == f"{name} (stand-in)"
    assert task.prepared.details["stand_in"] == f"prefix of {total:,} bytes"
    assert task.spec.size == size
    assert task.spec.metric == "bits_per_byte"
    data = (real_data(name) / name).read_bytes()
    parts = [task.prepared.array(split, "tokens") for split in SPLITS]
    assert [len(part) for part in parts] == [
        total * 90 // 100,
        total * 95 // 100 - total * 90 // 100,
        total - total * 95 // 100,
    ]
    symbols = b" abcdefghijklmnopqrstuvwxyz" if name == "text8" else bytes(range(256))
    assert bytes(symbols[i] for i in parts[0][:1000]) == data[:1000]
    assert bytes(symbols[i] for i in parts[2][-1000:]) == data[-1000:]


def test_words_of_wikitext(real, real_data):
    task = real("wikitext-2")
    counts = [2_088_628, 217_646, 245_569]
    assert [len(task.prepared.array(split, "tokens")) for split in SPLITS] == counts
    assert sizes(task) == [-(-(count - 1) // 512) for count in counts]
    assert task.spec.size == task.spec.outputs == 33_278 == len(task.vocabulary())
    words = (real_data("wikitext-2") / "wikitext-2" / "wiki.valid.tokens").read_text(encoding="utf-8")
    expected = words.replace("\n", " <eos> ").split()
    vocabulary = task.vocabulary()
    assert [vocabulary[i] for i in task.prepared.array("valid", "tokens")] == expected


def test_tasks_share_what_is_stored(real):
    assert real("smnist").folder() == real("pmnist").folder()
    assert real("text").folder() == real("text", max_length=100, seed=3).folder()


# What is not the set is refused, and nothing is left of it.


def refused(home, name, source, message, **options):
    task = create_task(name, **options)
    with pytest.raises(ValueError, match=message):
        task.prepare(source)
    assert not task.is_prepared()
    assert all(path.suffix == ".lock" for path in (home / "sets").iterdir())


@pytest.fixture
def mnist_copy(real_data, tmp_path):
    return shutil.copytree(real_data("mnist"), tmp_path / "mnist")


def rewrite(path, change):
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes())), compresslevel=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:4] + (60_001).to_bytes(4, "big") + d[8:], r"says that it holds \(60001, 28, 28\)"),
        (lambda d: d[:-1], "has 47,039,999; MNIST has"),
        (lambda d: d + b"x", "more than the 47,040,016 bytes"),
        (lambda d: b"\x00\x00\x0d\x03" + d[4:], "is not an idx file of bytes in 3 dimensions"),
        (lambda d: d[:3], "is not an idx file"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "have the form of MNIST, but are not MNIST"),
    ],
    ids=["lying header", "short", "long", "dtype", "stub", "one bit"],
)
def test_idx_files_that_lie(home, mnist_copy, change, message):
    rewrite(mnist_copy / "train-images-idx3-ubyte.gz", change)
    refused(home, "smnist", mnist_copy, message)


def test_idx_labels_out_of_range(home, mnist_copy):
    rewrite(mnist_copy / "train-labels-idx1-ubyte.gz", lambda d: d[:-1] + b"\x0b")
    refused(home, "smnist", mnist_copy, "labels of .* must be 0 to 9, got 11")


def test_a_missing_or_cut_file_of_mnist(home, mnist_copy):
    path = mnist_copy / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    refused(home, "smnist", mnist_copy, r"t10k-labels-idx1-ubyte.gz is damaged or incomplete")
    path.unlink()
    refused(home, "smnist", mnist_copy, "there is no file t10k-labels-idx1-ubyte .*lecun")


def test_files_of_cifar(home, real_data, tmp_path):
    folder = shutil.copytree(real_data("cifar10"), tmp_path / "cifar10")
    file = folder / "cifar-10-batches-bin" / "data_batch_3.bin"
    data = file.read_bytes()
    for change, message in (
        (data[:-5], "data_batch_3.bin must have the 30,730,000 bytes of a file of CIFAR-10, got 30,729,995"),
        (b"\x0a" + data[1:], "the labels of CIFAR-10 must be 0 to 9, got 10"),
        (data[:1] + bytes([data[1] ^ 255]) + data[2:], "are not CIFAR-10"),
    ):
        file.write_bytes(change)
        refused(home, "image", folder, message)
    file.unlink()
    refused(home, "image", folder, "there is no file data_batch_3.bin .*cs.toronto.edu")


def test_an_incomplete_imdb(home, tmp_path):
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            (tmp_path / "aclImdb" / split / label).mkdir(parents=True)
            (tmp_path / "aclImdb" / split / label / "0_9.txt").write_text("fine")
    refused(home, "text", tmp_path, "has 1 reviews in aclImdb/train/neg; IMDB has 12,500")
    (tmp_path / "aclImdb" / "train" / "pos" / "1_9.txt").write_bytes(b"\xff\xfe")
    refused(home, "text", tmp_path, "is not UTF-8")


def test_a_pipe_among_the_reviews(home, tmp_path):
    (tmp_path / "aclImdb" / "train" / "neg").mkdir(parents=True)
    os.mkfifo(tmp_path / "aclImdb" / "train" / "neg" / "0_9.txt")
    refused(home, "text", tmp_path, r"0_9.txt is not a file that can be read")


BOMBS = {
    "image": ("cifar-10-binary.tar.gz", "cifar-10-batches-bin/data_batch_1.bin", {}),
    "text": ("aclImdb_v1.tar.gz", "aclImdb/train/neg/0_9.txt", {}),
    "wikitext-2": ("x.tar.gz", "wikitext-2/wiki.train.tokens", {}),
    "retrieval": ("x.tar.gz", "new_aan_pairs.train.tsv", {"stand_in": True}),
    "listops": ("lra_release.gz", "basic_train.tsv", {"release": True}),
    "pathfinder": ("lra_release.gz", "pathfinder32/curv_contour_length_14/metadata/0.npy", {"release": True}),
    "text8": ("text8.zip", "text8", {}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_that_unpacks_to_much(home, tmp_path, name):
    """It is refused after a little of it, or after the length that the file should have."""
    archive, member, options = BOMBS[name]
    content = bytes({"text8": 300_000_000, "image": 200_000_000}.get(name, 100_000_000))
    if archive.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
            packed.writestr(member, content)
    else:
        with tarfile.open(tmp_path / archive, "w:gz", compresslevel=1) as packed:
            info = tarfile.TarInfo(member)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    size = len(content)
    del content
    tracemalloc.start()
    try:
        refused(home, name, tmp_path / archive, r"more than the .* bytes that it should have|is too long", **options)
        assert tracemalloc.get_traced_memory()[1] < size * 3 // 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", SOURCES)
def test_without_a_network_the_command_is_named_first(home, monkeypatch, name):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    options = SOURCES[name][1]
    flags = " --stand-in" if options else ""
    with pytest.raises(
        BadInput, match=rf"run 'longlens data prepare {name}{flags} --from DIR'.*(http|lra_release|has it)"
    ):
        create_task(name, **options).split("train")
    assert not [path for path in (home / "sets").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("name", "options"), [("smnist", {}), ("listops", {"sizes": (9, 1, 1)}), ("atomic-select", {})]
)
def test_a_source_that_is_not_there_is_refused_also_where_the_set_is(home, tmp_path, monkeypatch, name, options):
    task = create_task(name, **options)
    monkeypatch.setattr(type(task), "is_prepared", lambda self: True)
    for force in (False, True):
        with pytest.raises(BadInput, match=r"there is no folder or archive|leave out --from|nothing to import"):
            task.prepare("/nonexistent", force=force)
    with pytest.raises(BadInput, match=r"--from must be a path, got ~nosuchuser|nothing to import"):
        task.prepare("~nosuchuser/there")


def pairs(folder, *rows):
    folder.mkdir(exist_ok=True)
    for split in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return folder


GOOD = ('"1.0"', '"a"', '"b"', '"first ""quoted"" text"', '"second"')


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, GOOD[:4]], r"pair 2 must have 5 columns \(label, id1, id2, text1, text2\), got 4"),
        ([GOOD, ('"2.0"', *GOOD[1:])], "pair 2: the label must be 0 or 1, got '2.0'"),
        ([], "is empty"),
        ([GOOD], "has 1 pairs; the arena's has 147,086.*--stand-in"),
    ],
)
def test_pairs_that_are_not_the_arenas(home, tmp_path, rows, message):
    refused(home, "retrieval", pairs(tmp_path / "aan", *rows), message)


def test_pairs_as_a_stand_in_and_what_is_missing(tmp_path, home):
    folder = pairs(tmp_path / "aan", GOOD, ('"0.0"', *GOOD[1:]))
    task = create_task("retrieval", stand_in=True, min_count=1)
    task.prepare(folder)
    assert task.slug == "retrieval-stand-in"
    assert task.prepared.details["stand_in"] == "stand-in of 2 pairs"
    samples = task.split("test").take(np.array([0]))
    assert task.render(samples, 0) == 'first "quoted" text\n--\nsecond\n= one cites the other'
    (folder / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(ValueError, match=r"there is no file new_aan_pairs.eval.tsv .*lra_release.gz"):
        create_task("retrieval", stand_in=True, min_count=2).prepare(folder)
    with pytest.raises(
        ValueError, match=r"no download of its own: run 'longlens data prepare retrieval --from DIR', .*lra_release.gz"
    ):
        create_task("retrieval").prepare()


@pytest.mark.parametrize("name", ["text8", "enwik8"])
def test_a_prefix_needs_its_flag(home, tmp_path, name):
    (tmp_path / name).write_text("the quick brown fox " * 10)
    refused(home, name, tmp_path, "has 200 bytes; the official one has 100,000,000.*--stand-in")
    task = create_task(name, stand_in=True, max_length=16)
    task.prepare(tmp_path)
    assert task.title == f"{name} (max_length=16, stand-in)"
    assert task.slug == f"{name}-stand-in"
    assert "stand-in" in task.folder().name
    assert task.prepared.details["stand_in"] == "stand-in of 200 bytes"  # it is not how the official one begins
    task.prepare(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text("another text " * 30)
    with pytest.raises(ValueError, match=r"was made from .*; force replaces it"):
        task.prepare(tmp_path / "other")
    before = task.fingerprint()
    task.prepare(tmp_path / "other", force=True)
    assert task.fingerprint() != before
    task.prepare(tmp_path, force=True)
    assert task.fingerprint() == before
    assert task.render(task.split("train").take(np.array([0])), 0) == "the quick brown \n→ 'f'"
    with pytest.raises(ValueError, match=f"is your own: run 'longlens data prepare {name} --stand-in --from DIR'"):
        create_task(name, stand_in=True).prepare(force=True)


def test_text8_has_letters_only(home, tmp_path):
    (tmp_path / "text8").write_text("Capitals " * 100)
    refused(home, "text8", tmp_path, "this file has the byte 67", stand_in=True)


def test_wikitext_of_another_size(home, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(" = Title = \n a <unk> b \n")
    refused(home, "wikitext-2", tmp_path, "wiki.train.tokens .* must have the 2,088,628 tokens of wikitext-2, got 8")
    refused(
        home, "wikitext-103", tmp_path / "wiki.train.tokens", "must have the 103,227,021 tokens of wikitext-103, got 8"
    )


def test_what_is_missing_is_named_with_its_address(home, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, address in (("text", "stanford"), ("wikitext-2", "smerity"), ("image", "toronto"), ("smnist", "lecun")):
        refused(home, name, tmp_path / "empty", address)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smnist", {"valid_size": 60_000}, "valid_size must be below 60,000, got 60,000"),
        ("image", {"valid_size": 0}, "valid_size must be a whole number of at least 1, got 0"),
        ("text", {"max_length": 1}, "max_length must be a whole number from 2 to 16,777,216, got 1"),
        (
            "text",
            {"max_length": 2**63},
            "max_length must be a whole number from 2 to 16,777,216, got 9223372036854775808",
        ),
        ("text", {"valid_size": -1}, "valid_size must be a whole number of at least 1, got -1"),
        ("retrieval", {"max_length": 0}, "max_length must be a whole number from 2 to 16,777,216, got 0"),
        ("text8", {"context": 0}, "max_length must be a whole number from 1 to 16,777,216, got 0"),
    ],
)
def test_impossible_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_task(name, **options)
