"""Runs the answer's writers alone and judges each step; then the backward kernel with them; and compiles it."""

from dataclasses import dataclass
from types import SimpleNamespace

from common import make_qkv
from common.learn.check.require import explained_in, reject
from common.verify.reference import naive_attention
from phase5_tuning import given
from phase5_tuning.checks import FP16, hopper_case, on_model, require_compiled, wrong_rows
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.backward import WRITERS, Work
from phase5_tuning.hopper.machine import inside

import torch
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ALONE = [  # BLOCK_M, BLOCK_D, IS_CAUSAL, tiles of queries in a head, heads of a group, tile of keys
    (128, 64, False, 5, 1, 0),
    (128, 64, False, 3, 2, 2),
    (64, 128, True, 9, 1, 2),
    (64, 128, True, 6, 2, 0),
]
CASES = [  # heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal
    (1, 1, 300, 500, 64, False),
    (2, 1, 300, 300, 128, True),
]
SEEDS = range(2)
FOR_EVER = "its consumer waits there before it stores the next part, for ever"


def check(answer):
    if "_write" in answer.write.fn.__code__.co_names:
        reject("write calls _write of hopper_backward: write it out")
    for ordered in (True, False):
        for case in ALONE:
            for me in range(WRITERS.value):
                with explained_in("2.2"):
                    _Alone(answer.write, case, ordered, me).run()
    for ordered in (True, False):
        for case in CASES if ordered else CASES[:1]:
            _check_case(answer, case, ordered)
    q, k, v = make_qkv(1, 4, 300, 64, heads_kv=2, seq_k=256, dtype=FP16)
    tensors = q, k, v, q, torch.empty(1, 4, 300), q, None
    call = lambda: hopper_backward.plan(*tensors, False, 0.125, 1)(*tensors)  # noqa: E731
    require_compiled(answer, hopper_backward, "_attn_bwd_hopper_kernel", call, "_write = write")
    runs = len(CASES) * len(SEEDS)
    return (
        f"each step of {len(ALONE)} programs, {runs} runs in the interpreter with the same bits in each, others in any "
        "order; it compiles for an H100"
    )


