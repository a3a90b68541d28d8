"""Command lines: flags that there are and flags that there are not, with values that fit and values that do not."""

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st

from longlens import api
from longlens.mixers.registry import list_mixers
from longlens.options import Option, options_of
from longlens.tasks.base import list_tasks
from longlens.training.config import Runtime, section_options

WILD = [
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1",
        "2.5",
        "-1e-3",
        "1e308",
        "1e-320",
        "nan",
        "inf",
        "-inf",
        "9" * 400,
        "1" * 5_000,
    ),
    *("0x10", "1_000", "1e3", "true", "no", "none", "None", "NONE", "[1,2]", "1,2", "[/red]", "[bold]", "é", "𝟓", "١٢"),
    *(
        "\udcff",
        "\x1b[31m",
        "a\nb",
        "%s",
        "{0}",
        "~nobody",
        "../..",
        "/",
        "/dev/null",
        "nowhere",
        "a" * 300,
        "\0",
        "'\"",
    ),
    *("las", "s4d", "listops", "smoke", "train", "best", "--help=1", "=", "@file", "9223372036854775808", "4e18"),
]
NOT_RUN = (
    "runs",
    "folder",
    "device",
    "wandb",
    "tensorboard",
    "compile",
    "engine",
    "address",
    "jobs",
)  # slow, or not here

wild = st.one_of(st.sampled_from(WILD), st.text(max_size=6))


