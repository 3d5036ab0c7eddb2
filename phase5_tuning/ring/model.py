"""Two models of attention over several GPUs, without a GPU: its messages, and the time that it takes.

Ranks of a ring inside one process, with deadlocks and races:

    def program(rank, x):
        sending, coming = rank.send(x), rank.receive()
        ...                                # what is computed meanwhile
        sending.wait()
        return coming.wait()

    run(program, [x0, x1, x2])             # what each of three ranks returns

Each rank is a thread, and one thread runs at a time. A send is done when the next rank has started
the receive that matches it: the n-th send of a rank belongs to the n-th receive of the next. Transfers
are independent of one another, as with `isend` and `irecv` over gloo. Over NCCL a send and a receive
that are started apart may wait for one another; `batch_isend_irecv` starts them as one group.

`efficiency` predicts how near several GPUs come to as many times the speed of one, also on several hosts.
"""

import threading
from collections.abc import Callable, Sequence

from phase5_tuning.hopper.model import Deadlock, Race
from phase5_tuning.ring.ranks import meeting, shard_of

import torch


class Transfer:
    """One end of a message that has been started. `wait` returns when it is done: what came, or None.

    meanwhile: the numbers of keys of which its rank has computed something between start and wait.
    """

    def __init__(self, ring: "_Ring", rank: "Rank", kind: str, number: int, x=None):
        self._ring, self._rank, self._kind, self._number = ring, rank, kind, number
        self._sent, self._version, self.waited = x, None if x is None else x._version, False
        self._copy = None if x is None else x.clone()
        self._begun, self.meanwhile = len(rank.computed), []

    def _other_end(self):
        sends, rank, ranks = self._kind == "send", self._rank.number, self._ring.ranks
        other = ranks[(rank + 1 if sends else rank - 1) % len(ranks)]
        ends = other.receives if sends else other.sends
        return ends[self._number] if self._number < len(ends) else None

    def __str__(self):
        return f"rank {self._rank.number} waits for its {self._kind} {self._number + 1}"

    def wait(self) -> torch.Tensor | None:
        self._ring.wait_for(self)
        if not self.waited:
            self.waited = True
            self.meanwhile = self._rank.computed[self._begun :]
            self._rank.log.append(("waited", self._kind))
            if self._sent is not None and self._sent._version != self._version:
                changed = f"rank {self._rank.number} changed the tensor of its send {self._number + 1}"
                raise Race(f"{changed} before it had waited for that send")
        return self._other_end()._copy if self._kind == "receive" else None


