"""Checks that each tile is visited once, with a mask only if it needs one, and the results."""

import copy
import inspect
import itertools
import math
from unittest import mock

from common import make_qkv, runtime
from common.learn.check.require import Rejected, reject, require_verified
from phase5_tuning.checks import BF16, FP16, FP32

from triton.runtime.errors import InterpreterError

BLOCKS = ((32, 32), (64, 16), (16, 64))


def check(answer):
    lengths = ((64, 64), (70, 100), (100, 70), (1, 80), (65, 64), (33, 0))
    seen, fresh = 0, []
    if runtime.INTERPRETED:  # compiled, nobody can look on
        for blocks, (seq_q, seq_k), is_causal in itertools.product(BLOCKS, lengths, (False, True)):
            seen += _check_walks(answer, *blocks, seq_q, seq_k, is_causal, fresh)

    for (block_m, block_n), dtype in zip(BLOCKS, (FP16, BF16, FP32), strict=True):

        def split(q, k, v, *, is_causal, scale, enable_gqa, tiles=(block_m, block_n)):
            return answer.attention(q, k, v, is_causal, scale, block_m=tiles[0], block_n=tiles[1])

        for seq_q, seq_k, is_causal in ((40, 70, True), (70, 40, True), (20, 77, False)):
            layouts = dict(layout="bshd", layout_v="bhsd", poison=True)
            inputs = make_qkv(1, 2, seq_q, 24, seq_k=seq_k, dtype=dtype, **layouts)
            what = f"tiles {block_m} x {block_n}, {seq_q} queries, {seq_k} keys, {dtype}"
            if fresh:
                what = f"is the walk from key {fresh[0]} on given the state that the last one returned?\n{what}"
            require_verified(what, split, *inputs, is_causal=is_causal)
        require_verified("no keys", split, *make_qkv(1, 1, 20, 16, seq_k=0, dtype=dtype), is_causal=True)
    counted = f"{seen} tiles walked, each with a mask only if it needs one; " if seen else ""
    return f"{counted}o and lse in fp16, bf16 and fp32, tiles 32 x 32, 64 x 16 and 16 x 64"


def _check_walks(answer, block_m, block_n, seq_q, seq_k, is_causal, fresh) -> int:
    """Which tiles each program walks over, with and without a mask. Nothing is computed. Returns their number.

    fresh: gets the start of every walk that does not receive what the walk before it returned.
    """
    tiles_m = math.ceil(seq_q / block_m)
    heads = 2 if tiles_m == 1 else 1  # a second one shows whether tiles are told from heads, where that is cheap
    where = f"tiles {block_m} x {block_n}, {seq_q} queries, {seq_k} keys, {'causal' if is_causal else 'no mask'}"
    # Each has strides of its own.
    layouts = "transposed", "bhsd", "bshd"
    made = (make_qkv(1, heads, seq_q, 16, seq_k=seq_k, dtype=FP32, layout=layout) for layout in layouts)
    q, k, v = (of[n] for n, of in enumerate(made))
    walks = {program: [] for program in range(heads * tiles_m)}
    look_on = _onlooker(answer.walk.fn, where, k, v, tiles_m, block_n, walks, fresh)
    with mock.patch.object(answer, "walk", look_on):
        try:
            answer.attention(q, k, v, is_causal, block_m=block_m, block_n=block_n)
        except InterpreterError as error:
            if isinstance(error.__cause__, Rejected):  # by look_on
                raise error.__cause__ from None
            raise
    for program, visited in walks.items():
        first = program % tiles_m * block_m
        _require_tiles(where, visited, first, block_m, block_n, seq_q, seq_k, is_causal)
    return sum(map(len, walks.values()))


def _onlooker(walk, where, k, v, tiles_m, block_n, walks, fresh):
    """What takes the place of `walk`: it rejects wrong arguments, and adds the tiles to `walks`, by program."""
    from triton.runtime.interpreter import interpreter_builder as builder

    signature, returned = inspect.signature(walk), {}

    def look_on(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            reject(f"{where}: `walk` was called with other arguments than it has: {error}")
        program = builder.grid_idx[0]
        pid_m, start, end = (int(given[name]) for name in ("pid_m", "start", "end"))
        if pid_m != program % tiles_m:
            tile = f"tile {program % tiles_m} of head {program // tiles_m}"
            reject(f"{where}: program {program} calls `walk` with pid_m = {pid_m}, but owns {tile}")
        for name, t in (("stride_k", k), ("stride_v", v)):
            strides = tuple(int(getattr(n, "value", n)) for n in given[name])
            if strides != t.stride():
                reject(f"{where}: `walk` receives {strides} as {name}, which is {t.stride()}")
        masked = bool(getattr(given["MASKED"], "value", given["MASKED"]))
        walks[program] += [(start_n, masked, end) for start_n in range(start, end, block_n)]
        state = tuple(given[name] for name in ("m_i", "l_i", "acc"))
        before = returned.get(program, state)
        if any(t is not old for t, old in zip(state, before, strict=True)):
            fresh.append(start)
        returned[program] = tuple(copy.copy(t) for t in state)
        return returned[program]

    return look_on


def _require_tiles(where, visited, first, block_m, block_n, seq_q, seq_k, is_causal):
    """visited: (first key, whether masked, end of the walk) of the tiles that the queries from `first` on meet."""
    last = first + block_m - 1
    ends = first, last, min(last, seq_q - 1)
    seen_by_first, seen_by_last, needed = (min(seq_k, i + 1) if is_causal else seq_k for i in ends)
    queries = f"{where}: the queries {first} ... {last}"
    for start_n, masked, end in visited:
        end_n = start_n + block_n
        keys = f"{queries} visit the keys {start_n} ... {end_n - 1}"
        if start_n >= seen_by_last:
            reject(f"{keys}, and see none of them: where does the walk end?")
        if end_n > seen_by_first and not masked:
            why = "they do not all exist" if end_n > seq_k else f"query {first} does not see them all"
            asked = "where does the part without a mask end?"
            if end < end_n:
                asked = f"the part without a mask ends at {end}, so you did not round down to a multiple of {block_n}"
            reject(f"{keys} without a mask, but {why}: {asked}")
        if end_n <= seen_by_first and masked:
            reject(f"{keys} with a mask, and see all of them: this tile belongs to the part without one")
    starts = sorted(start_n for start_n, *_ in visited)
    missing = set(range(needed)).difference(*(range(n, n + block_n) for n in starts))
    if missing:
        hint = "" if visited else " (the walks are to be done by `walk`)"
        reject(f"{queries} never meet key {min(missing)}{hint}")
    if any(b - a < block_n for a, b in itertools.pairwise(starts)):
        reject(f"{queries} meet some keys twice, in the tiles that start at {starts}")
