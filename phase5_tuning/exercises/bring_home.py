"""Go round the ring once more for the gradients, and bring dK and dV home.

As in pass_keys.py, with the same `rank`. Queries stay, and so does their dQ. Each rank computes a term of dK and dV
for the keys that are here, and these keys belong to another rank. So a sum of such terms travels with the keys: a rank
adds its term to the sum that comes, and sends the sum on. At the end every rank has the whole sum for its own keys.
Its n-th receive brings the n-th send of the rank before.

    rank.gradients(q, kv, o, lse, do)   (dq, dkv): the terms of these keys alone, shaped as q and kv

    q, kv    as in pass_keys.py
    o, lse   of this rank's queries over the keys of all ranks
    do       (seq_q, head_dim), the gradient of o
    returns  (dq, dkv) of this rank's queries, and of its keys and values

Keys and values must be on their way while the rank computes, and from the second step on so must the sum that the step
before has sent on. A rank's own terms travel with the others', so each of W ranks sends 2 W - 1 times. A tensor that is
being sent must not change.

Notebook: phase5_tuning/context_parallel.ipynb, section 4.1.
"""


def backward(rank, q, kv, o, lse, do):
    """Gradients of this rank's queries, keys and values."""
    # your code: as many steps as there are ranks, and the way home
    raise NotImplementedError
