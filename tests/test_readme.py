"""What the documents tell people to type works: Python blocks run, every command is understood, cheap ones are run."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.data import home  # noqa: F401 (a fixture)

import longlens
from longlens.cli import COMMANDS, main
from longlens.cli.flags import Parser
from longlens.mixers.registry import REGISTRY, find_mixer

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
PLACEHOLDERS = {"TASK": "listops", "NAME": "s4d", "DIR": "folder", "SCALE": "mini", "MIXER": "las", "HASH": "hash"}

GROUPS = {name.split()[0] for name in COMMANDS if " " in name}


def commands(text: str) -> list[str]:
    """The ``longlens`` commands of a page: lines of its shell blocks, and those in the text."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL))
    lines = [line.partition("#")[0] for line in blocks.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = [part.strip() for line in lines for part in line.split("&&")] + re.findall(r"`([^`]+)`", prose)
    found = [" ".join(command.split()) for command in found]
    return list(dict.fromkeys(c for c in found if re.match(r"(\w+=\S+ )?longlens ", c) and "…" not in c))


COMMANDS_OF_PAGES = [(page, command) for page, text in TEXTS.items() for command in commands(text)]


class Understood(Exception):  # noqa: N818 (nothing is wrong)
    """All flags of a command were read."""


def run(words: list[str]) -> int | str | None:
    """The exit code of a command."""
    try:
        main(words)
    except SystemExit as stop:
        return stop.code
    return 0


def test_commands_are_found():
    assert len(COMMANDS_OF_PAGES) > 30
    assert ("README.md", "longlens sweep listops --mixer las --grid lr=1e-3,3e-3 mixer.window=3,5,9 --jobs 2") in (
        COMMANDS_OF_PAGES
    )


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), COMMANDS_OF_PAGES, ids=[command for _, command in COMMANDS_OF_PAGES])
def test_a_command_is_understood(page, command, tmp_path, monkeypatch, capsys):
    """By the parser that the command has: a wrong flag fails. The command itself is not run."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-layer", "average"):
        monkeypatch.setitem(REGISTRY.entries, name, find_mixer("las"))
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command.partition(">")[0])]
    words = words[words.index("longlens") + 1 :]
    if "my.toml" in words:
        (tmp_path / "my.toml").write_text("[training]\nsteps = 5\n")
    if "average" in words:
        words = [word for word in words if word not in ("--mixer.scale", "0.5")]  # an option of the example's layer
    if words[1:2] == ["parity"]:
        words[1] = "listops"
    if " ".join(words) in GROUPS or words == ["data", "prepare"]:
        words.append("--help")
    read = Parser.read

    def read_only(self, arguments):
        read(self, arguments)
        raise Understood

    monkeypatch.setattr(Parser, "read", read_only)
    if "--help" in words:
        assert not run(words), capsys.readouterr().err
        return
    try:
        code = run(words)
    except Understood:
        return
    pytest.fail(f"exit code {code}: {capsys.readouterr().err}")


def test_every_public_name_is_explained():
    names = set(longlens.__all__) - {"__version__"}
    assert {name for name in names if not re.search(rf"`{name}\b", TEXTS["docs/api.md"])} == set()


def test_a_wrong_flag_would_be_noticed(monkeypatch, tmp_path, capsys):
    with pytest.raises(pytest.fail.Exception, match="unknown flag --grd"):
        test_a_command_is_understood("", "longlens sweep listops --grd lr=1", tmp_path, monkeypatch, capsys)


SMOKE = "--recipe smoke --steps 2 --threads 1 --task.sizes 64 16 16".split()
OWN = [command for command in commands(TEXTS["README.md"]) if "sensors" in command]
TO_RUN = [
    command
    for command in commands(TEXTS["README.md"])
    if re.search(r"longlens (train|compare|sweep|eval)", command) and command not in OWN
]


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """Those that train, at the scale of smoke and in this process; the folder of the first is what is evaluated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)
    monkeypatch.setitem(REGISTRY.entries, "my-layer", find_mixer("s4d"))
    assert len(TO_RUN) >= 5
    for command in TO_RUN:
        words = shlex.split(command)
        words = words[words.index("longlens") + 1 :]
        if "--help" in words:
            continue
        if words[0] == "evaluate":
            (folder, *_) = (path.parent for path in tmp_path.glob("runs/listops/las/*/result.json"))
            words[1] = str(folder)
        else:
            words = [word for pair in _pairs(words) for word in pair if pair[:1] != ["--jobs"]] + SMOKE
        assert not run(words), (command, capsys.readouterr().err)
    said = capsys.readouterr().out
    assert "is better than" in said or "are equal" in said
    assert "best on validation: " in said
    assert "las on listops" in said