class Rank:
    """One rank: `number` of `ranks`, two ends of messages, and what its GPU computes.

    log: ("send", ""), ("waited", "receive"), ("computed", "attend") and so on, in order. attended: (queries, keys) of
    each `attend`. computed: the keys of each `attend` and each `gradients`.
    """

    def __init__(self, ring: "_Ring", number: int, ranks: int):
        self._ring, self.number, self.ranks = ring, number, ranks
        self.sends, self.receives, self.log, self.attended, self.computed = [], [], [], [], []

    def send(self, x: torch.Tensor) -> Transfer:
        """Start to send x to the next rank. x must not change before `wait` has returned."""
        return self._start("send", self.sends, x)

    def receive(self) -> Transfer:
        """Start to receive from the rank before; `wait` returns the tensor."""
        return self._start("receive", self.receives)

    def _start(self, kind: str, ends: list[Transfer], x=None) -> Transfer:
        self.log.append((kind, ""))
        ends.append(Transfer(self._ring, self, kind, len(ends), x))
        self._ring.lock.notify_all()
        return ends[-1]

    def attend(self, q, kv, is_causal=False) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse) of q (seq_q, head_dim) over keys and values kv (2, seq_k, head_dim), in fp32; under a causal mask
        query i sees the keys 0 to i of these.
        """
        self.log.append(("computed", "attend"))
        self.attended.append((len(q), kv.shape[1]))
        self.computed.append(kv.shape[1])
        s = q @ kv[0].T / q.shape[1] ** 0.5
        if is_causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        lse = torch.logsumexp(s, dim=1)
        return torch.exp(s - lse[:, None]) @ kv[1], lse

    def gradients(self, q, kv, o, lse, do) -> tuple[torch.Tensor, torch.Tensor]:
        """(dq, dkv) of these keys' part, as phase 4's backward pass: P from lse, delta from o and do."""
        self.log.append(("computed", "gradients"))
        self.computed.append(kv.shape[1])
        scale = q.shape[1] ** -0.5
        p = torch.exp(scale * q @ kv[0].T - lse[:, None])
        ds = p * (do @ kv[1].T - (o * do).sum(dim=1, keepdim=True))
        return scale * ds @ kv[0], torch.stack((scale * ds.T @ q, p.T @ do))


class _Ring:
    """Which thread runs: the one that holds the lock. A thread that waits lets it go."""

    def __init__(self, ranks: int):
        self.lock, self._waiting, self._dead = threading.Condition(), {}, None
        self.ranks = [Rank(self, number, ranks) for number in range(ranks)]
        self._running = set(range(ranks))

    def wait_for(self, transfer: Transfer) -> None:
        self._waiting[transfer._rank.number] = transfer
        self._find_deadlock()
        self.lock.wait_for(lambda: transfer._other_end() is not None or self._dead)
        del self._waiting[transfer._rank.number]
        if transfer._other_end() is None:
            raise Deadlock(self._dead)

    def _find_deadlock(self) -> None:
        waiting = [self._waiting[number] for number in sorted(self._waiting)]
        stuck = len(waiting) == len(self._running) and all(t._other_end() is None for t in waiting)
        if stuck and not self._dead:
            self._dead = "; ".join(map(str, waiting))
            self.lock.notify_all()

    def run(self, program: Callable, inputs: Sequence) -> list:
        results, errors = [None] * len(self.ranks), [None] * len(self.ranks)

        def live(rank):
            with self.lock:
                try:
                    results[rank.number] = program(rank, inputs[rank.number])
                except BaseException as error:
                    errors[rank.number] = error
                self._running.remove(rank.number)
                if self._running:
                    self._find_deadlock()

        threads = [threading.Thread(target=live, args=(rank,)) for rank in self.ranks]
        with self.lock:
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        raised = [e for e in errors if e is not None]
        # A rank that ends with an error leaves others waiting: what they say comes second.
        for error in sorted(raised, key=lambda e: isinstance(e, Deadlock)):
            raise error
        return results


def run(program: Callable, inputs: Sequence, ranks_to: list | None = None) -> list:
    """program(rank, inputs[rank.number]) on a ring of as many ranks as inputs; returns what each returns.

    ranks_to: a list that gets the ranks, with their logs. Raises Deadlock, Race, or what a rank raises.
    """
    ring = _Ring(len(inputs))
    if ranks_to is not None:
        ranks_to += ring.ranks
    return ring.run(program, inputs)


def times_computed(ranks: int, rows: int, believed: Callable[[int, int], int]) -> tuple[bool, set]:
    """Whether a causal ring computes each pair of a query and a key that it sees once, and no other pair.

    rows: of a chunk. believed(rank, step): whose keys a rank believes to hold. Beside it the chunk pairs that the ranks
    compute in a step with the keys of another rank, as a set.
    """
    seq = 2 * ranks * rows
    positions = [shard_of(torch.arange(seq)[:, None], rank, ranks)[:, 0] for rank in range(ranks)]
    times, work = torch.zeros(seq, seq, dtype=torch.int), set()
    for rank in range(ranks):
        for step in range(ranks):
            near, far, masked = meeting(rank, believed(rank, step), rows, rows, True)
            queries, keys = positions[rank][near], positions[(rank - step) % ranks][far]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int)
            times[queries[:, None], keys] += pairs.tril() if masked else pairs
            if step > 0:
                work.add(len(queries) * len(keys) // rows**2)
    return torch.equal(times, torch.ones_like(times).tril()), work


class Given(torch.autograd.Function):
    """apply(q, k, v, o, dq, dk, dv) -> o: what ranks have computed, as one operator that verify_results can call."""

    @staticmethod
    def forward(ctx, q, k, v, o, *grads):
        ctx.grads = grads
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        return *ctx.grads, None, None, None, None


# --- time ----------------------------------------------------------------------------------------------------------

HOST = 8  # GPUs of a host: an assumption
BETWEEN = 50e9  # bytes a second that a GPU sends to other hosts while it receives as many: an assumption
WAYS = "ring", "ulysses", "both"


def efficiency(
    way: str, gpus: int, tokens: int, rate: float, within: float,
    heads: int = 16, heads_kv: int = 16, head_dim: int = 128,
) -> float | None:  # fmt: skip
    """Predicted: T1 / (gpus * T) of a causal forward and backward pass of one sequence, in 16 bits.

    way: of WAYS; "both" shares out the heads within a host and runs the ring between hosts. gpus: up to HOST, or a
    multiple of it. rate: operations a second of a GPU. within: bytes a second between GPUs of a host. None where the
    heads cannot be shared out. Launches, merges and additions are left out, and so is that kernels are slower on few
    rows: so the true efficiency is lower. Raises ValueError for another way or number of GPUs.
    """
    if way not in WAYS:
        raise ValueError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
    if gpus < 1 or (gpus > HOST and gpus % HOST):
        raise ValueError(f"gpus: expected 1 to {HOST}, or a multiple of {HOST}, got {gpus!r}")
    sharing = dict(ring=1, ulysses=gpus, both=min(HOST, gpus))[way]
    if heads % sharing or heads_kv % sharing:
        return None
    ranks = gpus // sharing
    link = within if gpus <= HOST else BETWEEN  # the slowest link on the way holds up all of a ring
    sizes = tokens, heads / sharing, heads_kv / sharing, head_dim
    seconds = _exchange_seconds(gpus, sharing, tokens, heads, heads_kv, head_dim, within)
    seconds += _ring_seconds(ranks, *sizes, rate, link)
    return _ring_seconds(1, tokens, heads, heads_kv, head_dim, rate, link) / (gpus * seconds)


def _ring_seconds(ranks, tokens, heads, heads_kv, head_dim, rate, link) -> float:
    """Both passes; a step takes as long as its products, or as its transfers if these take longer.

    The backward pass computes with half of a rank's own heads of K and V while the first keys travel, and with the rest
    while the sums come home: with a single head, nothing hides the first transfer.
    """
    rows = tokens / ranks
    products = 2 * rows**2 * heads * head_dim / rate  # of a forward step
    keys = 4 * rows * heads_kv * head_dim / link if ranks > 1 else 0.0  # the sums, in fp32, take twice as long
    seconds = products + (ranks - 1) * max(products, keys)
    first = heads_kv // 2 / heads_kv * 2.5 * products
    seconds += max(first, keys) + max(2.5 * products - first, 2 * keys)
    for step in range(1, ranks):
        seconds += max(2.5 * products, keys * (step + 1 < ranks) + 2 * keys * (step > 1))
    return seconds


def _exchange_seconds(gpus, sharing, tokens, heads, heads_kv, head_dim, within) -> float:
    """In both passes Q, K, V and O go through all-to-alls of `sharing` GPUs; nothing is computed meanwhile."""
    to_each = 2 * 2 * (2 * heads + 2 * heads_kv) * tokens / gpus * head_dim / sharing
    near = min(HOST, sharing)
    return max(to_each * (near - 1) / within, to_each * (sharing - near) / BETWEEN)
