"""From a table of your own to a model that is used: which heartbeats are at risk?

Each row of ``beats.csv`` is a noisy recording of five heartbeats. It is at risk if the first beat has an extra spike
*and* the last one an inverted T wave: a rare pattern, whose two parts are a hundred samples apart, and each of which
alone means nothing. The commands that follow are those of the README, printed before they run:

    python examples/heartbeats.py      # four minutes on two cores; writes into heartbeats/

Its own flags are --folder, --rows, --mixers, --folds and --jobs; all others are those of ``longlens train``.
"""

import argparse
import csv
import json
import os
from pathlib import Path
from statistics import fmean

import numpy as np

from longlens.cli import main

BEAT, BEATS = 32, 5  # samples of a beat, and beats of a recording
# place, width and height of P, Q, R, S and T
WAVES = ((8, 2.0, 0.15), (13, 0.8, -0.2), (15, 1.0, 1.0), (17, 0.8, -0.25), (24, 2.5, 0.5))
NAMES = ("normal", "risk")


def recordings(count: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """(count, samples), and whether each is at risk."""
    random = np.random.default_rng(seed)
    spikes, inverted = random.random((2, count)) < 0.5
    time = np.arange(BEAT * BEATS)
    rows = random.normal(0, 0.05, (count, len(time)))
    rows += 0.1 * np.sin(2 * np.pi * (time / len(time) + random.random((count, 1))))  # the baseline wanders
    for beat in range(BEATS):
        start = BEAT * beat + random.integers(-1, 2, (count, 1))  # not quite regular
        for place, width, height in WAVES:
            is_last_t = beat == BEATS - 1 and place == WAVES[-1][0]
            heights = np.where(inverted & is_last_t, -height, height)[:, None]
            rows += heights * np.exp(-(((time - start - place) / width) ** 2))
        if beat == 0:
            rows += spikes[:, None] * np.exp(-(((time - start - 20) / 1.0) ** 2))
    return rows.round(3), [NAMES[int(risk)] for risk in spikes & inverted]


def write_table(path: Path, rows: np.ndarray, labels: list[str] | None = None) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["id", *(f"t{step}" for step in range(rows.shape[1])), *(["label"] if labels else [])])
        for number, row in enumerate(rows):
            table.writerow([f"patient {number}", *row, *([labels[number]] if labels else [])])


def longlens(*words: str) -> None:
    print("\n$ longlens", *words, flush=True)
    main(list(words))


def best_on_validation(path: Path) -> str:
    """The layer that has done best over all folds, without a look at the test sets."""
    valid: dict[str, list[float]] = {}
    for run in json.loads(path.read_text()):
        valid.setdefault(run["config"]["mixer"], []).append(run["result"]["valid"])
    return max(valid, key=lambda mixer: fmean(valid[mixer]))


def example(rows: int, mixers: list[str], folds: int, jobs: int, more: list[str]) -> None:
    """All of it, in this folder."""
    write_table(Path("beats.csv"), *recordings(rows, seed=0))
    new, truth = recordings(30, seed=1)
    write_table(Path("new.csv"), new)
    data = ["files", "--path", "beats.csv", "--ignore", "id", "--class-weights", "balanced", *more]
    compared = ["--folds", str(folds), "--jobs", str(jobs), "--metrics", "balanced-accuracy", "--out", "compared.json"]
    longlens("compare", *data, "--mixers", *mixers, *compared)
    longlens("train", *data, "--mixer", best_on_validation(Path("compared.json")), "--folder", "best")
    longlens("predict", "best", "new.csv", "--out", "labels.csv")
    with Path("labels.csv").open() as file:
        said = list(csv.DictReader(file))
    right = sum(row["label"] == label for row, label in zip(said, truth, strict=True))
    print(f"{right} of {len(said)} new recordings are named rightly")
    likely = max(range(len(said)), key=lambda number: float(said[number]["probability_risk"]))
    longlens("explain", "best", "new.csv", "--row", str(likely + 1), "--target", "risk", "--out", "why.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Which heartbeats are at risk?")
    parser.add_argument("--folder", type=Path, default=Path("heartbeats"), help="where to write")
    parser.add_argument("--rows", type=int, default=300, help="labeled recordings")
    parser.add_argument("--mixers", nargs="+", default=["las", "s4d", "lstm"], help="layers to compare")
    parser.add_argument("--folds", type=int, default=5, help="folds of the comparison")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    given, more = parser.parse_known_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(given.folder)
    example(given.rows, given.mixers, given.folds, given.jobs, more)
