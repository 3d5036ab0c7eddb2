"""Checks the budgets, the choice on lists drawn at random, and both against what the compiler makes of a few tiles."""

import itertools
import random
from unittest import mock

from common import runtime
from common.learn.check.require import reject
from common.measure import offline
from common.runtime import padded_dim
from phase5_tuning.checks import require_function
from phase5_tuning.ladder import forward
from phase5_tuning.launch import configs
from phase5_tuning.launch.configs import Config
from phase5_tuning.passes.forward import attention_forward

import torch

# head_dim, BLOCK_M, BLOCK_N, num_warps, num_stages: a few are drawn and compiled.
TILES = [(64, 64, 64, 4, 1), (64, 64, 64, 4, 3), (64, 128, 64, 4, 2), (64, 128, 64, 8, 3), (64, 64, 128, 4, 1)]
TILES += [(64, 64, 128, 4, 2), (64, 128, 128, 8, 2), (128, 64, 32, 4, 2), (128, 64, 64, 4, 1), (128, 64, 64, 4, 3)]
TILES += [(128, 128, 64, 8, 2), (128, 64, 128, 4, 1), (128, 128, 128, 8, 2)]
SPILLING = (128, 128, 64, 4, 2), (128, 128, 128, 4, 2)  # one of them is always among them
MARGIN = 0.08
# Registers for acc and S: 95 of a thread's 255 are left for all else.
BUDGET = 160

CHIPS = (64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024)  # bytes of shared memory
# Where everything fits, only the order counts: BLOCK_M, then stages, then place.
PAIRS = (((32, 128, 4, 3), (128, 32, 4, 1)), ((64, 64, 4, 1), (64, 64, 4, 2)), ((64, 64, 8, 2), (64, 64, 4, 2)))


def check(answer):
    _check_counts(answer, [Config(*tile) for _, *tile in (*TILES, *SPILLING)])
    cases = _cases()
    for candidates, *limits in cases:
        _check_pick(answer, candidates, *limits)
    _check_programs(answer)
    return f"{len(cases)} choices, most of them drawn at random; compiled: {'; '.join(_beside_the_compiler(answer))}"


def _beside_the_compiler(answer):
    """A line for each of a few tiles, as the compiler counts them."""
    drawn = random.Random()
    tiles = [*drawn.sample(TILES, 2), drawn.choice(SPILLING)]
    launches = []
    for d, *tile in tiles:
        q = torch.empty(1, 4, 1024, d, dtype=torch.float16, device=runtime.DEVICE)
        last = dict(kernel=forward._attn_fwd_descriptors_kernel, config=Config(*tile))
        with mock.patch.object(configs, "capability", return_value=(9, 0)):
            launches += offline.record_launches(lambda q=q, last=last: attention_forward(q, q, q, True, **last))
    for (d, *tile), c in zip(tiles, offline.compile_launches(launches), strict=True):
        config = Config(*tile)
        asked = answer.shared_bytes(config, d, 2)
        if abs(asked - c.shared) > MARGIN * c.shared:
            reject(f"{config}, head_dim {d}: the compiler asks for {c.shared} bytes of shared memory, not {asked}")
        fit = answer.programs(c.registers, c.shared, config.num_warps)
        yield f"{config}, D {d}: {c.registers} registers, {c.spills} B spilled, {c.shared} B shared, {fit} programs"


def _check_programs(answer):
    """On numbers drawn at random, and on some in which each budget decides."""
    drawn = random.Random()
    cases = [(102, 1000, 4)]  # 5 programs if registers were handed out singly
    cases += [(170, 1000, 4), (128, 1000, 4), (32, 100, 4), (24, 1000, 2), (24, 1000, 8)]
    cases += [(100, 57 * 1024, 4), (255, 227 * 1024, 8)]
    cases += [(drawn.randint(24, 255), drawn.randint(0, 227 * 1024), drawn.choice((4, 8))) for _ in range(40)]
    require_function(answer, "programs", cases, _programs, _programs_mistakes)


