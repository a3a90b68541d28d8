"""The tables say what the runs say, and no more than that."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from longlens.reports.tables import choice, results_table, verdict
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
        (
            (0.60, 0.50), 10_000,
            "las is ahead of transformer, 60.0 % to 50.0 %; two standard errors of the difference, with 10,000 test "
            "samples, are 1.4 %",
        ),
        ((0.505, 0.50), 1_000, ": it may be chance"),
        ((0.50, 0.60), 10_000, "transformer is ahead of las"),
    ],
)  # fmt: skip
def test_the_verdict_knows_chance(tests, samples, expected):
    outcomes = [
        outcome(name, test=test, samples=samples) for name, test in zip(("las", "transformer"), tests, strict=True)
    ]
    lines = list(verdict(outcomes))
    assert expected in lines[0]
    assert "one seed each" in lines[-1]


def test_equal_ones_are_equal():
    assert list(verdict([outcome(), outcome("transformer")])) == ["las and transformer are equal, 50.0 %"]


@pytest.mark.parametrize(("spread", "chance"), [(0.1, True), (0.001, False)])
def test_several_seeds_tell_chance_by_their_spread(spread, chance):
    outcomes = [outcome("las", seed=seed, test=0.52 + spread * (seed - 1)) for seed in range(3)]
    outcomes += [outcome("transformer", seed=seed, test=0.50 + spread * (seed - 1)) for seed in range(3)]
    (line,) = verdict(outcomes)
    assert "by the spread over seeds" in line
    assert ("it may be chance" in line) == chance


def test_less_is_better_for_languages():
    both = [outcome(name, test=test, metric="bits_per_byte") for name, test in (("las", 1.5), ("transformer", 1.6))]
    assert next(iter(verdict(both))).startswith("las is ahead of transformer, 1.500 to 1.600")


def test_one_model_has_nobody_to_be_compared_with():
    assert not list(verdict([outcome(), outcome("transformer", error="it broke")]))


def test_a_sweep_is_decided_by_validation_not_by_test():
    good, lucky = outcome(lr=0.1, test=0.50), outcome(lr=0.2, test=0.58)
    good.result["valid"], lucky.result["valid"] = 0.60, 0.55
    assert list(choice([lucky, good])) == [
        "best on validation: las training.lr=0.1, 60.0 %; on the test set it has 50.0 %"
    ]


def test_options_that_only_some_mixers_have_are_shown_too():
    outcomes = [outcome(window=3), outcome(window=5), outcome("transformer")]
    assert "mixer.window" in shown(outcomes)
    assert "las mixer.window=" in next(iter(choice(outcomes)))


def test_failed_seeds_are_not_counted():
    assert "las (1 of 2 seeds)" in shown([outcome(seed=0), outcome(seed=1, error="it broke")])


def test_the_table_of_three_models_fits_into_80_columns():
    console = Console(file=io.StringIO(), width=80)
    console.print(results_table([outcome(name) for name in ("transformer", "las", "las-chunk")]))
    text = console.file.getvalue()
    assert "…" not in text
    assert "transformer" in text
