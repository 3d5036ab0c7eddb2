"""`python -m phase1_softmax.bench`: softmax and logsumexp beside PyTorch's, in bytes per second."""

from common import runtime
from common.measure import records, timing
from phase1_softmax import online_softmax as ours

import torch

KERNELS = (ours._softmax_fused_kernel, ours._softmax_online_kernel, ours._logsumexp_kernel)
# a softmax has to read the matrix once and write it once.
USEFUL = {"logsumexp": 1, "torch.logsumexp": 1}


def case(cols: int) -> list[dict]:
    """fp16, 2^28 values in rows of `cols`; gb_per_s counts one read, and for a softmax one write: what has to move."""
    x = torch.randn(2**28 // cols, cols, device=runtime.DEVICE, dtype=torch.float16)
    providers = {
        "softmax_fused": lambda: ours.softmax_fused(x),
        "softmax_online": lambda: ours.softmax_online(x),
        "torch.softmax": lambda: x.softmax(-1),
        "logsumexp": lambda: ours.logsumexp(x),
        "torch.logsumexp": lambda: x.logsumexp(-1),
    }
    if cols > ours.TILE_ELEMENTS:
        del providers["softmax_fused"]
    rows = timing.measure(providers, rows=x.shape[0], cols=cols)
    for row in rows:
        if "ms" in row:
            row["gb_per_s"] = USEFUL.get(row["provider"], 2) * x.nbytes / row["ms"] / 1e6
    return rows


def run() -> list[dict]:
    return [row for cols in (1024, 4096, 32768, 262144) for row in case(cols)]


if __name__ == "__main__":
    raise SystemExit(records.main("phase1_softmax", KERNELS, run))
