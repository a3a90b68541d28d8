"""The report page in a real browser: what one sees, clicks, types and hears of it; and that it stays by itself."""

import os
import shutil
import threading
import time

import pytest
from support.page import HOSTILE, hostile_page, make_run
from support.runs import SLOWLY

from longlens.paper.page import write_page
from longlens.reports.page.entries import Watch
from longlens.reports.page.render import Still, draw_changing
from longlens.reports.page.serve import Server

pytestmark = pytest.mark.browser
LAYERS = ("las", "transformer", "s4d")
SEEN = "[...document.querySelectorAll('.canvas')].find(e => e.offsetParent)"  # the first chart that is not hidden


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    """A page of two tasks, two scales, three layers and three seeds."""
    folder = tmp_path_factory.mktemp("page")
    for mixer in LAYERS:
        for seed in range(3):
            make_run(folder / "runs", mixer=mixer, seed=seed)
        make_run(folder / "runs", "atomic-cummax", mixer)
        make_run(folder / "runs", recipe="mini", mixer=mixer)
    write_page(folder / "index.html", [folder / "runs"], folder / "none", maps=False)
    return (folder / "index.html").as_uri()


def rows(found) -> list[list[str]]:
    """The rows of the leaderboard that are seen."""
    shown = found.page.locator("tr.row:visible").all()
    return [[cell.inner_text().strip() for cell in row.locator("td, th").all()] for row in shown]


def traces(found, kind="curves") -> list[str]:
    """The names of the lines that the first chart of a kind has drawn."""
    code = f"[...document.querySelectorAll('.canvas[data-kind={kind}]')].find(e => e.data && e.offsetParent).data"
    return found.page.evaluate(f"{code}.map(trace => trace.name).filter(Boolean)")


def is_quiet(found, *, besides: tuple[str, ...] = ()) -> bool:
    assert found.said == []
    assert [url for url in found.asked if not url.startswith(("data:", *besides))] == []
    return True


def test_it_sorts_and_filters_with_the_mouse_and_the_keyboard(tab, address):
    found = tab()
    page = found.open(address)
    seen = rows(found)
    assert len(seen) == 9
    assert [row[0] for row in seen] == ["1", "2", "3"] * 3, "the best comes first"
    page.get_by_role("button", name="layer", exact=True).click()
    assert [row[1] for row in rows(found)] == ["las", "s4d", "transformer"] * 3
    page.get_by_role("button", name="time", exact=True).focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    times = page.locator("tr.row:visible .seconds").evaluate_all("cells => cells.map(cell => Number(cell.dataset.v))")
    assert all(times[i : i + 3] == sorted(times[i : i + 3], reverse=True) for i in (0, 3, 6))
    assert page.locator("th[aria-sort=descending]").inner_text().strip() == "time"
    page.select_option("#task", "atomic-cummax")
    assert found.texts(".board h3") == ["atomic-cummax smoke max_length=64, sizes=(256, 64, 64)"]
    page.select_option("#task", "")
    page.select_option("#scale", "mini")
    assert len(rows(found)) == 3
    page.locator(".chip[data-layer=las]").focus()
    page.keyboard.press("Space")
    assert {row[1] for row in rows(found)} == {"s4d", "transformer"}
    assert page.locator(".chip[data-layer=las]").get_attribute("aria-pressed") == "false"
    assert "2 of 9 lines shown" in found.texts("#shown")
    page.reload()  # the address remembers
    assert {row[1] for row in rows(found)} == {"s4d", "transformer"}
    assert all("las on" not in text for text in found.texts(".run summary"))
    page.click("#every-layer")
    assert len(rows(found)) == 3
    assert is_quiet(found, besides=(address,))


