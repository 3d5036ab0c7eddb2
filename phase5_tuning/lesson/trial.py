"""Try tiles on this GPU: `python -m phase5_tuning.lesson.trial --head-dim 128 --seq-len 4096 --causal yes`.

Prints the time of each config that `configs.choose` tries for the last rung's forward kernel on a GPU that its table
does not know. --tile 128x128x8x2 adds one of 128 queries, 128 keys, 8 warps and 2 stages. A call has 16384 tokens
(batch times seq) and 2048 columns (heads times head_dim).
"""

import argparse

from common.arguments import arguments, listed, size
from common.measure import records, timing
from common.verify.inputs import make_qkv
from phase5_tuning.launch import configs
from phase5_tuning.launch.configs import Config
from phase5_tuning.launch.plans import descriptors_allowed
from phase5_tuning.passes.forward import attention_forward

from triton.runtime.errors import OutOfResources, PTXASError


def tile(text: str) -> Config:
    """The config of "BLOCK_M x BLOCK_N x warps x stages". Raises argparse's error."""
    numbers = text.split("x")
    if len(numbers) != 4 or not all(map(str.isdecimal, numbers)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected four numbers, as in 128x64x4x2")
    return Config(*map(int, numbers))


def tried(head_dim: int, seq: int, is_causal: bool, more: list[Config]) -> dict[Config, float | None]:
    """Milliseconds of each config; None where it does not compile or fit."""
    batch, heads = max(1, 16384 // seq), max(1, 2048 // head_dim)
    q, k, v = make_qkv(batch, heads, seq, head_dim)
    known, found = configs.candidates("forward", head_dim, q.dtype, descriptors_allowed(q, k, v)), {}
    for config in dict.fromkeys([*known, *more]):
        call = lambda config=config: attention_forward(q, k, v, is_causal, config=config)  # noqa: E731
        try:
            found[config] = timing.time_ms(call).median
        except (OutOfResources, PTXASError):
            found[config] = None
    return found


def main(argv=None) -> int:
    args = arguments(
        argv=argv,
        head_dim=dict(type=size, default="128", help="of queries, keys and values"),
        seq_len=dict(type=size, default="4096", help="queries, and as many keys"),
        causal=dict(choices=("no", "yes"), default="no", help="the mask"),
        tile=dict(type=listed(tile), default=[], help="more tiles, as in 128x128x8x2,64x64x4x1"),
    )
    if records.without_gpu():
        return 1
    found = tried(args.head_dim, args.seq_len, args.causal == "yes", args.tile)
    print(f"forward, fp16, head_dim {args.head_dim}, seq {args.seq_len}, causal: {args.causal}, on this GPU:")
    for config, ms in found.items():
        print(f"{config!s:<52}", f"{ms:.3f} ms" if ms else "does not run here")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
