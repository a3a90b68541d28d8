"""``longlens data`` as a user meets it."""

import numpy as np
import pytest

SMALL = "--sizes 20 4 4 --min-length 5 --max-length 30".split()


def test_list_names_every_set(longlens, home):
    longlens("data", "prepare", "listops", *SMALL)
    said = longlens("data", "list")
    assert said.code == 0
    assert "listops-" in said.out
    assert "20 / 4 / 4" in said.out
    assert str(home) in said.out


def test_prepare_says_what_there_is(longlens):
    said = longlens("data", "prepare", "listops", *SMALL)
    assert said.code == 0
    assert "20 / 4 / 4 samples (train / valid / test), up to 30 × 18 symbols" in said.out
    assert "made in" in said.out
    assert "was there already" in longlens("data", "prepare", "listops", *SMALL).out
    assert "made in" in longlens("data", "prepare", "listops", *SMALL, "--force").out
    assert "nothing is stored" in longlens("data", "prepare", "atomic-select").out


@pytest.mark.parametrize("prefix", ["--", "--task."])
def test_options_of_the_task_are_flags(longlens, prefix):
    flags = [flag.replace("--", prefix) for flag in SMALL]
    assert "up to 30 × 18 symbols" in longlens("data", "prepare", "listops", *flags).out
    assert "--max-length INT" in longlens("data", "prepare", "listops", "--help").words
    assert "--task." not in longlens("data", "prepare", "listops", "--help").out


def test_options_have_their_old_names_too(longlens):
    assert "up to 8 ×" in longlens("data", "prepare", "atomic-cumsum", "--length", 8).out


