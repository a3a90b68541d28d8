"""The report page: what it says of runs, whatever is in their folders, and who may ask its server."""

import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import threading
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from support.page import HOSTILE, hostile_page, make_run

from longlens import api
from longlens.cli import main
from longlens.errors import BadInput
from longlens.paper.page import record_entries, write_page
from longlens.reports.page.boards import POINTS, make_boards, show_time
from longlens.reports.page.command import command_of
from longlens.reports.page.entries import Watch, read_entry, total_steps, without_repeats
from longlens.reports.page.render import SCRIPTS, Artifact, Still, draw_changing, render_page
from longlens.reports.page.serve import Server
from longlens.training.config import load_recipe
from longlens.training.run import read_config

ROOT = Path(__file__).parents[2]
PACKAGE = files("longlens.reports.page")


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def test_the_vendored_library_is_what_it_says():
    about = json.loads((PACKAGE / "vendor" / "vendored.json").read_text())
    library = (PACKAGE / "vendor" / about["file"]).read_bytes()
    assert hashlib.sha256(library).hexdigest() == about["sha256"]
    assert f"v{about['version']}".encode() in library[:100]
    assert "MIT License" in (PACKAGE / "vendor" / "plotly-basic.LICENSE").read_text()


@pytest.mark.parametrize(
    "name", ["charts.js", "page.js", "style.css", *(f.name for f in (PACKAGE / "templates").iterdir())]
)
def test_our_own_files_are_read_in_one_sitting(name):
    folder = PACKAGE / "templates" if name.endswith(".html") else PACKAGE
    assert len((folder / name).read_text().splitlines()) <= 400


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_ends_before_its_end(name):
    text = (PACKAGE / name).read_text()
    assert "</script" not in text.lower()
    assert "<!--" not in text
    assert "\r" not in text, "a browser would change it, and its checksum would not fit"


def test_seeds_are_folded_into_mean_and_deviation(tmp_path):
    for mixer in ("las", "transformer"):
        for seed in range(3):
            make_run(tmp_path, mixer=mixer, seed=seed)
    (board,) = make_boards(Watch([tmp_path]).look())
    assert "is better than" in board.verdict[0]
    make_run(tmp_path, mixer="las", seed=0, lr=0.5, stops_at=10)
    (board,) = make_boards(Watch([tmp_path]).look())
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    scores = {name: [r["test"] for r in results if r["mixer"] == name] for name in ("las", "transformer")}
    order = sorted(scores, key=lambda name: -np.mean(scores[name]))
    assert [(row.layer, row.rank) for row in board.rows[:2]] == [(order[0], 1), (order[1], 2)]
    for row in board.rows[:2]:
        assert row.test.value == pytest.approx(np.mean(scores[row.layer]))
        assert row.deviation == pytest.approx(np.std(scores[row.layer], ddof=1))
        assert row.test.shown == f"{np.mean(scores[row.layer]):.3f} ± {np.std(scores[row.layer], ddof=1):.3f}"
        assert row.strip.low < row.strip.mean < row.strip.high
    last = board.rows[2]
    assert (last.layer, last.rank, last.seeds, last.test.shown, last.again) == ("las", None, "0 of 1", "", True)
    assert board.verdict[0].startswith("best on validation: "), (
        "of a layer with several settings, the test set chooses none"
    )


def test_curves_are_means_over_the_seeds_that_have_a_step(tmp_path):
    folders = [make_run(tmp_path, seed=seed, stops_at=stop) for seed, stop in ((0, None), (1, 20), (2, None))]
    (board,) = make_boards(Watch([tmp_path]).look())
    curve = board.rows[0].curves["valid"]
    lines = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    assert (curve["step"], curve["seeds"]) == ([10, 20, 30, 40], [3, 3, 2, 2])
    for place, step in enumerate(curve["step"]):
        found = [v["r2"] for run in lines for v in run if v["split"] == "valid" and v["step"] == step]
        assert curve["mean"][place] == pytest.approx(np.mean(found), rel=1e-3)
        assert curve["deviation"][place] == pytest.approx(np.std(found, ddof=1), rel=1e-3)


def test_long_curves_are_thinned_with_both_ends(tmp_path):
    make_run(tmp_path, steps=2000)
    (board,) = make_boards(Watch([tmp_path]).look())
    steps = board.rows[0].curves["train"]["step"]
    assert (len(steps), steps[0], steps[-1]) == (POINTS, 2, 2000)


