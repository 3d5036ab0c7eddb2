"""The model of a Hopper program; the kernels' own rules of who has which tile and who adds when, as plain Python."""

import functools
import inspect
import itertools
import random
import textwrap
from types import SimpleNamespace
from unittest import mock

from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import figures as hopper_figures
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import order as hopper_order
from phase5_tuning.hopper.model import (
    MUFU,
    TENSOR,
    TMA_BANDWIDTH,
    TMA_LATENCY,
    WGMMA,
    Barrier,
    Deadlock,
    Interval,
    Race,
    Slot,
    Timeline,
    arrive,
    exponentials,
    forward,
    load,
    plain,
    product,
    simulate,
    wait,
    wait_products,
    work,
)
from phase5_tuning.hopper.order import dq_schedule
from phase5_tuning.launch.plans import cdiv

import matplotlib.pyplot as plt
import pytest

CONSUMERS, ROWS = 2, 64
BLOCK_N = CONSUMERS * ROWS


def as_python(function, old="", new="", **others):
    """The source of a function in Gluon, with `old` replaced by `new`, as a function of plain numbers.

    others: what else it finds among its globals.
    """
    text = textwrap.dedent(inspect.getsource(function.fn))
    text = text[text.index("def ") :]
    assert old in text, old
    stub = SimpleNamespace(minimum=min, maximum=max, cdiv=cdiv, constexpr=int, where=lambda yes, a, b: a if yes else b)
    names = dict(gl=stub, CONSUMERS=CONSUMERS, ROWS=ROWS, **others)
    exec(text.replace(old, new) if old else text, names)
    return names[function.fn.__name__]


# --- the order of dQ ----------------------------------------------------------------------------------------------


class Rules:
    """The kernel's rules for one set of sizes, as `dq_schedule` takes them. edits: function: (old, new)."""

    def __init__(self, tiles_m, tiles_n, block_m, is_causal, heads, group, together, edits=None):
        edits = edits or {}
        take = as_python(hopper_backward._take_tile, *edits.get("_take_tile", ()))
        names = "first_m", "steps", "tile_m", "order"
        rules = {name: as_python(getattr(hopper_backward.Work, name), *edits.get(name, ())) for name in names}

        def work(n, toward):
            sizes = dict(tiles_m=tiles_m, tiles_n=tiles_n, group=group, BLOCK_M=block_m, IS_CAUSAL=is_causal)
            made = SimpleNamespace(n=n, toward=toward, **sizes)
            for name, rule in rules.items():
                setattr(made, name, functools.partial(rule, made))
            return made

        def walk(n, toward):
            of_program = work(n, toward)
            return [of_program.tile_m(i) for i in range(of_program.steps())]

        self.take_tile = lambda ticket: take(ticket, tiles_n, heads, together, is_causal)
        self.walk = walk
        self.order = lambda m, n, toward: work(n, toward).order(m)


def possible(tiles_m, tiles_n, block_m, is_causal):
    """True if a call can have these tiles: under a causal mask, keys past the last query are left out."""
    return not is_causal or tiles_n <= cdiv(tiles_m * block_m, BLOCK_N)


SIZES = [
    sizes for sizes in itertools.product(range(1, 9), range(1, 9), (64, 128, 256), (False, True)) if possible(*sizes)
]


