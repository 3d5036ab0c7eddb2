"""Every kernel of the ladder, and the Hopper kernels, as an H100 or H200 would run them, compiled on any CPU.

    ladder()["forward", 128, True, "base 2"]        # its machine code, registers, shared memory: a `Compiled`
    turn("forward", 128, True, "base 2")["FMUL"]    # how often a warp runs FMUL in a turn of the loop
    compiled({"plain": plain_launch(128)})          # the last rung with a tile of one's own, or a Hopper kernel

A kernel is "forward", "dkdv" or "dq". A case is (head_dim, is_causal).
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

from common import runtime, verify_results
from common.edited import Stage
from common.measure import offline, sass
from common.measure.offline import Compiled, RecordedLaunch
from common.source import source
from common.verify.inputs import make_qkv
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.ladder import dkdv
from phase5_tuning.launch import configs
from phase5_tuning.launch.configs import Config
from phase5_tuning.passes import forward as launcher
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import torch

RUNG = {rung.name: rung for rung in LADDER}
FORWARD = ["as in phases 3 and 4", "tiles", "base 2", "late sums", "masks at edges", "descriptors"]
BACKWARD = ["as in phases 3 and 4", "tiles", "base 2", "masks at edges", "transposed dK, dV", "descriptors"]
PASSES = {"fwd": ("forward",), "bwd": ("dkdv", "dq")}  # the kernels of a pass
RUNGS = {"forward": FORWARD, "dkdv": BACKWARD, "dq": BACKWARD}  # those whose turn of the loop differs
PRODUCTS = {"forward": 2, "dkdv": 4, "dq": 3}  # of a kernel, in each of its tiles
CASES = [(64, False), (64, True), (128, False), (128, True)]  # head_dim, is_causal
LAST, KERNEL = "descriptors", "_attn_fwd_descriptors_kernel"
SMS = 132  # multiprocessors of an H100 or H200

# The forward kernel of the last rung, with the product S of the next tile issued before this tile's softmax.
AHEAD = Stage(
    launcher,
    (
        KERNEL,
        """    for start_n in range(0, end_n, BLOCK_N):
        k = k_desc.load([b, h // group, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
""",
        """    k = k_desc.load([b, h // group, 0, 0]).reshape(BLOCK_N, BLOCK_D)
    s_next = tl.dot(q, tl.trans(k))
    for start_n in range(0, end_n, BLOCK_N):
        s = s_next
        k = k_desc.load([b, h // group, start_n + BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
        s_next = tl.dot(q, tl.trans(k))  # of the next tile, before this tile's softmax
""",
    ),
)

# dK/dV of the rung before "masks at edges" and of that rung; the line that tells the compiler that the loop runs.
BASE2, EDGES = "_attn_bwd_dkdv_base2_kernel", "_attn_bwd_dkdv_edges_kernel"
LOOP = "    for g in range(0, group):\n"
ASSUME = "    tl.assume(start < seq_q)  # ptxas may serialize the products of a loop that need not run at all\n"
WITHOUT_LINE = Stage(dkdv, (EDGES, ASSUME, ""))
WITH_LINE = Stage(dkdv, (BASE2, LOOP, ASSUME + LOOP))


def chosen(kernel: str, head_dim: int, is_causal: bool, tma: bool = True) -> Config:
    """The tile that is shipped for an H100 or H200 with enough to do."""
    row = configs.TABLE[kernel, head_dim, tma]
    return row.causal if is_causal else row.full


def tile_of(kernel: str, head_dim: int, is_causal: bool, name: str) -> Config:
    """The tile with which a rung runs on an H100 or H200."""
    if not RUNG[name].tuned:
        return configs.plain(kernel, head_dim, torch.float16)
    return chosen(kernel, head_dim, is_causal, tma=name == LAST)


def _launch(kernel: str, head_dim: int, is_causal: bool, name: str, config: Config | None = None) -> RecordedLaunch:
    """The launch of one kernel of a rung, in fp16."""
    q = torch.empty(1, 4, 1024, head_dim, dtype=torch.float16, device=runtime.DEVICE)
    lse = torch.empty(1, 4, 1024, device=runtime.DEVICE)
    rung, config = RUNG[name], config or tile_of(kernel, head_dim, is_causal, name)

    def call():
        if kernel == "forward":
            return attention_forward(q, q, q, is_causal, kernel=rung.forward, config=config)
        needs = dict(needs_q=kernel == "dq", needs_kv=kernel == "dkdv")
        of_rung = dict(dkdv_kernel=rung.dkdv, dq_kernel=rung.dq) | {f"{kernel}_config": config}
        return attention_backward(q, q, q, q, lse, q, is_causal=is_causal, **needs, **of_rung)

    with mock.patch.object(configs, "capability", return_value=(9, 0)):
        return offline.record_launches(call)[-1]


def plain_launch(head_dim: int, **tile) -> RecordedLaunch:
    """The last rung's launch, under a full mask. tile: another `Config` than the tuned one."""
    return _launch("forward", head_dim, False, LAST, Config(**tile) if tile else None)


def hopper_launch(
    head_dim: int, is_causal: bool = False, seq: int = 1024, heads: int = 4, **changes
) -> tuple[RecordedLaunch, dict]:
    """(launch, its arguments by name) of the Hopper forward kernel, in fp16."""
    q = torch.empty(1, heads, seq, head_dim, dtype=torch.float16, device=runtime.DEVICE)
    made = []

    def call():
        made.append(hopper_forward.plan(q, q, q, is_causal, head_dim**-0.5, 1, **changes).launch)
        made[0](q, q, q, q, torch.empty(1, heads, seq), torch.zeros(1, dtype=torch.int32))

    with mock.patch.object(configs, "multiprocessors", return_value=SMS):
        (launch,) = offline.record_launches(call)
    names = made[0].kernel.arg_names
    return launch, dict(zip(names[-len(made[0].rest) :], made[0].rest, strict=True))


def compiled(launches: Mapping[object, RecordedLaunch]) -> dict[object, Compiled]:
    """What the compiler makes of launches for an H100 or H200, by their keys."""
    made = offline.compile_launches(launches.values(), sass=True, processes=2)
    return dict(zip(launches, made, strict=True))


@cache
def ladder() -> Mapping[tuple[str, int, bool, str], Compiled]:
    """Each rung's kernels in four cases: 72 of them, in some minutes on a slow CPU."""
    jobs = [(kernel, d, c, name) for kernel, names in RUNGS.items() for d, c in CASES for name in names]
    return compiled({job: _launch(*job) for job in jobs})


def last_rung(tiles: Iterable[tuple[int, bool, Config]]) -> dict[tuple[int, bool, Config], Compiled]:
    """The forward kernel of the last rung with other tiles: (head_dim, is_causal, config) of each."""
    return compiled({(d, c, config): _launch("forward", d, c, LAST, config) for d, c, config in tiles})


@cache
def turn(kernel: str, head_dim: int, is_causal: bool, name: str) -> Counter:
    """How often a warp runs each instruction in a turn of a kernel's loop."""
    return sass.counted(sass.turn(ladder()[kernel, head_dim, is_causal, name].sass))


def next_product_early() -> tuple[str, dict[int, Compiled]]:
    """The verdict on `AHEAD`, and what the compiler makes of it at head_dim 128, causal, by num_stages."""
    kernel = AHEAD[KERNEL]
    q = torch.empty(1, 4, 1024, 128, dtype=torch.float16, device=runtime.DEVICE)

    def attention(q, k, v, **options):
        return attention_forward(q, k, v, kernel=kernel, **options)

    def launch_of(stages):
        config = replace(chosen("forward", 128, True), num_stages=stages)
        return offline.record_launches(lambda: attention(q, q, q, is_causal=True, config=config))[-1]

    with AHEAD, mock.patch.object(configs, "capability", return_value=(9, 0)):
        verdict = verify_results(attention, *make_qkv(1, 2, 100, 32), is_causal=True).verdict
        launches = {stages: launch_of(stages) for stages in (1, 2, 3)}
    text = "from phase5_tuning.ladder.forward import *\n\n\n" + source(kernel)
    return verdict, compiled({stages: replace(one, source=text) for stages, one in launches.items()})


@cache
def assumed() -> Mapping[tuple[str, bool, bool], Compiled]:
    """dK/dV at head_dim 64 without and with the line `ASSUME`: (rung, is_causal, whether it has the line)."""
    kernels = {("base 2", True): WITH_LINE[BASE2], ("masks at edges", False): WITHOUT_LINE[EDGES]}
    made = {}
    for (name, has), kernel in kernels.items():
        text = "from phase5_tuning.ladder.dkdv import *\n\n\n" + source(kernel)
        for c in (False, True):
            made[name, c, not has] = ladder()["dkdv", 64, c, name]
            made[name, c, has] = replace(_launch("dkdv", 64, c, name), source=text)
    new = compiled({job: one for job, one in made.items() if isinstance(one, RecordedLaunch)})
    return made | new


def of_learner(attention: Callable, **tile: int) -> Compiled:
    """A learner's attention(q, k, v, is_causal) at head_dim 128, causal, in fp16. tile: its block_m and block_n."""
    q = torch.empty(1, 4, 1024, 128, dtype=torch.float16, device=runtime.DEVICE)
    (launch,) = offline.record_launches(lambda: attention(q, q, q, True, **tile))
    text = Path(inspect.getsourcefile(attention)).read_text()  # the file of an answer is in no list of modules
    return compiled({0: replace(launch, source=text)})[0]
