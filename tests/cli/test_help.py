"""Help screens: what they say, in which words, and how wide they are."""

import re
import subprocess
import sys

import pytest

from longlens import api
from longlens.cli import COMMANDS, GROUPS, data, generate, train
from longlens.mixers.registry import find_mixer, list_mixers
from longlens.models.config import ModelConfig, Writing
from longlens.options import Option, options_of
from longlens.registry import read_skeleton
from longlens.tasks.base import find_task, list_tasks
from longlens.training.config import Runtime, TrainingConfig

FUNCTIONS = {  # as help reads them
    name: read_skeleton(module, lambda node, wanted=function: node.name == wanted, {})[function]
    for name, command in COMMANDS.items()
    for module, function in [command.target.split(":")]
    if not function.startswith("*")
}
FOR_EACH_TASK = ("train", "compare", "sweep", "data prepare", "data show")
SCREENS = [
    ["--help"],
    *([group, "--help"] for group in GROUPS),
    *([*name.split(), "--help"] for name in COMMANDS),
    *([*name.split(), "files", "--help"] for name in FOR_EACH_TASK),
    ["train", "listops", "--mixer", "mega", "--recipe", "paper", "--help"],
    ["compare", "listops", "--mixers", *list_mixers(), "--help"],
]


def declared_options() -> dict[str, Option]:
    """Every option that a flag is made of, by where it is declared."""
    places = {kind.__name__: options_of(kind) for kind in (ModelConfig, Writing, TrainingConfig, Runtime)}
    places |= {f"mixer {name}": find_mixer(name).options for name in list_mixers()}
    places |= {f"task {name}": options_of(find_task(name)) for name in list_tasks()}
    places |= {f.__name__: options_of(f) for f in (api.train, api.compare, api.sweep)}
    places |= {name: options_of(function) for name, function in FUNCTIONS.items()}
    for module in (data, generate, train):
        places[module.__name__] = {o.name: o for o in vars(module).values() if isinstance(o, Option)}
    return {f"{place}.{name}": option for place, options in places.items() for name, option in options.items()}


OPTIONS = declared_options()


def test_all_kinds_of_options_are_looked_at():
    assert len(OPTIONS) > 250
    assert {
        "TrainingConfig.lr",
        "mixer las.window",
        "task files.path",
        "compare.seeds",
        "check.layers",
    } <= OPTIONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_description_stands_alone(name):
    text = OPTIONS[name].help
    assert text, "not empty"
    assert text[0].isupper(), "begins with a capital letter"
    assert text.endswith("."), "is a sentence"
    first = re.split(r"\W", text)[0].lower()
    assert first not in ("of", "and", "which", "that", "or", "but", "if", "also"), "begins with a noun or a verb"
    assert "\n" not in text
    assert "  " not in text


@pytest.mark.parametrize("summary", [*(command.summary for command in COMMANDS.values()), *GROUPS.values()])
def test_a_command_has_a_summary_of_one_line(summary):
    assert len(summary) <= 80
    assert "\n" not in summary
    assert summary[0].isupper()
    assert summary.endswith(".")
    assert (
        re.split(r"\W", summary)[0]
        in "Compare Train Evaluate Predict Reproduce Check List Print Generate Show Time Draw Prepare Measure".split()
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_command_says_what_it_does(name):
    about = FUNCTIONS[name].__doc__ or ""
    assert about[0].isupper()
    assert about.partition("Args:")[0].strip().endswith(".")


@pytest.mark.parametrize("name", [*list_mixers(), *list_tasks()])
def test_every_name_has_a_summary(name):
    found = find_mixer(name) if name in list_mixers() else find_task(name)
    assert found.summary
    assert "\n" not in found.summary
    assert not found.summary.endswith(".")
    assert len(found.summary) <= 75


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("screen", SCREENS, ids=" ".join)
def test_a_screen_fits_the_terminal(longlens, screen, columns):
    said = longlens(*screen, columns=columns)
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= columns
    assert "…" not in re.sub(r"[A-Z ]…", "", said.out), "nothing is cut; 'COMMAND …' and 'LAYERS…' are meant"
    assert "None" not in said.words.replace("e.g.", ""), "none is how it is written"
    assert "(default: )" not in said.words


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("check", "longlens check [LAYERS…] [flags]"),
        ("list mixers", "longlens list mixers [NAME] [flags]"),
        ("recipe show", "longlens recipe show TASK [SCALE] [flags]"),
        ("list runs", "longlens list runs [flags]"),
    ],
)
def test_what_comes_without_a_flag_is_in_the_usage(longlens, command, usage):
    assert longlens(*command.split(), "--help").out.splitlines()[0].endswith(f": {usage}")


