"""The site's moving pictures in a browser: what they show after a click and a key is computed here again."""

import heapq
import math
import re
import shutil
from itertools import pairwise

from common import runtime
from common.measure import offline
from common.measure.traffic import tiled_attention_bytes
from common.phases import ROOT
from phase2_tiling import lesson, tiling
from phase5_tuning.hopper import figures
from phase5_tuning.hopper import model as hopper_model
from phase5_tuning.hopper.order import Deadlock, dq_schedule

import numpy as np
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
    pages = {path.as_uri() for path in FOLDER.iterdir()}
    assert not heard
    assert all(url.partition("?")[0] in pages or url.startswith("data:") for url in asked), asked
    for page in opened:
        page.close()


def rewind(page):
    while page.get_by_role("button", name="Back").is_enabled():
        page.get_by_role("button", name="Back").click()


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
    controls = page.locator("button:enabled, select:enabled, input:enabled, [role=slider]").filter(visible=True)
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
    assert page.locator("#say").inner_text()


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


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_two_steps_in_and_says_under_the_buttons_what_they_did(visit, name):
    page = visit(name)
    assert page.evaluate("picture.at()") == 2
    said = page.locator("#say").inner_text()
    page.get_by_role("button", name="Step").click()
    assert page.locator("#say").inner_text() != said
    button, sentence = (page.locator(one).bounding_box() for one in ("#step", "#say"))
    assert 0 <= sentence["y"] - button["y"] - button["height"] < 20


@pytest.mark.parametrize("name", NAMES)
def test_it_plays_in_sight_until_it_is_used_and_not_for_who_wants_no_motion(visit, name):
    page = visit(name, reduced_motion="no-preference")
    page.locator("#picture").scroll_into_view_if_needed()
    page.wait_for_function("picture.at() > 2")
    page.mouse.move(1, 1)
    page.mouse.down()
    assert page.locator("#play").inner_text() == "Play"
    calm = visit(name)
    assert calm.locator("#play").inner_text() == "Play"
    calm.evaluate("picture.pace = 1; picture.go(picture.last() - 2)")
    calm.locator("#play").click()
    calm.wait_for_function("picture.at() === picture.last() && $('play').textContent === 'Play'")
    calm.evaluate("picture.pace = 60_000")
    calm.locator("#play").click()
    assert calm.evaluate("picture.at()") == 0


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
    rewind(page)
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
    for _ in range(2):
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


def test_softmax_takes_a_finger(visit):
    page = visit("softmax", width=390, has_touch=True)
    page.get_by_role("button", name="Back").tap()
    column = page.get_by_role("slider").first.bounding_box()
    page.touchscreen.tap(column["x"] + 10, column["y"] + column["height"] - 2)
    assert shown(page, "m", "l", "acc") == [-math.inf, 0, 0]
    page.touchscreen.tap(column["x"] + 10, column["y"] + 22)  # the highest
    assert shown(page, "m", "l", "acc") == [8, 1, 2]


def test_softmax_motion_ends_where_the_step_ends_and_can_be_turned_off(visit):
    for motion, early in (("no-preference", True), ("reduce", False)):
        page = visit("softmax", reduced_motion=motion)
        page.get_by_role("button", name="Step").click()
        assert page.evaluate("progress < 1") == early
        page.wait_for_function("progress === 1")


# --- tiles ---------------------------------------------------------------------------------------

HEAD_DIM = 4


def example(seq):
    """The picture's Q, K and V."""
    i, d = np.mgrid[:seq, :HEAD_DIM]
    return [(a * i + b * d + i * d) % 5 - 2.0 for a, b in ((2, 3), (4, 2), (1, 3))]


def bytes_so_far(page):
    said = page.locator("#say").inner_text()
    return [
        int(x.replace(",", ""))
        for x in re.findall(r"So far ([\d,]+) bytes; with S and P stored in fp16, ([\d,]+):", said)[0]
    ]


def rows(page):
    lines = page.locator("#rows tbody tr").all()
    return np.array([[number(x) for x in line.locator("th, td").all_inner_texts()] for line in lines])


