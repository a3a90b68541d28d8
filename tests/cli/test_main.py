"""The way from arguments to a function, and from what it raises to an exit code."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import longlens as package
from longlens import cli
from longlens.cli import COMMANDS, main
from longlens.errors import BadInput, Interrupted, RunError
from longlens.files import sync


@pytest.fixture
def command(monkeypatch):
    """Make ``longlens list runs`` call a function."""

    def give(function):
        monkeypatch.setattr("longlens.cli.lists.list_runs", function)

    return give


def raising(error):
    def function(*_, **__):
        raise error

    return function


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_version(longlens, flag):
    assert longlens(flag).out == f"longlens {package.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BadInput("lr must be a number"), 2, "lr must be a number"),
        (RunError("the loss is not finite"), 3, "the loss is not finite"),
        (Interrupted("stopped at step 5"), 75, "stopped at step 5"),
        (MemoryError(), 2, "not enough memory for these sizes: try smaller ones"),
        (RuntimeError("CUDA out of memory. Tried …"), 2, "not enough memory for these sizes: try smaller ones"),
        (BadInput("two\nlines"), 2, "two lines"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(longlens, command, error, code, message):
    command(raising(error))
    assert longlens("list", "runs") == (code, "", f"longlens: {message}\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped")])
@pytest.mark.parametrize("name", ["train", "compare", "sweep"])
def test_an_interrupted_run_can_be_resumed(longlens, monkeypatch, name, error):
    monkeypatch.setattr(f"longlens.cli.train.{name}", raising(error))
    assert longlens(name, "listops") == (75, "", "longlens: stopped; the same command resumes\n")


@pytest.mark.parametrize(
    ("words", "code"), [("data prepare listops", 75), ("data show listops", 130), ("bench data", 130), ("demo", 75)]
)
def test_only_what_resumes_says_so(longlens, monkeypatch, words, code):
    monkeypatch.setattr("longlens.cli.run", raising(KeyboardInterrupt()))
    said = longlens(*words.split())
    assert (said.code, "resumes" in said.err) == (code, code == 75)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), TypeError("a bug"), KeyError("x"), RuntimeError("a bug"), AssertionError("a bug")]
)
def test_a_bug_keeps_its_traceback(longlens, command, error):
    command(raising(error))
    with pytest.raises(type(error)):
        longlens("list", "runs")


def test_a_file_that_we_touch_is_a_sentence(longlens, command):
    command(lambda **_: sync(Path("nowhere")))
    assert longlens("list", "runs") == (2, "", "longlens: nowhere: No such file or directory\n")


def test_an_installed_package_says_it_as_well(monkeypatch):
    package = "/usr/lib/python3/site-packages/longlens"
    monkeypatch.setattr(cli, "__file__", f"{package}/cli/__init__.py")
    for file, said in ((f"{package}/files.py", "nowhere: No such file or directory"), (f"{package}er/files.py", None)):
        with pytest.raises(FileNotFoundError) as caught:
            exec(compile("open('nowhere')", file, "exec"))
        assert cli._environment_problem(caught.value) == said


def test_a_file_that_others_touch_is_a_bug_of_theirs(longlens, command):
    command(lambda **_: Path("nowhere").read_text())
    with pytest.raises(FileNotFoundError):
        longlens("list", "runs")


def test_sigterm_is_75_whatever_is_under_way(longlens, command):
    command(lambda **_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    said = longlens("list", "runs")
    assert said == (75, "", "longlens: stopped before anything was to be saved\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_can_be_called_in_a_thread(longlens, capsys):
    codes = []

    def call():
        try:
            main(["list", "mixers", "s4d"])
        except SystemExit as stop:
            codes.append(stop.code)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not codes
    assert "state_size" in capsys.readouterr().out


@pytest.mark.slow
def test_nobody_reads_any_more(here):
    """``longlens list mixers | head -1`` ends without a traceback."""
    command = f"{sys.executable} -m longlens list recipes | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(("name", "function"), [(name, command.target) for name, command in COMMANDS.items()])
def test_every_command_is_there(name, function):
    module, _, attribute = function.partition(":")
    found = getattr(__import__(module, fromlist=["_"]), attribute.removeprefix("*"))
    assert callable(found), name


def test_help_is_a_command_too(longlens):
    assert longlens("help") == longlens("--help") == longlens()
    assert longlens("help", "list", "runs") == longlens("list", "runs", "--help")
    assert longlens("help", "train", "listops") == longlens("train", "listops", "-h")


def test_what_a_command_returns_is_printed_as_it_is(longlens, command):
    from longlens.reports.sheet import Column, Sheet

    sheet = Sheet("[bold]title[/x]", [Column("a")], [["[/red] :smile:"]], ["[/note]"])
    command(lambda **_: ["[/line] " + "x" * 200, sheet, None])
    said = longlens("list", "runs", columns=80)
    assert said.code == 0
    assert "[/line] " + "x" * 200 + "\n" in said.out, "a line is not wrapped"
    for text in ("[bold]title[/x]", "[/red] :smile:", "[/note]"):
        assert text in said.words


def test_arguments_come_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longlens", "--version"])
    cli.main()
    assert capsys.readouterr().out.startswith("longlens ")
