"""A turn of a kernel's loop in Hopper's machine code, read from top to bottom.

The listing has no times. It has an order, and from it follows what can be under way at once: a product is under way
from its HGMMA to the DEPBAR that waits for it, a copy from its UTMALDG to the PHASECHK that waits for its bytes.
"""

import re
from dataclasses import dataclass
from itertools import groupby

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
    def what(self) -> str:
        for beginning, what in WHAT.items():
            if self.opcode.startswith(beginning):
                return what
        return ARITHMETIC

    @property
    def left_in_registers(self) -> bool:
        """True for a product whose left factor comes from registers."""
        return bool(re.search(r"\bR\d+, R\d+, gdesc", self.text))

    @property
    def still_under_way(self) -> int:
        """For a wait for products: how many groups may still be under way after it."""
        return int(re.search(r"gsb0, (0x[0-9a-f]+)", self.text)[1], 16)


def instructions(sass: str) -> list[Instruction]:
    """All instructions of a listing."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;", sass)
    return [Instruction(int(at, 16), re.sub(r"\s+", " ", text)) for at, text in found]


def turn(sass: str) -> list[Instruction]:
    """The shortest loop with products and exponentials: a turn of the walk over keys, or over queries.

    In machine code a loop ends with a branch to an earlier address. A branch inside the loop that skips a mask is not
    followed: the mask counts.
    """
    code = instructions(sass)
    loops = []
    for line in code:
        to = re.search(r"^(?:@!?\w+ )?BRA\b.*?(0x[0-9a-f]+)", line.text)
        if to and int(to[1], 16) < line.address:
            body = [x for x in code if int(to[1], 16) <= x.address <= line.address]
            kinds = [x.what for x in body]
            if kinds.count("product") >= 8 and kinds.count("exponential") >= 16:
                loops.append(body)
    return min(loops, key=len)


def outline(body: list[Instruction]) -> str:
    """A turn in lines: position, how many instructions, what they do."""

    def kind(x):
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
        text = kind_
        exponentials = sum(x.what == "exponential" for x in group)
        if exponentials:
            text += f", {exponentials} exponentials among them"
        if kind_ == ARITHMETIC and len(group) < 12:
            continue
        lines.append(f"{position[group[0].address]:>5}{len(group):>5}  {text}")
    return "\n".join(["   at    n  what", *lines])


def under_way(body: list[Instruction]) -> list[tuple[str, int, int]]:
    """(name, first, last) of each group of products and each copy: positions in the turn between which it may be under
    way. A group is "PV" if its left factors are in registers, else "S".
    """
    spans, groups, copies = [], [], []
    opened = None
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
    return spans


def mask(body: list[Instruction]) -> tuple[int, int]:
    """(first, last) position of the mask: what a branch skips if it holds a mask's selects and no exponential."""
    position = {x.address: n for n, x in enumerate(body)}
    for n, x in enumerate(body):
        to = re.search(r"^(?:@!?\w+ )?BRA\b.*?(0x[0-9a-f]+)", x.text)
        end = position.get(int(to[1], 16), 0) if to else 0
        skipped = [y.opcode.split(".")[0] for y in body[n + 1 : end]]
        if skipped.count("FSEL") >= 32 and "MUFU" not in skipped:
            return n + 1, end - 1
    raise ValueError("this turn skips no mask")


def hidden(body: list[Instruction]) -> tuple[int, int]:
    """(exponentials issued while a product of the same warps may be under way, exponentials)."""
    products = [(first, last) for name, first, last in under_way(body) if name != "copy"]
    at = [n for n, x in enumerate(body) if x.what == "exponential"]
    return sum(any(a < n < b for a, b in products) for n in at), len(at)
