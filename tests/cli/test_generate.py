"""``longlens generate``: text on the screen as it is written, or in a file."""

import io
import sys

import pytest

from longlens import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on a few bytes of another kind of text."""
    from longlens.cli import main

    folder = tmp_path_factory.mktemp("enwik8")
    (folder / "enwik8").write_bytes("Zürich, 20 €. ".encode() * 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGLENS_HOME", str(folder / "home"))
        main(["data", "prepare", "enwik8", "--from", str(folder), "--stand-in"])
        flags = "--mixer las --recipe smoke --steps 150 --lr 1e-2 --task.stand-in --threads 1".split()
        main(["train", "enwik8", *flags, "--folder", str(folder / "run")])
    return folder / "run"


def test_it_goes_on_with_what_it_has_learned(longlens, run):
    said = longlens("generate", run, "--prompt", "20 €. Zü", "--tokens", 30, "--temperature", 0)
    assert said.code == 0, said.err
    assert said.out == "20 €. Zürich, 20 €. Zürich, 20 €.\n"
    assert said.err == ""


def test_a_file_has_the_whole_text(longlens, run, here):
    said = longlens("generate", run, "--prompt", "20 ", "--tokens", 90, "--seed", 2, "--out", "new/text.txt")
    assert said.code == 0, said.err
    assert said.out == "written to new/text.txt\n"
    assert said.err.startswith("longlens: the model sees at most 64 tokens, as in training: when there are more")
    expected = "20 " + load_run(run).generate("20 ", tokens=90, seed=2) + "\n"
    assert (here / "new" / "text.txt").read_text() == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "prompt must have at least one symbol to go on from, got none"),
        (["--prompt", "a", "--temperature", "hot"], "--temperature must be a number of at least 0, got hot"),
        (["--prompt", "a", "--top-k", "0"], "--top-k must be a whole number of at least 1 or none, got 0"),
        (["--prompt", "a", "--token", "5"], "unknown flag --token; did you mean --tokens"),
        (["--prompt", "a", "--out", "."], "out must be a file, and . is a folder"),
    ],
)
def test_bad_input_is_a_sentence(longlens, run, flags, said):
    given = longlens("generate", run, *flags)
    assert given.code == 2
    assert said in given.err
    assert len(given.err.splitlines()) == 1
    assert given.out == ""


@pytest.mark.parametrize(("terminal", "shown"), [(True, "�a\t"), (False, "\x1ba\t")])
def test_a_terminal_takes_no_commands_from_a_model(monkeypatch, terminal, shown):
    from longlens.cli.generate import _place

    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    with _place(None) as write:
        write("\x1ba\t")
    assert screen.buffer.getvalue().decode() == shown
