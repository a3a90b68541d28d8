"""``longlens report``: one page of runs, or a small server that follows them."""

from pathlib import Path
from typing import Any, Literal

from longlens.cli import show
from longlens.errors import BadInput, Interrupted
from longlens.options import Port
from longlens.paper.page import record_entries, still_parts, write_page
from longlens.reports.page.entries import Watch, check_places
from longlens.reports.page.render import Changing, draw_changing
from longlens.reports.page.serve import Server


def report(
    runs: tuple[Path, ...] = (),
    *,
    out: Path = Path("page"),
    results: Path | None = None,
    scale: Literal["smoke", "mini", "paper"] = "mini",
    maps: bool = True,
    serve: bool = False,
    port: Port = 8000,
) -> list[Any]:
    """Write one page of runs that needs no network: leaderboard, curves, cost, the paper's tables beside ours, samples,
    and what made each run. With --serve, open it on this machine instead, where it follows runs that train.

    Args:
        runs: Folders of runs, or folders that have runs in them; by default runs, if it is there.
        out: Folder for the page, index.html.
        results: Folder of the records of 'longlens reproduce', which are shown with the runs; by default results,
            if it is there and no runs are named.
        scale: Scale of the paper's tables, which are those of the records.
        maps: Draw the attention of finished runs, if their data is there.
        serve: Open the page on 127.0.0.1 and follow the runs, until Ctrl-C.
        port: Port of --serve; 0 is any free one.
    """
    if not serve:  # which waits for runs that are not there yet
        check_places(runs)
    if results is not None and not results.is_dir():
        raise BadInput(f"results must be a folder of records of 'longlens reproduce', and {results} is not there")
    results = results or (None if runs else Path("results"))
    places = runs or tuple(place for place in [Path("runs")] if place.is_dir() or serve)
    if not (places or (results and results.is_dir())):
        raise BadInput("there is nothing to show: no folder runs, and no results; give folders of runs")
    if not serve:
        return [write_page(out / "index.html", places, results, scale, maps=maps)]
    watch, records = Watch(places), record_entries(results)

    def look() -> Changing:
        return draw_changing([*watch.look(), *records])

    still = still_parts(results, scale, [*watch.look(), *records], maps=maps)
    with Server(still, look, port) as server:
        show(f"the page is at {server.url} until Ctrl-C")
        try:
            server.serve_forever()
        except (KeyboardInterrupt, Interrupted):
            return ["stopped"]
    return []
