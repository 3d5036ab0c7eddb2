"""Few queries, many keys: `python -m phase5_tuning.bench.models.decode --name h100_decode`.

40 cases by name and 20 drawn by a seed, bf16; one query to 512, 1k to 128k keys, groups of 1 to 16. A row has the GPU's
time, by replays of a graph whose calls take turns among as many inputs as the L2 cache cannot hold, as a model's layers
do; and the caller's, with one input and the host's work. FlashAttention-3 chooses its own number of parts. --check
verifies a part of every case first.
"""

import random

from common import arguments as command_line
from common.measure import records
from phase5_tuning.bench import peers
from phase5_tuning.bench.models.calls import SIZES, Replayed, host_us, in_turns, inputs, said
from phase5_tuning.decode import folded, split_kv
from phase5_tuning.passes import forward
from phase5_tuning.passes.rungs import LADDER

import torch
from torch.nn.attention.bias import causal_lower_right

K = 1024
NAMED = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim
    *((1, 32, 8, 1, n * K, 128) for n in (1, 2, 4, 8, 32, 128)),
    *((batch, 32, 8, 1, n * K, 128) for batch, n in ((8, 4), (12, 4), (16, 8), (64, 2), (128, 1), (128, 8), (128, 64))),
    *((batch, 32, 32, 1, n * K, 128) for batch, n in ((1, 8), (1, 32), (16, 4))),
    (1, 64, 8, 1, 8 * K, 128), (4, 64, 8, 1, 32 * K, 128), (1, 16, 1, 1, 32 * K, 128), (8, 32, 2, 1, 8 * K, 128),
    (1, 12, 12, 1, 4 * K, 64), (32, 16, 16, 1, 2 * K, 64), (1, 32, 8, 1, 16 * K, 64), (1, 8, 1, 1, 8 * K, 256),
    (1, 32, 8, 2, 32 * K, 128), (64, 32, 8, 2, 2 * K, 128), (8, 32, 8, 4, 4 * K, 128), (1, 32, 8, 8, 32 * K, 128),
    (1, 32, 32, 8, 8 * K, 128), (1, 32, 8, 16, 8 * K, 128), (1, 32, 8, 32, 32 * K, 128),
    (1, 32, 8, 64, 4 * K, 128), (1, 32, 8, 64, 32 * K, 128), (1, 32, 8, 128, 16 * K, 128),
    (1, 32, 8, 256, 2 * K, 128), (1, 32, 8, 256, 32 * K, 128), (1, 32, 8, 512, 32 * K, 128),
    (1, 32, 32, 256, 8 * K, 128), (4, 32, 8, 256, 4 * K, 128), (1, 12, 12, 256, 8 * K, 64),
]  # fmt: skip
LOWER_RIGHT = [
    *((1, 32, 8, seq_q, 32 * K, 128) for seq_q in (8, 256, 512, 2 * K)),
    (1, 32, 8, 2 * K, 4 * K, 128), (1, 32, 8, 1000, 9000, 128), (4, 32, 8, 512, 4 * K, 96),
]  # fmt: skip
SEED, DRAWN = 38, 20
PROVIDERS = "sdpa", "sdpa-flash", "sdpa-cudnn", "flash-attn-3", "ours"


def drawn() -> list[tuple]:
    """DRAWN cases that fit into 8 GB, by SEED."""
    rng, cases = random.Random(SEED), []
    while len(cases) < DRAWN:
        heads_kv, group, head_dim = (
            rng.choice((1, 2, 4, 8, 16, 32)),
            rng.choice((1, 2, 4, 8, 16)),
            rng.choice((64, 128)),
        )
        seq_q, seq_k = rng.choice((1, 1, 1, 2, 3, 5, 8, 16, 32, 64, 100, 200, 400)), rng.randint(1000, 2**17)
        batch = rng.choice((1, 1, 2, 4, 8, 16, 32, 64, 128))
        fits = 4 * batch * heads_kv * seq_k * head_dim < 8e9
        if fits and heads_kv * group <= 128 and batch * heads_kv * group * seq_q < 40000:
            cases.append((batch, heads_kv * group, heads_kv, seq_q, seq_k, head_dim))
    return cases


def check(sizes) -> None:
    """Verify ours on the case's shapes, with one batch entry and one group. Raises VerificationError."""
    _, heads_q, heads_kv, seq_q, seq_k, head_dim = sizes
    peers.check("bf16", 1, heads_q, head_dim, seq_q, False, heads_kv=heads_kv, seq_k=seq_k, backward=False)


def measured(sizes, lower_right: bool) -> list[dict]:
    """A row for each provider."""
    tensors = inputs(sizes)
    case = dict(zip(SIZES, sizes, strict=True)) | dict(mask="lower right" if lower_right else "full")
    case["bytes"] = sum(t.nbytes for t in tensors[0]) + tensors[0][0].nbytes
    mask = causal_lower_right(*sizes[3:5]) if lower_right else None
    return in_turns(case, PROVIDERS, tensors, mask=mask)


def run(args) -> list[dict]:
    rows = []
    cases = [(sizes, False) for sizes in (*NAMED, *drawn())] + [(sizes, True) for sizes in LOWER_RIGHT]
    for sizes, lower_right in cases:
        if args.check and not lower_right:
            check(sizes)
        made = measured(sizes, lower_right)
        rows += made
        print(*sizes, made[0]["mask"], said(made), sep="  ", flush=True)
        torch.cuda.empty_cache()
    return rows


DECODE_KERNELS = split_kv._attn_fwd_parts_kernel, split_kv._attn_fwd_merge_kernel
KERNELS = *DECODE_KERNELS, peers.HOPPER_KERNELS[0], LADDER[-1].forward
SETTINGS = (
    run, inputs, in_turns, Replayed, host_us, split_kv.pays, split_kv.plan, folded.parts, folded.plan, forward.choose,
)  # fmt: skip


def main(argv=None) -> int:
    args = command_line.arguments(argv=argv, name=records.NAME, commit=records.COMMIT, check="verify every case first")
    packages = peers.packages_of(PROVIDERS)
    return records.main("phase5_tuning", KERNELS, lambda: run(args), args, packages, SETTINGS)


if __name__ == "__main__":
    raise SystemExit(main())
