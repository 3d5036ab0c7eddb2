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
from common.site import moving

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


def test_every_exercise_has_a_page_with_its_task_and_the_section_that_it_belongs_to(site):
    for exercise in exercises.load():
        text = (site / f"exercises/{exercise.name}.html").read_text()
        shown = " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())
        _, task, *_ = exercise.task.replace("`", "").split("\n\n")  # without its title
        assert " ".join(task.split()).removeprefix("1. ") in shown, exercise.name
        chapter = f"{exercise.phase.folder}/{exercise.notebook.removesuffix('.ipynb')}"
        assert re.search(rf'href="\.\./{chapter}\.html#[\w-]+"', text), (
            f"{exercise.name}: no section {exercise.section}"
        )


def test_terms_and_papers_are_linked(site):
    text = (site / "glossary.html").read_text()
    rows = re.findall(r"<tr.*?</tr>", text, re.S)[1:]
    assert rows
    assert all(re.search(r'href="[\w/]+\.html#', row) for row in rows)
    for chapter in CHAPTERS:
        text = (site / chapter).read_text()
        for paper in re.findall(r"arXiv (\d{4}\.\d{5})", re.sub(r"<a .*?</a>|<pre.*?</pre>", "", text, flags=re.S)):
            raise AssertionError(f"{chapter}: {paper} is no link")


def test_pages_say_what_they_are_and_nothing_else_is_published(site):
    for page in ("index.html", *CHAPTERS):
        text = (site / page).read_text()
        for name in ('name="description"', 'property="og:title"', 'property="og:description"'):
            assert re.search(rf'<meta {name} content="[^"]{{20,}}"', text), page
    assert not (site / ".doctrees").exists()


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


def pages_of(site):
    """All pages, but of the exercises' the first one."""
    return [
        *sorted(site.glob("*.html")),
        site / f"exercises/{exercises.load()[0].name}.html",
        *map(site.joinpath, CHAPTERS),
    ]


OUTSIDE = """() => {
    const content = document.querySelector(".content").getBoundingClientRect().right;
    const scrolls = node => node.parentElement.closest("pre, .table-wrapper, .output, div.math, .sidebar-scroll");
    const ends = node => node.getBoundingClientRect().right;
    const outside = [...document.querySelectorAll("article :is(p, li, dt, dd, h1, h2, h3, summary, img, iframe, pre)")]
        .filter(node => ends(node) > Math.min(content, document.documentElement.clientWidth) + 1 && !scrolls(node));
    const { scrollWidth, clientWidth } = document.documentElement;
    return scrollWidth > clientWidth ? ["the page scrolls"] : outside.map(node => node.outerHTML.slice(0, 80));
}"""


def test_no_text_is_cut_off_at_any_width(site, browser):
    for path in pages_of(site):
        page, errors, elsewhere = opened(browser, path.as_uri(), viewport=dict(width=320, height=900))
        for width in range(320, 1921, 50):
            page.set_viewport_size(dict(width=width, height=900))
            assert page.evaluate(OUTSIDE) == [], f"{path.relative_to(site)} at {width}"
        assert not errors, path
        assert not elsewhere, path
        page.context.close()


