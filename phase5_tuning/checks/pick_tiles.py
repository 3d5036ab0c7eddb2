"""Checks the budgets against what the compiler recorded, and the choice on lists drawn at
random.
"""

import itertools
import random

from common.learn.judge import reject
from phase5_tuning.checks import padded_dim, require_ints
from phase5_tuning.configs import Config

# What the compiler made of `_attn_fwd_descriptors_kernel` (fp16, causal): Triton 3.7.1,
# target sm_90. head_dim, BLOCK_M, BLOCK_N, num_warps, num_stages, bytes of shared memory,
# registers, bytes spilled
COMPILED = [
    (64, 64, 64, 4, 1, 16392, 91, 0),
    (64, 64, 64, 4, 2, 40992, 106, 0),
    (64, 64, 64, 4, 3, 57400, 106, 0),
    (64, 128, 64, 4, 2, 49184, 188, 0),
    (64, 128, 64, 8, 3, 65592, 110, 0),
    (64, 64, 128, 4, 1, 25600, 130, 0),
    (64, 64, 128, 4, 2, 73760, 155, 0),
    (64, 128, 128, 8, 2, 81952, 159, 0),
    (64, 128, 128, 4, 2, 81952, 231, 0),
    (64, 128, 256, 8, 2, 147488, 251, 0),
    (128, 64, 32, 4, 2, 49184, 117, 0),
    (128, 64, 64, 4, 1, 32776, 122, 0),
    (128, 64, 64, 4, 2, 81952, 138, 0),
    (128, 64, 64, 4, 3, 114744, 138, 0),
    (128, 128, 64, 4, 2, 98336, 255, 16),
    (128, 128, 64, 8, 2, 98336, 138, 0),
    (128, 64, 128, 4, 1, 50176, 164, 0),
    (128, 64, 128, 8, 3, 229432, 137, 0),
    (128, 128, 128, 8, 1, 65544, 161, 0),
    (128, 128, 128, 8, 2, 163872, 191, 0),
    (128, 128, 128, 4, 2, 163872, 255, 776),
    (256, 64, 32, 4, 2, 98336, 178, 0),
    (256, 64, 64, 4, 1, 65544, 197, 0),
    (256, 64, 64, 4, 2, 163872, 206, 0),
    (256, 128, 64, 4, 2, 196640, 255, 1536),
    (256, 128, 64, 8, 2, 196640, 209, 0),
    (256, 64, 128, 8, 3, 442424, 205, 0),
    (256, 128, 128, 8, 1, 131080, 234, 0),
]
MARGIN = 0.08
# Registers for acc and S: in none of the compiles with no more than that was anything spilled.
BUDGET = 160


CHIPS = (64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024)  # bytes of shared memory
# Where everything fits, only the order counts: BLOCK_M, then stages, then place.
PAIRS = (
    ((32, 128, 4, 3), (128, 32, 4, 1)),
    ((64, 64, 4, 1), (64, 64, 4, 2)),
    ((64, 64, 8, 2), (64, 64, 4, 2)),
)


def check(answer):
    recorded = [(Config(*row[1:5]), row[0], *row[5:]) for row in COMPILED]
    _check_counts(answer, [config for config, *_ in recorded])
    for config, head_dim, shared, _, spilled in recorded:
        asked = answer.shared_bytes(config, head_dim, 2)
        if abs(asked - shared) > MARGIN * shared:
            reject(
                f"{config}, head_dim {head_dim}: the compiler asks for {shared} bytes of shared memory, not {asked}"
            )
        if answer.registers(config, head_dim) <= BUDGET and spilled:
            reject(f"{config}, head_dim {head_dim}: {spilled} bytes were spilled")
    cases = _cases()
    for candidates, *limits in cases:
        _check_pick(answer, candidates, *limits)
    return f"{len(recorded)} compiles within {MARGIN:.0%}, {len(cases)} choices, most of them drawn at random"


def _check_counts(answer, configs):
    shared_calls, register_calls = [], []
    for config, head_dim in itertools.product(configs, (16, 40, 64, 80, 256, 8, 3)):
        for itemsize in (1, 2, 4):
            call, got = (
                (config, head_dim, itemsize),
                answer.shared_bytes(config, head_dim, itemsize),
            )
            shared_calls.append(
                (f"shared_bytes{call}", got, _shared(*call), _shared_mistakes(*call))
            )
        got, right = answer.registers(config, head_dim), _registers(config, head_dim)
        mistakes = _registers_mistakes(config, head_dim)
        register_calls.append((f"registers{config, head_dim}", got, right, mistakes))
    require_ints(shared_calls)
    require_ints(register_calls)


