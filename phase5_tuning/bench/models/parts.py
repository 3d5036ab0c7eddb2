"""One query, cut by hand: `python -m phase5_tuning.bench.models.parts --name h100_parts`.

How long decode/split_kv.py takes with any number of parts, on the GPU, bf16: by replays of a graph, as in decode.py. A
row has the time of both kernels (ms), and of the parts without their merge (parts_ms). The provider "not packed" is
the same with a program for each head of a group; "plain" is the ladder's last rung, a program for each head and all
keys; "nothing" is a kernel that doubles one number.
"""

import statistics
from functools import partial
from unittest import mock

from common import arguments as command_line
from common import runtime
from common.canary import _double_kernel
from common.measure import records
from phase5_tuning.bench.models.calls import ROUNDS, Replayed, inputs
from phase5_tuning.bench.models.decode import DECODE_KERNELS
from phase5_tuning.decode import split_kv
from phase5_tuning.launch.plans import cdiv
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import torch

K = 1024
CASES = [  # batch, heads_q, heads_kv, seq_k, head_dim
    *((1, 32, 8, n * K, 128) for n in (1, 2, 8, 32, 128)),
    *((batch, 32, 8, n * K, 128) for batch, n in ((4, 8), (8, 4), (12, 4), (16, 8), (20, 4), (32, 4))),
    (1, 32, 32, 8 * K, 128), (1, 16, 1, 32 * K, 128), (1, 12, 12, 4 * K, 64), (32, 16, 16, 2 * K, 64),
]  # fmt: skip
COUNTS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128


def counts(tiles: int) -> list[int]:
    """Numbers of parts without an empty one, for so many tiles of keys."""
    return sorted({cdiv(tiles, cdiv(tiles, n)) for n in COUNTS if n <= tiles})


def by_head(q, k, v):
    """The same call, unpacked: the heads of a group are batch entries that share keys. For a batch of 1."""
    group = q.shape[1] // k.shape[1]
    return q[0].unflatten(0, (-1, group)).transpose(0, 1), *(t.expand(group, -1, -1, -1) for t in (k, v))


def launched(n: int, tensors, o, lse):
    """The launches of a call in n parts. Tiles come by descriptors, which take a batch with a stride of 0, too."""
    given = dict(parts=mock.Mock(return_value=n), descriptors_allowed=mock.Mock(return_value=True))
    with mock.patch.multiple(split_kv, **given):
        return split_kv.plan(*tensors, o, lse, False, 0, o.shape[3] ** -0.5)


def measured(case) -> list[dict]:
    """A row for each number of parts, which take turns."""
    batch, heads_q, heads_kv, seq_k, head_dim = case
    tensors = inputs((batch, heads_q, heads_kv, 1, seq_k, head_dim))
    q, k, _ = tensors[0]
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    turns = tensors * max(1, 8 // len(tensors))
    row = dict(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=1, seq_k=seq_k, head_dim=head_dim)
    row |= dict(bytes=2 * (k.nbytes + q.nbytes))
    tile = split_kv.tiles(heads_q // heads_kv, head_dim, q.itemsize)[0]
    both, alone, unpacked = {}, {}, {}
    for n in counts(cdiv(seq_k, tile.BLOCK_N)):
        launch = launched(n, tensors[0], o, lse)
        both[n] = Replayed([partial(launch, *each, o, lse) for each in turns])
        of_parts = split_kv.room(launch.parts, q) if n > 1 else (None, None)
        alone[n] = Replayed([partial(launch.attend, k, v, q, o, lse, *of_parts) for q, k, v in turns])
        if batch == 1 and heads_q > heads_kv:
            heads = [by_head(*each) for each in turns]
            into = torch.empty_like(heads[0][0]), torch.empty(heads[0][0].shape[:3], device=q.device)
            launch = launched(n, heads[0], *into)
            unpacked[n] = Replayed([partial(launch, *each, *into) for each in heads])
    plain = partial(attention_forward, enable_gqa=True, kernel=LADDER[-1].forward)
    plain_ms = Replayed([partial(plain, *each) for each in turns]).ms()
    times = {n: ([], [], []) for n in both}
    for turn in range(ROUNDS):
        for n in list(both)[:: -1 if turn % 2 else 1]:
            for found, graphs in zip(times[n], (both, alone, unpacked), strict=True):
                found += graphs[n].ms() if n in graphs else []
    rows = [
        row | timed(ms) | dict(provider="ours", parts=n, parts_ms=statistics.median(parts_ms))
        for n, (ms, parts_ms, _) in times.items()
    ]
    rows += [row | timed(ms) | dict(provider="not packed", parts=n) for n, (*_, ms) in times.items() if ms]
    return [*rows, row | timed(plain_ms) | dict(provider="plain")]


def timed(ms: list[float]) -> dict:
    return dict(ms=statistics.median(ms), ms_min=min(ms), ms_max=max(ms))


def nothing() -> dict:
    """A launch that does next to nothing."""
    x = torch.zeros(1, device=runtime.DEVICE)
    ms = Replayed([partial(_double_kernel[(1,)], x, x, 1, 16)] * 40).ms()
    return dict(provider="nothing") | timed(ms)


def run() -> list[dict]:
    rows = [nothing()]
    print(f"nothing {1e3 * rows[0]['ms']:.1f}")
    for case in CASES:
        made = measured(case)
        rows += made
        short = (f"{r['parts']}: {1e3 * r['ms']:.1f} ({1e3 * r.get('parts_ms', 0):.1f})" for r in made[:-1])
        print(*case, *short, f"plain: {1e3 * made[-1]['ms']:.1f}", sep="  ", flush=True)
        torch.cuda.empty_cache()
    return rows


KERNELS = *DECODE_KERNELS, LADDER[-1].forward, _double_kernel
SETTINGS = run, inputs, Replayed, split_kv.plan


def main(argv=None) -> int:
    args = command_line.arguments(argv=argv, name=records.NAME, commit=records.COMMIT)
    with torch.no_grad():
        return records.main("phase5_tuning", KERNELS, run, args, settings=SETTINGS)


if __name__ == "__main__":
    raise SystemExit(main())
