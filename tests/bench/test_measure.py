"""Measuring is fair, and what cannot be written is refused before it."""

import json
import time

import pytest
import torch

from longlens.bench.measure import check_given, peak_memory, time_interleaved, write_result
from longlens.errors import BadInput

CPU = torch.device("cpu")


def test_all_jobs_run_in_turn_and_the_best_counts():
    order, turns = [], []
    jobs = {name: lambda name=name: (order.append(name), time.sleep(0.025)) for name in "ab"}
    timings = time_interleaved(jobs, CPU, 2, on_turn=lambda: turns.append(1))
    assert order == ["a", "b"] * 3, "once to warm up, then two rounds"
    assert len(turns) == 4
    assert all(len(timing.seconds) == 2 and timing.best == min(timing.seconds) >= 0.025 for timing in timings.values())


def test_a_slow_job_takes_part_in_the_first_round_only():
    jobs = {"fast": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.05)}
    timings = time_interleaved(jobs, CPU, 3, short=0.001, long=0.02)
    assert (len(timings["fast"].seconds), len(timings["slow"].seconds)) == (3, 1)


def test_peak_memory_counts_what_is_held_at_once():
    def job():
        first = torch.ones(1000)  # 4,000 bytes, and as many for the sum
        return first + first

    assert peak_memory(job, CPU) == 8000


def test_a_list_without_values_is_refused():
    check_given(mixers=None, lengths=(64,))
    with pytest.raises(BadInput, match="lengths must have at least one value, got none"):
        check_given(mixers=None, lengths=())


def test_the_environment_is_written_beside_the_figures(tmp_path):
    out = tmp_path / "figures.json"
    assert write_result(None, CPU, {"rows": [1]}) == []
    assert write_result(out, CPU, {"rows": [1]}) == [f"written to {out}"]
    written = json.loads(out.read_text())
    assert written["rows"] == [1]
    assert {"torch", "processor", "threads"} <= set(written["environment"])