def _programs(registers, shared, num_warps, handed=8, reserved=1024, warps=64, threads=32, kib=228):
    held = -(-registers // handed) * handed
    return min(65536 // (held * threads * num_warps), kib * 1024 // max(1, shared + reserved), warps // num_warps)


def _programs_mistakes(*case):
    registers, shared, num_warps = case
    return {
        "registers are handed out in eights: round up": _programs(*case, handed=1),
        "a multiple of eight is not rounded up: 128 stay 128": _programs(registers + 1, shared, num_warps),
        "each program takes 1 KiB of shared memory more": _programs(*case, reserved=0),
        "a multiprocessor has 228 KiB; 227 are the most that one program may have": _programs(*case, kib=227),
        "there is room for 64 warps": _programs(*case, warps=10**6),
        "a warp has 32 threads": _programs(*case, threads=1),
        "a program has num_warps warps, not always four": _programs(*case, threads=128 // num_warps),
        "shared memory is a budget, too": _programs(registers, 0, num_warps),
        "registers are a budget, too": _programs(1, shared, num_warps),
    }


def _check_counts(answer, configs):
    head_dims = 16, 40, 64, 80, 256, 8, 3
    cases = itertools.product(configs, head_dims, (1, 2, 4))
    require_function(answer, "shared_bytes", cases, _shared, _shared_mistakes)
    # Eight warps first: with four, a thread's share of bytes is the share of one warp's threads.
    cases = itertools.product(sorted(configs, key=lambda config: -config.num_warps), head_dims)
    require_function(answer, "registers", cases, _registers, _registers_mistakes)


def _cases():
    """(candidates, head_dim, itemsize, shared_limit, register_budget) of each call of `pick`."""
    drawn = random.Random()
    everything = list(itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (4, 8), (1, 2, 3, 4)))
    cases = [([Config(*c) for c in pair], 64, 2, 10**6, 255) for pair in PAIRS]
    cases += [([Config(*c) for c in everything], d, 2, chip, BUDGET) for d in (64, 80, 128, 256) for chip in CHIPS]
    cases += [(cases[-1][0], 256, 4, 1024, BUDGET), ([], 64, 2, 10**6, 255)]
    exact = Config(128, 64, 8, 2)  # takes all there is
    cases.append(([Config(16, 16, 4, 1), exact], 128, 2, _shared(exact, 128, 2), _registers(exact, 128)))
    for _ in range(40):
        some = [Config(*c) for c in drawn.sample(everything, 12)]
        budget = drawn.choice((96, 128, 160, 255))
        head_dim = drawn.choice((16, 40, 64, 128, 200, 256))
        cases.append((some, head_dim, drawn.choice((1, 2, 4)), drawn.choice(CHIPS), budget))
    return cases


def _check_pick(answer, candidates, *limits):
    given = list(candidates)
    right = _pick(candidates, *limits)
    try:
        got = answer.pick(candidates, *limits)
    except (IndexError, ValueError) as error:
        if given:
            raise
        reject(f"pick([], ...) raises {error!r}; expected None")
    if candidates != given:
        reject("pick: the list of candidates is not as it was")
    if got != right:
        reject(_why_not(got, right, given, *limits))


def _shared(config, head_dim, itemsize):
    tiles_of_keys = 2 * config.num_stages if config.num_stages > 1 else 1
    return (config.BLOCK_M + tiles_of_keys * config.BLOCK_N) * padded_dim(head_dim) * itemsize


def _shared_mistakes(config, head_dim, itemsize):
    row, stages, right = padded_dim(head_dim) * itemsize, config.num_stages, _shared(config, head_dim, itemsize)
    q, k = config.BLOCK_M * row, config.BLOCK_N * row
    return {
        "these are elements: how many bytes has each?": _shared(config, head_dim, 1),
        "q stays for the whole walk": right - q,
        "there is a tile of k and one of v in each stage": q + stages * k,
        "there are num_stages tiles of k, and as many of v, not one fewer": q + 2 * (stages - 1) * k,
        "q is there once": right + q,
        "with one stage, k and v take turns in the place of one": q + 2 * stages * k,
        "q is loaded once, it has no stages": stages * (q + 2 * k),
        "head_dim is padded to a power of two, 16 or more": right // padded_dim(head_dim) * head_dim,
    }


def _registers(config, head_dim):
    return config.BLOCK_M * (padded_dim(head_dim) + config.BLOCK_N) // (32 * config.num_warps)


def _registers_mistakes(config, head_dim):
    padded, threads = padded_dim(head_dim), 32 * config.num_warps
    p = config.BLOCK_M * config.BLOCK_N
    acc_and_s = config.BLOCK_M * padded + p
    return {
        "a warp has 32 threads": acc_and_s // config.num_warps,
        "all the program's threads share them: num_warps warps": acc_and_s // 32,
        "S is missing, (BLOCK_M, BLOCK_N)": config.BLOCK_M * padded // threads,
        "acc has head_dim columns, S has BLOCK_N": 2 * config.BLOCK_M * padded // threads,
        "S has BLOCK_N columns, acc has head_dim": 2 * p // threads,
        "acc is missing, (BLOCK_M, head_dim)": config.BLOCK_M * config.BLOCK_N // threads,
        "a register has 4 bytes, as has an element of fp32": acc_and_s * 4 // threads,
        "acc and S alone: P, in 16 bits, makes do with the rest": (acc_and_s + p // 2) // threads,
        "acc and S alone: P makes do with the rest": (acc_and_s + p) // threads,
        "head_dim is padded to a power of two, 16 or more": config.BLOCK_M * (head_dim + config.BLOCK_N) // threads,
    }


def _fits(config, head_dim, itemsize, shared_limit, register_budget):
    fits = _registers(config, head_dim) <= register_budget
    return fits and _shared(config, head_dim, itemsize) <= shared_limit


def _pick(candidates, *limits):
    fitting = [c for c in candidates if _fits(c, *limits)]
    return max(fitting, key=lambda c: (c.BLOCK_M * c.BLOCK_N, c.BLOCK_M, c.num_stages), default=None)


def _why_not(got, right, candidates, *limits):
    what = "pick(..., head_dim={}, itemsize={}, shared_limit={}, register_budget={})".format(*limits)
    if right is None:
        return f"{what}: nothing fits, and the answer is {got}; expected None"
    if got is not None:
        if got not in candidates:
            return f"{what}: {got!r} is not one of the candidates"
        if not _fits(got, *limits):
            over = "shared memory" if _shared(got, *limits[:2]) > limits[2] else "registers"
            return f"{what}: {got} does not fit, it takes too much of {over}"
    if got in [_pick(candidates, *limits[:2], limits[2] - a, limits[3] - b) for a, b in ((1, 0), (0, 1), (1, 1))]:
        return f"{what}: {right} fits, it takes all of a budget, which it may; the answer is {got}"
    if got is None:
        return f"{what}: the answer is None, but {right} fits"
    if got.BLOCK_M * got.BLOCK_N < right.BLOCK_M * right.BLOCK_N:
        return f"{what}: {right} fits as well and is larger than {got}"
    if got.BLOCK_M != right.BLOCK_M:
        return f"{what}: {right} is as large as {got}, and has more queries"
    if got.num_stages != right.num_stages:
        return f"{what}: {right} is a tile like {got}, and has more stages"
    return f"{what}: {right} is as good as {got} and comes first"
