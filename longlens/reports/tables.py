"""Tables of runs, and what can be said about them."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from longlens.errors import BadInput, LongLensError
from longlens.reports.chance import LEVEL, Finding, Trial, sign_of, weigh, weigh_samples
from longlens.reports.collect import read_run
from longlens.reports.folds import OF_A_FOLD, Fold, compare_trials, fold_count, fold_of, trials
from longlens.reports.sheet import Column, Sheet
from longlens.training.many import Outcome
from longlens.training.run import higher_is_better, read_environment, read_scores, show_metric

ACCURACIES = ("balanced-accuracy", "macro-f1")  # are shown in percent
COMPARED = ("commit", "torch", "device")  # what should be the same in all runs of a table
RANKS = {"test": 0, "valid": 1, "last": 6, "params": 2, "steps": 7, "tokens/s": 4, "memory": 5, "time": 3}


def runs_tables(runs: Path) -> list[Sheet]:
    """The runs below a folder: a table for each task, and a line for each run with what tells it from the others."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(runs.glob("*/*/*/config.json")):
        groups.setdefault(path.parts[-4], []).append(path.parent)
    if not groups:
        raise BadInput(f"there is no run in {runs}: 'longlens train' makes one there, or give --runs FOLDER")
    return [_runs_table(str(runs / task), folders) for task, folders in groups.items()]


def _runs_table(title: str, folders: list[Path]) -> Sheet:
    columns = [Column("run"), Column("differs in", wrap=True), Column("recipe", 3), Column("steps", 4, number=True)]
    columns += [Column("valid", 1, number=True), Column("test", number=True), Column("date", 2)]
    sheet = Sheet(title, [*columns, Column("state", wrap=True)])
    found: dict[Path, Outcome] = {}
    problems: dict[Path, str] = {}
    for folder in folders:
        try:
            found[folder] = read_run(folder)
        except LongLensError as error:  # one damaged run does not hide the others
            problems[folder] = str(error)
    different = changing([*found.values()], seeds=True)
    for folder in folders:
        name = f"{folder.parent.name}/{folder.name}"
        if folder in problems:
            sheet.rows.append([name, *[""] * 6, "cannot be read"])
            sheet.notes.append(f"{name} cannot be read: {problems[folder]}")
            continue
        run, result = found[folder], found[folder].result
        about = [name, describe(run, different, with_mixer=False), run.config.recipe]
        date = str(next(iter(read_environment(folder)), {}).get("date", ""))
        if result is None:
            steps = [int(p.name) for p in (folder / "checkpoints").glob("[0-9]*") if p.name.isdecimal()]
            state = f"saved at step {max(steps):,}" if steps else "no checkpoint yet"
            sheet.rows.append([*about, "", "", "", date, state])
        else:
            numbers = [show_metric(result["metric"], result[key]) for key in ("valid", "test")]
            sheet.rows.append([*about, f"{result['steps']:,}", *numbers, date, "finished"])
    return sheet


def results_table(outcomes: list[Outcome], metrics: Sequence[str] = ()) -> Sheet:
    """A line for each run, or for all seeds of one: metrics, parameters, speed, memory; and ``metrics`` beside the
    task's own."""
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    different = changing(outcomes)
    title = outcomes[0].config.task.title
    if results:
        title += f": {results[0]['metric'].replace('_', ' ')}"
    if len({result["steps"] for result in results}) == 1:
        title += f" after {results[0]['steps']:,} steps"
    columns = [Column("mixer"), *(Column(name.rpartition(".")[2]) for name in different)]
    columns += [Column(name, number=True) for name in metrics]
    sheet = Sheet(title, columns + [Column(name, rank, number=True) for name, rank in RANKS.items()])
    marks = _other_environments(outcomes)
    for group in seed_groups(outcomes):
        values = group[0].values()
        mark = "*" if any(outcome.folder in marks for outcome in group) else ""
        cells = [_with_seeds(group) + mark, *(str(values.get(name, "")) for name in different)]
        done = [outcome.result for outcome in group if outcome.result is not None]
        if not done:
            sheet.rows.append([*cells, *[""] * len(metrics), "failed", *[""] * (len(RANKS) - 1)])
            continue
        cells += _other_metrics([outcome.folder for outcome in group if outcome.result is not None], metrics)
        metric, scores = done[0]["metric"], ("test", "valid", "test_last")
        cells += [spread(metric, [result[key] for result in done]) for key in scores]
        cells += [f"{done[0]['parameters']:,}", f"{mean(result['steps'] for result in done):,.0f}"]
        cells.append(f"{mean(result['tokens_per_second'] for result in done):,.0f}")
        memory = most_memory(done)
        cells.append("–" if memory is None else f"{memory:,.0f} MiB")
        cells.append(f"{mean(result['seconds'] for result in done):,.0f} s")
        sheet.rows.append(cells)
    for name, values in _baseline_values(outcomes).items() if results else ():
        shown = spread(results[0]["metric"], values)
        sheet.rows.append([name, *[""] * (len(different) + len(metrics)), shown, *[""] * (len(RANKS) - 1)])
    if results:
        sheet.notes.append("test, valid: model with the best validation; last: last model on the test set")
    if early := sum(result.get("ended_by") == "validation" for result in results):
        sheet.notes.append(f"{early} of {len(results)} runs ended when validation no longer improved")
    sheet.notes += [f"* made with another {what}" for what in dict.fromkeys(itertools.chain(*marks.values()))]
    return sheet