class _Alone:
    """A writer without its kernel: what it asks for is noted and judged, and nobody lets it wait."""

    def __init__(self, write, case, ordered, me):
        self.write, self.ordered, self.me = write, ordered, me
        block_m, block_d, is_causal, tiles_m, group, n = case
        self.work = _Work(
            BLOCK_M=block_m, BLOCK_D=block_d, IS_CAUSAL=is_causal, tiles_m=tiles_m, tiles_n=n + 3, group=group, n=n,
            toward=1, b=0, h=1, heads_q=2 * group, dq_sum="dq_sum", count_ptr=0,
        )  # fmt: skip
        steps = self.work.steps()
        self.steps = [
            (self.work.query_tile(s // steps, m), self.work.order(m))
            for s in range(me, steps * group, WRITERS.value)
            for m in [self.work.tile_m(s % steps)]
        ]
        self.mine = {2 * me: 0, 2 * me + 1: 0}  # its places, and how often it has let each of them go
        self.full, self.copied, self.read = set(), set(), set()  # places and laps
        self.turn, self.added = set(), []  # tiles

    def run(self):
        memory = SimpleNamespace(**{of: _Places(of) for of in ("dq", "dq_full", "dq_empty")})
        barrier = SimpleNamespace(wait=self._wait, arrive=self._arrive)
        copies = SimpleNamespace(async_copy_shared_to_global=self._store, store_wait=self._store_wait)
        words = (mbarrier, barrier), (given.tma, copies), (given.tma_add, self._add)
        words += (given.await_count, self._await_count), (given.release_count, self._release_count)
        interpreter.Interpreted(self.write, replaced=words)[(1,)](self.work, memory, self.ordered, self.me)
        for place, laps in self.mine.items():
            if laps < len(self.steps):
                self._stop(place, f"nobody lets dq_empty[{place}] go: {FOR_EVER}")
        if self.ordered and len(self.added) < len(self.steps):
            self._stop(2 * self.me, "nobody says that this program has added: the next one waits for ever")

    def _stop(self, place, why):
        order = "in the fixed order" if self.ordered else "in any order"
        lap = min(self.mine[place], len(self.steps) - 1)
        (_, before), step = self.steps[lap], self.me + WRITERS.value * lap
        reject(f"writer {self.me}, {order}, step {step}, number {before} at its tile: {why}")

    def _of(self, part, kind, what):
        """The place's number."""
        first, second = self.mine
        if getattr(part, "of", None) != kind:
            self._stop(first, f"{what} takes one of memory.{kind}, got {part}")
        if part.i not in self.mine:
            self._stop(first, f"{part} is the other writer's: this one has places {first} and {second}")
        if self.mine[part.i] == len(self.steps):
            self._stop(part.i, f"{part} is used once more than there are steps")
        return part.i

    def _wait(self, barrier, parity):
        if barrier.of == "dq_empty":
            self._stop(
                2 * self.me, f"{barrier} is where a consumer waits. A writer waits until a part is there: dq_full"
            )
        place = self._of(barrier, "dq_full", "wait")
        lap = self.mine[place]
        if parity & 1 != lap & 1:
            fresh = "A fresh barrier lets parity 1 pass: so the first wait is over before anybody has stored a part"
            later = "That phase is over: each of the writer's steps completes one more, so the parity changes each time"
            why = f"{later if lap else fresh} (hopper_forward, section 2)"
            self._stop(place, f"it waits at {barrier} with parity {int(parity)}. {why}")
        self.full.add((place, lap))

    def _arrive(self, barrier, count=1, pred=True):
        if barrier.of == "dq_full":
            self._stop(2 * self.me, f"{barrier} is for the consumers to arrive at. A writer lets go at dq_empty")
        place = self._of(barrier, "dq_empty", "arrive")
        now = place, self.mine[place]
        if now not in self.copied:
            self._stop(place, f"it lets {barrier} go before it has copied the part: the consumer overwrites it")
        if now not in self.read:
            why = "before the copy has read the part: a copy goes on after its line, so wait first (section 2.2)"
            self._stop(place, f"it lets {barrier} go {why}")
        if self.steps[now[1]][0] in self.added:
            why = "its sum has arrived, and so long the consumer waits: let go once the copy has read the part"
            self._stop(place, f"it lets {barrier} go only when {why} (section 2.2)")
        self.mine[place] += 1

    def _store(self, to, where, part):
        self._copy(to, where, part, adds=False)

    def _add(self, to, where, part):
        self._copy(to, where, part, adds=True)

    def _copy(self, to, where, part, adds):
        place = self._of(part, "dq", "a copy")
        lap = self.mine[place]
        tile, before = self.steps[lap]
        if (place, lap) not in self.full:
            self._stop(place, f"it copies {part} before it has waited at dq_full[{place}]: the part may not be there")
        if (place, lap) in self.copied:
            self._stop(place, f"it copies {part} twice")
        if self.ordered and before and tile not in self.turn:
            self._stop(place, f"it copies {part} before its turn: others may not have added yet, and the bits vary")
        if adds and self.ordered and before == 0:
            self._stop(place, "the first program adds. Nobody has filled the sum with zeros: it must store")
        if not adds and not (self.ordered and before == 0):
            first = (
                "Only the first program stores" if self.ordered else "Programs come as they like, and the sum is zeros"
            )
            self._stop(place, f"it stores {part} over what others have added. {first}: add")
        self._require_corner(place, tile, [int(x) for x in where])
        self.copied.add((place, lap))

    def _require_corner(self, place, tile, where):
        second, block_m = place % 2, self.work.BLOCK_M
        right = [tile * block_m + second * (block_m - given.ROWS.value), second * (self.work.BLOCK_D - 64)]
        if where != right:
            self._stop(place, f"dq[{place}] goes to row and column {where}, where {right} is right")

    def _store_wait(self, n):
        if n == 0:
            self.read |= self.copied

    def _await_count(self, pointer, n):
        if not self.ordered:
            self._stop(2 * self.me, "it waits for a count. In any order nobody counts: it waits for ever")
        place = min(self.mine, key=self.mine.get)
        tile, before = self.steps[self.mine[place]]
        if pointer in [later for later, _ in self.steps[self.mine[place] + 1 :]]:
            self._stop(place, f"it goes on, and nobody has let dq_empty[{place}] go: {FOR_EVER}")
        if (pointer, n) != (tile, before):
            told = f"until the count of tile {int(pointer)} is {int(n)}"
            self._stop(place, f"it waits {told}, where {before} programs add to tile {tile} before this one")
        self.turn.add(tile)

    def _release_count(self, pointer):
        if not self.ordered:
            self._stop(2 * self.me, "it counts. In any order nobody reads the count")
        laps = [lap for lap, (tile, _) in enumerate(self.steps) if tile == pointer]
        if not laps:
            self._stop(2 * self.me, f"it says that it has added to tile {int(pointer)}, which is not this writer's")
        if pointer in self.added:
            self._stop(2 * self.me, "it says twice that it has added: the one after next adds too early")
        if not all((place, laps[0]) in self.copied for place in self.mine):
            why = "before it has copied both parts: the next program adds at the same time"
            self._stop(2 * self.me, f"it says that it has added {why}")
        self.added.append(pointer)
        self.read |= self.copied  # it waits until all copies have arrived


class _Work(SimpleNamespace):
    """A program's work, as the kernel's."""

    first_m, steps, tile_m, query_tile, order = (
        interpreter.function(of) for of in (Work.first_m, Work.steps, Work.tile_m, Work.query_tile, Work.order)
    )


@dataclass(frozen=True)
class _Places:
    """Parts of dQ, or barriers; one of them if i is given."""

    of: str
    i: int | None = None

    def index(self, i):
        return _Places(self.of, inside(i, 2 * WRITERS.value))

    def __str__(self):
        return f"{self.of}[{self.i}]"


def _check_case(answer, case, ordered):
    said, q, k, v = hopper_case(1, *case)
    said, is_causal = said + ", in any order" * (not ordered), case[-1]
    o, lse, _ = naive_attention(*(t.double() for t in (q, k, v)), is_causal=is_causal)
    o, lse, do = o.to(FP16), lse.float(), q.flip(2)

    def gradients(replaced=(), seed=0):
        tensors = q, k, v, o, lse, do, None
        with interpreter.interpreted(seed, replaced=replaced):
            return hopper_backward.plan(*tensors, is_causal, q.shape[3] ** -0.5, 1, ordered)(*tensors)

    right, tolerance = gradients(), dict(rtol=2e-2, atol=2e-2)
    for seed in SEEDS:
        with on_model(said):
            found = gradients([(hopper_backward._write, answer.write)], seed)
        for name, got, wanted in zip(("dq", "dk", "dv"), found, right, strict=True):
            close = torch.allclose(got, wanted, **tolerance)
            if not close or (ordered and not torch.equal(got, wanted)):
                why = f"the last bits of {name} are not those of the fixed order: parts are added in another"
                unfilled = "its sum or a part was used before anybody filled it"
                reject(f"{said}: {why if close else wrong_rows(name, got, wanted, unfilled, **tolerance)}")