def _pairs(words: list[str]) -> list[list[str]]:
    """A flag and its values together; ``--recipe`` is left out, as smoke takes its place."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return [group for group in groups if group[:1] != ["--recipe"]]


def test_your_own_files(tmp_path, monkeypatch, capsys):
    """The README's folder, by the README's command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_folder").mkdir()
    rows = ["label,input"] + [f"{'ab'[n % 2]},{'xy' * (3 + n % 3)}" for n in range(40)]
    (tmp_path / "my_folder" / "train.csv").write_text("\n".join(rows))
    (command,) = (c for c in commands(TEXTS["README.md"]) if "my_folder" in c)
    main(shlex.split(command)[1:])
    assert "samples (train / valid / test)" in capsys.readouterr().out


@pytest.mark.slow
def test_your_own_sequences_from_the_file_to_a_model_that_is_used(tmp_path, monkeypatch, capsys):
    """A newcomer's story, by the README's commands: semicolons, an id, 300 rows; folds, and the best beside guessing;
    and the run is moved before it is used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)
    random = np.random.default_rng(0)
    header = ";".join(["id", *(f"t{step}" for step in range(12))])

    def lines(count, labels):
        for number in range(count):
            label = number % 2
            values = [f"{value:.3f}" for value in random.normal(2 * label, 1, 12)]
            yield ";".join([str(100 + number), *values, *([("low", "high")[label]] if labels else [])])

    for name, count, labels in (("sensors.csv", 300, True), ("other.csv", 40, True), ("new.csv", 10, False)):
        text = "\n".join([header + (";target" if labels else ""), *lines(count, labels)])
        (tmp_path / name).write_text(text + "\n")
    assert run(["data", "prepare", "files", "--path", "sensors.csv", "--label-column", "target"]) == 0
    assert "column 'id' looks like a number of the row" in capsys.readouterr().out
    moved = tmp_path / "sent" / "run"
    for command in OWN:
        words = shlex.split(command)[1:]
        if words[0] in ("predict", "evaluate", "explain", "export"):
            if not moved.exists():
                shutil.copytree(tmp_path / "sensors-model", moved)
                shutil.rmtree(tmp_path / "sensors-model")
                shutil.rmtree(tmp_path / "runs")
                shutil.rmtree(tmp_path / "home")
                (tmp_path / "sensors.csv").unlink()
                monkeypatch.delenv("LONGLENS_HOME")
            words[1] = str(moved)
        if words[0] in ("compare", "train"):
            words += "--recipe smoke --steps 30 --threads 1".split()
        assert run(words) == 0, (command, capsys.readouterr().err)
        said = capsys.readouterr().out
        if words[0] == "compare":
            assert "las (5 folds)" in said
            assert "linear model of statistics" in said
            assert "best on validation, beats guessing" in said
            assert re.search(r"over 5 folds \(p = [\d.e-]+\)", said)
        if words[0] == "evaluate":
            assert "other.csv (40 samples)" in said
    with (tmp_path / "labels.csv").open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 10
    assert set().union(*(row.values() for row in found)) & {"low", "high"}
    assert (tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")


SNIPPETS = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", TEXTS[page], flags=re.DOTALL)]
SCRIPTS = [(page, code) for page, code in SNIPPETS if not re.match(r"# \w+\.py\n", code)]


def test_the_readme_has_snippets():
    assert sum(page == "README.md" for page, _ in SCRIPTS) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), SCRIPTS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(SCRIPTS)])
def test_snippets_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("longlens.api._is_only_here", lambda config: True)  # a process for each run takes seconds
    exec(compile(code, page, "exec"), {})


EXAMPLES = {code.partition("\n")[0].removeprefix("# "): code for _, code in SNIPPETS if re.match(r"# \w+\.py\n", code)}


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES)
def test_the_examples_of_the_contributing_guide_run(file, tmp_path):
    """A layer and a task outside of the repository, with the commands that the guide gives, at the scale of smoke."""
    (tmp_path / file).write_text(EXAMPLES[file])
    environment = os.environ | {"LONGLENS_IMPORT": file}
    given = [command for command in commands(TEXTS["CONTRIBUTING.md"]) if f"LONGLENS_IMPORT={file} " in command]
    assert given
    for command in given:
        words = shlex.split(command)[2:]
        if words[0] == "check":
            words.append("--no-processes")
        else:
            words = [word for pair in _pairs(words) for word in pair] + "--recipe smoke --steps 2 --threads 1".split()
        done = subprocess.run(
            [sys.executable, "-m", "longlens", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert words[0] == "check" or list(tmp_path.glob("runs/*/*/*/result.json"))


def test_the_examples_are_a_layer_and_a_task():
    assert sorted(EXAMPLES) == ["average.py", "parity.py"]


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", TEXTS[page], flags=re.MULTILINE):
            assert target in targets, page
