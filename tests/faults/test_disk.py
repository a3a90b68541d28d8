"""A full disk is one clear sentence; what was saved stays whole, and the run resumes when there is room."""

import shutil
import subprocess

import pytest

from longlens.training import checkpoint

pytestmark = pytest.mark.faults

FLAGS = ["--dropout", "0.1", "--keep", "100"]


def assert_whole_and_refused(run):
    assert run.code == 3
    assert f"there is no room left for {run.folder}: make some, and the same command resumes" in run.said
    assert "Traceback" not in run.said
    assert not list(run.folder.rglob("*partial*"))
    for step in run.checkpoints():
        checkpoint.read(run.folder / "checkpoints" / f"{step:08d}")


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a small disk, which is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_a_sentence_and_the_run_resumes_when_there_is_room(runs, compare, disk):
    ballast, reached = disk / "ballast", []
    for kilobytes in (0, 4, 8, 24, 48, 64, 96):  # from no room for a config to some checkpoints
        ballast.unlink(missing_ok=True)
        free = shutil.disk_usage(disk).free
        ballast.write_bytes(bytes(max(0, free - 1024 * kilobytes)))
        run = runs.train(disk / "run", *FLAGS)
        assert_whole_and_refused(run)
        reached.append(run.checkpoints()[-1:])
    assert reached[0] == []
    assert reached == sorted(reached), "nothing that was saved is lost"
    assert reached[-1] > [3]
    ballast.unlink()
    assert runs.train(disk / "run", *FLAGS).code == 0
    compare.same(disk / "run", runs.undisturbed(*FLAGS))


@pytest.mark.parametrize("limit", [400, 1500, 9000])  # bytes of a file: a config, a line, the moments do not fit
def test_a_file_that_may_not_grow_is_a_sentence(runs, compare, limit):
    setup = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    run = runs.train("run", *FLAGS, setup=setup)
    assert_whole_and_refused(run)
    assert runs.train("run", *FLAGS).code == 0
    compare.same(run.folder, runs.undisturbed(*FLAGS))