def check_schedule(drawn, tiles_m, tiles_n, block_m, is_causal, edits=None):
    """Run the kernel's rules on drawn heads, slots and an order of dispatch. Raises where one is wrong."""
    heads, group, slots = drawn.randint(1, 5), drawn.randint(1, 3), drawn.choice((1, 1, 2, 3, 5, 8, 40))
    together = drawn.randint(1, min(4, heads))
    programs = heads * tiles_n
    dispatch = drawn.choice(("in order", "reversed", "any"))
    late = [0.0] * programs
    if dispatch == "reversed":
        late = [0.01 * (programs - i) for i in range(programs)]
    elif dispatch == "any":
        late = [drawn.choice((0.0, 0.1, 3.0)) for _ in range(programs)]
    rules = Rules(tiles_m, tiles_n, block_m, is_causal, heads, group, together, edits)
    schedule = dq_schedule(
        tiles_m, tiles_n, block_m, BLOCK_N, is_causal, slots, drawn.choice((0.3, 1.0, 2.5)), 1.0,
        heads=heads, group=group, together=together, late=late,
        take_tile=rules.take_tile, walk=rules.walk, order=rules.order,
    )  # fmt: skip
    assert sorted((p.n, p.head) for p in schedule.programs) == list(itertools.product(range(tiles_n), range(heads)))
    tiles = itertools.product(range(heads), range(group), range(tiles_m))
    for head, member, m in tiles:
        added = [schedule.programs[ticket] for ticket in schedule.added.get((head, member, m), [])]
        seen = [n for n in range(tiles_n) if not is_causal or n * BLOCK_N < (m + 1) * block_m]
        assert sorted(p.n for p in added) == seen
        assert {p.head for p in added} == {head}
        assert [rules.order(m, p.n, p.toward) for p in added] == list(range(len(added)))
    for program in schedule.programs:
        for part in program.parts:
            assert part.after is None or part.after < program.ticket, "waits for a higher ticket"


def check_schedules(edits=None, times=1):
    drawn = random.Random(1)
    for _ in range(times):
        for sizes in SIZES:
            check_schedule(drawn, *sizes, edits=edits)


def test_programs_add_to_dq_in_a_fixed_order_and_nobody_waits_for_ever():
    check_schedules(times=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("order", "gl.minimum(last, self.tiles_n - 1) - self.n", "last - self.n"),  # hangs where seq_k < seq_q
        ("order", "(m + 1) * self.BLOCK_M - 1", "m * self.BLOCK_M"),
        ("order", "before = self.n\n", "before = self.tiles_n - 1 - self.n\n"),
        ("order", "- self.n", "- self.n + 1"),
        ("order", "toward > 0", "toward < 0"),
        ("tile_m", "self.tiles_m - 1", "self.tiles_m"),
        ("tile_m", "- 1 - i", "- 1 + i"),
        ("steps", "self.first_m()", "self.first_m() - 1"),
        ("first_m", "// self.BLOCK_M", "// self.BLOCK_M + 1"),
        ("first_m", "if self.IS_CAUSAL", "if not self.IS_CAUSAL"),
        ("_take_tile", "if IS_CAUSAL", "if not IS_CAUSAL"),
        ("_take_tile", "where(toward > 0,", "where(toward < 0,"),
        ("_take_tile", "gl.minimum(together, heads - first)", "together"),
        ("_take_tile", "within // taking_turns", "within % tiles_n"),
        ("_take_tile", "first + within % taking_turns", "within % taking_turns"),
    ],
)
def test_a_mistake_in_the_kernels_rules_is_found(function, old, new):
    with pytest.raises((AssertionError, Deadlock)):
        check_schedules({function: (old, new)})


def test_the_models_rules_are_the_kernels():
    for tiles_m, tiles_n, block_m, is_causal in SIZES:
        for heads, together in ((1, 1), (5, 2), (4, 4)):
            rules = Rules(tiles_m, tiles_n, block_m, is_causal, heads, 1, together)
            for ticket in range(tiles_n * heads):
                given = ticket, tiles_n, heads, together, is_causal
                assert rules.take_tile(ticket) == hopper_order.take_tile(*given)
        blocks = block_m, BLOCK_N, is_causal
        for n, toward, group in itertools.product(range(tiles_n), (1, -1) if is_causal else (1,), (1, 3)):
            rules = Rules(tiles_m, tiles_n, block_m, is_causal, 1, group, 1)
            visited = list(hopper_order.walk(n, tiles_m, *blocks, toward, group))
            assert rules.walk(n, toward) == visited
            for m in visited:
                assert rules.order(m, n, toward) == hopper_order.order(m, n, tiles_n, *blocks, toward)


