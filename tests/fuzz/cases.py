"""A case of the fuzz: commands in this process, and what they may end with.

Success, or one line on stderr that begins with ``longlens:`` and a documented exit code. Never a traceback, a second
line, a hang, or something half-written.
"""

import contextlib
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from longlens import cli

SEED = os.environ.get("LONGLENS_FUZZ_SEED")  # other cases than those of every other time
TIMES = float(os.environ.get("LONGLENS_FUZZ_TIMES", "1"))  # more of them, or fewer
SECONDS = 60  # after which a command hangs; most take a tenth of one
ROOM = 3 << 30  # bytes that a command may ask for: sizes that do not fit are refused, and nobody else suffers
HALVES = ("*.partial", "*.new", "*.old", "*.parts", ".tmp*", "*.part")  # of files and folders being written

counts: Counter[str] = Counter()  # cases by kind, and commands by exit code


def fuzz(cases: int, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Above a test: so many cases, always the same ones unless LONGLENS_FUZZ_SEED is given."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        decorated = settings(
            max_examples=max(1, round(cases * TIMES)),
            derandomize=SEED is None,
            database=None,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(given(**strategies)(test))
        return pytest.mark.fuzz(decorated if SEED is None else seed(int(SEED))(decorated))

    return decorate


class Hang(BaseException):  # not one that the package could catch
    """A command is still at work after its time."""


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    line: str
    code: int
    out: str
    err: str
    errors: list[str]  # sentences of errors, as they were said

    @property
    def notes(self) -> str:
        """What was said beside an error."""
        return "\n".join(self.err.splitlines()[: len(self.err.splitlines()) - len(self.errors)])


class Case:
    """A folder for one case, in which commands are given. Its cache is ``home``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.here = folder / "here"
        self.home = folder / "home"
        self.temporary = folder / "tmp"

    def longlens(self, *arguments: object, may_fail: bool = False) -> Said:
        """Run a command and check how it ends. ``may_fail``: the exit code may be 1."""
        said = call([str(argument) for argument in arguments])
        check_end(said, may_fail)
        counts[f"code {said.code}"] += 1
        for folder in (self.home, self.here):
            left = [path for pattern in HALVES for path in folder.rglob(pattern)]
            assert not left, f"left behind: {left} {said}"
        left = [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor")]  # torch's cache
        assert not left, f"left behind in the folder of temporary files: {said}"
        return said


@contextlib.contextmanager
def new_case(kind: str) -> Iterator[Case]:
    """An empty folder, in which commands are given; it is gone afterwards."""
    counts[kind] += 1
    before, environment, temporary = Path.cwd(), dict(os.environ), tempfile.tempdir
    case = Case(Path(tempfile.mkdtemp(prefix="case-")))
    for folder in (case.here, case.home, case.temporary):
        folder.mkdir()
    os.environ["LONGLENS_HOME"] = str(case.home)
    try:
        os.chdir(case.here)
        tempfile.tempdir = str(case.temporary)
        yield case
    finally:
        tempfile.tempdir = temporary
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(case.folder)


def call(arguments: list[str]) -> Said:
    """Run a command in this process."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, newline="", write_through=True)
        for errors in ("strict", "backslashreplace")  # as Python has them in a shell
    )
    errors: list[str] = []
    say = cli._say
    code: Any = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(cli, "_say", lambda message: (errors.append(str(message)), say(message))),
        mock.patch.object(sys, "argv", ["longlens", *arguments]),
        _shown_warnings(),
        _limits(),
    ):
        try:
            cli.main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        except Hang as problem:
            raise AssertionError(f"{' '.join(arguments)}: {problem}") from problem
    out, err = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return Said(" ".join(arguments), code, out, err, errors)


def check_end(said: Said, may_fail: bool) -> None:
    """The only ends that are allowed."""
    allowed = (0, 1, 2, 3, 75) if may_fail else (0, 2, 3, 75)
    assert said.code in allowed, said
    assert len(said.errors) == (said.code in (2, 3, 75)), said
    for line in said.err.splitlines():
        assert line.startswith("longlens: "), f"a line that is not ours, {line!r}: {said}"
    assert "Traceback" not in said.err + said.out, said
    if said.errors:
        last = said.err.splitlines()[-1]
        assert len(last) > len("longlens: ") + 5, said
        assert len(last) < 2_000 + 3 * len(said.line), said
        assert said.err.endswith("\n"), said
        assert "Errno" not in last, said
        assert "pydantic" not in last, said


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    """Warnings on stderr, as in a shell: pytest would keep them for itself."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: print(
            warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr
        )
        yield


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """No more than so much time and memory."""

    def stop(number: int, frame: Any) -> None:
        raise Hang(f"still at work after {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True, file=2)  # of code that no signal reaches
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_here(request: str, folder: Path, quiet: bool, *_: Any) -> tuple[dict[str, Any] | None, str | None]:
    """In place of ``longlens.training.many.launch``: the run of another process, in this one. A bug is a bug."""
    from longlens.errors import BadInput, LongLensError
    from longlens.training.config import Config, Runtime
    from longlens.training.logs import open_to_append
    from longlens.training.loop import train_run

    values = json.loads(request)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if quiet:
            open_to_append(folder / "log.txt").close()
    except (BadInput, OSError) as error:  # as launch has it
        return None, str(error)
    try:
        config = Config.from_json(values["config"], "the request")
        return train_run(config, Runtime.make(values["runtime"], "the runtime")), None
    except LongLensError as error:
        return None, str(error)


class Dry(SystemExit):
    """A command came to where it would begin to work."""

    def __init__(self) -> None:
        super().__init__(0)


@contextlib.contextmanager
def dry() -> Iterator[None]:
    """Commands stop before they train, prepare or draw: their options are read, resolved, and make a layer."""
    from longlens.models.model import check_mixer_builds
    from longlens.training.config import Config

    def resolved(configs: Any, *_: Any, **__: Any) -> Any:
        for config in configs if isinstance(configs, list) else [configs]:
            again = Config.from_json(json.loads(json.dumps(config.to_json())), "the config")
            assert again.digest("") == config.digest(""), "a config that is written and read is the same"
            check_mixer_builds(config.task, config.mixer, config.model)
        raise Dry

    def stop(*_: Any, **__: Any) -> Any:
        raise Dry

    with (
        mock.patch("longlens.api.train_config", resolved),
        mock.patch("longlens.api.run_configs", resolved),
        mock.patch("longlens.data.store.prepare", stop),
        mock.patch("longlens.cli.check.check_properties", stop),
        mock.patch("matplotlib.figure.Figure.savefig", stop),
        mock.patch("longlens.paper.table10.traits_tables", stop),
    ):
        yield