def test_charts_say_what_is_under_the_mouse_and_zoom(tab, address):
    found = tab()
    page = found.open(address)
    page.select_option("#task", "atomic-cumsum")
    page.select_option("#scale", "smoke")
    canvas = page.locator(".canvas[data-kind=curves]:visible")
    canvas.scroll_into_view_if_needed()
    found.wait(f"{SEEN}.querySelector('.main-svg')")
    assert sorted(traces(found)) == ["las", "s4d", "transformer"]
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.4 * box["height"])
    page.wait_for_selector(".hoverlayer text:has-text('±')")
    said = " ".join(page.locator(".hoverlayer text").all_text_contents())
    assert "transformer" in said
    assert "3 seeds" in said
    width = f"(e => e.layout.xaxis.range[1] - e.layout.xaxis.range[0])({SEEN})"
    before = page.evaluate(width)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.7 * box["height"], steps=4)
    page.mouse.up()
    found.wait(f"{width} < 0.5 * {before}")
    canvas.focus()
    page.keyboard.press("0")
    found.wait(f"Math.abs({width} - {before}) < 1e-6 * {before}")
    page.keyboard.press("+")
    found.wait(f"{width} < 0.8 * {before}")
    page.locator("button[data-zoom=reset]:visible").first.click()
    found.wait(f"Math.abs({width} - {before}) < 1e-6 * {before}")
    page.locator(".chip[data-layer=las]").click()
    assert sorted(traces(found)) == ["s4d", "transformer"]
    page.locator(".plot.seconds:visible").scroll_into_view_if_needed()
    assert sorted(traces(found, "seconds")) == sorted(traces(found, "memory")) == ["s4d", "transformer"]
    page.get_by_label("training loss").check()
    assert "training loss by step" in found.texts(".plot.curves figcaption")
    assert is_quiet(found, besides=(address,))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_phones_and_screens_by_day_and_by_night(tab, address, width, scheme):
    found = tab(width, 844, scheme)
    page = found.open(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    page.locator(".canvas").first.scroll_into_view_if_needed()
    found.wait("document.querySelector('.canvas .main-svg')")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = "(e => getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    assert (page.evaluate(f"{light}(document.body)") > 384) == (scheme == "light")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate(f"{light}(document.body)") < 384, "auto, light, dark"
    page.locator(".canvas").first.scroll_into_view_if_needed()
    line = "document.querySelector('.canvas').data.find(trace => trace.name === 'las').line.color"
    found.wait(f"{line} === 'rgba(86,180,233,1)'")  # lines are light on dark
    assert is_quiet(found, besides=(address,))


def test_what_can_be_used_has_a_name_and_layers_differ_without_color(tab, address):
    page = tab().open(address)
    for element in page.locator("button, select, input, [tabindex='0'], svg[role=img]").all():
        named = element.evaluate(
            "e => (e.textContent || e.getAttribute('aria-label') || e.closest('label')?.textContent)"
        )
        assert named, element.evaluate("e => e.outerHTML")
    assert page.locator("table > caption").count() == page.locator("table").count()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    looks = [chip.locator("path").all() for chip in page.locator(".chip[data-layer]").all()]
    assert len({(line.get_attribute("stroke-dasharray"), mark.get_attribute("d")) for line, mark in looks}) == 3


def test_hostile_names_stay_inert(tab, tmp_path):
    found = tab()
    page = found.open(hostile_page(tmp_path).as_uri())
    page.locator(".canvas").first.scroll_into_view_if_needed()
    found.wait("document.querySelector('.canvas .main-svg')")
    for summary in page.locator(".run summary").all():
        summary.click()
    assert page.title() == "LongLens report"
    assert any(HOSTILE.replace("/", "") in text for text in found.texts(".run .place"))
    assert page.locator("img").count() == page.locator("script[src]").count() == 0
    # A script that came in all the same would not run.
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert page.evaluate("window.hacked") is None
    assert len(found.said) == 1
    assert "Content Security Policy" in found.said[0]


def test_two_hundred_runs_are_there_at_once(tab, tmp_path, record_property):
    tasks = ("atomic-cumsum", "atomic-cummax")
    mixers = "las las-chunk transformer l-attention s-attention alibi s4 s4d dss lru s5 hyena".split()
    for number in range(200):
        task, mixer = tasks[number % 2], mixers[number // 2 % len(mixers)]
        make_run(tmp_path / "runs", task, mixer, seed=number // 24, steps=400)
    write_page(tmp_path / "index.html", [tmp_path / "runs"], tmp_path / "none", maps=False)
    size = (tmp_path / "index.html").stat().st_size
    assert size < 5e6
    found = tab()
    page = found.open((tmp_path / "index.html").as_uri())
    timing = "performance.getEntriesByType('navigation')[0]"
    seconds = page.evaluate(f"{timing}.loadEventEnd") / 1000
    record_property("seconds", seconds)
    print(f"{size / 1e6:.2f} MB, loaded in {seconds:.2f} s")
    assert found.texts(".counts dd")[0] == "200"
    assert seconds < 20, "on a busy machine; two seconds on a free one"
    assert is_quiet(found, besides=((tmp_path / "index.html").as_uri(),))


def test_it_follows_a_run_and_survives_its_end(tab, runs, tmp_path):
    folder = tmp_path / "live" / "one"
    make_run(tmp_path / "live", mixer="transformer")
    watch = Watch([tmp_path / "live"])
    server = Server(Still(), lambda: draw_changing(watch.look()), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        found = tab()
        page = found.open(server.url)
        assert found.texts(".counts dd")[0] == "1"
        run = runs.start(folder, "--steps", "2000", "--log-every", "1", setup=SLOWLY)
        page.wait_for_selector(".live li.training:has-text('las')", timeout=120_000)
        page.wait_for_selector(".live .left:has-text(' left')", timeout=60_000)
        page.locator(".card:has-text('2000'), .card").last.scroll_into_view_if_needed()
        page.get_by_label("training loss").check()
        drawn = "Math.max(0, ...[...document.querySelectorAll('.canvas[data-kind=curves]')].flatMap(e => e.data ?? [])"
        drawn += ".filter(t => t.name === 'las').map(t => t.x.at(-1)))"
        found.wait(f"{drawn} > 0")
        before = page.evaluate(drawn)
        found.wait(f"{drawn} > {before}")
        run.kill()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"split": "train", "step": 9')
        for path in [folder, *folder.rglob("*")]:  # as an hour later
            os.utime(path, (time.time(), path.stat().st_mtime - 3600))
        page.wait_for_selector(".live li.stopped:has-text('the same command resumes')", timeout=60_000)
        shutil.rmtree(folder)
        found.wait("document.querySelector('.counts dd').textContent === '1'")
        assert is_quiet(found, besides=(server.url,))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    page.wait_for_selector("#link.lost", timeout=60_000)
    assert len(rows(found)) == 1, "what was there stays"
