"""The six small Gluon kernels: right beside PyTorch, compiled for an H100, and their mistakes noticed."""

import functools

from common.measure import offline
from phase5_tuning.hopper import model
from phase5_tuning.hopper.interpreter import interpreted
from phase5_tuning.hopper.small import bench, k1_copy, k2_ring, k3_roles, k4_consumers, k5_stay, k6_pairs
from phase5_tuning.hopper.small.lesson import KERNELS, inputs, leads, outcome, run, speeds, threads, truth

import numpy as np
import pytest
import torch
from helpers import interpreted_only
from triton.experimental.gluon import language as gl

NAMES = {module: module.__name__.rpartition(".")[2] for module in KERNELS}
MODULES = pytest.mark.parametrize("module", KERNELS, ids=NAMES.values())


@MODULES
@pytest.mark.parametrize(("heads", "seq", "d"), [(1, 128, 64), (3, 256, 64), (2, 640, 128)])
def test_it_agrees_with_pytorch(module, heads, seq, d):
    given = inputs(module, heads, seq, d)
    for seed in range(3):
        got = run(module, *given, seed=seed)
        torch.testing.assert_close(got.float(), truth(module, *given), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_ring_has_any_number_of_slots(stages):
    for module in list(KERNELS)[1:]:
        assert outcome(module, stages=stages) == "right"


@pytest.mark.parametrize("programs", [1, 5, 40])
@pytest.mark.parametrize("module", [k5_stay, k6_pairs], ids=NAMES.get)
def test_programs_that_stay_take_every_tile_once(module, programs):
    given = inputs(module, 3, 512)
    for seed in range(3):
        got = run(module, *given, seed=seed, programs=programs)
        torch.testing.assert_close(got.float(), truth(module, *given), atol=2e-3, rtol=2e-3)


@functools.cache
def compiled():
    """Every kernel at head_dim 64 and 128, in one child process."""
    launches = []
    for module in KERNELS:
        for d in (64, 128):
            given = inputs(module, 2, 1024, d)
            launches += offline.record_launches(lambda module=module, given=given: module.run(*given))
    made = iter(offline.compile_launches(launches, ["sm_90"]))
    return {(module, d): next(made) for module in KERNELS for d in (64, 128)}


@pytest.mark.slow
@interpreted_only
@pytest.mark.parametrize("d", [64, 128])
@MODULES
def test_it_compiles_for_hopper(module, d):
    c = compiled()[module, d]
    assert c.error is None, str(c)
    assert c.kernel == KERNELS[module]
    assert c.fits, str(c)
    assert not c.serialized, str(c)
    assert c.spills == 0, str(c)
    assert c.instructions["TMA"] > 0
    assert (c.instructions["wgmma"] > 0) == (module in (k4_consumers, k5_stay, k6_pairs))
    assert (c.instructions["setmaxnreg"] > 0) == (module not in (k1_copy, k2_ring))


@pytest.mark.slow
@interpreted_only
def test_a_slot_is_read_by_all_warps_before_it_is_filled_again():
    """The ring of one group of warps has no empty barrier: the compiler has the warps meet behind their fences."""
    ptx = compiled()[k2_ring, 64].assembly
    fence = ptx.index("fence.proxy.async", ptx.index("ld.shared.v4"))
    assert ptx.index("bar.sync", fence) < ptx.index("cp.async.bulk.tensor", fence)


def test_a_layout_says_which_thread_holds_what():
    rows, columns = np.mgrid[:64, :128]
    blocked = threads(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]), (64, 128))
    assert np.array_equal(blocked, rows % 8 * 16 + columns // 8)
    narrow, wide = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, k]) for k in (16, 32))
    s = threads(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]), (64, 128))
    assert np.array_equal(s, rows // 16 * 32 + rows % 8 * 4 + columns % 8 // 2)
    assert np.array_equal(s, threads(gl.DotOperandLayout(0, narrow, 2), (64, 128)))
    assert not np.array_equal(s, threads(gl.DotOperandLayout(0, wide, 4), (64, 128))), "8 bits: neighbors of four"


MISTAKES = {
    "a copy is not waited for": (k1_copy, {"mbarrier.wait(full, 0)": "mbarrier.wait(full, 1)"}, {"Race"}),
    "no bytes are announced": (k1_copy, {"x_desc.block_type.nbytes)": "0)"}, {"Race"}),
    "half the bytes are announced": (
        k1_copy,
        {"x_desc.block_type.nbytes)": "x_desc.block_type.nbytes // 2)"},
        {"Race"},
    ),
    "nobody arrives": (k1_copy, {"init(full, count=1)": "init(full, count=2)"}, {"Deadlock"}),
    "the program ends too early": (k1_copy, {"    tma.store_wait(0)": "    pass"}, {"Race"}),
    "the parity stays": (k2_ring, {"lap & 1)": "0)"}, {"Race", "Deadlock"}),
    "a slot of the next tile": (
        k2_ring,
        {"full.index(slot), v.index(slot))": "full.index(slot), v.index(0))"},
        {"Race", "Deadlock"},
    ),
    "the producer's parity": (k3_roles, {"lap & 1 ^ 1": "lap & 1"}, {"Deadlock"}),
    "the consumer's parity": (
        k3_roles,
        {"wait(kv_full.index(slot), lap & 1)": "wait(kv_full.index(slot), lap & 1 ^ 1)"},
        {"Race", "Deadlock"},
    ),
    "nothing is let go": (k3_roles, {"        mbarrier.arrive(kv_empty.index(slot), count=1)\n": ""}, {"Deadlock"}),
    "one arrival frees a slot": (
        k4_consumers,
        {"init(kv_empty.index(slot), count=2)": "init(kv_empty.index(slot), count=1)"},
        {"Race", "Deadlock"},
    ),
    "queries are not waited for": (k4_consumers, {"    mbarrier.wait(q_full, 0)\n": ""}, {"Race"}),
    "O leaves without a fence": (k4_consumers, {"    fence_async_shared()  # what": "    # what"}, {"Unfenced"}),
    "nobody is told of the end": (k5_stay, {"    mbarrier.arrive(q_full.index(side), count=1)\n": ""}, {"Deadlock"}),
    "a side's parity changes with every turn": (
        k5_stay,
        {"turn // 2 & 1)\n    return": "turn & 1)\n    return"},
        {"Race", "Deadlock"},
    ),
    "O's side is given back too early": (k5_stay, {"        tma.store_wait(0)\n": ""}, {"Race"}),
    "one product of two is waited for": (
        k6_pairs,
        {"acc, s = warpgroup_mma_wait(0, deps": "acc, s = warpgroup_mma_wait(1, deps"},
        {"Race"},
    ),
    "a pair is let go while its products are under way": (
        k6_pairs,
        {
            """            acc, s = warpgroup_mma_wait(0, deps=(acc, s))  # until here s, acc, p and p16 are theirs
            mbarrier.arrive(kv_empty.index(slot), count=1)
""": """            mbarrier.arrive(kv_empty.index(slot), count=1)
            acc, s = warpgroup_mma_wait(0, deps=(acc, s))
"""
        },
        {"Race"},
    ),
    "the last pair is announced with keys": (k6_pairs, {"if (j == 0) | (j == tiles_n):": "if j == 0:"}, {"Deadlock"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake):
    module, change, expected = MISTAKES[mistake]
    found = {outcome(module, change, seed).partition(":")[0] for seed in range(8)} - {"right"}
    assert found
    assert found <= expected


@interpreted_only
@pytest.mark.parametrize("module", bench.CASES, ids=NAMES.get)
def test_the_bench_launches_it(module, monkeypatch):
    def measure(providers, rounds, **case):
        return [case | dict(provider=name, ms=1.0, out=call()) for name, call in providers.items()]

    monkeypatch.setitem(bench.CASES, module, (2, 256))
    monkeypatch.setattr(bench.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench.timing, "measure", measure)
    with interpreted(also=[(module, KERNELS[module])]):
        ours, pytorch = bench.measured(module)
    torch.testing.assert_close(
        ours["out"].float(), pytorch["out"].float().view(ours["out"].shape), atol=2e-3, rtol=2e-3
    )


def test_two_slots_let_consumers_fall_out_of_step_and_one_does_not(monkeypatch):
    def grown(stages):
        of = leads(model.simulate(model.forward(128, 2, stages, False, tiles_n=32)))
        return of[9] - of[1]

    instruction = model.WGMMA / model.TENSOR
    assert grown(1) == pytest.approx(0)
    assert grown(2) == pytest.approx(8 * instruction, rel=0.1)
    for name in ("WGMMA", "PART"):
        monkeypatch.setattr(model, name, getattr(model, name) // 8)
    assert grown(2) == pytest.approx(instruction, rel=0.1), "an eighth of an instruction in each step"


def test_a_table_of_speeds_leaves_open_what_was_not_measured():
    lines = speeds({("a", False): 524.4, ("b", True): 449.6}, dict(a="plain", b="fifth")).splitlines()
    assert [line.split() for line in lines] == [["TFLOP/s", "full", "causal"], ["plain", "524"], ["fifth", "450"]]
