"""Choose consumers, stages and registers so that the Hopper kernel fits.

`_attn_fwd_hopper_kernel` (phase5_tuning/hopper/forward.py) is one program on each multiprocessor, so it may use all of
its shared memory, 227 KiB = 232448 bytes, and all of its 65536 registers. Shared memory holds two tiles of queries,
this one and the next, each of 64 rows for each consumer, and in each stage a tile of 128 keys and one of their values.
Barriers take less than 1 KiB.

A consumer is a warpgroup: four warps, 128 threads. The producer is one warp, but it counts as four, as registers are
shared out by warpgroups. At launch every thread gets the same number of registers, a multiple of 8. Then `setmaxnreg`
moves them: producers give some back, consumers take more. Write

1. `shared_bytes`, the bytes of all tiles of a program;
2. `launch_registers`, the most registers that each thread can have at launch;
3. `shape`, the choice for head_dim 64 and for 128:
       CONSUMERS             2 or 3
       STAGES                pairs of tiles of K and V in the ring
       OVERLAP               True or False: P V of the step before still runs during this step's maxima. Then that
                             P in 16 bits keeps its registers longer. (Two consumers also hold their queries in
                             registers, three do not.)
       CONSUMER_REGISTERS    of a thread, after setmaxnreg: a multiple of 8, from 24 to 240
       PRODUCER_REGISTERS    the same. The warpgroups together cannot have more than they had at launch.

A shape fits if nothing is spilled in its kernel, and no product waits for the one before (ptxas calls that
serialized). Right is a shape that fits and has

- two stages or more: with one, consumers wait for each other and for every copy;
- as many consumers as fit: while one exponentiates, others multiply;
- OVERLAP, if with so many consumers it fits as well.

The check compares the counts with numbers of its own, and has the compiler make your kernels for sm_90, without a GPU.
Where you leave out a consumer or OVERLAP it compiles the kernel that has it, too. That takes about half a minute.

Notebook: phase5_tuning/hopper_forward.ipynb, section 7, "5.11 Choose a shape that fits".
"""


def shared_bytes(head_dim: int, consumers: int, stages: int) -> int:
    """Bytes of shared memory of a program's tiles, fp16. head_dim: 64 or 128."""
    # your code: queries, keys and values
    q = 2 * consumers * 64 * head_dim * 2
    kv = stages * 2 * 128 * head_dim * 2
    return q + kv
    # end of your code


def launch_registers(consumers: int) -> int:
    """Registers of each thread at launch, the most that are possible. consumers: at least 2."""
    # your code: how many threads share the registers?
    threads = 128 * (consumers + 1)
    return 65536 // threads // 8 * 8
    # end of your code


def shape(head_dim: int) -> dict:
    """The five choices, by name. head_dim: 64 or 128."""
    # your code: one shape for each head_dim
    if head_dim == 64:
        return dict(CONSUMERS=3, STAGES=4, OVERLAP=False, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32)
    return dict(CONSUMERS=2, STAGES=2, OVERLAP=True, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24)
    # end of your code
