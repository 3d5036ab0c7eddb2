"""`make site` in a browser: every page, its links, its formulas and its pictures, and no request that leaves it."""

import functools
import html
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urldefrag

from common.learn import exercises
from common.phases import PHASES, ROOT

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("myst_nb")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.slow
CHAPTERS = [str(p.relative_to(ROOT).with_suffix(".html")) for phase in PHASES for p in phase.notebook_paths]


@pytest.fixture(scope="module")
def site():
    """The folder of the built site."""
    subprocess.run([sys.executable, "-m", "common.site.build"], cwd=ROOT, check=True)
    return ROOT / "build" / "site" / "html"


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}


def test_no_link_is_broken_and_none_fetches_from_elsewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(unquote(link).partition("?")[0] if "#" not in link else unquote(link))
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.relative_to(site)}: {link}"
            if anchor and file in pages:
                assert anchor in pages[file].anchors, f"{path.relative_to(site)}: {link}"


def test_every_exercise_and_chapter_has_its_place(site):
    text = (site / "exercises.html").read_text()
    shown = " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())
    for exercise in exercises.load():
        assert f'id="{exercise.name.replace("_", "-")}"' in text or f'id="{exercise.name}"' in text
        first = " ".join(exercise.task.replace("`", "").partition("\n\n")[0].split())
        assert first in shown, exercise.name
    for chapter in CHAPTERS:
        assert (site / chapter).exists()


def opened(browser, address, **look):
    """(page, its errors, addresses that it asked for elsewhere)"""
    page = browser.new_context(**look).new_page()
    errors, elsewhere = [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else elsewhere.append(r.url))
    page.goto(address)
    page.wait_for_load_state("networkidle")
    return page, errors, elsewhere


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable(site, browser, width, scheme):
    for path in sorted(site.glob("*.html")) + [site / chapter for chapter in CHAPTERS]:
        look = dict(viewport=dict(width=width, height=900), color_scheme=scheme)
        page, errors, elsewhere = opened(browser, path.as_uri(), **look)
        name = path.relative_to(site)
        assert not errors, (name, errors)
        assert not elsewhere, (name, elsewhere)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} scrolls sideways"
        page.context.close()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_formulas_are_typeset_and_figures_described(site, browser, chapter):
    page, *_ = opened(browser, (site / chapter).as_uri())
    page.wait_for_selector("mjx-container", timeout=60_000)
    page.wait_for_function("document.querySelectorAll('.math:not(:has(mjx-container))').length === 0", timeout=60_000)
    assert page.locator("mjx-merror").count() == 0
    figures = page.locator("div.cell_output img")
    assert figures.count() >= 4
    assert all(len(alt) > 20 for alt in figures.evaluate_all("all => all.map(one => one.alt)"))
    page.context.close()


@pytest.fixture
def address(site):
    """The site on a server: browsers read no search index from a file."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_search_finds_a_term(address, browser):
    page, errors, elsewhere = opened(browser, f"{address}/search.html?q=rescale")
    page.wait_for_selector("ul.search li", timeout=60_000)
    assert not errors
    assert all(request.startswith(address) for request in elsewhere)
    page.context.close()


def shown_whole(page, count=4):
    """Wait until no picture of the page is cut off."""
    frames = page.locator("iframe.picture")
    assert frames.count() == count
    for k in range(count):
        frames.nth(k).scroll_into_view_if_needed()  # a browser may not lay out what is out of sight
        frame = frames.nth(k).element_handle().content_frame()
        frame.wait_for_function("document.documentElement.scrollHeight <= innerHeight + 2", polling=100)


def test_pictures_are_whole_when_they_are_loaded_before_the_script_of_the_page(address, browser):
    page = browser.new_page()
    with page.expect_response("**/course.js*"):
        page.route("**/course.js*", lambda route: (page.wait_for_timeout(1500), route.continue_()))
        page.goto(f"{address}/pictures.html")
    shown_whole(page)
    page.close()


def test_pictures_are_shown_whole_and_follow_the_theme(site, browser):
    page, errors, _ = opened(browser, (site / "pictures.html").as_uri(), color_scheme="light")
    shown_whole(page)
    page.evaluate("document.body.dataset.theme = 'dark'")
    page.wait_for_function("[...document.querySelectorAll('iframe')].every(f => f.src.endsWith('?theme=dark'))")
    assert not errors
    page.context.close()


@pytest.mark.parametrize("chapter", [str(PHASES[k].folder) for k in (0, 1)])
def test_a_picture_moves_inside_its_chapter(site, browser, chapter):
    path = next(site / one for one in CHAPTERS if one.startswith(chapter))
    page, errors, elsewhere = opened(browser, path.as_uri(), viewport=dict(width=390, height=900))
    shown_whole(page, 1)
    page.frame_locator("iframe.picture").get_by_role("button", name="Step").click()
    assert page.frame_locator("iframe.picture").get_by_role("button", name="Back").is_enabled()
    assert not errors
    assert not elsewhere
    page.context.close()
