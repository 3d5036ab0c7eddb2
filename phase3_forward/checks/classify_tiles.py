"""Checks the kinds of tiles and the bounds of loops against a count of the visible pairs."""

import itertools
import math
import numbers

from common.learn.check.require import reject
from phase3_forward.checks import bottom_right, in_pieces

import torch

TILINGS = [(32, 32), (64, 32), (32, 64), (48, 80)]
LENGTHS = [(128, 128), (100, 100), (70, 200), (200, 70), (1, 130), (130, 1), (65, 64), (99, 100), (100, 99), (64, 0)]
MISTAKES = {  # sentence: the last key that query i sees; shift: seq_k - seq_q
    "this is right for top-left alignment, j <= i: where does the last query's row end?": lambda i, shift: i,
    "this is right for j <= i + seq_q - seq_k: is the shift the wrong way round?": lambda i, shift: i - shift,
    "the diagonal is hidden: j = i + seq_k - seq_q is visible": lambda i, shift: i + shift - 1,
    "one key too many is visible: j = i + seq_k - seq_q is the last": lambda i, shift: i + shift + 1,
}
ROWS = [  # of tiles: the arguments of `loop_bounds`
    (tile_m, *blocks, *lengths)
    for blocks, lengths in itertools.product(TILINGS, LENGTHS)
    for tile_m in range(math.ceil(lengths[0] / blocks[0]))
]


def check(answer):
    in_pieces(answer, ("kind", _check_kind), ("loop_bounds", _check_loop_bounds))
    tiles = sum(map(len, _all_kinds(bottom_right)))
    return f"{tiles} tiles of {len(LENGTHS)} pairs of lengths, also seq_q > seq_k, agree with the count"


def _check_kind(answer):
    right = _all_kinds(bottom_right)
    rows = list(zip(ROWS, right, strict=True))
    got = [[answer.kind(tile_m, n, *rest) for n in range(len(kinds))] for (tile_m, *rest), kinds in rows]
    for ((tile_m, *rest), kinds), theirs in zip(rows, got, strict=True):
        for n, (kind, expected) in enumerate(zip(theirs, kinds, strict=True)):
            if kind != expected:
                call = f"kind{(tile_m, n, *rest)} is {kind!r}, counting its pairs says {expected!r}"
                _name_mistake(got, _all_kinds, call)
                reject(f"{call}: {_seen(kind, expected)}")


def _seen(kind, expected):
    """What two corners of a tile say against `kind`."""
    if "full" in (kind, expected):
        return f"its first query {'sees' if expected == 'full' else 'does not see'} its last key"
    return f"its last query {'does not see' if expected == 'skipped' else 'sees'} its first key"


def _check_loop_bounds(answer):
    right, got = _all_bounds(bottom_right), [tuple(answer.loop_bounds(*row)) for row in ROWS]
    if not all(isinstance(bound, numbers.Integral) for pair in got for bound in pair):
        reject("loop_bounds: expected integers, as a loop counts with them: divide with //")
    if got == [(full, end - full) for full, end in right]:
        reject("loop_bounds: the end counts all tiles that are visited, the full ones too")
    for row, actual, expected in zip(ROWS, got, right, strict=True):
        if actual != expected:
            call = f"loop_bounds{row} is {actual}, counting says {expected}"
            _name_mistake(got, _all_bounds, call)
            seen = ": none of its queries sees a key. " if expected == (0, 0) else ": "
            reject(call + seen + _consequence(row, actual, expected))


def _consequence(row, actual, expected):
    """What a walk with these bounds gets wrong, or does for nothing."""
    tiles = math.ceil(row[4] / row[2])
    if min(actual) < 0:
        return "Can either bound be negative?"
    if max(actual) > tiles:
        return f"there are {tiles} tiles of keys, and the walk goes past them"
    (full, end), (right_full, right_end) = actual, expected
    wrong = (_walk(row, actual) - _walk(row, expected)).abs().amax(dim=1) > 1e-6
    first = f"attention is wrong, first in query {row[0] * row[1] + int(wrong.int().argmax())}"
    if full > right_full:
        return f"{_tiles(right_full, full)} walked without a mask, though not all pairs are visible: {first}"
    if max(full, end) < right_end:
        return f"{_tiles(max(full, end), right_end)} not visited: {first}"
    if end < full:
        return "the end counts all tiles that are visited, the full ones too"
    if full < right_full:
        return f"attention is right, but {_tiles(full, right_full)} masked for nothing"
    return f"attention is right, but {_tiles(right_end, end)} visited for nothing"


def _tiles(first, end):
    return f"tile {first} is" if end == first + 1 else f"tiles {first} to {end - 1} are"


def _walk(row, bounds):
    """Attention of one row of tiles, on made-up logits: a loop without a mask, then one with it."""
    tile_m, block_m, block_n, seq_q, seq_k = row
    i = torch.arange(tile_m * block_m, min(seq_q, (tile_m + 1) * block_m))[:, None]
    j = torch.arange(math.ceil(seq_k / block_n) * block_n)
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(len(i), len(j), generator=generator, dtype=torch.float64)
    v = torch.randn(len(j), 8, generator=generator, dtype=torch.float64)
    s[:, seq_k:], v[seq_k:] = 0, 0  # as load_tile fills the last tile
    l, acc = (s.new_zeros(len(i), width) for width in (1, 8))
    full, end = bounds
    for n in (*range(full), *range(full, end)):
        keys = slice(n * block_n, (n + 1) * block_n)
        p = s[:, keys].exp() * (n < full or bottom_right(i, j[keys], seq_q, seq_k))
        l, acc = l + p.sum(dim=1, keepdim=True), acc + p @ v[keys]
    return acc / torch.where(l == 0, 1.0, l)


def _name_mistake(got, of_rule, call):
    """Reject if `got` is what a wrong rule gives. Only rows with no more queries than keys are compared: there every
    rule stays inside S.
    """
    usual = [n for n, (*_, seq_q, seq_k) in enumerate(ROWS) if seq_q <= seq_k]
    right = of_rule(bottom_right)
    for sentence, last in MISTAKES.items():
        wrong = of_rule(lambda i, j, seq_q, seq_k, last=last: (j <= last(i, seq_k - seq_q)) & (j < seq_k))
        if any(got[n] != right[n] for n in usual) and all(got[n] == wrong[n] for n in usual):
            reject(f"{call.split('(')[0]}: {sentence} ({call})")


def _all_kinds(visible):
    return [_kinds(visible, *row) for row in ROWS]


def _all_bounds(visible):
    return [(row.count("full"), len(row) - row.count("skipped")) for row in _all_kinds(visible)]


def _kinds(visible, tile_m, block_m, block_n, seq_q, seq_k):
    """The kinds of a row of tiles under a rule `visible`, by counting pairs."""
    tiles = math.ceil(seq_k / block_n)
    i = torch.arange(tile_m * block_m, (tile_m + 1) * block_m)[:, None]
    pairs = visible(i, torch.arange(tiles * block_n), seq_q, seq_k).view(block_m, tiles, block_n).sum(dim=(0, 2))
    return [{0: "skipped", block_m * block_n: "full"}.get(n, "partial") for n in pairs.tolist()]
