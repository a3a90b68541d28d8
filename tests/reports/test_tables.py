"""The tables say what the runs say, and no more than that."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from longlens.reports.tables import results_table, verdict
from longlens.training.config import resolve
from longlens.training.many import Outcome


def outcome(mixer="las", seed=0, test=0.5, samples=1000, metric="accuracy", error=None, **changes):
    config = resolve("smoke", "atomic-cumsum", mixer, {"seed": seed, **changes})
    result = {
        "metric": metric, "test": test, "test_last": test, "valid": test, "parameters": 1234, "steps": 10,
        "tokens_per_second": 1000.0, "peak_memory_bytes": 2**20, "seconds": 5.0, "test_samples": samples,
    }  # fmt: skip
    return Outcome(config, Path("run"), None if error else result, error)


def shown(outcomes):
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table(outcomes))
    return console.file.getvalue()


def test_seeds_of_one_config_share_a_line():
    text = shown([outcome(seed=0, test=0.4), outcome(seed=1, test=0.6), outcome("transformer", test=0.45)])
    assert "las (2 seeds)" in text
    assert "50.0 % ± 14.1 %" in text
    assert "45.0 %" in text


def test_fields_that_differ_are_columns():
    text = shown([outcome(lr=0.1), outcome(lr=0.2)])
    assert "training.lr" in text
    assert "0.1" in text
    assert "model.depth" not in text


def test_a_failed_run_is_shown_as_such():
    text = shown([outcome(), outcome("transformer", error="it broke")])
    assert "failed" in text


@pytest.mark.parametrize(
    ("tests", "samples", "expected"),
    [
        ((0.60, 0.50), 10_000, "las is ahead of transformer, 60.0 % to 50.0 %; with 10,000 test samples, two standard"),
        ((0.505, 0.50), 1_000, ": it may be chance"),
        ((0.50, 0.60), 10_000, "transformer is ahead of las"),
        ((0.50, 0.50), 1_000, "are equal"),
    ],
)
def test_the_verdict_knows_chance(tests, samples, expected):
    lines = list(verdict([outcome("las", test=tests[0], samples=samples), outcome("transformer", test=tests[1])]))
    assert expected in lines[0]
    assert "one seed each" in lines[-1]


def test_less_is_better_for_languages():
    lines = list(
        verdict([outcome(test=1.5, metric="bits_per_byte"), outcome("transformer", test=1.6, metric="bits_per_byte")])
    )
    assert lines[0].startswith("las is ahead of transformer, 1.500 to 1.600")


def test_one_model_has_nobody_to_be_compared_with():
    assert not list(verdict([outcome(), outcome("transformer", error="it broke")]))
