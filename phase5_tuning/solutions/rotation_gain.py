"""Predict where a rotation helps, then measure it.

A number that is rounded to e4m3 is off by ROUNDING of its size, as a root mean square: 2.65 %. The chapter derives from
that what a logit q k^T is off by. (The scale of the softmax is left out.) Write

1. `expected_error`: for each pair of a query and a key the root mean square of its error, if q and k are rounded as
   they are, or rotated first by a random-sign Hadamard matrix. Rotated, take each element of a row for as large as
   their root mean square;
2. `measured_error`: round, and look. `rounded(t)` is t (batch, heads, seq, d) after its way through e4m3, with a scale
   for each 64 rows, and `rotation(d)` is the matrix, both in fp64;
3. PREDICTED: before you measure! Does the rotation make the root mean square error of all logits smaller ("helps"),
   larger ("hurts"), or neither ("same": 0.8 to 1.25 times as large)? Afterwards put right what was wrong. The inputs,
   in which all other elements are normally distributed:

    few           q and k have elements ten times as large, in random places, one in a thousand
    both          column 3 of q and column 3 of k are 8 times as large as the others
    opposite      column 3 of q is 32 times as large, column 3 of k 32 times as small
    keys          column 3 of k is 30 times as large, q has no outliers
    row           one key is 30 times as large as the others

Notebook: phase5_tuning/fp8.ipynb, section 3.4.
"""

from phase5_tuning.given import rotation, rounded

import torch

ROUNDING = 0.0265

PREDICTED = dict(
    # your code: "helps", "hurts" or "same"
    #| few="?", both="?", opposite="?", keys="?", row="?"
    few="same", both="helps", opposite="hurts", keys="same", row="same"
    # end of your code
)  # fmt: skip


def expected_error(q: torch.Tensor, k: torch.Tensor, rotate: bool) -> torch.Tensor:
    """(batch, heads, seq_q, seq_k), fp64: what each q k^T is off by. q and k (batch, heads, seq, d) are fp64."""
    # your code: without rotation, and with it
    if rotate:
        squares = q.square().sum(3)[..., :, None] * k.square().sum(3)[..., None, :] / q.shape[3]
    else:
        squares = q.square() @ k.square().mT
    return ROUNDING * (2 * squares).sqrt()
    # end of your code


def measured_error(q: torch.Tensor, k: torch.Tensor, rotate: bool) -> float:
    """The root mean square, over all pairs, of what q k^T is off by once q and k are rounded."""
    # your code: round, multiply, compare
    m = rotation(q.shape[3]) if rotate else torch.eye(q.shape[3], dtype=torch.float64)
    off = rounded(q @ m) @ rounded(k @ m).mT - q @ k.mT
    return off.square().mean().sqrt().item()
    # end of your code
