"""What the compiler makes of the Hopper kernels, for a GPU that is not here."""

import functools
import itertools
import re
from collections import Counter
from unittest import mock

from common.measure import offline, sass
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.launch import configs

import pytest
import torch
from helpers import interpreted_only

pytestmark = pytest.mark.slow
FP16, BF16 = torch.float16, torch.bfloat16
KERNELS = {
    "forward": "_attn_fwd_hopper_kernel",
    "wide": "_attn_fwd_hopper_wide_kernel",
    "backward": "_attn_bwd_hopper_kernel",
}
# Bytes a thread, at most, by head_dim.
SPILLS = {
    "forward": {64: 0, 80: 0, 96: 0, 128: 0},
    "wide": {192: 0, 256: 0},
    "backward": {64: 64, 80: 0, 96: 8, 128: 96},
}
SIZES = list(itertools.product((64, 128), (False, True)))
# Pass, head_dim, is_causal, what is special.
CASES = [
    *(("forward", *sizes, "") for sizes in SIZES),
    ("forward", 64, True, "short"),
    ("forward", 64, False, "ragged"),
    ("forward", 128, False, "few"),
    ("wide", 192, False, "few"),
    *(("wide", *sizes, "") for sizes in itertools.product((192, 256), (False, True))),
    *(("backward", *sizes, order) for sizes in SIZES for order in ("", "any order")),
    *((which, *sizes, "") for which in ("forward", "backward") for sizes in itertools.product((80, 96), (False, True))),
]
VARIANTS = [(*case, dtype) for dtype, case in itertools.product((FP16, BF16), CASES)]
LOWER_RIGHT = [
    (which, n, True, "lower right") for which, n in (("forward", 64), ("forward", 128), ("wide", 192), ("wide", 256))
]


