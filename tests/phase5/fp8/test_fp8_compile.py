"""What the compiler makes of the FP8 kernels, for GPUs that are not here."""

import functools
import itertools
import re
from unittest import mock

from common.measure import offline, sass
from phase5_tuning.fp8 import forward, plain, quantize
from phase5_tuning.launch import configs

import pytest
import torch
from helpers import interpreted_only

CASES = list(itertools.product((128, 64), (False, True), (False, True)))  # head_dim, is_causal, line
cases = pytest.mark.parametrize(("head_dim", "is_causal", "line"), CASES)
pytestmark = pytest.mark.slow


def tensors(head_dim, dtype=torch.bfloat16):
    q, k = (torch.empty(2, heads, 2048, head_dim, dtype=dtype) for heads in (4, 2))
    return q, k, quantize.room(q, k, head_dim), torch.empty(q.shape[:3])


def recorded(call):
    with mock.patch.object(configs, "multiprocessors", return_value=132):  # an H200's
        (launch,) = offline.record_launches(call)
    return launch


def hopper_launch(head_dim, is_causal, line):
    q, _, codes, lse = tensors(head_dim)
    taken = torch.zeros(1, dtype=torch.int32)

    def call():
        forward.plan(codes, q, is_causal, 0.1, line)(*codes[:3], q, *codes[3:], lse, taken)

    return recorded(call)


def quantize_launch(head_dim, rotate=True):
    q, k, codes, _ = tensors(head_dim)
    return recorded(lambda: quantize.plan(q, k, k, head_dim, rotate, 1)(q, k, k, *codes))


def plain_launch(head_dim, line, half):
    q, _, codes, lse = tensors(head_dim)
    if half:
        codes = codes._replace(**{name: getattr(codes, name).half() for name in "qkv"})
    return recorded(lambda: plain.plan(codes, q, True, 0.1, line)(*codes[:3], q, *codes[3:], lse))


@functools.cache
def compiled(head_dim):
    """Variants of one head_dim in one child process, since it takes seconds to start."""
    cases = [case for case in CASES if case[0] == head_dim]
    made = offline.compile_launches([hopper_launch(*case) for case in cases], ["sm_90"], sass=True)
    return dict(zip(cases, made, strict=True))


def opcodes(listing):
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", listing)


@interpreted_only
@cases
def test_the_hopper_kernel_compiles(head_dim, is_causal, line):
    c = compiled(head_dim)[head_dim, is_causal, line]
    assert c.error is None, str(c)
    assert c.fits, str(c)
    # At 64 a consumer has 160 registers: S, acc, PV and P's codes before and after are 160. One number moves out.
    assert c.spills <= (64 if head_dim == 64 else 0), str(c)
    assert not c.serialized, str(c)
    consumers = {64: 3, 128: 2}[head_dim]
    assert c.instructions["setmaxnreg"] > 0
    # Of P, twice a consumer: of the first tile and of the next ones. Alpha, of two rows.
    assert c.instructions["ex2"] == consumers * (2 if line else 2 * 64 + 2)
    found = opcodes(c.sass)
    assert "QGMMA" in found
    assert "HGMMA" not in found
    # Codes stay where they are: of the line, one for four codes; exact, none.
    per_consumer = 2 * 16 if line else 0
    assert abs(found.count("PRMT") - consumers * per_consumer) <= 8 * consumers, found.count("PRMT")


@interpreted_only
@cases
def test_every_word_that_orders_accesses_is_there(head_dim, is_causal, line):
    ptx = compiled(head_dim)[head_dim, is_causal, line].assembly
    consumers, stages = {64: (3, 4), 128: (2, 3)}[head_dim]
    counts = {
        "fence.proxy.async.shared": 1 + consumers,  # when barriers begin, and ones are there; O
        "cp.async.bulk.wait_group.read \t0": consumers * 2,  # O, before the next one and at the end
        "wgmma.wait_group.sync.aligned 0": consumers * 3,
        "wgmma.wait_group.sync.aligned 2": consumers,  # S, while PV and its sums are computed
        "mbarrier.init": 2 * 2 + 2 * stages,
    }
    assert {word: ptx.count(word) for word in counts} == counts


@interpreted_only
@pytest.mark.parametrize("is_causal", [False, True])
def test_p_keeps_its_registers_until_its_products_end(is_causal):
    """P's next codes, whose registers are those of the codes before, are made after the products that read these."""
    turn = [x.text for x in sass.turn(compiled(128)[128, is_causal, False].sass.replace("QGMMA", "HGMMA"))]
    left = {}  # by the first register of the sum
    for product in filter(None, (re.search(r"HGMMA\S+ R(\d+), R(\d+), gdesc", text) for text in turn)):
        left.setdefault(product[1], set()).update(int(product[2]) + i for i in range(4))
    pv, sums = left.values()
    assert len(pv) == 16
    assert pv == sums
    last_wait = max(i for i, text in enumerate(turn) if "DEPBAR.LE gsb0, 0x0" in text)
    moved = r"(?:F2FP|IMAD\.MOV|MOV)\S* R(\d+),"
    written = [(i, int(to[1])) for i, text in enumerate(turn) if (to := re.match(moved, text))]
    assert pv <= {to for _, to in written}
    assert all(i > last_wait for i, to in written if to in pv)


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_89", "sm_100", "sm_120"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_other_kernels_compile(head_dim, target):
    launches = [
        quantize_launch(head_dim),
        quantize_launch(head_dim, rotate=False),
        plain_launch(head_dim, False, False),
    ]
    for c in offline.compile_launches([*launches, plain_launch(head_dim, True, False)], [target]):
        assert c.error is None, str(c)
        assert c.fits, str(c)
        assert c.spills <= 64, str(c)  # the line's plain kernel, at head_dim 128


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_the_plain_kernel_compiles_where_there_is_no_e4m3(target):
    for c in offline.compile_launches([plain_launch(d, False, True) for d in (64, 128)], [target]):
        assert c.error is None, str(c)
        assert c.fits, str(c)