def test_a_gpu_does_not_end_with_a_few_long_walks():
    """Under a causal mask the last heads' longest walks come first. The programs are never done later for it."""

    def total(heads, together, slots, all_from_the_diagonal):
        def take_tile(ticket):
            return hopper_order.take_tile(ticket, 8, heads, together, True, toward=1)  # no head is among the last

        sizes = dict(tiles_m=16, tiles_n=8, block_m=64, is_causal=True, slots=slots, heads=heads, together=together)
        return dq_schedule(**sizes, take_tile=take_tile if all_from_the_diagonal else None).total

    for heads, together in ((1, 1), (2, 1), (4, 2), (8, 4)):
        for slots in (2, 5, 8, 13):
            assert total(heads, together, slots, False) <= total(heads, together, slots, True)
    assert total(4, 2, 16, True) / total(4, 2, 16, False) > 1.2


def test_a_long_call_on_an_h100_has_the_kernels_tiles():
    for head_dim, block_m in hopper_backward.BLOCK_M.items():
        schedule = dq_schedule(16384 // block_m, 128, block_m, is_causal=True, heads=4, together=2, hop=0.8)
        assert hopper_order.on_h100(head_dim, 4, True) == schedule.total


def test_every_tile_of_queries_has_a_counter_of_its_own():
    query_tile = as_python(hopper_backward.Work.query_tile)
    for batch, heads, group, tiles_m in itertools.product((1, 3), (1, 2), (1, 4), (1, 5)):
        of_head = [
            SimpleNamespace(b=b, h=h, heads_q=heads * group, group=group, tiles_m=tiles_m)
            for b, h in itertools.product(range(batch), range(heads))
        ]
        tiles = [query_tile(work, *mm) for work in of_head for mm in itertools.product(range(group), range(tiles_m))]
        assert tiles == list(range(batch * heads * group * tiles_m))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_writers_take_the_parts_in_the_order_in_which_consumers_make_them(is_causal):
    names = "first_m", "steps", "tile_m", "order", "query_tile"
    rule = {name: as_python(getattr(hopper_backward.Work, name)) for name in names}
    nothing = mock.MagicMock()
    for block_m, group, n, toward in itertools.product((64, 128), (1, 3), (0, 1, 2), (1, -1) if is_causal else (1,)):
        work = SimpleNamespace(
            n=n, toward=toward, b=1, h=1, heads_q=2 * group, group=group, tiles_m=7, tiles_n=3, count_ptr=0,
            dq_sum=None, BLOCK_M=block_m, BLOCK_D=128, IS_CAUSAL=is_causal,
        )  # fmt: skip
        for name, function in rule.items():
            setattr(work, name, functools.partial(function, work))
        await_count = mock.Mock()
        write = as_python(
            hopper_backward._write, tma=nothing, mbarrier=nothing, tma_add=nothing, release_count=nothing, WRITERS=2,
            await_count=await_count,
        )  # fmt: skip
        write(work, nothing, True, 0)
        write(work, nothing, True, 1)
        walk = hopper_order.walk(n, 7, block_m, BLOCK_N, is_causal, toward, group)
        steps = [(member, m) for member in range(group) for m in walk]
        right = [mock.call(work.query_tile(member, m), work.order(m)) for member, m in steps]
        assert await_count.mock_calls == right[0::2] + right[1::2]


@pytest.mark.slow
def test_programs_add_to_dq_in_a_fixed_order_at_length():
    check_schedules(times=40)


def test_waiting_and_total_of_two_programs():
    schedule = dq_schedule(3, 2, slots=2, hop=1.0, step=1.0)
    first, second = schedule.programs
    assert [(part.computed, part.begin, part.end) for part in first.parts] == [(1, 1, 2), (2, 2, 3), (3, 3, 4)]
    assert [(part.computed, part.begin, part.end) for part in second.parts] == [(1, 2, 3), (2, 3, 4), (4, 4, 5)]
    assert (first.waited, second.waited, schedule.total) == (0, 1, 5)
    assert schedule.added[0, 0, 0] == [0, 1]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_program_of_a_lower_ticket_may_not_wait_for_a_higher_one(is_causal):
    def turned_round(m, n, toward):
        last = 7 if not is_causal else m
        return last - hopper_order.order(m, n, 8, 128, 128, is_causal, toward)

    options = dict(is_causal=is_causal, order=turned_round)
    assert dq_schedule(8, 8, slots=8, **options).total > 0  # all of them are there
    with pytest.raises(Deadlock, match=r"ticket 0 \(key tile \d\) waits until 7 have added to query tile"):
        dq_schedule(8, 8, slots=7, **options)


@pytest.mark.parametrize("order", [lambda m, n, _: 0, lambda m, n, _: n + 1, lambda m, n, _: 2 * n])
def test_an_order_with_a_gap_or_a_turn_given_twice_deadlocks(order):
    with pytest.raises(Deadlock):
        dq_schedule(4, 4, slots=4, order=order)


# --- the queue of the forward pass -----------------------------------------------------------------------------------


def check_places(place, tiles_m_of):
    for seq_q, batch, heads_q, together, consumers, is_causal in itertools.product(
        (1, 128, 129, 1000), (1, 2), (1, 3, 4), (1, 2, 3, 7), (2, 3), (False, True)
    ):
        heads = batch * heads_q
        if together > heads:
            continue
        work = SimpleNamespace(
            seq_q=seq_q, heads=heads, heads_q=heads_q, together=together, CONSUMERS=consumers, IS_CAUSAL=is_causal
        )
        work.tiles_m = lambda work=work: tiles_m_of(work)
        tiles_m = cdiv(seq_q, consumers * ROWS)
        assert work.tiles_m() == tiles_m
        places = [place(work, tile) for tile in range(tiles_m * heads)]
        rows = [m * consumers * ROWS for m in range(tiles_m)]
        assert sorted(places) == sorted(itertools.product(rows, range(batch), range(heads_q)))
        if is_causal:  # of the heads that are done together, the last queries come first
            for first in range(0, heads, together):
                group = places[first * tiles_m : min(first + together, heads) * tiles_m]
                assert [row for row, _, _ in group] == sorted((row for row, _, _ in group), reverse=True)


TILES_M = as_python(hopper_forward.Work.tiles_m)


def test_every_tile_of_queries_is_taken_once():
    check_places(as_python(hopper_forward.Work.place), TILES_M)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gl.minimum(self.together, self.heads - first)", "self.together"),
        ("tiles_m - 1 - m", "tiles_m - m"),
        ("within // heads", "within % tiles_m"),
        ("first + within % taking_turns", "within % taking_turns"),
        ("if self.IS_CAUSAL", "if not self.IS_CAUSAL"),
        ("bh // self.heads_q, bh % self.heads_q", "bh % self.heads_q, bh // self.heads_q"),
    ],
)
def test_a_mistake_in_the_queue_is_found(old, new):
    with pytest.raises(AssertionError):
        check_places(as_python(hopper_forward.Work.place, old, new), TILES_M)


