"""Flags and values, random and absurd: each command line is carried out, or refused in one sentence."""

from unittest import mock

from fuzz.cases import dry, fuzz, new_case, run_here
from fuzz.lines import WILD, fitting, flags, many_lines, mixers, paths, tasks, tiny_lines, train_lines, wild
from hypothesis import strategies as st

from longlens.cli import COMMANDS
from longlens.cli import data as data_commands
from longlens.mixers.registry import list_mixers
from longlens.options import options_of
from longlens.paper.figure1 import draw_kernels
from longlens.paper.figure_eld import draw_eld
from longlens.training.config import section_options


@fuzz(300, line=train_lines())
def test_train_is_resolved_or_refused(line):
    with new_case("options") as case, dry():
        case.longlens(*line)
        assert not list(case.here.rglob("*")), "nothing is written before it runs"


@fuzz(200, line=many_lines())
def test_compare_and_sweep_are_resolved_or_refused(line):
    with new_case("options") as case, dry():
        case.longlens(*line)


@fuzz(160, line=tiny_lines())
def test_a_tiny_run(line):
    with new_case("options") as case:
        case.longlens(*line)


@fuzz(30, line=tiny_lines(), out=paths())
def test_a_tiny_comparison(line, out):
    with new_case("options") as case, mock.patch("longlens.training.many.launch", run_here):
        line = ["compare", *(flag.replace("--mixer", "--mixers") if flag == "--mixer" else flag for flag in line[1:])]
        said = case.longlens(*line, "--out", out, may_fail=True)
        assert said.code != 1 or "failed: " in said.out, said


words = st.one_of(
    st.sampled_from([word for name in COMMANDS if not name.startswith(("demo", "bench")) for word in name.split()]),
    st.sampled_from(["--help", "-h", "--version", "help", "--recipe", "smoke", "--mixer", "las", "listops", "files"]),
    tasks,
    mixers,
    wild,
)


@fuzz(160, line=st.lists(words, max_size=6))
def test_any_words(line):
    with new_case("options") as case, dry():
        case.longlens(*line, may_fail=True)


@st.composite
def data_lines(draw: st.DrawFn) -> list[str]:
    task = draw(tasks)
    options = section_options("task", task, ())
    own = ("SOURCE", "WORKERS", "FORCE", "SPLIT", "FIRST", "COUNT", "PICTURE")
    options |= {option.name: option for option in (getattr(data_commands, name) for name in own)}
    return ["data", draw(st.sampled_from(["prepare", "show"])), task, *draw(flags(options))]


@fuzz(120, line=data_lines())
def test_data(line):
    with new_case("options") as case, dry():
        case.longlens(*line)


@fuzz(
    60,
    line=st.sampled_from(["evaluate", "list runs --runs", "data verify", "list mixers", "list recipes"]),
    path=paths(),
    more=st.lists(wild, max_size=2),
)
def test_a_place_or_name(line, path, more):
    with new_case("options") as case:
        case.longlens(*line.split(), path, *more, may_fail=line == "data verify")


FIGURES = {"eld": options_of(draw_eld), "kernels": options_of(draw_kernels)}


@st.composite
def figure_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(list(FIGURES)))
    return ["figures", name, *draw(flags(FIGURES[name], small=True))]


@fuzz(80, line=figure_lines())
def test_figures(line):
    with new_case("options") as case, mock.patch("matplotlib.figure.Figure.savefig"):
        case.longlens(*line)


MIXERS = list_mixers()


def _is_quick(number: str) -> bool:
    """A length of 1,000 is no mistake, and takes a minute."""
    return number not in ("1_000", "1e3")


@st.composite
def check_lines(draw: st.DrawFn) -> list[str]:
    mixer = draw(st.one_of(mixers, mixers, mixers, wild))
    found = ["check", mixer]
    for name in ("width", "length"):
        size = draw(st.sampled_from([None, None, "1", "8", "16", "wild"]))
        if size is not None:
            found += [f"--{name}", draw(st.sampled_from(WILD).filter(_is_quick)) if size == "wild" else size]
    options = section_options("mixer", "listops", [mixer]) if mixer in MIXERS else {}
    chosen = draw(st.one_of(st.just([]), st.lists(st.sampled_from([*options, "windw"]), min_size=1, max_size=2)))
    given = []
    for name in chosen:
        fits = name in options and draw(st.integers(0, 3))
        value = " ".join(draw(fitting(options[name].hint, small=True))) if fits else draw(wild)
        given.append(f"{name}={value}")
    return [*found, *(["--options", *given] if given else []), "--no-processes"]


@fuzz(60, line=check_lines())
def test_check(line):
    with new_case("options") as case:
        said = case.longlens(*line, may_fail=True)
        assert said.code != 1 or "failed" in said.out, said
