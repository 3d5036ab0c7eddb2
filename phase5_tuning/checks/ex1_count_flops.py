"""Checks both counts, by convention and as executed, on given sizes and on some drawn at random."""

import itertools
import math
import random

from phase5_tuning.checks import padded_dim, require_ints


def check(answer):
    drawn = random.Random()  # anew each time, so that no list of right answers will do
    cases = [
        (1, 2, 33, 200, 64),
        (2, 3, 100, 100, 40),
        (1, 1, 64, 64, 64),
        (2, 1, 200, 33, 80),
        (1, 1, 1, 7, 3),
    ]
    cases += [(1, 4, 0, 64, 64), (1, 4, 64, 0, 64)]
    cases += [tuple(drawn.randint(1, n) for n in (5, 9, 300, 300, 256)) for _ in range(4)]
    # The last one is past what floats count.
    large = [(32, 16, 16384, 16384, 128), (3, 31, 999999, 1000001, 255)]
    calls = []
    for sizes, is_causal, mode in itertools.product(
        cases + large, (False, True), ("fwd", "bwd", "both")
    ):
        full, half = 2 * math.prod(sizes), 2 if is_causal else 1
        products, recomputed = {"fwd": (2, 2), "bwd": (5, 7), "both": (7, 9)}[mode]
        right = full * products // half
        mistakes = {
            "under a causal mask the count is half": full * products,
            "an addition and a multiplication are two operations: 2 a b c": right // 2,
            "backward counts for 2.5 forward passes, whatever kernels recompute": full
            * recomputed
            // half,
            "backward has five products: S, dP, dV, dQ, dK": full
            * {"fwd": 2, "bwd": 4, "both": 6}[mode]
            // half,
            '"both" is forward and backward together, 3.5 times as much as forward': full
            * min(products, 5)
            // half,
            "the convention takes head_dim as it is; kernels pad it": right
            // sizes[-1]
            * padded_dim(sizes[-1]),
        }
        calls.append(
            (
                f"flops{(*sizes, is_causal, mode)}",
                answer.flops(*sizes, is_causal, mode),
                right,
                mistakes,
            )
        )
    require_ints(calls)

    blocks = [((32, 128), (128, 64)), ((64, 64), (128, 32)), ((64, 128), (16, 16))]
    calls = []
    for sizes, is_causal, tiles in itertools.product(cases, (False, True), blocks):
        case = (*sizes, is_causal, *tiles)
        got = answer.executed_flops(*case)
        calls.append((f"executed_flops{case}", got, executed(*case), _executed_mistakes(*case)))
    require_ints(calls)
    return f"{len(cases + large)} sizes by convention, {len(cases)} as executed, four of them drawn at random"


def executed(
    batch,
    heads,
    seq_q,
    seq_k,
    head_dim,
    is_causal,
    *tiles,
    products=(4, 3),
    width=None,
    counts=None,
):
    """What the backward kernels execute, or by a mistaken count: with a width instead of the padded
    head_dim, or with the part of a tile that counts(first query, last query, first key, last
    key)."""
    count = 0
    for of_tile, (block_m, block_n) in zip(products, tiles, strict=True):
        for m0, n0 in itertools.product(range(0, seq_q, block_m), range(0, seq_k, block_n)):
            m1, n1 = m0 + block_m - 1, n0 + block_n - 1
            part = counts(m0, m1, n0, n1) if counts else not is_causal or n0 <= min(m1, seq_q - 1)
            count += part * of_tile * 2 * block_m * block_n
    return batch * heads * count * (width or padded_dim(head_dim))


def _executed_mistakes(batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles):
    case = batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles
    full, swapped = executed(*case[:5], False, *tiles), [tile[::-1] for tile in tiles]

    def those(counts):
        return executed(*case, counts=counts)

    def seen(m, n):
        return not is_causal or n <= min(m, seq_q - 1)

    def existing(m0, m1, n0, n1):
        return (
            (min(m1 + 1, seq_q) - m0)
            * (min(n1 + 1, seq_k) - n0)
            / ((m1 + 1 - m0) * (n1 + 1 - n0))
            * seen(m1, n0)
        )

    mistakes = {
        "the half is the convention of `flops`; here the tiles with a visible pair are counted": full
        // 2,
        "the half is the convention of `flops`, and the tiles are counted already": executed(*case)
        // 2,
        "no key exists from seq_k on: min(seq_k, ...)": executed(*case[:3], seq_q + 256, *case[4:]),
        "tiles above the diagonal are left out under a causal mask": full,
        "tiles on the diagonal are computed whole: they are missing": those(
            lambda m0, m1, n0, n1: n0 < m0
        ),
        "only tiles that are visible as a whole count here: those on the diagonal are computed, too": (
            those(lambda m0, m1, n0, n1: n1 < seq_k and n1 <= m0)
        ),
        "rows past the last query, in the last tile, see nothing": those(
            lambda m0, m1, n0, n1: n0 <= m1
        ),
    }
    return (mistakes if is_causal else {}) | {
        "both kernels compute S and dP for themselves: 4 + 3 products": executed(
            *case, products=(4, 1)
        ),
        "dK/dV makes S, dP, dV, dK: 4 products; dQ makes S, dP, dQ: 3": executed(
            *case, products=(3, 4)
        ),
        "each of the five products counts once only, as in the convention": executed(
            *case, products=(3, 2)
        ),
        "a tile is (block_m queries, block_n keys), in this order": executed(*case[:6], *swapped),
        "the dQ kernel cuts S into tiles of its own, dq_tile": executed(
            *case[:6], tiles[0], tiles[0]
        ),
        "there are batch * heads such heads": executed(1, 1, *case[2:]),
        "head_dim is padded to a power of two, 16 or more": executed(*case, width=head_dim),
        "head_dim is padded, but to 16 at least": executed(
            *case, width=1 << (head_dim - 1).bit_length()
        ),
        "a multiplication and an addition are two operations": executed(*case) // 2,
        "only visible pairs count here; a tile is computed whole": _pairs(*case),
        "a tile on the edge of S is cut off here; it is computed whole": those(existing),
        "a part of a tile is computed as a whole tile: round up": (
            those(lambda m0, m1, n0, n1: n1 < seq_k and seen(m1, n1))
        ),
        "the last queries fill no whole tile, and are missing: round up": (
            those(lambda m0, m1, n0, n1: m1 < seq_q and seen(m1, n0))
        ),
    }


def _pairs(batch, heads, seq_q, seq_k, head_dim, is_causal, *_):
    pairs = sum(min(seq_k, i + 1) for i in range(seq_q)) if is_causal else seq_q * seq_k
    return batch * heads * 14 * pairs * padded_dim(head_dim)