def most_memory(results: list[dict[str, Any]]) -> float | None:
    """MiB at the peak of runs; None if it is not known of any."""
    known = [result["peak_memory_bytes"] for result in results if result["peak_memory_bytes"] is not None]
    return max(known) / 2**20 if known else None


def _other_metrics(folders: list[Path], metrics: Sequence[str]) -> list[str]:
    if not metrics:
        return []
    from longlens.reports.metrics import other_metrics  # torch

    found = [other_metrics(folder, metrics) for folder in folders]
    return [spread("accuracy" if name in ACCURACIES else "", [values[name] for values in found]) for name in metrics]


def _other_environments(outcomes: list[Outcome]) -> dict[Path, list[str]]:
    """The runs that were made, all or in part, in another environment than most of the others, and what differs."""
    made = {outcome.folder: read_environment(outcome.folder) or [{}] for outcome in outcomes if outcome.result}
    found: dict[Path, list[str]] = {}
    for key in COMPARED:
        values = {folder: [str(entry.get(key) or "unknown") for entry in entries] for folder, entries in made.items()}
        last = [entries[-1] for entries in values.values()]
        usual = max(dict.fromkeys(last), key=last.count, default="")
        for folder, entries in values.items():
            others = dict.fromkeys(entry for entry in entries if entry != usual)
            found.setdefault(folder, []).extend(f"{key}, {other} instead of {usual}" for other in others)
    return {folder: differences for folder, differences in found.items() if differences}


def verdict(outcomes: list[Outcome]) -> Iterator[str]:
    """The best mixer on the test set, and whether the difference could be chance."""
    ranked = _ranked(outcomes, "test")
    if len(ranked) < 2:
        return
    best, next_best = ranked[:2]
    metric, different = _metric(best), changing(outcomes)
    first, second = mean(_scores(best, "test")), mean(_scores(next_best, "test"))
    if first == second:
        equal = [describe(group[0], different) for group in ranked if mean(_scores(group, "test")) == first]
        yield f"{', '.join(equal[:-1])} and {equal[-1]} are equal, {show_metric(metric, first)}"
    else:
        names = [describe(group[0], different) for group in (best, next_best)]
        line = f"{names[0]} is better than {names[1]}, {show_metric(metric, first)} to {show_metric(metric, second)}"
        folds = fold_count(outcomes)
        if folds is not None:
            p = compare_trials(trials(best), trials(next_best), folds, metric, one_sided=False)
            chance = "" if p is not None and p < LEVEL else ": it may be chance"
            yield f"{line}, over {folds} folds{'' if p is None else f' (p = {p:.2g})'}{chance}"
            return
        yield line + _said_of_chance(_difference(best, next_best, metric))
    if min(len(best), len(next_best)) == 1:
        of = "each" if len(best) == len(next_best) else "of one of them"
        yield f"one seed {of}: another seed may order them otherwise (--seeds 0 1 2)"