def test_a_walk_takes_the_tiles_of_keys_that_are_seen_and_no_other():
    tiles_n, tiles = as_python(hopper_forward.Work.tiles_n), as_python(hopper_forward.Work.tiles)
    for seq_k, end_m, (is_causal, offset) in itertools.product(
        (1, 127, 128, 129, 300), (64, 128, 192, 448), ((False, 0), (True, 0), (True, 100))
    ):
        seen = min(seq_k, end_m + offset) if is_causal else seq_k
        walk = dict(offset_of=lambda b, offset=offset: offset, keys_of=lambda b, seq_k=seq_k: seq_k)
        work = SimpleNamespace(**walk, IS_CAUSAL=is_causal, heads=6, tiles_m=lambda: 5)
        assert tiles_n(work, end_m, BLOCK_N) == len(range(0, seen, BLOCK_N))
        assert tiles(work) == 30


# --- the model of a multiprocessor ------------------------------------------------------------------------------------

FETCH, MULTIPLY, EXPONENTIATE = TMA_LATENCY + 1000 / TMA_BANDWIDTH, WGMMA / TENSOR, 512 / MUFU


def test_one_actor_does_one_thing_after_another():
    def actor(full):
        yield load(full, 1000, "K")
        yield wait(full, 0)
        yield product(2 * WGMMA, "S")
        yield exponentials(512)
        yield work(150)

    timeline = simulate({"me": actor(Barrier("full"))})
    assert timeline.total == pytest.approx(FETCH + 2 * MULTIPLY + EXPONENTIATE + 0.1)
    assert [(i.row, i.kind, i.text) for i in timeline.intervals] == [
        ("TMA", "load", "K"), ("me", "wait", "full"), ("tensor cores", "product", "S"),
        ("me", "exponentials", ""), ("me", "work", ""),
    ]  # fmt: skip
    assert timeline.busy("tensor cores") == pytest.approx(2 * MULTIPLY)