def test_lines_have_at_most_75_letters(site, browser):
    page, *_ = opened(browser, (site / CHAPTERS[0]).as_uri(), viewport=dict(width=1920, height=900))
    lines = page.evaluate("""() => [...document.querySelectorAll("article p")].flatMap(paragraph => {
        paragraph.querySelectorAll("mjx-container").forEach(formula => formula.remove());
        const walker = document.createTreeWalker(paragraph, NodeFilter.SHOW_TEXT), lines = {};
        for (let node; (node = walker.nextNode()); ) for (let i = 0; i < node.length; i++) {
            const range = new Range();
            range.setStart(node, i);
            range.setEnd(node, i + 1);
            const key = Math.round(range.getBoundingClientRect().bottom / 8);
            lines[key] = (lines[key] ?? "") + node.data[i];
        }
        return Object.values(lines).map(line => line.replace(/\\s+/g, " ").trim().length);
    })""")
    assert 55 < sorted(lines)[len(lines) * 3 // 4] <= max(lines) <= 75
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(site, browser, scheme):
    """On a page of each kind: axe looks at each word of a listing, which takes long."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    kinds = ("index.html", "exercises.html", "api.html", "glossary.html", CHAPTERS[-1])
    for path in [*map(site.joinpath, kinds), site / f"exercises/{exercises.load()[0].name}.html"]:
        look = dict(viewport=dict(width=1280, height=900), color_scheme=scheme)
        page, *_ = opened(browser, path.as_uri(), **look)
        found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        serious = {v["id"]: v["nodes"][0]["html"] for v in found if v["impact"] in ("serious", "critical")}
        assert not serious, path.relative_to(site)
        page.context.close()


def test_a_prediction_stands_above_the_answer(site, browser):
    page, *_ = opened(browser, (site / CHAPTERS[0]).as_uri())
    field = page.locator(".prediction + input").first
    field.fill("42 GiB")
    name = field.get_attribute("id")
    said = page.locator(f"[data-guess='{name}']")
    assert said.inner_text() == "Your prediction: 42 GiB"
    assert not said.locator("xpath=following::details").first.evaluate("details => details.open")
    page.context.close()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_formulas_are_typeset_and_figures_described(site, browser, chapter):
    page, *_ = opened(browser, (site / chapter).as_uri())
    page.wait_for_selector("mjx-container", timeout=60_000)
    page.wait_for_function("document.querySelectorAll('.math:not(:has(mjx-container))').length === 0", timeout=60_000)
    assert page.locator("mjx-merror").count() == 0
    figures = page.locator("div.cell_output img")
    assert figures.count() >= 3
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


def shown_whole(page, count):
    """Wait until no picture of the page is cut off."""
    frames = page.locator("iframe.picture")
    assert frames.count() == count
    for k in range(count):
        frames.nth(k).scroll_into_view_if_needed()  # a browser may not lay out what is out of sight
        frame = frames.nth(k).element_handle().content_frame()
        frame.wait_for_function("document.documentElement.scrollHeight <= innerHeight + 2", polling=100)


def test_the_first_page_leads_to_the_first_chapter_and_its_picture_plays(site, browser):
    page, errors, _ = opened(browser, (site / "index.html").as_uri(), viewport=dict(width=1280, height=1600))
    page.locator("iframe.picture").content_frame.get_by_text("Step 4 of 4").wait_for()
    page.get_by_role("link", name="Begin with chapter 1").click()
    assert page.url.endswith(CHAPTERS[0])
    assert not errors
    page.context.close()


def test_pictures_are_whole_when_they_are_loaded_before_the_script_of_the_page(address, browser):
    page = browser.new_page()
    with page.expect_response("**/course.js*"):
        page.route("**/course.js*", lambda route: (page.wait_for_timeout(1500), route.continue_()))
        page.goto(f"{address}/pictures.html")
    shown_whole(page, len(moving.TITLES))
    page.close()


def test_pictures_are_shown_whole_and_follow_the_theme(site, browser):
    page, errors, _ = opened(browser, (site / "pictures.html").as_uri(), color_scheme="light")
    shown_whole(page, len(moving.TITLES))
    page.evaluate("document.body.dataset.theme = 'dark'")
    page.wait_for_function("[...document.querySelectorAll('iframe')].every(f => f.src.endsWith('?theme=dark'))")
    assert not errors
    page.context.close()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_pictures_move_inside_their_chapters(site, browser, chapter):
    stored = (ROOT / chapter).with_suffix(".ipynb").read_text()
    page, errors, elsewhere = opened(browser, (site / chapter).as_uri(), viewport=dict(width=390, height=900))
    count = len(re.findall(r"\bshow_moving\(", stored))
    shown_whole(page, count)
    for k in range(count):
        picture = page.locator("iframe.picture").nth(k).content_frame
        before = picture.locator("#say").inner_text()
        picture.get_by_role("button", name="Step").click()
        sync_api.expect(picture.locator("#say")).not_to_have_text(before)
    assert not errors
    assert not elsewhere
    page.context.close()