def _cases():
    """(candidates, head_dim, itemsize, shared_limit, register_budget) of each call of `pick`."""
    drawn = random.Random()
    everything = list(
        itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (4, 8), (1, 2, 3, 4))
    )
    cases = [([Config(*c) for c in pair], 64, 2, 10**6, 255) for pair in PAIRS]
    cases += [
        ([Config(*c) for c in everything], d, 2, chip, BUDGET)
        for d in (64, 80, 128, 256)
        for chip in CHIPS
    ]
    cases += [(cases[-1][0], 256, 4, 1024, BUDGET), ([], 64, 2, 10**6, 255)]
    exact = Config(128, 64, 8, 2)  # takes all there is
    cases.append(
        ([Config(16, 16, 4, 1), exact], 128, 2, _shared(exact, 128, 2), _registers(exact, 128))
    )
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
    row, stages = padded_dim(head_dim) * itemsize, config.num_stages
    q, k = config.BLOCK_M * row, config.BLOCK_N * row
    return {
        "these are elements: how many bytes has each?": _shared(config, head_dim, 1),
        "q stays for the whole walk": _shared(config, head_dim, itemsize) - q,
        "there is a tile of k and one of v in each stage": q + stages * k,
        "there are num_stages tiles of k, and as many of v, not one fewer": q
        + 2 * (stages - 1) * k,
        "q is there once": _shared(config, head_dim, itemsize) + q,
        "with one stage, k and v take turns in the place of one": q + 2 * stages * k,
        "q is loaded once, it has no stages": stages * (q + 2 * k),
        "head_dim is padded to a power of two, 16 or more": _shared(config, head_dim, itemsize)
        // padded_dim(head_dim)
        * head_dim,
    }


def _registers(config, head_dim):
    return config.BLOCK_M * (padded_dim(head_dim) + config.BLOCK_N) // (32 * config.num_warps)


def _registers_mistakes(config, head_dim):
    padded, threads = padded_dim(head_dim), 32 * config.num_warps
    acc_and_s = config.BLOCK_M * (padded + config.BLOCK_N)
    return {
        "a warp has 32 threads": acc_and_s // config.num_warps,
        "S is missing, (BLOCK_M, BLOCK_N)": config.BLOCK_M * padded // threads,
        "acc is missing, (BLOCK_M, head_dim)": config.BLOCK_M * config.BLOCK_N // threads,
        "a register has 4 bytes, as has an element of fp32": acc_and_s * 4 // threads,
        "head_dim is padded to a power of two, 16 or more": config.BLOCK_M
        * (head_dim + config.BLOCK_N)
        // threads,
    }


def _fits(config, head_dim, itemsize, shared_limit, register_budget):
    fits = _registers(config, head_dim) <= register_budget
    return fits and _shared(config, head_dim, itemsize) <= shared_limit


def _pick(candidates, *limits):
    best = None
    for c in candidates:
        size = c.BLOCK_M * c.BLOCK_N, c.BLOCK_M, c.num_stages
        if _fits(c, *limits) and (
            best is None or size > (best.BLOCK_M * best.BLOCK_N, best.BLOCK_M, best.num_stages)
        ):
            best = c
    return best


def _why_not(got, right, candidates, *limits):
    what = "pick(..., head_dim={}, itemsize={}, shared_limit={}, register_budget={})".format(
        *limits
    )
    if right is None:
        return f"{what}: nothing fits, and the answer is {got}; expected None"
    if got is not None:
        if got not in candidates:
            return f"{what}: {got!r} is not one of the candidates"
        if not _fits(got, *limits):
            over = "shared memory" if _shared(got, *limits[:2]) > limits[2] else "registers"
            return f"{what}: {got} does not fit, it takes too much of {over}"
    if got in [
        _pick(candidates, *limits[:2], limits[2] - a, limits[3] - b)
        for a, b in ((1, 0), (0, 1), (1, 1))
    ]:
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
