"""Measuring is fair, and what cannot be written is refused before it."""

import json

import pytest
import torch

from longlens.bench import measure
from longlens.bench.measure import begin, make_table, passes, peak_memory, time_interleaved, write_result
from longlens.errors import BadInput

CPU = torch.device("cpu")


@pytest.fixture
def jobs(monkeypatch):
    """Jobs that take as long as they are told by a clock of their own, and a list of those that ran."""
    clock, order = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def make(**seconds):
        left = {name: iter(given) for name, given in seconds.items()}

        def run(name):
            order.append(name)
            clock[0] += next(left[name])

        return {name: lambda name=name: run(name) for name in seconds}, order

    return make


def test_all_jobs_run_in_turn_and_the_best_counts(jobs):
    given, order = jobs(a=[9, 3, 2], b=[9, 4, 5])
    turns = []
    best = time_interleaved(given, CPU, 2, on_turn=turns.append, long=100)
    assert order == ["a", "b"] * 3, "once to warm up, then two rounds"
    assert turns == [1, 2, 3, 4]
    assert best == {"a": 2, "b": 4}


def test_a_short_job_is_repeated_within_its_turn(jobs):
    given, order = jobs(a=[1, 0.25, *[0.125] * 4])
    assert time_interleaved(given, CPU, 2, short=1.0) == {"a": 0.125}
    assert len(order) == 6


def test_a_slow_job_takes_part_in_the_first_round_only(jobs):
    given, order = jobs(fast=[2] * 4, slow=[50] * 4)
    assert time_interleaved(given, CPU, 3, long=20) == {"fast": 2, "slow": 50}
    assert (order.count("fast"), order.count("slow")) == (4, 2)


def test_both_passes_of_a_function():
    x, weight = torch.randn(2, 3), torch.randn(3, 3)
    called = []
    jobs = passes(lambda x: called.append(torch.is_grad_enabled()) or x @ weight, [x], [weight])
    jobs["forward"]()
    jobs["forward_backward"]()
    assert called == [False, True]
    assert x.grad is None


def test_what_was_not_measured_is_a_dash():
    rows = [{"name": "las", "ms": 1.25}, {"name": "flex", "ms": None}, {"name": "s4"}]
    assert make_table("", rows, {"layer": "{name}", "step": "{ms:.1f} ms"}).rows == [
        ["las", "1.2 ms"],
        ["flex", "–"],
        ["s4", "–"],
    ]


def test_peak_memory_counts_what_is_held_at_once():
    def job():
        first = torch.ones(1000)  # 4,000 bytes, and as many for the sum
        return first + first

    assert peak_memory(job, CPU) == 8000


def test_a_list_without_values_is_refused_before_a_folder_is_made(tmp_path):
    assert begin("cpu", None, mixers=None, lengths=(64,)) == CPU
    with pytest.raises(BadInput, match="lengths must have at least one value, got none"):
        begin("cpu", tmp_path / "new" / "out.json", mixers=None, lengths=())
    assert not list(tmp_path.iterdir())


def test_the_environment_is_written_beside_the_figures(tmp_path):
    out = tmp_path / "figures.json"
    assert write_result(None, CPU, rows=[1]) == []
    assert write_result(out, CPU, rows=[1]) == [f"written to {out}"]
    written = json.loads(out.read_text())
    assert written["rows"] == [1]
    assert {"torch", "processor", "threads"} <= set(written["environment"])
