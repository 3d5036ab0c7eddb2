"""Checks the predicted bytes against those that are counted while the kernel runs."""

import contextlib
import random
from unittest import mock

from common import runtime
from common.learn.check.require import counted, reject
from common.measure import traffic
from phase2_tiling import tiling
from phase2_tiling.checks import FP16, FP32, one_head

import triton


def check(answer):
    cases = [(200, 330, 128, FP16), (150, 100, 128, FP32), (64, 90, 256, FP16), (65, 1, 16, FP16), (17, 0, 32, FP32)]
    cases += [(0, 17, 64, FP16)]
    drawn = random.Random()  # anew each time, so that no list of right answers will do
    for dtype in (FP16, FP32):
        cases.append((drawn.randint(65, 250), drawn.randint(65, 250), drawn.choice((16, 32, 64)), dtype))
    for seq_q, seq_k, head_dim, dtype in cases:
        what = f"seq_q = {seq_q}, seq_k = {seq_k}, head_dim = {head_dim}, {dtype}"
        with _nothing_measured():
            got = answer.predicted_bytes(seq_q, seq_k, head_dim, dtype)
        if not isinstance(got, dict) or set(got) != {"q", "k", "v", "o"}:
            reject(f'{what}: expected {{"q": ..., "k": ..., "v": ..., "o": ...}}, got {got!r}')
        for name, right in _bytes_of_attention(seq_q, seq_k, head_dim, dtype).items():
            if got[name] != right:
                mistakes = _wrong_bytes(name, right, seq_q, seq_k, head_dim, dtype)
                why = next((f": {sentence}" for sentence, wrong in mistakes.items() if got[name] == wrong), "")
                reject(f"{what}: {right} bytes of {name} are moved, not {got[name]}{why}")
    return f"{len(cases)} sizes, two of them drawn at random, to the byte"


@contextlib.contextmanager
def _nothing_measured():
    """Rejects an answer that runs the kernel or asks the module that counts bytes."""

    def stopped(*_, **__):
        reject("the bytes are measured, or taken from common.measure.traffic: predict them, from the sizes alone")

    measuring = dict.fromkeys(("measure", "rows_of_keys", "tiled_attention_bytes"), stopped)
    with mock.patch.object(tiling, "_launch", stopped), mock.patch.multiple(traffic, **measuring):
        yield


def _bytes_of_attention(seq_q, seq_k, head_dim, dtype):
    if runtime.INTERPRETED:
        q, k, v = one_head(seq_q, seq_k, head_dim, dtype=dtype)
        with counted(q=q, k=k, v=v) as moved:
            tiling.attention(q, k, v)
        return {name: moved.loaded_from[name] for name in "qkv"} | dict(o=moved.stored)
    block_m, row = runtime.tile_sizes(head_dim, dtype)["BLOCK_M"], head_dim * dtype.itemsize
    kv = triton.cdiv(seq_q, block_m) * seq_k * row  # compiled kernels are not counted
    return dict(q=seq_q * row, k=kv, v=kv, o=seq_q * row)


def _wrong_bytes(name, right, seq_q, seq_k, head_dim, dtype):
    """Sentence: what that mistake predicts for tensor `name`."""
    tiles, row = runtime.tile_sizes(head_dim, dtype), head_dim * dtype.itemsize
    block_m, block_n = tiles["BLOCK_M"], tiles["BLOCK_N"]
    programs, tiles_n = triton.cdiv(seq_q, block_m), triton.cdiv(seq_k, block_n)
    mistakes = {
        "these are elements: how many bytes has each?": right // dtype.itemsize,
        "an element of fp32 has four bytes, not two": right * 2 // dtype.itemsize,
    }
    if name in ("q", "o"):
        return mistakes | {
            "what a mask hides is not moved": programs * block_m * row,
            "a program loads its queries once, before the loop, and stores o once, after it": right * tiles_n,
            "o has the dtype of q: acc is fp32 on chip only": seq_q * head_dim * 4,
        }
    return mistakes | {
        "every program reads all keys and values": seq_k * row,
        "what a mask hides is not moved": programs * tiles_n * block_n * row,
        "the last program has fewer queries, but it reads every key too": seq_q // block_m * seq_k * row,
        "a part of a program is a whole program: round up": seq_q / block_m * seq_k * row,
        "is the number of programs that of tiles of queries?": triton.cdiv(seq_k, block_m) * seq_k * row,
        "the tile of queries depends on dtype: ask runtime.tile_sizes": triton.cdiv(seq_q, 64) * seq_k * row,
    }
