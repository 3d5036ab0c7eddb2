"""Attention inputs at random: what test_fuzz.py draws.

Sizes lie on the edges of tiles, or one beside, as often as anywhere else. Each tensor has its own
kind of memory. `Anything` prints as the call that makes it again.
"""

from dataclasses import dataclass

from common import make_qkv, runtime
from common.verify.inputs import KINDS, LAYOUTS

import torch
from hypothesis import strategies as st

EDGES = (16, 32, 64, 128)
MEMORY = (*LAYOUTS, "poisoned")  # NaN around every row
REPEATED = (*MEMORY, "one row")  # with stride 0 along seq
SCALES = st.none() | st.floats(-1, 1, width=32) | st.sampled_from([0.0, 1e-30, -3.0])


@dataclass(frozen=True)
class Anything:
    batch: int
    heads_kv: int
    group: int  # query heads that share a key head
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: torch.dtype
    kind: str
    kind_of_do: str
    memory: tuple[str, str, str, str]  # of q, k, v, do
    is_causal: bool
    scale: float | None

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v, do."""
        kinds = (self.kind,) * 3 + (self.kind_of_do,)
        made = [self._made(*look) for look in zip(kinds, self.memory, (0, 0, 0, 1), strict=True)]
        return [made[0][0], made[1][1], made[2][2], made[3][0]]

    def _made(self, kind, memory, seed):
        layout = {"poisoned": "bshd", "one row": "bhsd"}.get(memory, memory)
        made = make_qkv(
            self.batch, self.heads_kv * self.group, self.seq_q, self.head_dim, heads_kv=self.heads_kv,
            seq_k=self.seq_k, dtype=self.dtype, kind=kind, seed=seed, layout=layout,
            poison=memory == "poisoned",
        )  # fmt: skip
        return [t[:, :, :1].expand_as(t) for t in made] if memory == "one row" else made

    @property
    def options(self) -> dict:
        return dict(is_causal=self.is_causal, scale=self.scale, enable_gqa=self.group > 1)


def sizes(least: int, most: int):
    """Whole numbers from least to most, half of them within 1 of the edge of a tile."""
    edges = [n for edge in EDGES for n in (edge - 1, edge, edge + 1) if least <= n <= most]
    return st.integers(least, most) | st.sampled_from(edges)


def anything(most_q: int, most_k: int, head_dims):
    """Inputs of up to so many queries and keys; without queries, keys or batch too."""
    return st.builds(
        Anything,
        batch=st.integers(0, 2),
        heads_kv=st.integers(1, 2),
        group=st.integers(1, 3),
        seq_q=sizes(0, most_q),
        seq_k=sizes(0, most_k),
        head_dim=st.sampled_from(head_dims),
        dtype=st.sampled_from(runtime.DTYPES),
        kind=st.sampled_from(KINDS),
        kind_of_do=st.sampled_from(["normal", "positive", "flat"]),
        # Not q: equal queries round alike, and the harness expects roundings that differ by chance.
        memory=st.tuples(st.sampled_from(MEMORY), *[st.sampled_from(REPEATED)] * 3),
        is_causal=st.booleans(),
        scale=SCALES,
    )