def fitting(hint: Any, *, small: bool = False) -> st.SearchStrategy[list[str]]:
    """What may follow a flag of this type. ``small``: nothing that takes long."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _numbers(hint, small)
    if origin is Literal:
        return st.sampled_from([[str(part)] for part in parts])
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return st.lists(fitting(parts[0], small=small), min_size=1, max_size=3).map(
                lambda found: list(itertools.chain.from_iterable(found))
            )
        return st.tuples(*(fitting(part, small=small) for part in parts)).map(
            lambda found: list(itertools.chain.from_iterable(found))
        )
    if parts:  # a union
        return st.one_of(*(st.just(["none"]) if part is type(None) else fitting(part, small=small) for part in parts))
    if hint in (int, float):
        return _numbers(Annotated[hint, None], small)
    words = ["a.png", "x/b.svg", "here", "b c"] if hint is Path else ["s4", "las", "s4", "mega", "here", "b c"]
    return st.sampled_from(words).map(lambda word: [word])


def _numbers(hint: Any, small: bool) -> st.SearchStrategy[list[str]]:
    kind, *notes = get_args(hint)
    if get_origin(kind) is not None:
        return fitting(kind, small=small)
    low = next((getattr(note, "ge", getattr(note, "gt", None)) for note in notes if isinstance(note, Ge | Gt)), 0)
    high = next((getattr(note, "le", getattr(note, "lt", None)) for note in notes if isinstance(note, Le | Lt)), 100)
    if kind is int:
        usual = [*range(low, min(low + 9, high))] * 2
        edges = [low - 1, low, high + 1] + ([] if small else [high - 1, high])
        return st.sampled_from([*usual, *edges]).map(lambda number: [str(number)])
    usual = [low + part * (min(high, 2.0) - low) for part in (0.1, 0.3, 0.5, 0.7, 0.9)] * 2
    edges = [low - 1, low, high, 2 * high + 1, 1e-12, low + 5e-324]
    return st.sampled_from([*usual, *edges]).map(lambda number: [repr(number)])


@st.composite
def flags(draw: st.DrawFn, options: dict[str, Option], *, small: bool = False, most: int = 4) -> list[str]:
    """Some flags of these, or of none of them."""
    found: list[str] = []
    for _ in range(draw(st.integers(0, most))):
        name = draw(st.sampled_from(list(options)))
        option = options[name]
        flag = f"--{name.replace('_', '-')}"
        how = draw(st.integers(0, 19))
        if how == 0:  # a slip of the finger
            flag = draw(
                st.sampled_from([flag[:-1], flag + "s", flag.replace("--", "-"), flag.upper(), f"--{draw(wild)}"])
            )
        if option.hint is bool:
            found.append(flag if draw(st.booleans()) else flag.replace("--", "--no-", 1))
            values = []
        else:
            values = draw(fitting(option.hint, small=small))
        if how == 1:
            values = draw(st.lists(wild, max_size=3))
        if how in (2, 3, 4):
            values = [draw(wild) for _ in values]
        if how == 5 and len(values) == 1:
            found.append(f"{flag}={values[0]}")
        else:
            found += ([] if option.hint is bool else [flag]) + values
    return found


def train_options(task: str, mixers: list[str], function: Any = api.train) -> dict[str, Option]:
    """All flags of train, compare or sweep."""
    own = {name: option for name, option in options_of(function).items() if name not in ("task", "mixer", "mixers")}
    found = {name: option for name, option in own.items() if name != "grid"} | options_of(Runtime)
    for section in ("training", "model"):
        found |= section_options(section, task, ())
    for section in ("task", "mixer"):
        found |= {f"{section}.{name}": option for name, option in section_options(section, task, mixers).items()}
    return found


tasks = st.sampled_from(list_tasks())
mixers = st.sampled_from(list_mixers())


@st.composite
def train_lines(draw: st.DrawFn) -> list[str]:
    task, mixer = draw(tasks), draw(mixers)
    recipe = draw(st.sampled_from(["smoke", "smoke", "mini", "paper"]))
    return ["train", task, "--mixer", mixer, "--recipe", recipe, *draw(flags(train_options(task, [mixer])))]


@st.composite
def many_lines(draw: st.DrawFn) -> list[str]:
    """Of compare and sweep."""
    task, chosen = draw(tasks), draw(st.lists(mixers, min_size=1, max_size=3))
    if draw(st.booleans()):
        given = draw(flags(train_options(task, chosen, api.compare)))
        return ["compare", task, "--recipe", "smoke", "--mixers", *chosen, *given]
    options = train_options(task, chosen[:1], api.sweep)
    own = [name for name in options if "." in name or name in section_options("training", task, ())]
    grid = []
    for name in draw(st.lists(st.sampled_from([*own, *own, *options]), min_size=1, max_size=2)):
        values = draw(st.lists(fitting(options[name].hint), min_size=1, max_size=2))
        if draw(st.integers(0, 5)) == 0:
            values.append([draw(wild)])
        joined = (f"[{','.join(words)}]" if len(words) > 1 else " ".join(words) for words in values)
        shown = draw(st.sampled_from([name, name, name.replace("_", "-"), name.rpartition(".")[2]]))
        grid.append(f"{shown}={','.join(joined)}")
    given = draw(flags(options, most=1))
    return ["sweep", task, "--recipe", "smoke", "--mixer", chosen[0], *given, "--grid", *grid]


@st.composite
def tiny_lines(draw: st.DrawFn) -> list[str]:
    """Trained for real: a step or two of a tiny model, whatever else is asked for."""
    mixer = draw(mixers)
    options = train_options("atomic-select", [mixer])
    left = (*NOT_RUN, "recipe", "steps", "epochs", "task.sizes", "task.max_length", "task.marked", "threads", "depth")
    given = draw(flags({n: o for n, o in options.items() if n not in left}, small=True, most=3))
    end = "--task.max-length 8 --task.marked 2 --task.sizes 8 4 4 --steps 2 --threads 1 --valid-samples 4".split()
    begin = ["--batch-size", "4", "--evaluate-every", "1", *draw(st.sampled_from([[], ["--width", "8"]]))]
    return ["train", "atomic-select", "--mixer", mixer, "--recipe", "smoke", *begin, *given, *end]


def paths() -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(["here", ".", "x/y/z", str(Path("/proc/nothing"))]), wild)
