"""How long arithmetic takes beside a product: `python -m phase5_tuning.bench.beside --name h100_hopper_beside`, on an
H100 or H200.

A multiprocessor runs a program of two warpgroups. The first multiplies 64 x 128 by 128 x 128, with its left factor in
shared memory or in registers. Arithmetic on a tile of 64 x 64 in registers is done alone, by the same warpgroup while
its product is under way, or by the other one. A row has the clocks of a product, from one to the next, and those of the
arithmetic.
"""

from common import runtime
from common.measure import records
from phase5_tuning.hopper.parts import meet
from phase5_tuning.launch import configs

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

NONE = gl.constexpr("none")
SHARED, REGISTERS = gl.constexpr("shared memory"), gl.constexpr("registers")
MULTIPLY, MULTIPLY_ADD = gl.constexpr("128 FMUL"), gl.constexpr("128 FFMA")
EXPONENTIAL = gl.constexpr("32 FFMA, 32 MUFU")
TURNS = 1000  # that are counted
LAUNCHES = 3


@gluon.jit
def _clock():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %clock; // $1", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _compute(x, ARITHMETIC: gl.constexpr):
    """Arithmetic that takes less time than a product: 32 elements a thread."""
    if ARITHMETIC == EXPONENTIAL:
        x = gl.exp2(x * 0.5 - 1.0)
    else:
        for _ in gl.static_range(4):
            x = x * 0.999
            if ARITHMETIC == MULTIPLY_ADD:
                x = x + 0.25
    return x


@gluon.jit
def _sum(x):
    return gl.sum(gl.sum(x, axis=1), axis=0)


@gluon.jit
def _work(a_tile, b_tile, out_ptr, dump_ptr, turns, LEFT: gl.constexpr, ARITHMETIC: gl.constexpr, ME: gl.constexpr):
    """Turns of a product, of arithmetic, or of arithmetic while a product of the same warps is under way. Stores how
    many clocks all turns took, and the arithmetic of all turns.
    """
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = a_tile.load(gl.DotOperandLayout(0, SUM, 2))
    total = gl.zeros([64, 128], gl.float32, SUM)
    x = gl.full([64, 64], 0.5, gl.float32, HALF)
    arithmetic = 0
    begin = _clock()
    if LEFT == NONE and ARITHMETIC == NONE:
        turns *= 0
    one = gl.num_programs(1)  # which the compiler does not know: it unrolls nothing
    while turns > 0:
        if LEFT == REGISTERS:
            total = warpgroup_mma(a, b_tile.permute((1, 0)), total, is_async=True)
        elif LEFT == SHARED:
            total = warpgroup_mma(a_tile, b_tile.permute((1, 0)), total, is_async=True)
        meet(ME, 128)  # the assembler moves no wait for products across it
        issued = _clock()
        if ARITHMETIC != NONE:
            x = _compute(x, ARITHMETIC)
        arithmetic += _clock() - issued
        if LEFT != NONE:
            total = warpgroup_mma_wait(0, deps=(total,))
        turns -= one
    place = 2 * gl.program_id(0) + ME
    gl.store(out_ptr + 2 * place, _clock() - begin)
    gl.store(out_ptr + 2 * place + 1, arithmetic)
    gl.store(dump_ptr + place, _sum(x) + _sum(total))  # else the compiler leaves all of it out


@gluon.jit
def _beside_kernel(
    out_ptr, dump_ptr, turns, turns_of_the_other,
    LEFT: gl.constexpr, ARITHMETIC: gl.constexpr, OF_THE_OTHER: gl.constexpr,
):  # fmt: skip
    """A warpgroup's product and arithmetic, and the other one's arithmetic. out: for each warpgroup the clocks of all
    its turns, and those of their arithmetic. Grid: as many programs as multiprocessors.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a_tile = gl.allocate_shared_memory(gl.float16, [64, 128], TILE)
    b_tile = gl.allocate_shared_memory(gl.float16, [128, 128], TILE)
    a_tile.store(gl.full([64, 128], 0.01, gl.float16, ROWS))
    b_tile.store(gl.full([128, 128], 0.01, gl.float16, ROWS))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_work, (a_tile, b_tile, out_ptr, dump_ptr, turns, LEFT, ARITHMETIC, 0)),
            (_work, (a_tile, b_tile, out_ptr, dump_ptr, turns_of_the_other, NONE, OF_THE_OTHER, 1)),
        ],
        [4],
        [240],
    )


def clocks(left: str, own: str, of_the_other: str) -> dict[str, float]:
    """Clocks of a "product" and of "arithmetic", where there are any: the median of all multiprocessors and launches.

    Of two warpgroups the one whose clocks are not wanted works longer, so that every turn of the other has it beside.
    """
    none, longer = NONE.value, 8 * TURNS
    found = {}
    if left != none:
        found["product"] = _launched(left, own, of_the_other, TURNS, longer)[..., 0, 0]
    if own != none:
        found["arithmetic"] = _launched(left, own, of_the_other, TURNS, longer)[..., 0, 1]
    if of_the_other != none:
        found["arithmetic"] = _launched(left, own, of_the_other, longer, TURNS)[..., 1, 1]
    return {what: round(out.double().median().item() / TURNS, 1) for what, out in found.items()}


def _launched(left, own, of_the_other, turns, turns_of_the_other):
    """What LAUNCHES launches store: (launches, multiprocessors, warpgroups, 2)."""
    programs = configs.multiprocessors(torch.cuda.current_device())
    stored = torch.empty(LAUNCHES, programs, 2, 2, dtype=torch.int32, device=runtime.DEVICE)
    sums = torch.empty(programs, 2, device=runtime.DEVICE)
    for out in stored:
        _beside_kernel[(programs,)](
            out, sums, turns, turns_of_the_other,
            LEFT=left, ARITHMETIC=own, OF_THE_OTHER=of_the_other, num_warps=4, maxnreg=240,
        )  # fmt: skip
    return stored


def run() -> list[dict]:
    """A row for each product and arithmetic: alone, in one warpgroup, in two."""
    none = NONE.value
    products = SHARED.value, REGISTERS.value
    kinds = MULTIPLY.value, MULTIPLY_ADD.value, EXPONENTIAL.value
    cases = [("alone", left, none, none) for left in products]
    cases += [("alone", none, kind, none) for kind in kinds]
    for left in products:
        cases += [("same warpgroup", left, kind, none) for kind in kinds]
        cases += [("other warpgroup", left, none, kind) for kind in kinds]
    rows = []
    for where, left, own, of_the_other in cases:
        case = dict(where=where, left=left, arithmetic=of_the_other if own == none else own)
        rows.append(case | dict(clocks=clocks(left, own, of_the_other)))
        print(rows[-1], flush=True)
    return rows


KERNELS = (_beside_kernel,)
SETTINGS = (run,)


if __name__ == "__main__":
    raise SystemExit(records.main("phase5_tuning", KERNELS, run, settings=SETTINGS))
