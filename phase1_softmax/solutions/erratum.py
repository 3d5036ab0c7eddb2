"""Find the erratum, and an input that exposes it.

Attention carries the numerator of its output along, the sum of exp(s - m) v over the keys seen so far: after a first
tile it is o1, measured against the maximum m1. A second tile brings p2 = exp(s2 - m2) and v2, where m2 is the maximum
of both tiles. One of the four CANDIDATES gives the numerator for both tiles; A is what FlashAttention-2 (arXiv
2307.08691, p. 6 and Algorithm 1, line 10) and FlashAttention-3 (arXiv 2407.08608, Algorithm 1, line 21) print.

    1. Write the right one: `update`.
    2. Find an input, s1, v1, s2, v2, that tells: none of the three wrong ones gives the right output for it. But with
       its tiles exchanged, s2, v2, s1, v1, it hides: all four give the right output, and a test finds nothing.

    o1       (rows, head_dim)
    m1, m2   (rows, 1)
    p2       (rows, cols)
    v2       (cols, head_dim)
    s1, s2   (rows, cols) each, v1, v2 (cols, head_dim) each; cols may differ between the tiles

`attend` computes the output from two tiles with any of the updates, to try them on.

Notebook: phase1_softmax/softmax.ipynb, section 4.5, "What you will read elsewhere".
"""

import torch

CANDIDATES = {
    "A": lambda o1, m1, m2, p2, v2: o1 / torch.exp(m1 - m2) + p2 @ v2,
    "B": lambda o1, m1, m2, p2, v2: torch.exp(m1 - m2) * o1 + p2 @ v2,
    "C": lambda o1, m1, m2, p2, v2: torch.exp(m1 - m2) * (o1 + p2 @ v2),
    "D": lambda o1, m1, m2, p2, v2: o1 + torch.exp(m1 - m2) * (p2 @ v2),
}


def attend(update, s1, v1, s2, v2) -> torch.Tensor:
    """softmax([s1, s2]) [v1, v2], (rows, head_dim), by way of `update`; what is right, if `update` is right."""
    m1 = s1.amax(dim=1, keepdim=True)
    m2 = torch.maximum(m1, s2.amax(dim=1, keepdim=True))
    p1, p2 = torch.exp(s1 - m1), torch.exp(s2 - m2)
    l2 = torch.exp(m1 - m2) * p1.sum(dim=1, keepdim=True) + p2.sum(dim=1, keepdim=True)
    return update(p1 @ v1, m1, m2, p2, v2) / l2


def update(o1, m1, m2, p2, v2) -> torch.Tensor:
    """The numerator for both tiles, (rows, head_dim)."""
    # your code: return it
    return torch.exp(m1 - m2) * o1 + p2 @ v2
    # end of your code


def telling_input() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """s1, v1, s2, v2 for which no wrong candidate gives the right output, while for s2, v2, s1, v1 all of them do."""
    # your code: return four tensors
    # The maximum comes with the second tile. Exchanged, it comes with the first: m1 = m2, and the factor is 1.
    s1, s2 = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[3.0, 0.0]]).double()
    v1, v2 = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[1.0], [4.0]]).double()
    return s1, v1, s2, v2
    # end of your code
