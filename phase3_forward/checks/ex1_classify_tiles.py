"""Checks the kinds of tiles and the bounds of loops against a count of the visible pairs."""

import itertools
import math

from common.learn.judge import reject
from phase3_forward.checks import bottom_right, in_pieces

import torch

TILINGS = [(32, 32), (64, 32), (32, 64), (48, 80)]
LENGTHS = [
    (128, 128),
    (100, 100),
    (70, 200),
    (200, 70),
    (1, 130),
    (130, 1),
    (65, 64),
    (99, 100),
    (100, 99),
    (64, 0),
]
TILE_MISTAKES = {
    "this is right for top-left alignment, j <= i: where does the last query's row end?": (
        lambda i, j, seq_q, seq_k: (j <= i) & (j < seq_k)
    ),
    "this is right for j <= i + seq_q - seq_k: is the shift the wrong way round?": (
        lambda i, j, seq_q, seq_k: (j <= i + seq_q - seq_k) & (j < seq_k)
    ),
    "the diagonal is hidden: j = i + seq_k - seq_q is visible": (
        lambda i, j, seq_q, seq_k: (j < i + seq_k - seq_q) & (j < seq_k)
    ),
    "one key too many is visible: j = i + seq_k - seq_q is the last": (
        lambda i, j, seq_q, seq_k: (j <= i + 1 + seq_k - seq_q) & (j < seq_k)
    ),
}


def check(answer):
    rows = [
        (tile_m, *blocks, *lengths)
        for blocks, lengths in itertools.product(TILINGS, LENGTHS)
        for tile_m in range(math.ceil(lengths[0] / blocks[0]))
    ]

    def kinds(visible):
        return [_kinds(visible, *row) for row in rows]

    def bounds(rows_of_kinds):
        return [(row.count("full"), len(row) - row.count("skipped")) for row in rows_of_kinds]

    def name_mistake(got, right, as_kinds, call):
        """Where queries are no more than keys every rule below stays inside S, so that answers
        can be compared.
        """
        usual = [n for n, row in enumerate(rows) if row[3] <= row[4]]
        for sentence, visible in TILE_MISTAKES.items():
            wrong = as_kinds(kinds(visible))
            if any(got[n] != right[n] for n in usual) and all(got[n] == wrong[n] for n in usual):
                reject(f"{call.split('(')[0]}: {sentence} ({call})")

    right = kinds(bottom_right)

    def check_kind(answer):
        got = [
            [answer.kind(row[0], n, *row[1:]) for n in range(len(expected))]
            for row, expected in zip(rows, right, strict=True)
        ]
        if got != right:
            row, n = next(
                (r, n)
                for r in range(len(rows))
                for n in range(len(right[r]))
                if got[r][n] != right[r][n]
            )
            arguments = (rows[row][0], n, *rows[row][1:])
            call = f"kind{arguments} is {got[row][n]!r}, counting its pairs says {right[row][n]!r}"
            name_mistake(got, right, list, call)
            reject(call)

    def check_loop_bounds(answer):
        got = [tuple(answer.loop_bounds(*row)) for row in rows]
        if got != bounds(right):
            row, actual, expected = next(
                r for r in zip(rows, got, bounds(right), strict=True) if r[1] != r[2]
            )
            call = f"loop_bounds{row} is {actual}, counting says {expected}"
            name_mistake(got, bounds(right), bounds, call)
            why = f"; there are {math.ceil(row[4] / row[2])} tiles of keys"
            if expected == (0, 0):
                why = ": none of its queries sees a key. Can an end be negative?"
            reject(call + why)
        if not all(isinstance(bound, int) for pair in got for bound in pair):
            reject("loop_bounds: expected integers, as a loop counts with them: divide with //")

    in_pieces(answer, ("kind", check_kind), ("loop_bounds", check_loop_bounds))
    return f"{sum(map(len, right))} tiles of {len(LENGTHS)} pairs of lengths, also seq_q > seq_k, agree with the count"


def _kinds(visible, tile_m, block_m, block_n, seq_q, seq_k):
    """The kinds of a row of tiles under a rule `visible`, by counting pairs."""
    tiles = math.ceil(seq_k / block_n)
    i = torch.arange(tile_m * block_m, (tile_m + 1) * block_m)[:, None]
    pairs = (
        visible(i, torch.arange(tiles * block_n), seq_q, seq_k)
        .view(block_m, tiles, block_n)
        .sum(dim=(0, 2))
    )
    return [{0: "skipped", block_m * block_n: "full"}.get(n, "partial") for n in pairs.tolist()]