def beats_guessing(outcomes: list[Outcome]) -> Iterator[str]:
    """Whether the best on the validation set is better than what needs no model, on the test set. It is chosen before
    the test set is looked at, so that the number of layers does not matter."""
    if fold_count(outcomes) is not None:
        yield from _beats_over_folds(outcomes)
        return
    found = _baselines(outcomes)
    ranked = _ranked(outcomes, "valid") if found else []
    if not ranked:
        return
    best = max(ranked[0], key=lambda outcome: sign_of(_metric(ranked[0])) * (outcome.result or {})["valid"])
    metric, test = _metric(ranked[0]), (best.result or {})["test"]
    name = describe(best, changing(outcomes))
    (simplest, chance), *others = found.items()
    right = read_scores(best.folder)
    shown = f"{show_metric(metric, test)}, and the {simplest} {show_metric(metric, chance.value)}"
    if metric == "accuracy" and right is not None and chance.right is not None and len(right) == len(chance.right):
        from scipy.stats import binomtest  # half a second to import

        gained, lost = int((right > chance.right).sum()), int((right < chance.right).sum())
        p = binomtest(gained, gained + lost, alternative="greater").pvalue if gained + lost else 1.0
        beats = bool(p < LEVEL)
        shown += f" (p = {p:.2g})"
    else:
        beats = sign_of(metric) * (test - chance.value) > 0
    values = {other: trial.value for other, trial in others}
    yield from _said_of_guessing(name, beats, f"{shown} on the test set", metric, test, values)


def _beats_over_folds(outcomes: list[Outcome]) -> Iterator[str]:
    """The same of all test samples, over all folds."""
    found, folds = _baselines_by_fold(outcomes), fold_count(outcomes)
    ranked = _ranked(outcomes, "valid") if found else []
    if not ranked or folds is None:
        return
    best, metric = trials(ranked[0]), _metric(ranked[0])
    test = mean(trial.value for trial in best.values())
    means = {name: mean(trial.value for trial in of_folds.values()) for name, of_folds in found.items()}
    simplest = next(iter(found))
    p = compare_trials(best, found[simplest], folds, metric, one_sided=True)
    shown = f"{show_metric(metric, test)}, and the {simplest} {show_metric(metric, means.pop(simplest))}"
    shown += f" over {folds} folds" if p is None else f" over {folds} folds (p = {p:.2g})"
    name = describe(ranked[0][0], changing(outcomes))
    yield from _said_of_guessing(name, p is not None and p < LEVEL, shown, metric, test, means)


def _said_of_guessing(
    name: str, beats: bool, shown: str, metric: str, test: float, others: dict[str, float]
) -> Iterator[str]:
    if not beats:
        yield f"nothing beats guessing: {name}, the best on validation, has {shown}"
        return
    yield f"{name}, the best on validation, beats guessing: {shown}"
    for other, value in others.items():
        if sign_of(metric) * (test - value) <= 0:
            yield f"but a {other} is {'as good' if value == test else 'better'}: {show_metric(metric, value)}"


def _baseline_values(outcomes: list[Outcome]) -> dict[str, list[float | None]]:
    """The test result of each baseline, or its results on all folds."""
    if fold_count(outcomes) is None:
        return {name: [trial.value] for name, trial in _baselines(outcomes).items()}
    return {name: [t.value for t in found.values()] for name, found in _baselines_by_fold(outcomes).items()}


def _baselines_by_fold(outcomes: list[Outcome]) -> dict[str, dict[Fold, Trial]]:
    """Each baseline on the folds of the runs."""
    found: dict[str, dict[Fold, Trial]] = {}
    for fold, outcome in {fold_of(outcome.config): outcome for outcome in outcomes}.items():
        for name, trial in _baselines([outcome]).items():
            found.setdefault(name, {})[fold] = trial
    return found


def _baselines(outcomes: list[Outcome]) -> dict[str, Trial]:
    """On the test samples of the runs; none if these are not the same for all, or if the data is not there."""
    tasks = {(outcome.config.task, outcome.config.training.test_samples) for outcome in outcomes}
    if len(tasks) > 1 or not outcomes[0].config.task.is_prepared():
        return {}
    from longlens.reports.baselines import baselines  # and torch, which a list of runs does not wait for

    return baselines(*tasks.pop())


def choice(outcomes: list[Outcome]) -> Iterator[str]:
    """The best on the validation set, as the test set is not there to choose by."""
    ranked = _ranked(outcomes, "valid")
    if len(ranked) < 2:
        return
    best, metric = ranked[0], _metric(ranked[0])
    valid, test = (spread(metric, _scores(best, key)) for key in ("valid", "test"))
    name = describe(best[0], changing(outcomes))
    yield f"best on validation: {name}, {valid}; on the test set it has {test}"