def test_what_overlaps_counts_once():
    spans = ((0.0, 10.0), (1.0, 2.0), (5.0, 6.0), (12.0, 13.0))
    line = Timeline([Interval("row", "work", "", *span, "me") for span in spans])
    assert line.busy("row") == 11.0


def test_an_asynchronous_product_hides_what_follows():
    def actor():
        yield product(4 * WGMMA, is_async=True)
        yield exponentials(512)
        yield wait_products(0)

    assert simulate({"me": actor()}).total == pytest.approx(max(4 * MULTIPLY, EXPONENTIATE))


def test_products_are_waited_for_from_the_oldest():
    def actor():
        for _ in range(3):
            yield product(WGMMA, is_async=True)
        yield wait_products(1)
        yield work(15, "then")

    timeline = simulate({"me": actor()})
    (then,) = timeline.of("me", "work")
    assert then.start == pytest.approx(2 * MULTIPLY)
    assert timeline.total == pytest.approx(3 * MULTIPLY)


def test_shared_units_serve_actors_in_turn():
    def actor():
        yield product(2 * WGMMA)
        yield exponentials(512)

    timeline = simulate({"a": actor(), "b": actor()})
    a, b = timeline.of("tensor cores")
    assert (a.start, a.end, b.start, b.end) == pytest.approx((0, 3 * MULTIPLY, MULTIPLY, 4 * MULTIPLY))
    assert timeline.busy("tensor cores") == pytest.approx(4 * MULTIPLY)
    assert timeline.total == pytest.approx(4 * MULTIPLY + max(EXPONENTIATE, 2 * EXPONENTIATE - MULTIPLY))


def test_a_barrier_passes_by_the_parity_of_its_phase():
    barrier = Barrier("b", 2)
    assert barrier.passes(1)
    assert not barrier.passes(0)
    barrier.arrive()
    assert not barrier.passes(0)
    barrier.arrive()
    assert barrier.passes(0)
    assert not barrier.passes(1)


def test_the_picture_of_a_barrier_says_of_every_wait_what_the_model_says(monkeypatch):
    monkeypatch.setattr(hopper_figures.style, "show", lambda fig, alt: None)
    hopper_figures.barrier([("expect", 1, 16), ("8 KiB come", 0, -8), ("8 KiB come", 0, -8)] * 2)
    texts = [text.get_text() for text in plt.gca().texts]
    barrier = Barrier("full")
    for moment in range(7):
        if moment in (3, 6):  # the second part of a tile has come
            barrier.arrive()
        said = texts[6 * moment + 3 : 6 * moment + 6]
        assert said == [str(barrier.phase), *("passes" if barrier.passes(p) else "waits" for p in (0, 1))]


def pair(fetch_parity, use_parity, laps=3):
    """A producer and a consumer with one slot between them."""
    full, empty, slot = Barrier("full"), Barrier("empty"), Slot("slot")

    def producer():
        for lap in range(laps):
            yield wait(empty, fetch_parity(lap))
            yield load(full, 1000, into=[(slot, f"tile {lap}")])

    def consumer():
        for lap in range(laps):
            yield wait(full, use_parity(lap))
            yield product(WGMMA, is_async=True, reads=[(slot, f"tile {lap}")])
            yield arrive(empty)

    return {"producer": producer(), "consumer": consumer()}


