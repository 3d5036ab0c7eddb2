"""Turns of a kernel's loops in Hopper's machine code: read from top to bottom, and counted.

A turn is one pass through a kernel's loop over keys, or over queries. The listing has no times. It has an order, and
from it follows what can be under way at once: a product is under way from its HGMMA to the DEPBAR that waits for it, a
copy from its UTMALDG to the PHASECHK that waits for its bytes, or from the first LDGSTS of a group to its DEPBAR. From
counts of instructions follow clocks, if nothing overlaps; none is fitted to a measured time.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, groupby

TENSOR, MUFU = 4096, 16  # 16-bit operations and exponentials of a multiprocessor in a clock
KINDS = {
    "multiply, add, max": ("FMUL", "FADD", "FFMA", "FMNMX"),
    "compare, select": ("FSEL", "FSETP", "ISETP", "SEL", "PLOP3"),
    "loads and stores": ("LDGSTS", "UTMALDG", "LDSM", "STSM", "LDS", "STS", "LDG"),
    "spills": ("STL", "LDL"),
}

# What an instruction does, by the beginning of its name. Others are arithmetic.
WHAT = {
    "HGMMA": "product",
    "WARPGROUP.ARRIVE": "hand registers to products",
    "WARPGROUP.DEPBAR": "wait for products",
    "UTMALDG": "ask for a tile",
    "UTMAREDG": "add a tile in memory",
    "SYNCS.PHASECHK": "wait at an mbarrier",
    "SYNCS.ARRIVE": "arrive at an mbarrier",
    "BAR.SYNC": "warps meet",
    "MUFU": "exponential",
}
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Instruction:
    """One line of a listing: its address, its opcode, its text."""

    address: int
    text: str

    @property
    def opcode(self) -> str:
        return re.sub(r"^@!?\w+\s+", "", self.text).split()[0]

    @property
    def name(self) -> str:
        """Its opcode without what follows a dot."""
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        to = re.search(r"0x[0-9a-f]+", self.text) if self.name == "BRA" else None
        return int(to[0], 16) if to else None

    @property
    def what(self) -> str:
        return next((what for beginning, what in WHAT.items() if self.opcode.startswith(beginning)), ARITHMETIC)

    @property
    def left_in_registers(self) -> bool:
        """True for a product whose left factor comes from registers."""
        return bool(re.search(r"\bR\d+, R\d+, gdesc", self.text))

    @property
    def still_under_way(self) -> int:
        """For a wait for products or LDGSTS: how many groups may still be under way after it."""
        return int(re.search(r"(?:gsb0|SB0), (0x[0-9a-f]+)", self.text)[1], 16)


def instructions(sass: str) -> list[Instruction]:
    """All instructions of a listing."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;", sass)
    return [Instruction(int(at, 16), re.sub(r"\s+", " ", text)) for at, text in found]


def loops(sass: str) -> list[list[Instruction]]:
    """The loops over keys, or over queries, in the order of the listing: inner ones with products and exponentials.

    In machine code a loop ends with a branch to an earlier address. A branch inside the loop that skips a mask is not
    followed: the mask is there.
    """
    code, found = instructions(sass), []
    ends = [x for x in code if x.target is not None and x.target < x.address]
    for end in sorted(ends, key=lambda x: x.address - x.target):  # inner loops first
        body = [x for x in code if end.target <= x.address <= end.address]
        count = counted(body)
        apart = all(end.address < other[0].address or other[-1].address < body[0].address for other in found)
        if apart and count["HGMMA"] + count["HMMA"] >= 4 and count["MUFU"] >= 16:
            found.append(body)
    return sorted(found, key=lambda body: body[0].address)


def turn(sass: str) -> list[Instruction]:
    """The shortest of the loops. Raises ValueError if there is none."""
    return min(loops(sass), key=len)


def masks(body: list[Instruction]) -> list[tuple[int, int]]:
    """(first, last) position of each mask: what a branch skips if it holds a mask's selects and no exponential."""
    position, found = {x.address: n for n, x in enumerate(body)}, []
    for n, x in enumerate(body):
        end = position.get(x.target, 0)
        skipped = [y.name for y in body[n + 1 : end]]
        if skipped.count("FSEL") >= 32 and "MUFU" not in skipped:
            found.append((n + 1, end - 1))
    return found


def executed(body: list[Instruction]) -> list[Instruction]:
    """What a warp runs of a turn that skips its masks."""
    skipped = {n for first, last in masks(body) for n in range(first, last + 1)}
    return [x for n, x in enumerate(body) if n not in skipped]


def counted(body: list[Instruction]) -> Counter:
    """How often a warp runs each instruction in a turn that skips its masks."""
    return Counter(x.name for x in executed(body))


def starts(body: list[Instruction]) -> list[int]:
    """When each instruction of a turn begins, in a scheduler's clocks, if nothing overlaps; and the turn's end.

    A product is issued in one clock and then takes its own. A skipped mask takes none.
    """
    skipped = {n for first, last in masks(body) for n in range(first, last + 1)}
    return [0, *accumulate(0 if n in skipped else _clocks(x) for n, x in enumerate(body))]


