"""Checks both counts, by convention and as executed, on given sizes and on some drawn at random."""

import itertools
import math
import random

from common.runtime import padded_dim
from phase5_tuning.checks import require_function


def check(answer):
    drawn = random.Random()  # anew each time, so that no list of right answers will do
    cases = [(1, 2, 33, 200, 64), (2, 3, 100, 100, 40), (1, 1, 64, 64, 64), (2, 1, 200, 33, 80), (1, 1, 1, 7, 3)]
    cases += [(1, 4, 0, 64, 64), (1, 4, 64, 0, 64)]
    cases += [tuple(drawn.randint(1, n) for n in (5, 9, 300, 300, 256)) for _ in range(4)]
    # The last one is past what floats count.
    large = [(32, 16, 16384, 16384, 128), (3, 31, 999999, 1000001, 255)]
    modes = "fwd", "bwd", "both"
    calls = [(*sizes, *of) for sizes in cases + large for of in itertools.product((False, True), modes)]
    require_function(answer, "flops", calls, _by_convention, _mistakes_by_convention)
    blocks = [((32, 128), (128, 64)), ((64, 64), (128, 32)), ((64, 128), (16, 16))]
    calls = [(*sizes, of, *tiles) for sizes in cases for of in (False, True) for tiles in blocks]
    require_function(answer, "executed_flops", calls, executed, _executed_mistakes)
    return f"{len(cases + large)} sizes by convention, {len(cases)} as executed, four of them drawn at random"


PRODUCTS = dict(fwd=2, bwd=5, both=7)  # of two matrices, by the convention


def _by_convention(*case, products=PRODUCTS):
    *sizes, is_causal, mode = case
    return 2 * math.prod(sizes) * products[mode] // (1 + is_causal)


def _mistakes_by_convention(*case):
    *sizes, is_causal, mode = case
    recomputed, four, of_backward = (
        _by_convention(*case, products=dict(fwd=2, bwd=bwd, both=both)) for bwd, both in ((7, 9), (4, 6), (5, 5))
    )
    right, padded = _by_convention(*case), padded_dim(sizes[-1])
    mistakes = {
        "under a causal mask the count is half": _by_convention(*sizes, False, mode),
        "an addition and a multiplication are two operations: 2 a b c": right // 2,
        "backward counts for 2.5 forward passes, whatever kernels recompute": recomputed,
        "backward has five products: S, dP, dV, dQ, dK": four,
        '"both" is forward and backward together, 3.5 times as much as forward': of_backward,
        "the convention takes head_dim as it is; kernels pad it": right // sizes[-1] * padded,
    }
    if is_causal:
        batch, heads, seq_q, seq_k, head_dim = sizes
        side = min(seq_q, seq_k)
        pairs = side * (side + 1) // 2 + (seq_q - side) * seq_k
        visible = 2 * batch * heads * pairs * head_dim * PRODUCTS[mode]
        mistakes["the convention halves, whatever the lengths; this counts visible pairs"] = visible
    return mistakes


def executed(batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles, products=(4, 3), width=None, counts=None):
    """What the backward kernels execute, or by a mistaken count: with a width instead of the padded head_dim, or with
    the part of a tile that counts(first query, last query, first key, last key).
    """
    count = 0
    for of_tile, (block_m, block_n) in zip(products, tiles, strict=True):
        for m0, n0 in itertools.product(range(0, seq_q, block_m), range(0, seq_k, block_n)):
            m1, n1 = m0 + block_m - 1, n0 + block_n - 1
            part = counts(m0, m1, n0, n1) if counts else not is_causal or n0 <= min(m1, seq_q - 1)
            count += part * of_tile * 2 * block_m * block_n
    return batch * heads * count * (width or padded_dim(head_dim))


def _executed_mistakes(batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles):
    case = batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles
    right, swapped = executed(*case), [tile[::-1] for tile in tiles]

    def seen(m, n):
        return not is_causal or n <= min(m, seq_q - 1)

    def existing(m0, m1, n0, n1):
        of_tile = (min(m1 + 1, seq_q) - m0) * (min(n1 + 1, seq_k) - n0)
        return of_tile / ((m1 + 1 - m0) * (n1 + 1 - n0)) * seen(m1, n0)

    whole_keys = executed(*case, counts=lambda m0, m1, n0, n1: n1 < seq_k and seen(m1, n1))
    whole_queries = executed(*case, counts=lambda m0, m1, n0, n1: m1 < seq_q and seen(m1, n0))
    unpadded, power = (executed(*case, width=n) for n in (head_dim, 1 << (head_dim - 1).bit_length()))
    once, exchanged, five, three, ten = (executed(*case, products=n) for n in ((4, 1), (3, 4), (3, 2), (2, 1), (5, 5)))
    return (_causal_mistakes(case, right) if is_causal else {}) | {
        "both kernels compute S and dP for themselves: 4 + 3 products": once,
        "dK/dV makes S, dP, dV, dK: 4 products; dQ makes S, dP, dQ: 3": exchanged,
        "S and dP are products, too, and each kernel makes both": three,
        "this makes five products, as the convention counts; the kernels make seven": five,
        "no kernel makes all five products: dK/dV makes four, dQ three": ten,
        "a tile is (block_m queries, block_n keys), in this order": executed(*case[:6], *swapped),
        "the dQ kernel cuts S into tiles of its own, dq_tile": executed(*case[:7], tiles[0]),
        "there are batch * heads such heads": executed(1, 1, *case[2:]),
        "head_dim is padded to a power of two, 16 or more": unpadded,
        "head_dim is padded, but to 16 at least": power,
        "a multiplication and an addition are two operations": right // 2,
        "only visible pairs count here; a tile is computed whole": _pairs(*case),
        "a tile on the edge of S is cut off here; it is computed whole": executed(*case, counts=existing),
        "a part of a tile is computed as a whole tile: round up": whole_keys,
        "the last queries fill no whole tile, and are missing: round up": whole_queries,
    }


def _causal_mistakes(case, right):
    (*sizes, _), tiles, seq_k = case[:6], case[6:], case[3]
    full = executed(*sizes, False, *tiles)
    past_keys = executed(*case[:3], case[2] + 256, *case[4:])
    off_diagonal = executed(*case, counts=lambda m0, m1, n0, n1: n0 < m0)
    whole = executed(*case, counts=lambda m0, m1, n0, n1: n1 < seq_k and n1 <= m0)
    past_queries = executed(*case, counts=lambda m0, m1, n0, n1: n0 <= m1)
    first_row = executed(*case, counts=lambda m0, m1, n0, n1: n0 <= m0)
    return {
        "the half is the convention of `flops`; here the tiles with a visible pair are counted": full // 2,
        "the half is the convention of `flops`, and the tiles are counted already": right // 2,
        "no key exists from seq_k on: min(seq_k, ...)": past_keys,
        "tiles above the diagonal are left out under a causal mask": full,
        "tiles on the diagonal are computed whole: they are missing": off_diagonal,
        "only tiles that are visible as a whole count here: those on the diagonal are computed, too": whole,
        "rows past the last query, in the last tile, see nothing": past_queries,
        "a tile is computed if its last query sees a key, not only if its first does": first_row,
    }


def _pairs(batch, heads, seq_q, seq_k, head_dim, is_causal, *_):
    pairs = sum(min(seq_k, i + 1) for i in range(seq_q)) if is_causal else seq_q * seq_k
    return batch * heads * 14 * pairs * padded_dim(head_dim)
