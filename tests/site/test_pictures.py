"""The site's moving pictures in a browser: what they show after a click and a key is computed here again."""

import math
import re
import shutil
from itertools import pairwise

from common.phases import ROOT

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="needs chromium")]
FOLDER = ROOT / "common/site/pictures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.html"))


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens a picture by its name; at the end, nothing was on the console and nothing else was asked for."""
    opened, heard, asked = [], [], []

    def open_picture(name, query="", width=900, **options):
        options = dict(viewport=dict(width=width, height=800), reduced_motion="reduce") | options
        page = browser.new_page(**options)
        opened.append(page)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((FOLDER / f"{name}.html").as_uri() + query)
        return page

    yield open_picture
    pages = {(FOLDER / f"{name}.html").as_uri() for name in NAMES}
    assert not heard
    assert all(url.partition("?")[0] in pages or url.startswith("data:") for url in asked), asked
    for page in opened:
        page.close()


def number(text):
    """A number as the pictures write it."""
    return float(text.replace("−", "-").replace(",", "").lstrip("×+ "))


def shown(page, *ids):
    return [number(page.locator(f"#{name}").inner_text()) for name in ids]


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_phone_and_a_wide_page(visit, name):
    for width in (390, 900):
        page = visit(name, width=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator("#picture").bounding_box()
        assert box["width"] > 0.9 * width - 24


@pytest.mark.parametrize("name", NAMES)
def test_the_theme_is_the_readers_or_the_addresss(visit, name):
    colors = {
        (scheme, query): visit(name, query, color_scheme=scheme).evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        for scheme in ("light", "dark")
        for query in ("", "?theme=light", "?theme=dark")
    }
    light, dark = colors["light", ""], colors["dark", ""]
    assert light != dark
    assert {color for (_, query), color in colors.items() if "light" in query} == {light}
    assert {color for (_, query), color in colors.items() if "dark" in query} == {dark}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_can_be_used_is_named_and_reached_by_keyboard(visit, name):
    page = visit(name)
    controls = page.locator("button:enabled, select:enabled, input:enabled, [role=slider]")
    left = set(range(controls.count()))
    assert left
    for _ in range(2 * len(left)):
        page.keyboard.press("Tab")
        left -= {i for i in left if controls.nth(i).evaluate("node => node === document.activeElement")}
        if not left:
            break
    assert not left
    for i in range(controls.count()):
        named = "node => node.ariaLabel || node.labels?.[0]?.textContent || node.textContent"
        assert controls.nth(i).evaluate(named).strip()
    assert page.locator("#picture").get_attribute("aria-label")
    assert page.locator("[role=status]").inner_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_around_it_learns_its_height(visit, name):
    page = visit(name)
    page.evaluate("""() => {
        addEventListener("message", event => (window.told = event.data.height));
        const frame = document.createElement("iframe");
        frame.src = "?theme=dark";
        document.body.append(frame);
    }""")
    page.wait_for_function("window.told > 300")


def test_what_the_pictures_share_is_the_same_in_all():
    pages = [(FOLDER / f"{name}.html").read_text() for name in NAMES]
    styles = {page.split("</style>")[0].split("<style>")[1] for page in pages}
    scripts = {re.search(r"// --- what all pictures share.*?\n\n// ---", page, re.S)[0] for page in pages}
    assert len(styles) == len(scripts) == 1


# --- softmax -------------------------------------------------------------------------------------


def online(logits, values):
    """(m, l, acc) after each logit, by the definition: what the recurrence must give."""
    for count in range(len(logits) + 1):
        seen = logits[:count]
        m = max(seen, default=-math.inf)
        p = [math.exp(s - m) if m > -math.inf else 0.0 for s in seen]
        yield m, sum(p), sum(w * v for w, v in zip(p, values, strict=False))


VALUES = [2, 4, 1, 3]


def test_softmax_steps_through_the_states(visit):
    page = visit("softmax")
    states = list(online([3, 2, 5, 1], VALUES))
    assert shown(page, "m", "l", "acc") == pytest.approx(states[0])
    for (before, _, _), state in pairwise(states):
        page.get_by_role("button", name="Step").click()
        assert shown(page, "m", "l", "acc") == pytest.approx(state, abs=6e-4)
        assert number(page.locator(".factor").first.inner_text()) == pytest.approx(
            math.exp(before - state[0]), abs=6e-4
        )
    said = page.locator("#say").inner_text()
    o, direct = (number(x) for x in re.findall(r"(?:acc / l =|row gives) ([−\d.]+\d)", said))
    _, l, acc = states[-1]
    assert o == direct == pytest.approx(acc / l, abs=6e-4)
    page.get_by_role("button", name="Back").click()
    assert shown(page, "m", "l", "acc") == pytest.approx(states[3], abs=6e-4)


def test_softmax_logits_follow_keys_and_pointer_down_to_minus_infinity(visit):
    page = visit("softmax")
    for _ in range(4):
        page.get_by_role("button", name="Step").click()
    page.get_by_role("slider").nth(2).focus()
    for key, logit in (("ArrowUp", 5.5), ("End", 8), ("PageDown", 6), ("Home", -math.inf), ("ArrowUp", -4)):
        page.keyboard.press(key)
        assert shown(page, "m", "l", "acc") == pytest.approx(list(online([3, 2, logit, 1], VALUES))[-1], abs=6e-4)
    for j in range(4):
        column = page.get_by_role("slider").nth(j).bounding_box()
        page.mouse.move(column["x"] + 10, column["y"] + 60)
        page.mouse.down()
        page.mouse.move(column["x"] + 10, column["y"] + column["height"] - 2)
        page.mouse.up()
    assert shown(page, "m", "l", "acc") == [-math.inf, 0, 0]
    assert "masked" in page.locator("#say").inner_text()


def test_softmax_motion_ends_where_the_step_ends_and_can_be_turned_off(visit):
    for motion, early in (("no-preference", True), ("reduce", False)):
        page = visit("softmax", reduced_motion=motion)
        page.get_by_role("button", name="Step").click()
        assert page.evaluate("progress < 1") == early
        page.wait_for_function("progress === 1")