def record(which, head_dim, is_causal, dtype, seq=2048, heads=32, offset=0):
    q, k = (torch.empty(1, n, seq, head_dim, dtype=dtype) for n in (heads, heads // 2))
    lse = torch.empty(1, heads, seq)
    with mock.patch.object(configs, "multiprocessors", return_value=132):  # an H200's
        if which != "backward":
            module = wide_forward if which == "wide" else hopper_forward
            return offline.record_launches(lambda: module.plan(q, k, k, is_causal, 0.1, 1, offset=offset)(q, k, k))
        given = q, k, k, q, lse, q, None
        return offline.record_launches(lambda: hopper_backward.plan(*given, is_causal, 0.1, 1)(*given))


def launch_of(which, head_dim, is_causal, special, dtype):
    seq = dict(short=1024, ragged=577).get(special, 2048)
    with mock.patch.object(hopper_backward, "in_order", return_value=special != "any order"):
        heads, offset = 4 if special == "few" else 32, 77 if special == "lower right" else 0
        launches = record(which, head_dim, is_causal, dtype, seq, heads, offset)
    return next(launch for launch in launches if launch.name == KERNELS[which])


@functools.cache
def compiled(dtype):
    """All variants of a dtype, in one child process, since it takes seconds to start."""
    cases = [*CASES, *LOWER_RIGHT]
    launches = [launch_of(*case, dtype) for case in cases]
    return dict(zip(cases, offline.compile_launches(launches, ["sm_90"], sass=True), strict=True))


@interpreted_only
@pytest.mark.parametrize(
    ("which", "head_dim", "is_causal", "special", "dtype"), [*VARIANTS, *((*case, BF16) for case in LOWER_RIGHT)]
)
def test_the_hopper_kernels_compile(which, head_dim, is_causal, special, dtype):
    c = compiled(dtype)[which, head_dim, is_causal, special]
    assert c.error is None, str(c)
    assert c.kernel == KERNELS[which]
    assert c.fits, str(c)
    assert c.instructions["wgmma"] > 0, str(c)
    assert c.instructions["setmaxnreg"] > 0, str(c)
    assert c.instructions["TMA"] > 0, str(c)
    assert not c.serialized, str(c)
    outside_of_the_loop = 24 if (which, head_dim, special) == ("wide", 192, "lower right") else 0
    assert c.spills <= SPILLS[which][head_dim] + outside_of_the_loop, str(c)


# What orders one thread's accesses to memory for another thread or for the TMA, in PTX without registers. Neither the
# interpreter nor results on a GPU need show that such a word is missing.
SYNCHRONIZES = re.compile(
    r"^\s*(?:@\S* )?((?:fence|membar|red|ld\.(?:acquire|relaxed)|atom|mbarrier\.(?:init|arrive\.expect)|bar\.\w+ [89],"
    r"|bar\.warp\.sync 0x|cp\.reduce|cp\.async\.bulk\.wait|wgmma\.wait)[^;]*);",
    re.MULTILINE,
)
FENCE, LEFT = "fence.proxy.async.shared", "cp.async.bulk.wait_group.read 0"
INIT, EXPECT = "mbarrier.init.shared.b64 [], ", "mbarrier.arrive.expect_tx.shared.b64 _, [], "
ALL_BUT = "wgmma.wait_group.sync.aligned "


def forward_words(head_dim, special):
    shapes = {(64, ""): (3, 4, 128), (64, "short"): (2, 4, 64), (64, "ragged"): (2, 4, 128), (128, ""): (2, 2, 128)}
    columns, pieces = (64 if head_dim == 64 else 128), (2 if head_dim in (80, 96) else 1)
    consumers, stages, block_n = shapes[columns, special.removesuffix("few")]
    tile = block_n * columns * 2
    words = {
        FENCE: 1 + consumers,  # when barriers begin; O
        LEFT: consumers * 2,  # O, before the next queries and at the end
        INIT + "1": 2 + stages,
        INIT + f"{consumers}": 2 + stages,
        ALL_BUT + "0": consumers * 3,
    }
    if consumers == 2:
        words[ALL_BUT + f"{pieces}"] = consumers  # S, while PV is computed
    # Queries; keys or values alone at the ends of a walk; both.
    return words | Counter(f"{EXPECT}{size}" for size in (consumers * 64 * columns * 2, tile, tile, 2 * tile))


def wide_words(head_dim, is_causal):
    pieces, slots, block_n = {192: (3, 3, 128), 256: (4, 4, 64)}[head_dim]
    words = {
        FENCE: 1 + 2,
        LEFT: 2 * 2,
        INIT + "1": 2 * 3 + slots,
        INIT + "2": slots,
        ALL_BUT + "0": 2 * 3,
        ALL_BUT + f"{pieces}": 2,  # S, while PV is computed
        # In the first and the next tile; the first consumer to begin with, and where it does not see a tile.
        "bar.sync 8, 256": 2 + is_causal,
        "bar.sync 9, 256": 2,
        "bar.arrive 8, 256": 2,
        "bar.arrive 9, 256": 2 + 1 + is_causal,
    }
    # Queries of both consumers; keys and values, each at one end of a walk and in it.
    return words | Counter(f"{EXPECT}{rows * head_dim * 2}" for rows in (64, 64, *[block_n] * 4))


def backward_words(head_dim, special):
    columns, pieces = (64 if head_dim == 64 else 128), (2 if head_dim in (80, 96) else 1)
    queries = 2 * 64 * 128 * 2 + 2 * 4 * {64: 128, 128: 64}[columns]
    words = {
        "atom.global.gpu.acq_rel.add.u32 , [ + 0 ],": 1,  # the ticket
        FENCE: 1 + 2 * 3,  # when barriers begin; of each consumer dS, dQ, and dK with dV
        LEFT: 2 + 2,  # consumers at their end, writers
        INIT + "1": 1 + 2 + 4 + 4,
        INIT + "2": 2,
        f"{EXPECT}{2 * 128 * columns * 2}": 1,  # K and V
        f"{EXPECT}{queries}": 1,  # Q and dO, LSE and delta
        ALL_BUT + "0": 2 * 3,
        ALL_BUT + f"{pieces}": 2 * 2,
        "bar.sync 8, 256": 2 * 2,  # dS is there, K is read
        "cp.reduce.async.bulk.tensor.2d.global.shared.add.bulk_group [, {, }], []": 2 * 2 * 2,
    }
    ordered = {
        "ld.acquire.gpu.global.b32 , []": 2 * 2,
        "fence.proxy.async": 2,
        "cp.async.bulk.wait_group 0": 2,  # until it has arrived; .read: until it has left
        "bar.warp.sync 0xffffffff": 2,
        "red.release.gpu.global.add.s32 [], 1": 2,
    }
    return words if special else words | ordered


@interpreted_only
@pytest.mark.parametrize(("which", "head_dim", "is_causal", "special", "dtype"), VARIANTS)
def test_every_word_that_orders_accesses_is_there(which, head_dim, is_causal, special, dtype):
    ptx = re.sub(r"%\w+|::cta", "", compiled(dtype)[which, head_dim, is_causal, special].assembly)
    words = [" ".join(word.split()) for word in SYNCHRONIZES.findall(ptx)]
    if which == "wide":
        expected = wide_words(head_dim, is_causal)
    else:
        expected = dict(forward=forward_words, backward=backward_words)[which](head_dim, special)
    if which != "backward" and special != "few":
        expected["atom.global.gpu.relaxed.add.u32 , [ + 0 ],"] = 1  # the queue
    assert Counter(words) == expected
    after = len(words) - next(i for i, word in enumerate(reversed(words)) if word.startswith(INIT))
    assert words[after] == FENCE, "the barriers' first state is fenced before the TMA sees it"
    if (which, special) == ("backward", ""):  # a program passes the turn on, and takes it
        given = f"{LEFT} / cp.async.bulk.wait_group 0 / bar.warp.sync 0xffffffff / red.release.gpu.global.add.s32 [], 1"
        assert " / ".join(words).count(given) == 2
        taken = re.findall(r"fence\.proxy\.async;.*?(ld\.acquire|mbarrier\.try_wait)", ptx, re.DOTALL)
        assert taken == ["mbarrier.try_wait"] * 2, "the fence comes after the last look at the count"


@interpreted_only
def test_short_causal_sequences_have_small_tiles():
    def keys(*case):
        (launch,) = record("forward", *case)
        return launch.signature["k_desc"].split(",NV")[0], launch.options["maxnreg"]

    assert keys(64, True, FP16, 1024) == ("tensordesc<fp16[1, 1, 64, 64]", 168)
    assert keys(64, True, FP16, 1025) == keys(64, False, FP16, 1024) == ("tensordesc<fp16[1, 1, 128, 64]", 128)
    assert keys(128, True, FP16, 1024) == ("tensordesc<fp16[1, 1, 128, 128]", 168)


@interpreted_only
def test_a_launch_in_gluon_is_described_with_its_layouts():
    (launch,) = record("forward", 64, True, BF16)
    assert launch.module == "phase5_tuning.hopper.forward"
    kind = launch.signature["k_desc"]
    assert kind.startswith("tensordesc<bf16[1, 1, 128, 64],NVMMASharedLayout(swizzle_byte_width=128")
    assert launch.signature["taken_ptr"] == "*i32"
    assert launch.options == dict(num_warps=4, maxnreg=128)


@interpreted_only
def test_the_backward_pass_launches_three_kernels():
    names = [launch.name for launch in record("backward", 128, False, FP16)]
    assert names == ["_attn_bwd_hopper_rows_kernel", "_attn_bwd_hopper_kernel", "_attn_bwd_hopper_dq_kernel"]


@interpreted_only
@pytest.mark.parametrize(
    ("head_dim", "widths"), [(80, {64: 44, 32: 8, 16: 16}), (96, {64: 48, 32: 24}), (128, {64: 48, 128: 16})]
)
def test_products_are_of_the_columns_that_exist(head_dim, widths):
    """S and dP are 64 wide, with an instruction for each 16 columns of head_dim; gradients are as wide as head_dim."""
    ptx = compiled(FP16)["backward", head_dim, False, ""].assembly
    assert Counter(int(n) for n in re.findall(r"mma_async\S*m64n(\d+)k16", ptx)) == widths


@interpreted_only
@pytest.mark.parametrize(
    ("case", "registers"),
    [
        (("forward", 128, False, ""), (32, 32)),
        (("forward", 128, True, ""), (32, 32)),
        (("forward", 64, True, "short"), (16, 16)),
        (("forward", 64, False, "ragged"), (16, 32)),
        (("wide", 192, False, ""), (16, 32)),
        (("wide", 256, False, ""), (32, 16)),
        (("wide", 256, True, ""), (32, 16)),
    ],
)
def test_queries_in_registers_stay_there(case, registers):
    """S and PV both take their left factor from registers. ptxas 12.8 has given both the same ones in a plain kernel,
    so that P overwrote the queries (phase5_tuning/notes/compilers.md)."""
    turn = sass.turn(compiled(FP16)[case].sass)
    left = {}  # by the first register of the sum
    for x in turn:
        if product := re.search(r"HGMMA\S+ R(\d+), R(\d+), gdesc", x.text):
            left.setdefault(product[1], set()).update(int(product[2]) + i for i in range(4))
    s, pv, *pieces = left.values()
    assert (len(s), len(pv)) == registers
    assert all(piece == pv for piece in pieces)
    assert not s & pv
    written = {int(to[1]) for x in turn if (to := re.match(r"(?:@!?\w+ )?(?!HGMMA)[A-Z]\S* R(\d+),", x.text))}
    assert written & pv, "P is rounded to 16 bits in every turn"
    assert not written & s


@interpreted_only
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_turn_skips_the_rescaling_of_o(is_causal):
    turn = sass.turn(compiled(FP16)["forward", 128, is_causal, ""].sass)
    position = {x.address: n for n, x in enumerate(turn)}
    skipped = [[y.name for y in turn[n + 1 : position.get(x.target, 0)]] for n, x in enumerate(turn) if x.target]
    assert ["FMUL"] * 64 in skipped
