"""What several checks of phase 5's exercises need; each check is a module beside this one (see
common.learn.judge).
"""

import math
from collections import Counter

from common.learn.judge import reject

import torch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


def require_ints(calls):
    """calls: (what, got, right, mistakes) of one function. In a single call a wrong sentence may
    fit by chance, so one is believed if it explains most of what is wrong."""
    for what, got, _, _ in calls:
        if isinstance(got, bool) or not isinstance(got, int):
            why = (
                ". A float is not exact past 2^53: divide with //" if isinstance(got, float) else ""
            )
            reject(f"{what}: expected an int, got {type(got).__name__}{why}")
    off = [call for call in calls if call[1] != call[2]]
    if not off:
        return
    fits = Counter(
        sentence for _, got, _, wrong in off for sentence in wrong if wrong[sentence] == got
    )
    sentence, n = max(fits.items(), key=lambda fit: fit[1], default=("", 0))
    if 2 * n < len(off):
        sentence = ""
    what, got, right, _ = next(
        call for call in off if not sentence or call[3].get(sentence) == call[1]
    )
    if abs(got - right) < 2.0**-40 * right:
        sentence = "floats were used on the way, which are not exact past 2^53: divide ints with //"
    reject(f"{what} is {got}, where {right} is right{sentence and ': '}{sentence}")


def padded_dim(head_dim):
    return 2 ** max(4, math.ceil(math.log2(head_dim)))
