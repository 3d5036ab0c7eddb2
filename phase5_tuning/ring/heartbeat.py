"""Name the ranks that are killed or stopped, which the error of a process group does not.

    with heartbeat():
        train()

Every rank writes a sign of life to the process group's store, from a thread, and reads those of the others. A rank that
computes for long goes on giving signs. One that is killed or stopped does not.

Builds on: torch.distributed's store, which needs no GPU and no other rank to answer.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

_BLOCKS = itertools.count()
NO_STORE = "the store of the process group does not answer"


@contextlib.contextmanager
def heartbeat(group: dist.ProcessGroup | None = None, interval: float = 1.0, limit: float = 30.0):
    """While the block runs, watch the ranks of the group; all of them must enter it in the same order.

    interval: seconds between two signs of a rank. limit: seconds without one after which a rank counts as lost, from
    its first sign on.

    If the block raises a RuntimeError, as a backend does when the connection to a rank is closed, and a rank is lost or
    has raised another error, RuntimeError names that rank. It takes up to limit seconds. If the block still runs when a
    rank is lost, it may wait for that rank for ever. Then the process names the rank on stderr and ends with exit code
    1, without cleaning up. ValueError if interval is not above 0 and at most limit.
    """
    if not 0 < interval <= limit:
        raise ValueError(f"interval: expected more than 0 and at most limit {limit} s, got {interval}")
    # PyTorch has no public name for the store. A clone is a connection of its own.
    store = dist.distributed_c10d._get_default_store().clone()
    block = f"heartbeat {next(_BLOCKS)} of {dist.get_process_group_ranks(group or dist.group.WORLD)}"
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    pulse = Pulse(dist.PrefixStore(block, store), rank, ranks, math.ceil(limit / interval))
    done = threading.Event()
    threads = [threading.Thread(target=of, args=(pulse, done, interval), daemon=True) for of in (_give_signs, _watch)]
    for thread in threads:
        thread.start()

    def stop():
        done.set()
        for thread in threads:
            thread.join(limit)

    last = "left"
    try:
        yield
    except BaseException as error:
        last = f"raised {type(error).__name__}: {error}"
        stop()
        if isinstance(error, RuntimeError) and (lost := pulse.blamed(last, interval)):
            raise RuntimeError("; ".join(lost)) from error
        raise
    finally:
        stop()
        with contextlib.suppress(RuntimeError):  # the store may be gone
            pulse.give(last)


class Pulse:
    """The signs of all ranks, as one sees them. It counts ticks of its own: one that was stopped blames nobody."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, limit: int):
        self.store, self.rank, self.limit = store, rank, limit
        self.signs, self.ticks = [""] * ranks, [0] * ranks  # last sign; ticks since it came

    def give(self, sign: str) -> None:
        self.store.set(str(self.rank), sign)

    def listen(self) -> None:
        for rank, last in enumerate(self.signs):
            if self.store.check([str(rank)]):
                sign = self.store.get(str(rank)).decode()
                if sign != last:
                    self.signs[rank], self.ticks[rank] = sign, 0

    def tick(self) -> None:
        self.ticks = [ticks + 1 for ticks in self.ticks]

    def lost(self) -> list[str]:
        """What to say of the ranks that have been silent for too long or, if there are none, have raised."""
        if self.signs[self.rank] and self.ticks[self.rank] > self.limit:
            return [NO_STORE]
        return self._names(r for r in self._others() if self.ticks[r] > self.limit)

    def blamed(self, mine: str, interval: float) -> list[str]:
        """Wait until each other rank gives a sign or is lost. Say which are lost, or raised something else."""
        try:
            self.give(mine)
            self.listen()  # a lost rank may have given signs since we last heard it
            before = list(self.signs)
            for _ in range(self.limit + 1):
                self.listen()
                if all(self._raised(r) or self.signs[r] != before[r] for r in self._others()):
                    break
                time.sleep(interval)
                self.tick()
        except RuntimeError:
            return [NO_STORE]
        guilty = (r for r in self._others() if self.ticks[r] > self.limit or self._raised(r))
        return self._names(r for r in guilty if self.signs[r] != mine)

    def _others(self) -> list[int]:
        """Ranks that have entered the block and have not left it."""
        return [r for r, sign in enumerate(self.signs) if r != self.rank and sign not in ("", "left")]

    def _raised(self, rank: int) -> bool:
        return self.signs[rank].startswith("raised")

    def _names(self, ranks: Iterable[int]) -> list[str]:
        raised = {r: self._raised(r) for r in ranks}
        silent = [f"rank {r} gives no sign of life" for r, one in raised.items() if not one]
        return silent or [f"rank {r} {self.signs[r]}" for r in raised]


def _give_signs(pulse: Pulse, done: threading.Event, interval: float) -> None:
    with contextlib.suppress(RuntimeError):  # without the store, `_watch` finds it
        for count in itertools.count():
            pulse.give(str(count))
            pulse.listen()
            if done.wait(interval):
                return


def _watch(pulse: Pulse, done: threading.Event, interval: float) -> None:
    while not done.wait(interval):
        pulse.tick()
        if lost := pulse.lost():
            print(f"rank {pulse.rank}: {'; '.join(lost)}; this process ends", file=sys.stderr, flush=True)
            os._exit(1)
