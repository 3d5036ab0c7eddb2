"""Classify the tiles of a causal mask that is aligned bottom-right.

Counted from the end, query i sees the keys j <= i + seq_k - seq_q: the last query sees the last key. Cut S into tiles:
tile (tile_m, tile_n) holds queries tile_m * block_m and the block_m - 1 after it, and keys tile_n * block_n and the
block_n - 1 after it. seq_q and seq_k are any lengths. The last tiles may stick out: queries from seq_q on follow the
same rule, keys from seq_k on are seen by nobody.

kind         "skipped"   no pair of a query and a key in the tile is visible
             "full"      all block_m * block_n pairs are visible: the tile needs no mask of any sort. (It is
                         enough that its first query, which exists, sees its last key: then this key exists, too.)
             "partial"   neither
loop_bounds  two integers for the tiles of one row of tiles: how many are full (they come first), and where the loop
             over keys ends. It visits tiles 0 ... end - 1, and those from `full` on need a mask.

With seq_q > seq_k the first queries see nothing at all; a row of tiles without a visible pair has the bounds (0, 0).

Notebook: phase3_forward/forward.ipynb, sections 3.3 and 3.4.
"""


def kind(tile_m: int, tile_n: int, block_m: int, block_n: int, seq_q: int, seq_k: int) -> str:
    """ "skipped", "full" or "partial"; 0 <= tile_m < ceil(seq_q / block_m), 0 <= tile_n < ceil(seq_k / block_n)."""
    # your code: compare the corners of the tile
    first = tile_m * block_m + seq_k - seq_q  # the last key that the tile's first query sees
    last = first + block_m - 1  # and its last query
    first_key, last_key = tile_n * block_n, (tile_n + 1) * block_n - 1
    if first_key > last:
        return "skipped"
    return "full" if last_key <= first else "partial"
    # end of your code


def loop_bounds(tile_m: int, block_m: int, block_n: int, seq_q: int, seq_k: int) -> tuple[int, int]:
    """(full, end): tiles 0 ... full - 1 need no mask, tiles full ... end - 1 need one, the rest is not visited.

    0 <= tile_m < ceil(seq_q / block_m).
    """
    # your code: how many keys does the first query of the tile see, how many the last?
    seen_by_first = tile_m * block_m + seq_k - seq_q + 1
    seen_by_last = min(seq_k, seen_by_first + block_m - 1)
    full = max(0, seen_by_first) // block_n
    end = (max(0, seen_by_last) + block_n - 1) // block_n
    return full, end
    # end of your code