def test_lower_is_better_where_it_is(tmp_path):
    entries = [entry for entry in record_entries(ROOT / "results") if entry.config.task.name == "text8"]
    assert entries
    assert not make_boards(entries)[0].is_higher_better


class Found(Exception):  # noqa: N818 (nothing is wrong)
    """The config that a command would train."""


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The config of a command."""

    def refuse(config, runtime):
        raise Found(config)

    def run(command):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(api, "train_config", refuse)
        with pytest.raises(Found) as found:
            main(shlex.split(command)[1:])
        return found.value.args[0]

    return run


def test_the_command_of_a_run_makes_the_same_config(trained):
    entries = record_entries(ROOT / "results")
    assert len(entries) > 20
    for entry in entries:
        assert trained(command_of(entry.config)).values() == entry.config.values(), entry.place


CHANGES = {
    "epochs": 1.5,
    "betas": (0.8, 0.9),
    "groups": {"kernel": {"lr": 0.01}},
    "mixer.bias": False,
    "task.sizes": (64, 8, 8),
    "clip": 0.5,
    "train_on_valid": True,
    "seed": 7,
}


def test_flags_of_all_kinds_are_written(trained):
    config = load_recipe("smoke", "atomic-cumsum", ["las"]).resolve("atomic-cumsum", "las", CHANGES)
    command = command_of(config)
    assert "--no-mixer.bias" in command
    assert trained(command).values() == config.values()


def test_a_run_is_training_until_it_is_silent(tmp_path):
    folder = make_run(tmp_path, stops_at=20)
    entry = read_entry(folder)
    assert (entry.state, entry.step, total_steps(entry.config)) == ("training", 20, 40)
    assert " left</span>" in draw_changing([entry]).parts["live"]
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (0, path.stat().st_mtime - 3600))
    assert read_entry(folder).state == "stopped"
    assert "nothing written for 60 min" in draw_changing([read_entry(folder)]).parts["live"]


def test_the_time_left_is_by_the_speed_since_the_start(tmp_path):
    folder = make_run(tmp_path, stops_at=10)
    now = (folder / "metrics.jsonl").stat().st_mtime
    os.utime(folder / "environment.json", (0, now - 30))
    assert read_entry(folder).seconds_left(40) == pytest.approx(90, abs=20)
    assert read_entry(folder).seconds_left(None) is None


@pytest.mark.parametrize("at_least", [0, 999])
def test_the_steps_of_epochs_are_counted(at_least):
    changes = {"epochs": 2.5, "min_steps": at_least}
    config = load_recipe("smoke", "atomic-cumsum", ["las"]).resolve("atomic-cumsum", "las", changes)
    from longlens.training.config import Runtime
    from longlens.training.loop import Plan

    assert total_steps(config) == Plan(config, Runtime()).steps > at_least - 1


@pytest.mark.parametrize("is_finished", [True, False])
def test_numbers_of_files_are_no_percentages(is_finished, tmp_path):
    values = np.random.default_rng(0).normal(size=(80, 5)).round(3)
    lines = [f"{row[0] + row[1]:.3f},{','.join(map(str, row))}" for row in values]
    (tmp_path / "data.csv").write_text("\n".join(["label,a,b,c,d,e", *lines]))
    run = api.train("files", "las", path=str(tmp_path / "data.csv"), recipe="smoke", runs=tmp_path / "runs")
    if not is_finished:
        (run.folder / "result.json").unlink()
    (board,) = make_boards([read_entry(run.folder)])
    assert board.metric == "r2"
    assert "%" not in board.rows[0].test.shown
    assert board.rows[0].curves["valid"]


@pytest.mark.parametrize(("seconds", "shown"), [(5, "5 s"), (600, "10 min"), (7380, "2 h 03 min")])
def test_times_are_short(seconds, shown):
    assert show_time(seconds) == shown


def test_damage_is_shown_and_hides_nothing(tmp_path):
    make_run(tmp_path, mixer="s4d")
    cut, odd, lost = (make_run(tmp_path, seed=seed, stops_at=20) for seed in range(3))
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"split": "valid", "step": 30, "r2"')
    with (odd / "metrics.jsonl").open("a") as file:
        for value in ("NaN", "Infinity", '"<b>"', "[1]", "null"):
            file.write(f'{{"split": "valid", "step": 40, "loss": 1.0, "r2": {value}}}\n')
    (lost / "identity.json").unlink()
    made = make_run(tmp_path, seed=5)
    (made / "result.json").write_text("{")
    entries = {Path(entry.place): entry for entry in Watch([tmp_path]).look()}
    assert {entries[path].state for path in (lost, made)} == {"damaged"}
    assert entries[cut].step == entries[odd].step == 20
    text = write_and_read(tmp_path, [tmp_path])
    assert "identity.json is missing" in text
    assert {line["label"].split()[0] for line in data_of(text)["boards"][0]["lines"]} == {"las", "s4d"}


def write_and_read(tmp_path: Path, places: list[Path]) -> str:
    write_page(tmp_path / "out.html", places, tmp_path / "none", maps=False)
    return (tmp_path / "out.html").read_text()


def test_a_folder_that_vanishes_is_gone(tmp_path):
    watch = Watch([tmp_path])
    folder = make_run(tmp_path, stops_at=10)
    assert len(watch.look()) == 1
    shutil.rmtree(folder)
    assert watch.look() == []
    assert read_entry(folder) is None
    shutil.rmtree(tmp_path)
    assert watch.look() == []


def test_a_run_is_read_again_when_it_has_changed(tmp_path):
    watch, folder = Watch([tmp_path]), make_run(tmp_path)
    (first,), (again,) = watch.look(), watch.look()
    assert first is again
    (folder / "result.json").unlink()
    assert watch.look()[0].state == "training"


def test_of_one_config_there_is_one(tmp_path):
    one = make_run(tmp_path / "a", stops_at=10)
    shutil.copytree(make_run(tmp_path / "b"), tmp_path / "c" / "copy")
    os.utime(one / "metrics.jsonl", (0, 0))
    entries = Watch([tmp_path]).look()
    assert len(entries) == 3
    assert [entry.state for entry in without_repeats(entries)] == ["training"]


def test_other_data_of_one_name_is_another_board(tmp_path, monkeypatch):
    """A table in two folders, of which one column is predicted, or another."""
    rows = ["easy,coin,t0,t1", *(f"{'ab'[n % 2]},{'ab'[n // 2 % 2]},{n % 2},{n % 7}" for n in range(40))]
    for folder, text in (("one", rows), ("two", [*rows, "a,a,1,1"])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.csv").write_text("\n".join(text))
        monkeypatch.chdir(tmp_path / folder)
        path = {"task.path": "data.csv"}
        make_run(tmp_path / "same", "files", **path, **{"task.label_column": "easy", "task.ignore": ["coin"]})
    make_run(tmp_path / "columns", "files", **path, **{"task.label_column": "easy", "task.ignore": ["coin"]})
    make_run(tmp_path / "columns", "files", **path, **{"task.label_column": "coin", "task.ignore": ["easy"]})
    found = {place: make_boards(without_repeats(Watch([tmp_path / place]).look())) for place in ("same", "columns")}
    assert all(re.fullmatch(r"files \(data.csv, data=\w{8}\)", board.title) for board in found["same"])
    assert {board.title for board in found["columns"]} == {
        "files (data.csv, label_column=easy ignore=['coin'])",
        "files (data.csv, label_column=coin ignore=['easy'])",
    }
    boards = found["same"] + found["columns"]
    assert len({board.key for board in boards}) == 4
    assert not any(board.verdict for board in boards), "there is one run in each"


def test_hostile_names_are_text(tmp_path):
    text = hostile_page(tmp_path).read_text()
    assert "<script>document" not in text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert text.count("<script") == 1 + len(SCRIPTS)
    assert any(HOSTILE.replace("/", "") in board["key"] for board in data_of(text)["boards"])


def test_a_page_of_the_records_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["report", "--results", str(ROOT / "results")])
    text = (tmp_path / "page" / "index.html").read_text()
    assert "Kernels of S4, MEGA and SGConv decay" in text
    assert len(text) < 5e6
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text.partition('<script type="application/json"')[0])


def test_the_line_counts_a_run_and_its_record_once(tmp_path, monkeypatch, capsys):
    """Two folders of the same records are a run and its record."""
    monkeypatch.chdir(tmp_path)
    count = len(list((ROOT / "results").glob("*/*/*.json")))
    twice = [*record_entries(ROOT / "results"), *record_entries(ROOT / "results")]
    assert len(without_repeats(twice)) == count
    monkeypatch.setattr("longlens.paper.page.record_entries", lambda results: twice)
    main(["report", "--results", str(ROOT / "results")])
    assert f"{count:,} runs on one page: " in capsys.readouterr().out


def test_a_page_of_named_runs_has_those_alone(tmp_path, monkeypatch, capsys):
    """Though records are there; and records that are asked for must be there."""
    monkeypatch.chdir(ROOT)
    make_run(tmp_path / "runs")
    main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page"), "--no-maps"])
    assert "1 run on one page: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["report", "--results", str(tmp_path / "none")])
    assert "results must be a folder of records of 'longlens reproduce'" in capsys.readouterr().err


def test_the_line_of_a_single_run_is_in_the_singular(tmp_path):
    make_run(tmp_path / "runs")
    out = tmp_path / "out.html"
    assert write_page(out, [tmp_path / "runs"], tmp_path / "none", maps=False) == f"1 run on one page: {out}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "there is nothing to show: no folder runs, and no results; give folders of runs"),
        (["nowhere"], "nowhere is not a folder: give folders of runs, or folders that have runs in them"),
        (["--port", "70000"], "--port must be a whole number from 0 to 65535, got 70000"),
    ],
)
def test_bad_input_is_a_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["report", *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "runs")
    (tmp_path / "page").write_text("a file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["report", "--no-maps"])
    assert stop.value.code == 2
    assert "cannot write page/index.html" in capsys.readouterr().err


@pytest.fixture
def server(tmp_path):
    watch = Watch([tmp_path])
    with Server(Still(), lambda: draw_changing(watch.look()), 0) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.02,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server, path, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_server_answers_this_machine_and_nobody_else(server, tmp_path):
    make_run(tmp_path)
    assert server.server_address[0] == "127.0.0.1"
    answer, body = ask(server, "/")
    assert answer.status == 200
    assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
    assert data_of(body)["follows"] is True
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1:1", "127.0.0.1"):
        assert ask(server, "/", host=host)[0].status == 421, host
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0].status == 200
    for path in ("/index.html", "/../pyproject.toml", "//etc/passwd", "/live/", "/runs"):
        assert ask(server, path)[0].status == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0].status == 501, method


def test_the_server_says_what_has_changed_and_nothing_otherwise(server, tmp_path):
    folder = make_run(tmp_path)
    news = json.loads(ask(server, "/live")[1])
    assert ask(server, f"/live?seen={news['version']}")[0].status == 204
    (folder / "result.json").unlink()
    status, end = 204, time.monotonic() + 60
    while status == 204:  # it looks again after a while
        assert time.monotonic() < end
        answer, body = ask(server, f"/live?seen={news['version']}")
        status = answer.status
    assert status == 200
    assert "training" in json.loads(body)["parts"]["live"]


def test_a_port_that_is_taken_is_a_sentence(server):
    with pytest.raises(BadInput, match=rf"cannot listen on port {server.server_port}: .*choose another with --port"):
        Server(Still(), lambda: draw_changing([]), server.server_port)


def test_attention_maps_are_drawn_of_runs_whose_models_are_there(tiny, tmp_path):
    folder = tiny.train("run")
    make_run(tmp_path / "other", seed=3)  # has no checkpoint
    write_page(tmp_path / "index.html", [tmp_path], tmp_path / "none")
    text = (tmp_path / "index.html").read_text()
    assert text.count("Attention of las.") == 2  # the caption, and the text for those who do not see the picture
    assert read_config(folder).task.title in text


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        ("holds", "yes"),
        ("holds: it does", "yes"),
        ("does not hold, less than the paper's", "no"),
        ("holds in 2, not decided in 1", "open"),
        ("does not hold in 1, missing in 3", "open"),
        ("missing", "open"),
    ],
)
def test_a_mixed_verdict_is_open(verdict, kind):
    page = render_page(Still(artifacts=[Artifact("Table", "A claim.", "here", verdict)]), draw_changing([]))
    assert f'<span class="verdict {kind}">' in page