def _clocks(x: Instruction) -> int:
    """Those of one instruction of a warp of four that share a product."""
    if x.what == "product":
        return 1 + 2 * math.prod(map(int, re.search(r"(\d+)x(\d+)x(\d+)", x.opcode).groups())) // TENSOR
    return 32 * 4 // MUFU if x.name == "MUFU" else 1


def turn_clocks(
    count: Counter, products: int, block_m: int, block_n: int, num_warps: int, head_dim: int
) -> dict[str, float]:
    """Clocks of a multiprocessor for a logit if nothing overlaps, by what takes them.

    count: as `counted`. products: how many a kernel makes in each of its tiles, which are block_m x block_n.
    """
    each = num_warps / 4 / (block_m * block_n)  # the warps of a program share four schedulers
    kinds = {"products": 2 * products * head_dim / TENSOR, "exponentials": 32 / (MUFU / 4) * count["MUFU"] * each}
    kinds |= {kind: sum(count[op] for op in ops) * each for kind, ops in KINDS.items()}
    issued = (sum(count.values()) - count["MUFU"]) * each
    return kinds | {"other": issued - sum(kinds[kind] for kind in KINDS)}


def programs_per_sm(registers: int, shared: int, num_warps: int) -> tuple[int, int]:
    """How many programs fit on a multiprocessor of Hopper: by registers, and by shared memory."""
    a_thread = math.ceil(registers / 8) * 8
    return 65536 // (a_thread * 32 * num_warps), 228 * 1024 // (shared + 1024)


def outline(body: list[Instruction]) -> str:
    """A turn in lines: position, how many instructions, what they do."""
    skipped = {x.address for first, last in masks(body) for x in body[first : last + 1]}

    def kind(x):
        if x.address in skipped:
            return "mask, which most turns skip"
        if x.what == "exponential":
            return ARITHMETIC
        if x.what == "product":
            return f"product, left factor from {'registers' if x.left_in_registers else 'shared memory'}"
        if x.what == "wait for products":
            return f"wait until {x.still_under_way or 'no'} group of products is under way"
        return x.what

    stretches = [[kind, list(group)] for kind, group in groupby(body, kind)]
    merged = []
    for kind_, group in stretches:
        # A few addresses are computed between the products of a group.
        apart = len(merged) > 1 and merged[-1][0] == ARITHMETIC and merged[-2][0] == kind_
        if apart and kind_.startswith("product"):
            merged.pop()
            merged[-1][1].extend(group)
        else:
            merged.append([kind_, list(group)])
    lines, position = [], {x.address: n for n, x in enumerate(body, start=1)}
    for kind_, group in merged:
        if kind_ == ARITHMETIC and len(group) < 12:
            continue
        if exponentials := sum(x.what == "exponential" for x in group):
            kind_ += f", {exponentials} exponentials among them"
        lines.append(f"{position[group[0].address]:>5}{len(group):>5}  {kind_}")
    return "\n".join(["   at    n  what", *lines])


def under_way(body: list[Instruction]) -> list[tuple[str, int, int]]:
    """(name, first, last) of each group of products and each copy: positions in the turn between which it may be under
    way. A group is "PV" if its left factors are in registers, else "S".
    """
    spans, groups, copies, loads = [], [], [], []
    opened, first_load = None, None
    for n, x in enumerate(body):
        if x.what == "product":
            if opened is None or opened[1] != x.left_in_registers:
                opened = [n, x.left_in_registers]
                groups.append(opened)
        elif x.what == "hand registers to products":
            opened = None
        elif x.what == "wait for products":
            done = groups[: len(groups) - x.still_under_way]
            spans += [("PV" if registers else "S", first, n) for first, registers in done]
            groups = groups[len(done) :]
        elif x.what == "ask for a tile":
            copies.append(n)
        elif x.what == "wait at an mbarrier" and copies:
            spans.append(("copy", copies.pop(0), n))
        elif x.name == "LDGSTS" and first_load is None:
            first_load = n
        elif x.name == "LDGDEPBAR" and first_load is not None:
            loads.append(first_load)
            first_load = None
        elif x.name == "DEPBAR":
            done = loads[: len(loads) - x.still_under_way]
            spans += [("copy", first, n) for first in done]
            loads = loads[len(done) :]
    return spans


def hidden(body: list[Instruction]) -> tuple[int, int]:
    """(exponentials issued while a product of the same warps may be under way, exponentials)."""
    products = [(first, last) for name, first, last in under_way(body) if name != "copy"]
    at = [n for n, x in enumerate(body) if x.what == "exponential"]
    return sum(any(a < n < b for a, b in products) for n in at), len(at)


def beside_products(body: list[Instruction]) -> int:
    """How many instructions of a turn that skips its masks stand between the start of a product and the wait for it,
    which may be in the next turn."""
    code, under, found = executed(body), False, 0
    for n, x in enumerate(2 * code):
        under = x.what == "product" or (under and not (x.what == "wait for products" and not x.still_under_way))
        found += n >= len(code) and under and x.what != "product"
    return found


def wait_for_last(body: list[Instruction]) -> int:
    """The place, from 1, of the instruction that waits for a turn's last product. It may be the next turn's."""
    last = max(n for n, x in enumerate(body) if x.what == "product")
    ends = [n for n, x in enumerate(body) if x.what == "wait for products" and not x.still_under_way]
    return 1 + next((n for n in ends if n > last), ends[0])
