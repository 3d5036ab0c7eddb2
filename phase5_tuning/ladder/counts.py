"""Counts from which the chapter predicts: tiles, programs that fit, instructions of a turn, clocks.

A turn is one pass through a kernel's loop over keys, or over queries; `loops` finds it in Hopper's machine code. No
count is fitted to a measured time.
"""

import math
import re
from collections import Counter

from phase5_tuning.launch.configs import Config

TENSOR, MUFU = 4096, 16  # 16-bit operations and exponentials of a multiprocessor in a clock
KINDS = {
    "multiply, add, max": ("FMUL", "FADD", "FFMA", "FMNMX"),
    "compare, select": ("FSEL", "FSETP", "ISETP", "SEL", "PLOP3"),
    "loads and stores": ("LDGSTS", "UTMALDG", "LDSM", "STSM", "LDS", "STS", "LDG"),
    "spills": ("STL", "LDL"),
}


def products_done(seq: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """Multiply-adds of one product over the tiles that are visited, in units of head_dim."""
    ends = [min(seq, m + block_m) if is_causal else seq for m in range(0, seq, block_m)]
    return sum(block_m * block_n * math.ceil(end / block_n) for end in ends)


def programs_per_sm(registers: int, shared: int, num_warps: int) -> tuple[int, int]:
    """How many programs fit on a multiprocessor of Hopper: by registers, and by shared memory."""
    a_thread = math.ceil(registers / 8) * 8
    return 65536 // (a_thread * 32 * num_warps), 228 * 1024 // (shared + 1024)


def loops(sass: str) -> list[Counter]:
    """The loops over keys (or queries) in a kernel's machine code, in order: how often a warp runs each instruction in
    one turn. What a branch skips is left out if it is a mask.
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);", sass)]
    jumps = [(at, int(to[1], 16)) for at, text in code if (to := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text))]

    def opcodes(start, end):
        return Counter(
            re.sub(r"^@\S+\s+", "", text).split()[0].split(".")[0] for at, text in code if start <= at <= end
        )

    found, taken = [], []
    spans = [(to, at) for at, to in jumps if to < at]
    for start, end in sorted(spans, key=lambda span: span[1] - span[0]):  # inner loops first
        count = opcodes(start, end)
        for at, to in jumps:
            skipped = opcodes(at + 1, to - 1)
            if start <= at < to <= end and skipped["FSEL"] >= 32 and not skipped["MUFU"]:
                count -= skipped
        apart = all(end < a or b < start for a, b in taken)
        if apart and count["HGMMA"] + count["HMMA"] >= 4 and count["MUFU"] >= 16:
            found.append((start, count))
            taken.append((start, end))
    return [count for _, count in sorted(found, key=lambda pair: pair[0])]


def turn_clocks(instructions: Counter, products: int, tile: Config, head_dim: int) -> dict[str, float]:
    """Clocks of a multiprocessor for a logit if nothing overlaps, by what takes them.

    products: how many a kernel makes in each of its tiles
    """
    logits = tile.BLOCK_M * tile.BLOCK_N
    each = tile.num_warps / 4 / logits  # the warps of a program share four schedulers
    kinds = {
        "products": 2 * products * head_dim / TENSOR,
        "exponentials": 32 / (MUFU / 4) * instructions["MUFU"] * each,
    }
    kinds |= {kind: sum(instructions[op] for op in ops) * each for kind, ops in KINDS.items()}
    issued = (sum(instructions.values()) - instructions["MUFU"]) * each
    return kinds | {"other": issued - sum(kinds[kind] for kind in KINDS)}