def _ranked(outcomes: list[Outcome], key: str) -> list[list[Outcome]]:
    """The runs that ended, those of one config together, the best first."""
    groups = [[outcome for outcome in group if outcome.result is not None] for group in seed_groups(outcomes)]
    groups = [g for g in groups if g and not any(score is None or math.isnan(score) for score in _scores(g, key))]
    better = bool(groups) and higher_is_better(_metric(groups[0]))
    return sorted(groups, key=lambda group: mean(_scores(group, key)), reverse=better)


def _difference(best: list[Outcome], next_best: list[Outcome], metric: str) -> Finding | None:
    """The difference of two layers, over the seeds that both have; of one seed, over the test samples, if these are
    the same."""
    first, second = trials(best), trials(next_best)
    if (best[0].config.task, best[0].data) != (next_best[0].config.task, next_best[0].data):
        first, second = ({key: Trial(t.value, None) for key, t in found.items()} for found in (first, second))
    pairs = [(first[key], second[key]) for key in first if key in second]
    if not pairs:
        return None
    if len(pairs) == 1 and metric == "accuracy":
        ((one, other),) = pairs
        if one.right is not None and other.right is not None and len(one.right) == len(other.right):
            return weigh_samples(one.right.astype(float) - other.right)
    return weigh([(1.0, [one for one, _ in pairs]), (-1.0, [other for _, other in pairs])], metric)


def _said_of_chance(found: Finding | None) -> str:
    if found is not None and found.estimate < -1e-12:  # more than rounding: the means are over other seeds, too
        return f", but not over the seed{'' if found.seeds == 1 else 's'} that both have"
    if found is None or math.isnan(found.p):
        return ""
    over = [f"{found.seeds} seeds"] if found.seeds > 1 else []
    over += [f"{found.samples:,} test samples"] if found.samples else []
    return f" (p = {found.p:.2g} over {' and '.join(over)})" + ("" if found.p < LEVEL else ": it may be chance")


def _scores(group: list[Outcome], key: str) -> list[Any]:
    return [(outcome.result or {}).get(key) for outcome in group]


def _metric(group: list[Outcome]) -> Any:
    return (group[0].result or {})["metric"]


def seed_groups(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """Runs that differ in nothing but the seed, or the fold, belong together."""
    groups: dict[str, list[Outcome]] = {}
    alike = dict.fromkeys([*OF_A_FOLD, "data"] if fold_count(outcomes) is not None else ["training.seed"])
    for outcome in outcomes:
        values = outcome.values() | alike
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(outcome)
    return list(groups.values())


def changing(outcomes: Sequence[Outcome], *, seeds: bool = False) -> list[str]:
    """The fields other than the mixer, and the seed and the fold if it is not asked for, in which runs differ. Of the
    options of mixers, those in which runs of one mixer differ: the options of another are its own."""
    values = [outcome.values() for outcome in outcomes]
    left_out = {"mixer"} if seeds else {"mixer", "training.seed"}
    if not seeds and fold_count(outcomes) is not None:
        left_out |= {*OF_A_FOLD, "data"}
    names = dict.fromkeys(name for entry in values for name in entry)
    found = []
    for name in names:
        seen: dict[str, set[str]] = {}
        of_a_layer = name == "source" or name.startswith("mixer.")
        for entry in values:
            if name in entry:
                seen.setdefault(entry["mixer"] if of_a_layer else "", set()).add(str(entry[name]))
        if name not in left_out and max(map(len, seen.values())) > 1:
            found.append(name)
    return found


def describe(outcome: Outcome, different: Sequence[str], *, with_mixer: bool = True) -> str:
    """What tells a run from others: its mixer, and the fields in which they differ."""
    values = outcome.values()
    parts = [f"{name.rpartition('.')[2]}={values[name]}" for name in different if values.get(name, "") != ""]
    return " ".join([outcome.config.mixer.name, *parts] if with_mixer else parts)


def _with_seeds(group: list[Outcome]) -> str:
    name = group[0].config.mixer.name
    done = sum(outcome.result is not None for outcome in group)
    if len(group) == 1:
        return name
    folds = fold_count(group)
    times = f" × {len(group) // folds}" if folds is not None and len(group) > folds else ""
    count = f"{folds}{times}" if folds is not None else str(len(group))
    return f"{name} ({count if done == len(group) else f'{done} of {count}'} {'folds' if folds else 'seeds'})"


def spread(metric: str, values: Sequence[float | None]) -> str:
    """The mean, and the standard deviation if there are several."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return show_metric(metric, known[0]) if known else "–"
    return f"{show_metric(metric, mean(known))} ± {show_metric(metric, stdev(known))}"
