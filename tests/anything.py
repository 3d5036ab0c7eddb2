"""Attention inputs at random: what test_fuzz.py draws.

Sizes lie on the edges of tiles, or one beside, as often as anywhere else. Each tensor has its own kind of memory.
`Anything` prints as the call that makes it again.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from common import make_qkv, runtime
from common.verify.inputs import KINDS, LAYOUTS

import torch
from hypothesis import strategies as st

EDGES = (16, 32, 64, 128, 192, 256, 384)
# Triton compiles anew for a length of 1 and for multiples of 16.
LENGTHS = ("other",) * 5 + ("multiple",) * 3 + ("one",)
COMBINATIONS = 30
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
    kind: str
    kind_of_do: str
    memory: tuple[str, str, str, str]  # of q, k, v, do
    is_causal: bool
    scale: float | None
    fn: Callable | None = None  # what is called, where there is a choice

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v, do."""
        kinds, memory = (self.kind,) * 3 + (self.kind_of_do,), list(self.memory)
        if dtype == torch.float32 and memory[3] == "one row":
            memory[3] = "bhsd"  # sums of equal terms err alike, by more than the harness expects
        made = [self._made(dtype, *look) for look in zip(kinds, memory, (0, 0, 0, 1), strict=True)]
        return [made[0][0], made[1][1], made[2][2], made[3][0]]

    def _made(self, dtype, kind, memory, seed):
        layout = {"poisoned": "bshd", "one row": "bhsd"}.get(memory, memory)
        made = make_qkv(
            self.batch, self.heads_kv * self.group, self.seq_q, self.head_dim, heads_kv=self.heads_kv,
            seq_k=self.seq_k, dtype=dtype, kind=kind, seed=seed, layout=layout,
            poison=memory == "poisoned",
        )  # fmt: skip
        return [t[:, :, :1].expand_as(t) for t in made] if memory == "one row" else made

    @property
    def options(self) -> dict:
        return dict(is_causal=self.is_causal, scale=self.scale, enable_gqa=self.group > 1)


def combinations(head_dims, fns):
    """What kernels are compiled for: all there is where they are not, else COMBINATIONS, the same ones in every run."""
    choices = dict(
        heads_kv=[1, 2],
        group=[1, 2, 3],
        seq_q=LENGTHS,
        seq_k=LENGTHS,
        head_dim=head_dims,
        q=MEMORY,  # not one row, for the same reason as below
        k=REPEATED,
        v=REPEATED,
        do=REPEATED,
        is_causal=[False, True],
        fn=fns,
    )
    if runtime.INTERPRETED:
        return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})
    rng = random.Random(0)
    return st.sampled_from([{name: rng.choice(of) for name, of in choices.items()} for _ in range(COMBINATIONS)])


def lengths(kind: str, most: int):
    """Whole numbers of a kind up to most, half of them within 1 of the edge of a tile."""
    of_kind = {"one": [1], "multiple": range(0, most + 1, 16), "other": [n for n in range(2, most + 1) if n % 16]}[kind]
    edges = [n for n in of_kind if any(abs(n - edge) <= 1 for edge in EDGES)]
    return st.sampled_from(of_kind) | st.sampled_from(edges or of_kind)


@st.composite
def anything(draw, most_q: int, most_k: int, head_dims, fns=(None,)):
    """Inputs of up to so many queries and keys; without queries, keys or batch too."""
    compiled = draw(combinations(head_dims, fns))
    kind, scale = draw(st.sampled_from(KINDS)), draw(SCALES)
    # Rows of P and o that are alike round alike: with rows of do that are alike, or of one sign, the errors add up in
    # dk (see harness.py).
    alike = kind == "flat" or compiled["k"] == "one row" or scale == 0.0 or abs(scale or 1.0) < 0.01
    of_do = ["normal"] if alike else ["normal", "positive", "flat"]
    memory = {name: compiled[name] for name in ("q", "k", "v", "do")}
    if alike and memory["do"] == "one row":
        memory["do"] = "bhsd"
    return Anything(
        batch=draw(st.integers(0, 2)),
        heads_kv=compiled["heads_kv"],
        group=compiled["group"],
        seq_q=draw(lengths(compiled["seq_q"], most_q)),
        seq_k=draw(lengths(compiled["seq_k"], most_k)),
        head_dim=compiled["head_dim"],
        kind=kind,
        kind_of_do=draw(st.sampled_from(of_do)),
        memory=tuple(memory.values()),
        is_causal=compiled["is_causal"],
        scale=scale,
        fn=compiled["fn"],
    )