def test_the_first_screen_says_what_each_command_does(longlens):
    said = longlens("--help", columns=80)
    for name in (*(name for name in COMMANDS if " " not in name), *GROUPS):
        line = next(line for line in said.out.splitlines() if line.strip().startswith(f"{name} "))
        assert len(line.split()) > 3
    assert "--version" in said.out


@pytest.mark.parametrize("group", GROUPS)
def test_the_screen_of_a_group_has_its_commands(longlens, group):
    said = longlens(group, "--help")
    for name, command in COMMANDS.items():
        if name.startswith(f"{group} "):
            assert f"{name.split()[1]} " in said.out
            assert command.summary in said.words


@pytest.mark.parametrize("name", FOR_EACH_TASK)
def test_without_a_task_all_are_listed(longlens, name):
    said = longlens(*name.split(), "--help")
    assert COMMANDS[name].summary in said.words
    for task in list_tasks():
        assert f"  {task} " in said.out
        assert find_task(task).summary in said.words


def test_the_flags_of_train_are_in_panels(longlens):
    said = longlens("train", "listops", "--help")
    panels = [line for line in said.out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert panels == ["run:", "task listops:", "mixer las:", "model:", "training:", "hardware:", "logging:"]


def test_compare_has_no_flag_that_it_refuses(longlens):
    said = longlens("compare", "listops", "--help")
    assert "--folder" not in said.out
    assert "--grid" not in said.out
    assert "--seeds" in said.out


def test_defaults_are_those_of_the_recipe(longlens, here):
    text = "[model]\nwidth = 48\n[mixer]\nheads = 6\n[training]\nsteps = 7\nlr = 0.0123\n[task]\nmax_length = 99\n"
    (here / "mine.toml").write_text(text)
    said = longlens("train", "listops", "--recipe", "mine.toml", "--help")
    assert said.code == 0, said.err
    wanted = {"--width": 48, "--mixer.heads": 6, "--steps": 7, "--lr": 0.0123, "--task.max-length": 99}
    for flag, default in wanted.items():
        assert f"(default: {default})" in said.words.split(f" {flag} ", 1)[1][:300]


def test_defaults_are_those_of_the_mixer(longlens):
    said = longlens("train", "listops", "--mixer", "las-chunk", "--recipe", "paper", "--help")
    assert "--mixer.chunk-size INT" in said.words
    assert "(default: 128)" in said.words.split("--mixer.chunk-size", 1)[1][:200]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        (["--help"], []),
        (["train", "--help"], []),
        (["train", "listops", "--help"], []),
        (["compare", "listops", "--help"], []),
        (["data", "list"], []),
        (["list", "mixers"], []),
        (["list", "mixers", "s4d"], []),
        (["list", "recipes"], []),
        (["list", "runs"], []),
        (["data", "prepare", "listops", "--help"], []),
        (["bench", "layers", "--help"], []),
        (["check", "--help"], []),
        (["train", "listops", "--mixer", "lass"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_help_and_lists_import_neither_torch_nor_a_layer(arguments, layers, tmp_path):
    code = """
import sys
from longlens.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("\\\n" + " ".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    modules = set(done.stdout.splitlines()[-1].split())
    assert not modules & {"torch", "matplotlib", "pandas", "ray", "transformers"}
    imported = {m for m in modules if m.startswith("longlens.mixers.")} - {"longlens.mixers.registry"}
    assert imported == set(layers)
