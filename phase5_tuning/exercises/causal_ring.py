"""Put the ring and the causal mask together: whose keys are here, and which of them are seen?

As in pass_keys.py, with a causal mask over the whole sequence. It is cut into 2 W chunks of equal length. Rank r holds
chunk r and chunk 2 W - 1 - r, its early and its late one, in this order: q has the rows of both, and so has kv. In each
step the rank has to work out whose keys are here, which of its queries see which of them, and whether the pair needs a
mask.

    rank, merge_         as in pass_keys.py
    rank.attend(q, kv, is_causal)   (o, lse); with is_causal, row i of this q sees the rows 0 to i of this kv

    q        (2 n, head_dim), fp32: n rows of each chunk
    kv       (2, 2 n, head_dim)
    returns  (o, lse) of this rank's rows, (2 n, head_dim) and (2 n,)

From the second step on, compute no pair of chunks in which nothing is visible: then these steps have the same work.

Notebook: phase5_tuning/context_parallel.ipynb, section 3.2.
"""

from phase5_tuning.given import merge_


def forward(rank, q, kv):
    """Causal attention of this rank's queries to the keys of all ranks."""
    # your code: as in pass_keys.py, on the rows that see each other
    raise NotImplementedError
