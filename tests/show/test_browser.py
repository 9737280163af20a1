"""The page in a real browser: drawn, offline, within the screen."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import explanations
import pytest

from auditor.show.html import write_html

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser on the path: looked for {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Opened:
    """A page opened from a file with the network cut, and what it tried and complained about."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requested)
        self.page.route("**/*", self._answered)
        self.page.add_init_script(
            "window.violations = [];"
            "document.addEventListener('securitypolicyviolation',"
            " e => window.violations.push(e.violatedDirective + ' ' + e.blockedURI));"
        )
        self.path = path
        self.page.goto(path.as_uri())

    def _requested(self, request: Any) -> None:
        if request.url != self.path.as_uri() and not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)

    def _answered(self, route: Any) -> None:
        route.continue_() if route.request.url == self.path.as_uri() else route.abort()

    def drawn(self) -> Opened:
        self.page.wait_for_selector("#figure[data-drawn]", timeout=30_000)
        return self

    def assert_quiet(self) -> None:
        assert self.requests == []
        assert self.complaints == []
        assert self.page.evaluate("window.violations") == []


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    opened: list[Opened] = []

    def _open(made: tuple[Any, Any], width: int = 1280, scheme: str = "light") -> Opened:
        path = tmp_path / "report.html"
        write_html(*made, path)
        opened.append(Opened(browser, path, width, scheme))
        return opened[-1]

    yield _open
    for one in opened:
        one.context.close()


USUAL = (explanations.explanation(), explanations.proposal())

PATHS = """() => {
  const found = {};
  // The right axis of a panel draws inside that panel: the layer's own name tells them apart.
  for (const layer of document.querySelectorAll('#figure .scatterlayer')) {
    const plot = layer.closest('.plot, .overplot > g, .subplot');
    const name = [...plot.classList].find(c => /^xy[0-9]*$/.test(c));
    const boxes = [...layer.querySelectorAll('path.js-line, path.js-fill')]
      .map(path => path.getBBox()).filter(box => box.width > 50);
    if (boxes.length) found[name] = Math.max(...boxes.map(box => box.height));
  }
  return found;
}"""


def n_colours(png: bytes) -> int:
    """Different colours of an 8-bit PNG that are on more than 20 pixels."""
    at, data, width, n_channels = 8, b"", 0, 3
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, n_channels = int.from_bytes(body[:4], "big"), {2: 3, 6: 4}[body[9]]
        elif kind == b"IDAT":
            data += body
        at += 12 + length
    raw, stride = zlib.decompress(data), width * n_channels
    before = bytearray(stride)
    counts: dict[bytes, int] = {}
    for start in range(0, len(raw), stride + 1):
        row = bytearray(raw[start + 1 : start + 1 + stride])
        _unfilter(raw[start], row, before, n_channels)
        for x in range(0, stride, n_channels * 3):
            pixel = bytes(row[x : x + 3])
            counts[pixel] = counts.get(pixel, 0) + 1
        before = row
    return sum(count > 20 for count in counts.values())


def _unfilter(kind: int, row: bytearray, above: bytearray, n: int) -> None:
    for i in range(len(row)) if kind else ():
        left, up = row[i - n] if i >= n else 0, above[i]
        corner = above[i - n] if i >= n else 0
        if kind == 4:
            guess = left + up - corner
            distances = (abs(guess - left), abs(guess - up), abs(guess - corner))
            added = (left, up, corner)[distances.index(min(distances))]
        else:
            added = {1: left, 2: up, 3: (left + up) // 2}[kind]
        row[i] = (row[i] + added) & 255


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_all_six_panels_without_network(open_page: Any, scheme: str) -> None:
    opened = open_page(USUAL, scheme=scheme).drawn()
    found = opened.page.evaluate(PATHS)
    assert set(found) == {"xy", "xy2", "xy3", "xy4", "xy5", "xy6", "xy7", "xy8"}
    for name, height in found.items():
        assert height > 5, name
    assert n_colours(opened.page.locator("#figure").screenshot()) > 12
    opened.assert_quiet()


def test_browser_text_of_the_figure_follows_the_theme(open_page: Any) -> None:
    fills = {}
    for scheme in ("light", "dark"):
        opened = open_page(USUAL, scheme=scheme).drawn()
        fills[scheme] = opened.page.evaluate(
            "getComputedStyle(document.querySelector('#figure .annotation-text')).fill"
        )
    assert fills["light"] != fills["dark"]


@pytest.mark.parametrize("width", [320, 390, 768])
def test_browser_narrow_page_does_not_overflow(open_page: Any, width: int) -> None:
    for made in (USUAL, explanations.hostile()):
        opened = open_page(made, width=width).drawn()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        box = opened.page.locator("#figure .main-svg").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        opened.assert_quiet()


def test_browser_runs_nothing_from_data(open_page: Any) -> None:
    opened = open_page(explanations.hostile()).drawn()
    opened.page.on("dialog", lambda dialog: pytest.fail("a dialog opened"))
    opened.page.wait_for_timeout(300)
    assert opened.page.locator("#figure a, main a, img").count() == 0
    opened.assert_quiet()


def test_browser_hover_is_unified_over_the_panels(open_page: Any) -> None:
    opened = open_page(USUAL).drawn()
    panel = opened.page.locator("#figure .xy .nsewdrag, #figure .nsewdrag").first
    panel.scroll_into_view_if_needed()
    box = panel.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
    opened.page.wait_for_selector("#figure .hoverlayer .legend")
    told = opened.page.locator("#figure .hoverlayer").text_content()
    for words in (
        "rank ratio (raw), block 1",
        "grade S4",
        "probe loss",
        "learning rate: 0.001",
        "share of novels",
    ):
        assert words in told
    opened.assert_quiet()


def test_browser_switches_variants_and_resets_zoom(open_page: Any) -> None:
    opened = open_page(USUAL).drawn()
    page = opened.page
    shown = (
        "document.getElementById('figure').data.filter(t => t.meta && t.visible).map(t => t.meta)"
    )
    assert set(page.evaluate(shown)) == {"raw"}
    page.check("input[value=column]")
    page.wait_for_function("document.getElementById('figure').data[0].visible === false")
    assert set(page.evaluate(shown)) == {"column"}
    reach = "document.getElementById('figure').layout.xaxis.range"
    whole = page.evaluate(reach)
    page.evaluate("Plotly.relayout('figure', {'xaxis.range': [10, 20]})")
    page.click("#reset-zoom")
    page.wait_for_function(f"{reach}[1] > 20")
    assert page.evaluate(reach) == whole
    opened.assert_quiet()


def test_browser_offers_no_upload(open_page: Any) -> None:
    opened = open_page(USUAL).drawn()
    titles = opened.page.eval_on_selector_all(
        "#figure .modebar-btn", "found => found.map(b => b.dataset.title)"
    )
    assert len(titles) == 6
    assert not any("cloud" in title.lower() or "share" in title.lower() for title in titles)


def test_browser_page_without_scripts_still_tells(open_page: Any) -> None:
    made = explanations.without_events(**explanations.EMPTY)
    opened = open_page((made, explanations.NOTHING_PROPOSED))
    assert opened.page.locator("h1").inner_text() == "No event"
    opened.assert_quiet()


def test_browser_prints_within_the_paper_and_in_light_colours(open_page: Any) -> None:
    opened = open_page(USUAL, scheme="dark").drawn()
    page = opened.page
    page.set_viewport_size({"width": 720, "height": 1000})
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(300)
    assert page.locator("#figure .main-svg").first.bounding_box()["width"] <= 720
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.assert_quiet()