def test_a_wrong_parity_deadlocks_or_races():
    def right(lap):
        return lap % 2

    def wrong(lap):
        return lap % 2 ^ 1

    with pytest.raises(Deadlock, match=r"consumer waits since 0\.00 us for parity 0 of full, in phase 0 with 0 of 1"):
        simulate(pair(right, right))
    with pytest.raises(Race, match="consumer reads tile 0 in slot: it is not there"):
        simulate(pair(wrong, wrong))
    with pytest.raises(Race, match="producer overwrites slot, which is in use"):
        simulate(pair(wrong, right))  # the consumer lets the slot go before its product is done
    with pytest.raises(Deadlock, match=r"producer waits since .* for parity 0 of empty"):
        simulate(pair(wrong, right, laps=1) | pair(right, right))


def test_the_tile_of_another_lap_is_not_the_one_to_be_read():
    slot, full = Slot("k"), Barrier("full")

    def actor():
        yield load(full, 100, into=[(slot, 0)])
        yield wait(full, 0)
        yield product(WGMMA, reads=[(slot, 1)])

    with pytest.raises(Race, match="reads 1 in k: 0 is there"):
        simulate({"consumer": actor()})


def test_a_tile_that_is_being_overwritten_is_not_there():
    slot, full = Slot("k"), Barrier("full")

    def reads_too_late():
        yield load(full, 1e3, into=[(slot, 0)])
        yield wait(full, 0)
        yield load(full, 1e6, into=[(slot, 1)])
        yield product(1e6, reads=[(slot, 0)])

    with pytest.raises(Race, match="me reads 0 in k: it is not there"):
        simulate({"me": reads_too_late()})


def test_who_is_never_let_go_waits():
    actors = forward(64, 2, 2, True, tiles_n=4)
    del actors["consumer 1"]
    with pytest.raises(Deadlock, match="of kv_empty"):
        simulate(actors)


def test_what_is_no_operation_is_refused():
    with pytest.raises(TypeError, match="me yields 3"):
        simulate({"me": iter([3])})


def total(*args, **options):
    return simulate(forward(*args, **options)).total


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_stages_never_slow_it(head_dim):
    for overlap in (False, True):
        one = [total(head_dim, 1, stages, overlap, 12, 2) for stages in (1, 2, 3, 4)]
        assert one == sorted(one, reverse=True)
        assert one[0] > one[1]
        # Several consumers meet at shared units: by chance, a little later with more stages.
        two = [total(head_dim, 2, stages, overlap, 12, 2) for stages in (1, 2, 3, 4)]
        assert all(more < 1.03 * fewer for fewer, more in itertools.pairwise(two))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_overlap_helps(head_dim):
    for consumers in (1, 2):
        with_it, without = (total(head_dim, consumers, 4, overlap, 32, 2) for overlap in (True, False))
        assert with_it < without


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_all_products_are_made_once(consumers):
    timeline = simulate(forward(128, consumers, 2, True, tiles_n=5, tiles_m=3))
    names = sorted([f"S{j}" for j in range(5)] + [f"PV{j}" for j in range(5)])
    for me in range(consumers):
        mine = [i for i in timeline.of("tensor cores") if i.actor == f"consumer {me}"]
        assert sorted(i.text for i in mine) == sorted(names * 3)
    assert timeline.total == max(i.end for i in timeline.intervals)


def test_programs_that_share_a_multiprocessor_slow_each_other():
    assert simulate(plain(64, 2, tiles_n=3)).total > simulate(plain(64, 1, tiles_n=3)).total


def test_pictures_show_every_program(monkeypatch):
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf()))
    one, two = (simulate(forward(64, consumers, 2, True, tiles_n=3)) for consumers in (1, 2))
    hopper_figures.timeline({"one": one})
    hopper_figures.timeline({"one": one, "two": two}, 1.0, 3.0)
    schedule = dq_schedule(3, 3, slots=2)
    hopper_figures.dq_order({"full": schedule})
    hopper_figures.dq_order({"full": schedule, "causal": dq_schedule(3, 3, is_causal=True)})
    labels = [[label.get_text() for ax in figure.axes for label in ax.get_yticklabels()] for figure in drawn]
    plt.close("all")
    assert labels[0] == ["TMA", "tensor cores", "consumer 0"]
    assert labels[1] == [*labels[0], *labels[0], "consumer 1"]
    assert labels[2:] == [["0", "1", "2"], ["0", "1", "2", "0", "1", "2"]]
