"""The runs of tests/training, which are disturbed here."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("runs_of_training", Path(__file__).parents[1] / "training" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_runs = module_from_spec(_spec)
sys.modules[_spec.name] = _runs
_spec.loader.exec_module(_runs)

shared, runs, compare = _runs.shared, _runs.runs, _runs.compare
