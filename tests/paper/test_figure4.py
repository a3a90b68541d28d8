"""Figure 4 decides by numbers: how far maps reach, how rough they are, and whether seeds agree."""

import json

import numpy as np
import pytest

from longlens.paper.figure4 import STUDY, measure_map
from longlens.paper.records import Records
from longlens.paper.report import study_sheets
from longlens.paper.run import verdict_of


def test_a_map_that_looks_k_steps_back_reaches_k():
    for k in (1, 3):
        assert measure_map(np.eye(16, k=-k))[0] == pytest.approx(k)


def test_a_uniform_map_is_smooth_and_reaches_half_of_what_is_seen():
    length = 64
    rows = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    reach, rough = measure_map(rows)
    assert reach == pytest.approx(np.mean([row / 2 for row in range(length // 2, length)]))
    assert rough == pytest.approx(0.0, abs=1e-12)


def test_pooling_makes_a_map_smoother():
    noise = np.tril(np.random.default_rng(0).random((64, 64)))
    pooled = (noise + np.roll(noise, -1, axis=1) + np.roll(noise, -2, axis=1)) / 3
    assert measure_map(pooled)[1] < 0.6 * measure_map(noise)[1]


def measured(folder, runs=(), **reach):
    """Records without runs, and what was measured of these."""
    names = {"Transformer": 0.5, "LaS": 0.1}
    measures = {
        f"{row}, layer {layer}": {
            "reach": [reach.get(row, (10, 10))[layer] + 0.1 * seed for seed in range(3)],
            "roughness": [rough + 0.01 * seed * (layer + 1) * rough for seed in range(3)],
        }
        for row, rough in names.items()
        for layer in (0, 1)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figure4.json").write_text(json.dumps({"runs": [*runs], "samples": 16, "measures": measures}))
    return Records(folder)


def test_the_verdict_is_that_of_the_measures(tmp_path):
    records = measured(tmp_path / "mini", LaS=(12, 15), Transformer=(10, 12))
    assert verdict_of(STUDY, "mini", records) == "holds"
    table, claims = (
        sheet for sheet in study_sheets(STUDY, "mini", records) if sheet.title.startswith(("Meas", "Claim"))
    )
    assert table.rows[0] == ["Transformer, layer 0", "10.100 ± 0.100", "0.505 ± 0.005"]
    assert [row[-1] for row in claims.rows] == ["holds"] * 4
    shorter = measured(tmp_path / "mini", LaS=(15, 10), Transformer=(10, 12))
    assert verdict_of(STUDY, "mini", shorter) == "holds in 3, does not hold in 1"


def test_what_smoothing_moves_is_no_reach(tmp_path):
    """The window of 3 moves weights by 1."""
    records = measured(tmp_path / "mini", LaS=(10, 12.5), Transformer=(10, 12))
    assert verdict_of(STUDY, "mini", records) == "holds in 2, does not hold in 2"


def test_measures_of_other_runs_do_not_count(tmp_path):
    assert verdict_of(STUDY, "mini", measured(tmp_path / "mini", ["las-0123456789ab"])) == "missing"
    assert verdict_of(STUDY, "mini", Records(tmp_path / "none")) == "missing"
    (tmp_path / "mini" / "figure4.json").write_text("[]")
    assert verdict_of(STUDY, "mini", Records(tmp_path / "mini")) == "missing"
