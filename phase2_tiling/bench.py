"""`python -m phase2_tiling.bench`: one head, with S and P through memory and without."""

from common import runtime
from common.measure import records, timing
from common.verify.inputs import make_qkv
from phase2_tiling import tiling as ours

import torch.nn.functional as F

KERNELS = (ours._attention_tiled_kernel, ours._matmul_kernel)


def case(seq: int) -> list[dict]:
    """One head, fp16, head_dim 64: our tiled kernel, our three kernels, the same steps in PyTorch, and SDPA."""
    q4, k4, v4 = make_qkv(1, 1, seq, 64, device=runtime.DEVICE)
    q, k, v = q4[0, 0], k4[0, 0], v4[0, 0]
    providers = {
        "attention (tiled)": lambda: ours.attention(q, k, v),
        "attention_unfused": lambda: ours.attention_unfused(q, k, v),
        "PyTorch, three steps": lambda: (q @ k.T * 0.125).softmax(-1) @ v,
        "SDPA": lambda: F.scaled_dot_product_attention(q4, k4, v4),
    }
    return timing.with_tflops(
        timing.measure(providers, seq=seq, head_dim=64), timing.attention_flops(1, 1, seq, seq, 64)
    )


def run() -> list[dict]:
    return [row for seq in (1024, 4096, 16384, 32768) for row in case(seq)]


if __name__ == "__main__":
    raise SystemExit(records.main("phase2_tiling", KERNELS, run))