def test_verify_finds_damage(longlens, home):
    assert longlens("data", "verify").code == 2
    longlens("data", "prepare", "listops", *SMALL)
    assert longlens("data", "verify").code == 0
    assert longlens("data", "verify", "listops").code == 0
    said = longlens("data", "verify", "mnist")
    assert (said.code, "no prepared set of mnist" in said.err) == (2, True)
    file = next((home / "sets").glob("*/test.values.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    said = longlens("data", "verify")
    assert said.code == 1
    assert "test.values.npy was changed" in said.out
    (file.parent / "meta.json").write_text("not json")
    said = longlens("data", "verify")
    assert said.code == 1
    assert "is damaged" in said.out
    assert "--force" in said.out
    longlens("data", "prepare", "listops", *SMALL, "--force")
    assert longlens("data", "verify").code == 0


def test_verify_knows_sets_by_their_tasks(longlens, real_data):
    source = real_data("text8")
    longlens("data", "prepare", "text8", "--stand-in", "--from", source)
    assert longlens("data", "verify", "text8").code == 0
    assert longlens("data", "verify", "text").code == 2  # not text8


def test_show_draws_trees(longlens):
    said = longlens("data", "show", "listops", *SMALL, "--count", 3, "--split", "valid")
    assert said.code == 0
    assert said.out.count("sample") == 3
    assert "\n  " in said.out
    said = longlens("data", "show", "listops", *SMALL, "--first", 20)
    assert (said.code, "first must be at most 19, the last train sample" in said.err) == (2, True)
    said = longlens("data", "show", "listops", *SMALL, "--out", "x.png")
    assert (said.code, "are not pictures" in said.err) == (2, True)


@pytest.mark.slow
def test_show_writes_pictures(longlens, here):
    from PIL import Image

    options = "--size 16 --contour 5 --distractors 1 --sizes 20 4 4".split()
    said = longlens("data", "show", "pathfinder", *options, "--out", "new/sheet.png")
    assert said.code == 0, said.err
    assert "20 samples of pathfinder" in said.out
    assert Image.open(here / "new" / "sheet.png").size[0] > 1000


def write_sensors(file):
    """Curves of two classes with an id, semicolons between the cells, and a class whose name begins a formula."""
    rng = np.random.default_rng(0)
    lines = [";".join(["id", *(f"t{i}" for i in range(20)), "class"])]
    for row in range(40):
        curve = np.sin(np.arange(20) / 3 + 2 * (row % 2)) + rng.normal(0, 0.2, 20)
        lines.append(";".join([str(row), *(f"{value:.3f}" for value in curve), ("flat", "$up")[row % 2]]))
    file.write_text("\n".join(lines) + "\n")


def test_your_own_table_is_prepared_with_warnings_and_shown_as_curves(longlens, here):
    from PIL import Image

    write_sensors(here / "sensors.csv")
    flags = ["--path", "sensors.csv", "--label-column", "class"]
    said = longlens("data", "prepare", "files", *flags)
    assert said.code == 0, said.err
    assert "note: column 'id' looks like a number of the row" in said.words
    assert "use --ignore id" in said.words
    assert said.err == ""
    assert "looks like a number" in longlens("data", "list").words
    assert "note: column 'id'" in longlens("data", "prepare", "files", *flags).words  # again
    flags += ["--ignore", "id"]
    assert "note" not in longlens("data", "prepare", "files", *flags).out
    said = longlens("data", "show", "files", *flags, "--count", 3, "--out", "new/curves.png")
    assert (said.code, "6 curves of files (sensors.csv), train: written to new/curves.png" in said.words) == (0, True)
    assert Image.open(here / "new" / "curves.png").size[0] > 600
    assert longlens("data", "show", "files", *flags, "--split", "test").code == 0
    assert (here / "figures" / "files.png").exists()
    said = longlens("data", "show", "files", *flags, "--out", "curves.txt")
    assert (said.code, "out must end in .png, .pdf or .svg, got curves.txt" in said.err) == (2, True)


def test_tokens_of_your_own_are_shown_as_texts(longlens, here):
    (here / "words.csv").write_text("input,label\n" + "abc,x\nba,y\n" * 15)
    said = longlens("data", "show", "files", "--path", "words.csv")
    assert (said.code, "abc" in said.out) == (0, True)


@pytest.mark.parametrize("name", ["atomic-select", "atomic-cummax", "atomic-cumsum"])
def test_show_every_task_that_needs_no_data(longlens, name):
    said = longlens("data", "show", name, "--max-length", 8)
    assert said.code == 0, said.err
    assert "target" in said.out


def test_a_damaged_set_does_not_hide_the_others(longlens, home):
    longlens("data", "prepare", "listops", *SMALL)
    longlens("data", "prepare", "listops", *SMALL, "--seed", 1)
    next((home / "sets").glob("*/meta.json")).write_text("{")
    (home / "sets" / "path-x-1.parts").mkdir()
    said = longlens("data", "list", columns=80)
    assert said.code == 0
    assert "damaged" in said.out
    assert "20 / 4 / 4" in said.out
    assert "unfinished" in said.out


@pytest.mark.parametrize("damage", ["labels", "empty", "header", "meta"])
def test_a_damaged_set_is_not_used(longlens, home, damage):
    """Shown, or prepared without --force: one line, and what to do."""
    longlens("data", "prepare", "listops", *SMALL)
    (folder,) = (path for path in (home / "sets").iterdir() if path.is_dir())
    if damage == "labels":  # of the same shape
        labels = np.load(folder / "train.labels.npy")
        np.save(folder / "train.labels.npy", (labels + 1) % 10)
    elif damage == "meta":
        (folder / "meta.json").write_text("[" * 100_000)
    else:
        (folder / "train.values.npy").write_bytes(b"" if damage == "empty" else b"\x93NUMPY" + b"(" * 200)
    for command in ("show", "prepare"):
        said = longlens("data", command, "listops", *SMALL)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "is damaged" in said.err
        assert "--force" in said.err
    assert longlens("data", "list").code == 0
    assert longlens("data", "verify").code == 1
    assert longlens("data", "prepare", "listops", *SMALL, "--force").code == 0
    assert longlens("data", "show", "listops", *SMALL).code == 0


def test_a_source_that_is_not_there_where_the_set_is(longlens):
    longlens("data", "prepare", "listops", *SMALL)
    said = longlens("data", "prepare", "listops", *SMALL, "--from", "/nonexistent")
    assert (said.code, "leave out --from" in said.err) == (2, True)


def test_data_that_cannot_be_downloaded(longlens, monkeypatch):
    """What to do comes first, then where the data can be had."""

    def refuse(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    said = longlens("train", "smnist", "--recipe", "smoke")
    assert said.code == 2
    assert "longlens data prepare smnist" in said.err
    assert said.err.index("--from DIR") < said.err.index("http")


@pytest.mark.parametrize("home_folder", ["~nosuchuser", "/proc/nothing"])
def test_a_cache_folder_that_cannot_be(longlens, monkeypatch, home_folder):
    monkeypatch.setenv("LONGLENS_HOME", home_folder)
    said = longlens("data", "prepare", "listops", *SMALL)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert said.err.startswith("longlens: ")
