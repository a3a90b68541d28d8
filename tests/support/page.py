"""Folders of runs without training, by the code that writes those of real ones; and a real browser."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longlens.files import write_sealed
from longlens.paper.page import write_page
from longlens.training.config import Runtime, load_recipe
from longlens.training.logs import Logs, open_to_append
from longlens.training.run import RunFolder, fingerprint, run_folder

ENVIRONMENT = {
    **{"longlens": "0.1", "commit": "abc", "torch": "2.13.0", "processor": "a CPU", "device": "cpu", "threads": 1},
    **{"processes": 1, "date": "2026-11-17", "command": ["longlens", "compare"]},
}
HOSTILE = '<script>document.title="hacked"</script><img src=x onerror=alert(1)>&"\''
sys.path.append(str(Path(__file__).parents[2] / "tools"))  # which opens a browser for its pictures


def make_run(
    runs: Path,
    task: str = "atomic-cumsum",
    mixer: str = "las",
    *,
    recipe: str = "smoke",
    folder: Path | None = None,
    steps: int = 40,
    stops_at: int | None = None,
    environment: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run with a metric that depends on its layer and seed; one that ``stops_at`` a step has no result."""
    config = load_recipe(recipe, task, [mixer]).resolve(task, mixer, {"steps": steps, **changes})
    data = fingerprint(config)
    place = RunFolder(run_folder(config, Runtime(runs=runs, folder=folder), data), keep=1)
    place.claim(config, data)
    place.note_environment({**ENVIRONMENT, **(environment or {})})
    seed, metric = config.training.seed, config.task.metric
    random = np.random.default_rng([seed, *mixer.encode()])
    best = 0.5 + 0.4 * np.random.default_rng([*mixer.encode()]).random() + 0.02 * random.standard_normal()
    with open_to_append(place.metrics) as file:
        logs = Logs(metric, file)
        for step in range(1, (stops_at or steps) + 1):
            part = 1 - np.exp(-4 * step / steps)
            if step % 2 == 0:
                logs.trained(step, loss=2 - best * part, lr=1e-3, tokens_per_second=1e4 * (1 + random.random()))
            if step % 10 == 0:
                logs.evaluated(step, loss=2 - best * part, **{metric: float(best * part)})
    if stops_at is None:
        result = {
            **{"task": config.task.title, "mixer": mixer, "seed": seed, "metric": metric, "steps": steps},
            **{"test": float(best), "test_last": float(best), "test_samples": 64, "valid": float(best)},
            **{"valid_last": float(best), "best_step": steps, "parameters": 1000 + 10 * len(mixer), "tokens": 10**6},
            **{"tokens_per_second": 1e4, "overhead": 0.01, "seconds": 10.0 + 100 * random.random()},
            "peak_memory_bytes": int(2**20 * (20 + 50 * random.random())),
        }
        write_sealed(place.folder / "result.json", result)
    place.lock.release()
    return place.folder


def hostile_page(folder: Path) -> Path:
    """A page of runs with names that would be markup."""
    recipe = folder / f"{HOSTILE.replace('/', '')}.toml"
    recipe.write_text("[training]\nsteps = 40\n")
    environment = {"processor": HOSTILE, "commit": HOSTILE, "</script>": "</script>"}
    make_run(folder, recipe=str(recipe), folder=folder / "runs" / HOSTILE.replace("/", ""), environment=environment)
    broken = make_run(folder, folder=folder / "runs" / "<script>alert(2)<", stops_at=10, mixer="s4d")
    (broken / "identity.json").write_text(json.dumps(HOSTILE))
    write_page(folder / "index.html", [folder / "runs"], folder / "none", maps=False)
    return folder / "index.html"


@pytest.fixture(scope="session")
def chromium():
    """Debian's browser, driven by playwright."""
    pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with import_module("screenshots").chromium() as browser:
        yield browser


class Tab:
    """A page in the browser, and all that it says and asks for."""

    def __init__(self, browser: Any, **options: Any):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def wait(self, condition: str, seconds: float = 60) -> None:
        """For a condition in JavaScript; as a function, since the page evaluates no texts."""
        self.page.wait_for_function(f"() => {condition}", timeout=1000 * seconds)

    def texts(self, selector: str) -> list[str]:
        """Of the elements that can be seen."""
        return [found.inner_text().strip() for found in self.page.locator(selector).all() if found.is_visible()]


@pytest.fixture
def tab(chromium):
    """``tab(width=390, scheme="dark")``: a new, empty profile."""
    opened: list[Tab] = []

    def open_tab(width: int = 1280, height: int = 900, scheme: str = "light") -> Tab:
        opened.append(Tab(chromium, viewport={"width": width, "height": height}, color_scheme=scheme))
        return opened[-1]

    yield open_tab
    for found in opened:
        found.context.close()