@pytest.mark.parametrize(("seq", "block_m", "block_n"), [(8, 4, 4), (10, 4, 8), (6, 8, 2)])
def test_tiles_keep_the_state_and_count_the_bytes(visit, seq, block_m, block_n):
    page = visit("tiles")
    for name, value in (("seq", seq), ("block_m", block_m), ("block_n", block_n)):
        page.locator(f"#{name}").select_option(str(value))
    q, k, v = example(seq)
    s = q @ k.T / 2
    programs, tiles = -(-seq // block_m), -(-seq // block_n)
    rewind(page)
    step = page.get_by_role("button", name="Step")
    for program in range(programs):
        step.click()
        for tile in range(tiles):
            step.click()
            query, m, factor, l, acc, o = rows(page).T
            assert list(query) == list(range(program * block_m, min(seq, (program + 1) * block_m)))
            mine = s[query.astype(int)]
            seen, before = mine[:, : (tile + 1) * block_n], mine[:, : tile * block_n]
            p = np.exp(seen - seen.max(1, keepdims=True))
            np.testing.assert_allclose(m, seen.max(1))
            np.testing.assert_allclose(l, p.sum(1), atol=6e-4)
            np.testing.assert_allclose(acc, p @ v[: seen.shape[1], 0], atol=6e-4)
            np.testing.assert_allclose(o, p @ v[: seen.shape[1], 0] / p.sum(1), atol=6e-4)
            np.testing.assert_allclose(factor, np.exp(before.max(1, initial=-np.inf) - seen.max(1)), atol=6e-4)
        step.click()
    assert step.is_disabled()
    naive = (4 * seq * HEAD_DIM + 4 * seq * seq) * 2  # each of Q, K, V, O once, S and P twice
    assert bytes_so_far(page) == [tiled_attention_bytes(seq, seq, HEAD_DIM, block_m, block_n, 2), naive]


def test_a_second_tile_raises_the_maximum_of_some_queries_of_each_program():
    q, k, _ = example(8)
    first, second = (q @ k.T / 2).reshape(8, 2, 4).max(2).T
    factor = np.exp(first - np.maximum(first, second)).reshape(2, 4)
    assert ((factor > 0.05) & (factor < 0.5)).any(1).all()
    assert (factor == 1).any(1).all()


def test_tiles_are_stepped_with_the_arrow_keys(visit):
    page = visit("tiles")
    page.locator("#at").focus()
    page.keyboard.press("Home")
    seen = []
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        seen.append(bytes_so_far(page))
    tile, scores = 4 * HEAD_DIM * 2, 4 * 4 * 2
    assert seen == [[n * tile, n * tile + pairs * 4 * scores] for n, pairs in ((1, 0), (3, 1), (5, 2))]
    page.keyboard.press("ArrowLeft")
    assert bytes_so_far(page) == seen[1]


def test_tiles_of_real_sizes_ask_for_what_the_compiler_asks_for(visit, monkeypatch):
    page = visit("tiles")
    for d, m, n in ((128, 128, 128), (128, 128, 256), (128, 256, 256), (128, 64, 64), (128, 32, 16), (64, 256, 128),
                    (64, 64, 64), (64, 16, 32)):  # fmt: skip
        for name, value in (("real_d", d), ("real_m", m), ("real_n", n)):
            page.locator(f"#{name}").select_option(str(value))
        said = page.locator("#real-say").inner_text()
        tiles = dict(BLOCK_M=m, BLOCK_N=n, num_warps=8 if m >= 128 else 4, num_stages=2)
        monkeypatch.setattr(runtime, "tile_sizes", lambda *_, tiles=tiles: tiles)
        launches = offline.record_launches(lambda d=d: tiling.attention(*lesson.one_head(512, d)))
        for c in offline.compile_launches(launches, ["sm_80", "sm_90"]):
            limit = offline.SHARED_LIMIT[c.target] // 1024
            fits = "fits" if c.fits else "does not fit"
            assert f"{c.target}: {c.shared / 1024:g} KiB, {fits} into {limit}" in said
        assert f"moves {tiled_attention_bytes(4096, 4096, d, m, n, 2) / 2**20:.0f} MiB" in said


# --- masks ---------------------------------------------------------------------------------------


def tile_kinds(seq_q, seq_k, block_m, block_n, causal):
    """Rows of kinds, from every pair of a query and a key; queries past the end follow the same rule."""
    tiles_m, tiles_n = -(-seq_q // block_m), -(-seq_k // block_n)
    i, j = np.mgrid[: tiles_m * block_m, : tiles_n * block_n]
    visible = (j < seq_k) & ((i >= j) | (not causal))
    pairs = visible.reshape(tiles_m, block_m, tiles_n, block_n).sum((1, 3))
    return [["masked" if 0 < n < block_m * block_n else "full" if n else "skipped" for n in row] for row in pairs]


def last_done(works, processors):
    free = [0] * processors
    for work in works:
        heapq.heapreplace(free, free[0] + work)
    return max(free)


@pytest.mark.parametrize("sizes", [(1024, 1024, 128, 128), (1000, 700, 128, 64), (200, 1000, 64, 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_skip_tiles_and_share_out_programs(visit, sizes, causal):
    page = visit("masks")
    for name, value in zip(("seq_q", "seq_k", "block_m", "block_n"), sizes, strict=True):
        page.locator(f"#{name}").select_option(str(value))
    page.locator("#causal").set_checked(causal)
    kinds = tile_kinds(*sizes, causal)
    flat = [kind for row in kinds for kind in row]
    assert shown(page, "full", "masked", "skipped") == [flat.count(k) for k in ("full", "masked", "skipped")]
    works = [len(row) - row.count("skipped") for row in kinds]
    heavy = sorted(works, reverse=True)
    for heads, processors in ((4, 6), (8, 16), (1, 2)):
        page.locator("#heads").select_option(str(heads))
        page.locator("#processors").select_option(str(processors))
        queues = {"grid": works * heads, "head": heavy * heads, "all": sorted(works * heads, reverse=True)}
        for order, queue in queues.items():
            page.locator("#order").select_option(order)
            end, ideal = shown(page, "end", "ideal")
            assert end == last_done(queue, processors)
            assert ideal == pytest.approx(sum(queue) / processors, abs=0.06)


def test_masks_time_moves_by_click_key_and_pointer(visit):
    page = visit("masks")
    page.get_by_role("button", name="Back").click()
    assert page.locator("#say").inner_text().startswith("Time 1 of 28: 6 of 6 multiprocessors compute, 25 of 32")
    page.locator("#time").focus()
    page.keyboard.press("End")
    assert page.locator("#say").inner_text().startswith("Time 28 of 28: 0 of 6")
    box = page.locator("#picture").bounding_box()
    page.locator("#picture").click(position=dict(x=page.evaluate("x(6.5)"), y=box["height"] - 100))
    assert page.locator("#say").inner_text().startswith("Time 6 of 28: 6 of 6")


# --- ring ----------------------------------------------------------------------------------------

SPLITS = dict(
    contiguous=lambda rank, ranks: (2 * rank, 2 * rank + 1), zigzag=lambda rank, ranks: (rank, 2 * ranks - 1 - rank)
)  # the chunks of a rank


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("split", ["full", *SPLITS])
def test_the_ring_counts_work_and_whose_keys_are_where(visit, ranks, split):
    page = visit("ring")
    page.locator("#ranks").select_option(str(ranks))
    page.locator("#split").select_option(split)
    rewind(page)
    done, time = np.zeros(ranks), 0.0
    for step in range(ranks):
        page.get_by_role("button", name="Step").click()
        sources = [(rank - step) % ranks for rank in range(ranks)]
        work = np.full(ranks, 4.0)
        if split != "full":
            held = [SPLITS[split](rank, ranks) for rank in range(ranks)]
            work = np.array(
                [sum((1 + np.sign(i - j)) / 2 for i in held[rank] for j in held[source])
                 for rank, source in enumerate(sources)]
            )  # fmt: skip
        done, time = done + work, time + work.max()
        table = [[number(x) for x in line.locator("td").all_inner_texts()] for line in page.locator("tbody tr").all()]
        assert np.array_equal(np.transpose(table), [sources, work, done])
    said = page.locator("#say").inner_text()
    assert f"The steps took {time:g}, and the ranks were busy {100 * done.mean() / time:.0f} % of it." in said
    assert page.get_by_role("button", name="Step").is_disabled()


# --- order ---------------------------------------------------------------------------------------

HIGH, LOW = (lambda t: (5 - t, 0, 1)), (lambda t: (t, 0, 1))  # who begins first
ORDERS = {
    "low": dict(is_causal=True, take_tile=LOW, order=lambda m, n, toward: n),
    "backwards": dict(is_causal=True, take_tile=lambda t: (t, 0, -1)),
    "high": dict(is_causal=True, take_tile=HIGH),
    "full": dict(take_tile=LOW),
    "shifted": dict(
        walk=lambda n, toward: [(2 * n + i) % 12 for i in range(12)], order=lambda m, n, toward: (m // 2 - n) % 6
    ),
}  # as the chapter has them


def ending(order, places):
    """What the chapter's model says of an order."""
    try:
        run = dq_schedule(12, 6, 64, slots=places, hop=0.8, **ORDERS[order])
    except Deadlock as deadlock:
        return re.findall(r"key (tile \d+)\) waits until (\d+) have added to query (tile \d+)", str(deadlock))
    parts = sum(len(tickets) for tickets in run.added.values())
    return f"All {parts} parts are added after {run.total:.3g} steps."


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_additions_ends_when_the_model_does(visit, order):
    page = visit("order")
    page.locator("#order").select_option(order)
    for places in range(1, 7):
        page.locator("#places").select_option(str(places))
        page.evaluate("picture.go(picture.last())")
        said = page.locator("#say").inner_text()
        if said.startswith("Deadlock"):
            said = re.findall(r"(tile \d+) waits until (\d+) have added to (tile \d+)", said)
        assert said == ending(order, places)


# --- pipeline ------------------------------------------------------------------------------------


def share(page, row):
    return number(page.locator(f"[data-share='{row}']").text_content().split()[-2]) / 100


FORWARD = [(64, 3, 4, False), (128, 2, 2, True), (128, 1, 1, False)]


def test_pipeline_shows_how_busy_the_units_are(visit):
    page = visit("pipeline")
    page.locator("#zoom").focus()
    page.keyboard.press("Home")  # the whole run
    for d, consumers, stages, overlap in FORWARD:
        for name, value in (("head_dim", d), ("consumers", consumers), ("stages", stages)):
            page.locator(f"#{name}").select_option(str(value))
        page.locator("#overlap").set_checked(overlap)
        run = hopper_model.simulate(hopper_model.forward(d, consumers, stages, overlap, figures.TILES_N))
        exponentials = consumers * figures.TILES_N * hopper_model.ROWS * hopper_model.BLOCK_N / hopper_model.MUFU
        expected = {"copy engine (TMA)": run.busy("TMA"), "tensor cores": run.busy("tensor cores")}
        expected |= {"exponential unit": exponentials, "producer": run.busy("producer", "wait")}
        for row, busy in expected.items():
            assert share(page, row) == pytest.approx(busy / run.total, abs=0.012), row
    page.locator("#kernel").select_option("plain")
    page.locator("#programs").select_option("3")
    run = hopper_model.simulate(hopper_model.plain(128, 3, 1, figures.TILES_N))
    assert share(page, "tensor cores") == pytest.approx(run.busy("tensor cores") / run.total, abs=0.012)


def test_pipeline_time_moves_by_click_key_and_pointer(visit):
    page = visit("pipeline")
    run = hopper_model.simulate(hopper_model.forward(128, 2, 2, False, figures.TILES_N))
    rewind(page)
    events = sorted({round(i.start * 100) for i in run.intervals if i.row == "tensor cores"})
    for event in events[:4]:
        page.get_by_role("button", name="Step").click()
        assert page.locator("#say").inner_text().startswith(f"At {event / 100:.2f} of {run.total:.2f} µs:")
    page.locator("#time").focus()
    page.keyboard.press("End")
    assert page.locator("#say").inner_text() == f"At {run.total:.2f} µs all is done."
    page.keyboard.press("Home")
    middle = page.evaluate("(shownWindow.from + shownWindow.to) / 2")
    box = page.locator("#picture").bounding_box()
    page.locator("#picture").click(position=dict(x=(14 + box["width"] - 4) / 2, y=60))
    assert page.evaluate("shownWindow.time") == pytest.approx(middle, abs=4)
