"""Count the FLOPs: those that a table of speeds counts, and those that the kernels execute.

1. `flops`, by the convention of the field. A product of an (a, b) and a (b, c) matrix is 2 a b c operations. The
   forward pass has two products; the backward pass counts for 2.5 times as much, five products, and "both" for the
   sum. Under a causal mask the count is half, whatever the lengths. Everything that is not a product is free.

2. `executed_flops`, what the products of phase 5's two backward kernels execute. Both kernels cut S into tiles of
   (block_m queries, block_n keys), each into its own. A tile in which any pair is visible is computed whole, the others
   are left out. Query i sees the keys j <= i if is_causal, otherwise all; rows past the last query, in the last tile,
   see nothing. head_dim is padded to a power of two, 16 or more. In each of its tiles a kernel makes all
   products that its gradients need (phase 4): one kernel returns dK and dV, the other dQ.

Both return an int, exact to the last digit.

    batch, heads, seq_q, seq_k, head_dim    any sizes; the lengths may be 0
    mode                                    "fwd", "bwd" or "both"
    dkdv_tile, dq_tile                      (block_m, block_n), powers of two, in either order of size

Notebook: phase5_tuning/measure.ipynb, section 2.3, "Exercise 5.1: Count the FLOPs".
"""


def flops(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, is_causal: bool, mode: str) -> int:
    """FLOPs by convention, of attention's forward pass, backward pass, or both."""
    # your code: return the count
    raise NotImplementedError


def tiles(seq_q: int, seq_k: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """How many tiles of one head's S hold a visible pair."""
    # your code: go through the tiles of queries, and count the tiles of keys that each of them meets
    raise NotImplementedError


def executed_flops(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, is_causal: bool,
    dkdv_tile: tuple[int, int], dq_tile: tuple[int, int],
) -> int:  # fmt: skip
    """FLOPs in the products of the backward pass, both kernels together."""
    # your code: what does a tile cost in each of the two kernels, and how many are there?
    raise NotImplementedError
