"""Pick a tile that fits: shared memory and registers as budgets.

What does a program of the tuned forward kernel keep on the chip, compiled for Hopper (sm_90)? In
shared memory:

    the tile of q, for the whole walk;
    tiles of k and v: with num_stages of 2 or more, that many of each, so that later ones arrive while this one is used;
    with 1 stage a tile of k and one of v take turns in a single place.

In registers, fp32, spread evenly over the threads (32 in a warp): acc and S. Everything else, P, the state of the rows
and addresses, has to make do with the rest of the 255 that a thread can have. Write

1. `shared_bytes` and `registers`, the numbers that follow, as ints. head_dim is padded to a power of two, 16 or more;
2. `pick`: of the candidates that fit both budgets the one with the largest BLOCK_M * BLOCK_N; among equals the one with
   the larger BLOCK_M (the larger it is, the less often k and v are read), then with more stages, then the first one.
   None if nothing fits, or if there is no candidate. Section 4.2 of the notebook measures the tile that the rule picks;
3. `programs`: how many programs run on a multiprocessor of Hopper at once, from what the compiler reports of a kernel.
   It has 65536 registers, 228 KiB of shared memory and room for 64 warps. A thread's registers are handed out in
   eights: with 129 it holds 136. Each program takes 1 KiB of shared memory more than it asks for. A program has two
   warps or more.

The check draws tiles, compiles the kernel with them for sm_90, and compares: shared memory within 8 % (there are a few
barriers as well). It prints the registers, the spills and the programs of each.

    Config     BLOCK_M, BLOCK_N, num_warps, num_stages
    itemsize   bytes of an element, 2 for fp16

Notebook: phase5_tuning/measure.ipynb, section 4.1, "Exercise 5.2: Pick a tile that fits".
"""

from phase5_tuning.given import Config


def shared_bytes(config: Config, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory of one program."""
    # your code: q, k and v
    padded = max(16, 1 << (head_dim - 1).bit_length())
    q, k = (block * padded * itemsize for block in (config.BLOCK_M, config.BLOCK_N))
    return q + (k if config.num_stages == 1 else config.num_stages * 2 * k)
    # end of your code


def registers(config: Config, head_dim: int) -> int:
    """Registers of one thread for acc and S, 4 bytes each."""
    # your code: acc and S
    padded = max(16, 1 << (head_dim - 1).bit_length())
    return config.BLOCK_M * (padded + config.BLOCK_N) // (32 * config.num_warps)
    # end of your code


def pick(
    candidates: list[Config], head_dim: int, itemsize: int, shared_limit: int, register_budget: int
) -> Config | None:
    """The largest tile whose shared memory and registers stay within the limits, which themselves are allowed."""
    # your code: which fit, and which of them is the largest?
    fitting = [
        c
        for c in candidates
        if shared_bytes(c, head_dim, itemsize) <= shared_limit and registers(c, head_dim) <= register_budget
    ]
    return max(fitting, key=lambda c: (c.BLOCK_M * c.BLOCK_N, c.BLOCK_M, c.num_stages), default=None)
    # end of your code


def programs(registers: int, shared: int, num_warps: int) -> int:
    """How many programs fit on a multiprocessor: registers of a thread, bytes of shared memory, warps of a program."""
    # your code: three budgets
    held = (registers + 7) // 8 * 8
    return min(65536 // (held * 32 * num_warps), 228 * 1024 // (shared + 1024), 64 // num_warps)
    # end of your code
