"""The tables say what the runs say, and no more than that."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from longlens.reports.tables import changing, choice, results_table, runs_tables, verdict
from longlens.training.config import load_recipe
from longlens.training.many import Outcome


def outcome(mixer="las", seed=0, test=0.5, samples=1000, metric="accuracy", error=None, folder=None, **changes):
    config = load_recipe("smoke", "atomic-cumsum", [mixer]).resolve("atomic-cumsum", mixer, {"seed": seed, **changes})
    result = {
        **{"metric": metric, "test": test, "test_last": test, "valid": test, "parameters": 1234, "steps": 10},
        **{"tokens_per_second": 1000.0, "peak_memory_bytes": 2**20, "seconds": 5.0, "test_samples": samples},
    }
    return Outcome(config, folder or Path("run"), None if error else result, error)


def printed(sheet, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(sheet)
    text = console.file.getvalue()
    assert "…" not in text, "no cell is cut"
    assert all(len(line) <= width for line in text.splitlines()), "no line is wider than the terminal"
    return text


def shown(outcomes, width=200):
    return printed(results_table(outcomes), width)


def test_seeds_of_one_config_share_a_line():
    text = shown([outcome(seed=0, test=0.4), outcome(seed=1, test=0.6), outcome("transformer", test=0.45)])
    assert "las (2 seeds)" in text
    assert "50.0 % ± 14.1 %" in text
    assert "45.0 %" in text


def test_fields_that_differ_are_columns():
    text = shown([outcome(lr=0.1), outcome(lr=0.2)])
    assert "┃ lr " in text
    assert "│ 0.1 " in text
    assert "depth" not in text


def test_a_failed_run_is_shown_as_such():
    text = shown([outcome(), outcome("transformer", error="it broke")])
    assert "failed" in text


def runs(folder, mixer, rights):
    """A run of a mixer for each seed, with what it has right."""
    found = []
    for seed, right in enumerate(rights):
        place = folder / f"{mixer}-{seed}"
        place.mkdir()
        np.save(place / "scores.npy", np.asarray(right, dtype=np.float32))
        found.append(outcome(mixer, seed=seed, test=float(np.mean(right)), samples=len(right), folder=place))
    return found


def test_test_samples_are_paired_only_if_they_are_the_same(tmp_path):
    random = np.random.default_rng(0)
    first, second = (
        runs(tmp_path, mixer, [random.random(200) < share]) for mixer, share in (("las", 0.9), ("lstm", 0.5))
    )
    assert "over 200 test samples" in next(verdict([*first, *second]))
    others = [replace(second[0], data="another")], [replace(second[0], config=outcome(**{"task.seed": 5}).config)]
    for other in others:
        assert "p = " not in next(verdict([*first, *other]))


def flips(count, share):
    """``count`` answers, a share of which is right."""
    return np.arange(count) < round(share * count)


def test_of_one_seed_the_verdict_is_that_of_the_samples(tmp_path):
    clear = runs(tmp_path, "las", [flips(1000, 0.6)]) + runs(tmp_path, "transformer", [flips(1000, 0.5)])
    first, last = verdict(clear)
    expected = stats.ttest_rel(flips(1000, 0.6).astype(float), flips(1000, 0.5).astype(float)).pvalue
    assert first == f"las is better than transformer, 60.0 % to 50.0 % (p = {expected:.2g} over 1,000 test samples)"
    assert "one seed each" in last
    close = runs(tmp_path, "s4d", [flips(1000, 0.502)]) + runs(tmp_path, "lstm", [flips(1000, 0.5)])
    assert next(iter(verdict(close))).endswith("test samples): it may be chance")


def test_a_lead_that_the_seeds_of_both_deny_has_no_p_value(tmp_path):
    """One layer is ahead by seeds that the other has not."""
    better = runs(tmp_path, "las", [flips(1000, 0.4), flips(1000, 0.6), flips(1000, 0.6)])
    first, last = verdict(better + runs(tmp_path, "transformer", [flips(1000, 0.5)]))
    assert first == "las is better than transformer, 53.3 % to 50.0 %, but not over the seed that both have"
    assert last.startswith("one seed of one of them: ")
    numbers = [outcome(seed=seed, test=test, metric="r2") for seed, test in enumerate((0.4, 0.6, 0.6))]
    first, _ = verdict([*numbers, outcome("transformer", test=0.5, metric="r2")])
    assert first.endswith("0.533 to 0.500, but not over the seed that both have"), "without a p-value, too"


def test_two_seeds_that_agree_do_not_hide_that_samples_are_few(tmp_path):
    """18.8 % and 17.2 % to 12.5 % and 14.1 % of 64 samples, which are not the same ones."""
    best = runs(tmp_path, "s4d", [flips(64, 0.188), flips(64, 0.172)])
    other = runs(tmp_path, "las", [flips(64, 0.125)[::-1], flips(64, 0.141)[::-1]])
    (line,) = verdict([*best, *other])
    assert "over 2 seeds and 64 test samples" in line
    assert line.endswith(": it may be chance")


def test_equal_ones_are_equal():
    lines = list(verdict([outcome(), outcome("transformer"), outcome("s4d", test=0.1)]))
    assert lines[0] == "las and transformer are equal, 50.0 %"


def test_all_of_the_equal_ones_are_named():
    lines = list(verdict([outcome(name) for name in ("las", "transformer", "s4d")]))
    assert lines[0] == "las, transformer and s4d are equal, 50.0 %"


@pytest.mark.parametrize(("spread", "chance"), [(0.1, True), (0.001, False)])
def test_several_seeds_tell_chance_by_their_spread(spread, chance):
    outcomes = [outcome("las", seed=seed, test=0.52 + spread * (seed - 1)) for seed in range(3)]
    outcomes += [outcome("transformer", seed=seed, test=0.50 - spread * (seed - 1)) for seed in range(3)]
    (line,) = verdict(outcomes)
    assert "over 3 seeds)" in line
    assert ("it may be chance" in line) == chance


def test_what_is_not_a_number_is_not_ranked():
    unknown = outcome("transformer", test=float("nan"), metric="r2")
    assert not list(verdict([unknown, outcome("las", test=0.5, metric="r2")]))
    assert not list(choice([unknown, outcome("las", test=0.5, metric="r2")]))


def test_less_is_better_for_languages():
    both = [outcome(name, test=test, metric="bits_per_byte") for name, test in (("las", 1.5), ("transformer", 1.6))]
    assert next(iter(verdict(both))).startswith("las is better than transformer, 1.500 to 1.600")


def test_one_model_has_nobody_to_be_compared_with():
    assert not list(verdict([outcome(), outcome("transformer", error="it broke")]))


def test_a_sweep_is_decided_by_validation_not_by_test():
    good, lucky = outcome(lr=0.1, test=0.50), outcome(lr=0.2, test=0.58)
    good.result["valid"], lucky.result["valid"] = 0.60, 0.55
    assert list(choice([lucky, good])) == ["best on validation: las lr=0.1, 60.0 %; on the test set it has 50.0 %"]


def test_options_that_only_some_mixers_have_are_shown_too():
    outcomes = [outcome(window=3), outcome(window=5), outcome("transformer")]
    assert "┃ window " in shown(outcomes)
    assert "las window=" in next(iter(choice(outcomes)))


def test_failed_seeds_are_not_counted():
    assert "las (1 of 2 seeds)" in shown([outcome(seed=0), outcome(seed=1, error="it broke")])


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "outcomes",
    [
        lambda: [outcome(name) for name in ("transformer", "las", "las-chunk")],
        lambda: [outcome(name, seed=seed) for name in ("transformer", "las-bidirectional") for seed in range(10)],
        lambda: [outcome(window=w, max_rate=r) for w in (3, 5, 9) for r in (1e-3, 1e-1)],
        lambda: [outcome(lr=lr, depth=d, batch_size=b) for lr in (0.0001234, 1e-5) for d in (2, 12) for b in (8, 256)],
        lambda: [outcome(error="it broke"), outcome("las-chunk")],
        lambda: [outcome(metric="bits_per_byte", test=1.2345), outcome("s4-bidirectional", metric="bits_per_byte")],
    ],
)
def test_what_matters_fits_the_terminal(outcomes, width):
    """Nothing is cut; the test metric and all that differs are there, and what is left out is named."""
    runs = outcomes()
    text = shown(runs, width)
    header = next(line for line in text.splitlines() if line.startswith("┃"))
    for name in ("mixer", "test", *(field.split(".")[-1] for field in changing(runs))):
        assert f" {name} " in header
    for run in runs:
        assert f"│ {run.config.mixer.name} " in text
    hidden = [column.name for column in results_table(runs).columns if f" {column.name} " not in header]
    assert not hidden or f"not shown at this width: {', '.join(hidden)}" in " ".join(text.split())


def test_all_columns_are_shown_on_a_wide_terminal():
    text = shown([outcome(), outcome("transformer")], 120)
    for name in ("test", "valid", "last", "params", "steps", "tokens/s", "memory", "time"):
        assert f" {name} ┃" in text
    assert "last: last model on the test set" in text


def environment(folder: Path, **values) -> Path:
    folder.mkdir()
    usual = {"commit": "0123456789ab", "torch": "2.13.0", "device": "cpu", "date": "2026-11-16"}
    (folder / "environment.json").write_text(json.dumps([usual | values]))
    return folder


@pytest.mark.parametrize(
    ("key", "value", "usual"),
    [("commit", "ba9876543210", "0123456789ab"), ("torch", "2.9.0", "2.13.0"), ("device", "NVIDIA A100", "cpu")],
)
def test_runs_of_another_environment_are_marked(tmp_path, key, value, usual):
    folders = [environment(tmp_path / name) for name in "ab"] + [environment(tmp_path / "c", **{key: value})]
    names = ("las", "transformer", "s4d")
    text = shown([outcome(name, folder=folder) for name, folder in zip(names, folders, strict=True)], 80)
    assert "│ s4d* " in text
    assert text.count("*") == 2, "no other is marked"
    assert f"* made with another {key}, {value} instead of {usual}" in text


def test_all_that_differs_is_said(tmp_path):
    folders = [environment(tmp_path / name) for name in "ab"]
    folders += [environment(tmp_path / "c", torch="2.9.0", device="NVIDIA A100")]
    names = ("las", "transformer", "s4d")
    text = shown([outcome(name, folder=folder) for name, folder in zip(names, folders, strict=True)])
    assert "another torch, 2.9.0 instead of 2.13.0" in text
    assert "another device, NVIDIA A100 instead of cpu" in text


def test_a_run_is_of_the_environment_that_it_ended_in(tmp_path):
    """It was begun elsewhere, and resumed."""
    folders = [environment(tmp_path / name) for name in "ab"]
    entries = json.loads((folders[1] / "environment.json").read_text())
    (folders[1] / "environment.json").write_text(json.dumps([entries[0] | {"torch": "2.9.0"}, entries[0]]))
    text = shown([outcome(n, folder=f) for n, f in zip(("las", "transformer"), folders, strict=True)])
    assert "│ transformer* " in text


@pytest.mark.parametrize("damage", ["", "{", "[1]", "[" * 100_000, '{"torch": 1}'])
def test_a_damaged_environment_hides_nothing(tmp_path, damage):
    folders = [environment(tmp_path / name) for name in "ab"]
    (folders[1] / "environment.json").write_text(damage)
    assert "│ transformer" in shown(
        [outcome(n, folder=f) for n, f in zip(("las", "transformer"), folders, strict=True)]
    )


def test_where_there_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="there is no run in"):
        runs_tables(tmp_path)
