"""Pictures of the report page for the README and docs/: ``python tools/screenshots.py [PAGE] [--out DIR]``.

Without a page, one is made of the records in results/. It takes Debian's chromium, and the package playwright.
"""

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
SHOTS = {  # the width and height of the window, the scheme, and the part of the page at its top
    "report-light": (1280, 1270, "light", "header"),
    "report-dark": (1280, 1270, "dark", "header"),
    "report-phone-light": (390, 844, "light", "header"),
    "report-phone-dark": (390, 844, "dark", ".card:not([hidden])"),
}
SHOWN = "#?task=atomic-select"  # five seeds each


@contextmanager
def chromium(**options: Any) -> Iterator[Any]:
    """A browser with an empty profile, which playwright makes and deletes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*FLAGS], **options)
        try:
            yield browser
        finally:
            browser.close()


def make_page(folder: Path) -> Path:
    from longlens.paper.page import write_page

    write_page(folder / "index.html", [], ROOT / "results")
    return folder / "index.html"


def take(page: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, (width, height, scheme, top) in SHOTS.items():
            tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab.goto(page.absolute().as_uri() + SHOWN)
            tab.wait_for_selector("html[data-ready]")
            tab.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
            tab.locator(top).first.evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 8)")
            tab.wait_for_timeout(800)  # charts that come into view are drawn
            Image.open(io.BytesIO(tab.screenshot())).convert("RGB").save(out / f"{name}.png", optimize=True)
            tab.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    if shutil.which("chromium") is None:
        sys.exit("there is no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        take(given.page or make_page(Path(folder)), given.out)
