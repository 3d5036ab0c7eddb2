"""Predict a rung's gain from counted instructions, and compare it with the record.

You are given turns of kernels' loops: the tile, the warps, and how often a warp runs each instruction in one turn. A
multiprocessor of Hopper has three kinds of units for them:

    tensor cores    4096 operations of a 16-bit product in a clock. A turn of the forward pass makes two products,
                    S = Q K^T and P V, of 2 * block_m * block_n * head_dim operations each
    exponentials    MUFU: 16 results in a clock, for the four schedulers together. A warp's instruction has 32 results,
                    and a scheduler's share is a quarter of the unit
    schedulers      four; each issues one instruction in a clock, of any kind, for one of its warps. The warps of a
                    program, 4, 8 or 16, are spread evenly over them

Write, for one turn of one program,

1. `serial_clocks`: nothing overlaps. The products' clocks, plus a scheduler's clocks for its warps: for each MUFU those
   that the unit takes, for every other instruction (those that start products too) one.
2. `overlapped_clocks`: everything overlaps, and the unit that is busy for longest decides. A MUFU is issued like any
   other instruction, in one clock, and then keeps its unit busy.
3. `gain`: by what number are the clocks divided when a rung turns `before` into `after`, if nothing overlaps? The two
   may have different tiles: compare the clocks of a logit.

Then the check puts your numbers beside the record of an H100, which is a gain in time.

Notebook: phase5_tuning/rungs.ipynb, section 2.3, "Exercise 5.4: Predict, then measure".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One turn of a program's loop. `instructions`: opcode ("MUFU", ...) -> how often each warp runs it, if it does."""

    block_m: int
    block_n: int
    num_warps: int
    instructions: dict[str, int]


def serial_clocks(turn: Turn, head_dim: int) -> float:
    """Clocks of a multiprocessor for one turn, one thing after the other."""
    # your code: the products, and what the schedulers issue
    products = 2 * 2 * turn.block_m * turn.block_n * head_dim / 4096
    exponentials = turn.instructions.get("MUFU", 0)
    others = sum(turn.instructions.values()) - exponentials
    return products + (others + 8 * exponentials) * turn.num_warps / 4
    # end of your code


def overlapped_clocks(turn: Turn, head_dim: int) -> float:
    """Clocks of a multiprocessor for one turn, everything at the same time."""
    # your code: which unit is busy for longest?
    products = 2 * 2 * turn.block_m * turn.block_n * head_dim / 4096
    exponentials = 8 * turn.instructions.get("MUFU", 0) * turn.num_warps / 4
    issued = sum(turn.instructions.values()) * turn.num_warps / 4
    return max(products, exponentials, issued)
    # end of your code


def gain(before: Turn, after: Turn, head_dim: int) -> float:
    """Clocks of a logit before, divided by those after, if nothing overlaps."""
    # your code: return the quotient
    old, new = (serial_clocks(t, head_dim) / (t.block_m * t.block_n) for t in (before, after))
    return old / new
    # end of your code
