"""Runs an answer in three processes over gloo: results, deadlocks, races, and what travels meanwhile.

The check starts a process that imports the course once and forks the ranks. There `isend` and `irecv` start a
`Transfer`, which sees what gloo does not tell: who waits for what, what changes on its way, and what is used before it
has come. Ranks end with the process that started them, and by themselves when their time is over.
"""

import contextlib
import datetime
import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

from common.arguments import arguments
from common.learn.check import judge
from common.learn.check.require import Rejected, reject
from common.phases import ROOT
from phase1_softmax.checks import attention
from phase5_tuning import given
from phase5_tuning.checks import require_o_lse
from phase5_tuning.checks.pass_keys import SEND_FIRST
from phase5_tuning.passes import forward

import torch
import torch.distributed as dist

RANKS = 3
STUCK = "stuck"  # the kind of verdict where a transfer does not end
LIMIT = 12  # seconds for a transfer; a rank has twice as many in all, and usually takes one
SHAPES = (1, 2, 8, 16), (2, 1, 5, 32)
COLLECTIVES = """
    all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast
    broadcast_object_list gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list
"""
BLOCKING = dict(send="isend", recv="irecv", send_object_list="isend", recv_object_list="irecv")


def check(answer):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__, answer.__file__, folder],
            cwd=ROOT,
            env=os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
            stdin=subprocess.DEVNULL,
        )
        verdicts = [_verdict(Path(folder), rank, answer.__file__) for rank in range(RANKS)]
    failed = [of for of in verdicts if of["kind"] != "passed"]
    # A rank that ends leaves others waiting, or without an end: what they say comes second.
    failed.sort(key=lambda of: (of["kind"] == STUCK, of["kind"] in ("timeout", "crashed")))
    if failed and failed[0]["kind"] == STUCK:
        waiting = "; ".join(of["message"] for of in failed)
        reject(f"no rank goes on: {waiting}. {failed[0]['advice']}")
    if failed:
        raise Rejected(failed[0]["message"], failed[0]["kind"])
    return f"{RANKS} processes over gloo: right, nobody waits for ever, keys travel while ranks attend"


def _verdict(folder: Path, rank: int, path: str) -> dict:
    """What a rank has written, or why it has not, with the line of the answer where it ended."""
    written = folder / f"{rank}.json"
    if written.exists():
        return json.loads(written.read_text())
    stack = folder / f"{rank}.stack"
    text = stack.read_text() if stack.exists() else ""
    line = re.search(rf'File "{re.escape(path)}", line (\d+)', text)
    where = f" It was at line {line[1]}." if line else ""
    if text.startswith("Timeout"):
        why = f"no result of rank {rank} after {2 * LIMIT} s: is there a loop that never ends?"
        return dict(kind="timeout", message=why + where)
    return dict(kind="crashed", message=f"Python ended rank {rank} in the middle of the check." + where)


# --- in the process of a rank ----------------------------------------------------------------------------------------


class Transfer:
    """A send or a receive that has been started. What is received is there after `wait`, and NaN before.

    gloo gets a copy, so that a mistake shows in every run, whichever rank is faster.
    """

    def __init__(self, rank: "Rank", kind: str, tensor, peer: int | None, tag: int, start):
        self.rank, self.kind, self.tensor, self.waited = rank, kind, tensor, False
        self.before, self.tag = rank.attended, tag
        if not tensor.is_contiguous():
            reject(f"line {rank.line()}: isend and irecv take contiguous tensors alone")
        rank.transfers.append(self)
        self.number = len(rank.of(kind))
        rank.check_start(self, peer)
        self.copy = tensor.clone()
        with self._other_rank("starts"):
            self.work = start(self.copy, peer, tag=tag)
        if kind == "receive" and tensor.is_floating_point():
            tensor.fill_(float("nan"))

    @contextlib.contextmanager
    def _other_rank(self, does: str):
        """Inside, an error means that the other rank has not come, or has left after a mistake of its own."""
        try:
            yield
        except RuntimeError as error:
            what = f"rank {self.rank.number} {does} its {self.kind} {self.number} in line {self.rank.line()}"
            raise Rejected(what, STUCK) from error

    def wait(self, *timeout) -> bool:
        if self.waited:
            reject(
                f"line {self.rank.line()}: rank {self.rank.number} waits for its {self.kind} {self.number} once more. "
                "Over gloo the second wait() of a transfer never returns"
            )
        self.rank.check_wait(self)
        with self._other_rank("waits for"):
            self.work.wait(*timeout)
        self.waited = True
        if self.kind == "receive":
            self.tensor.copy_(self.copy)
        elif not torch.allclose(self.tensor, self.copy, rtol=0, atol=0, equal_nan=True):
            reject(
                f"rank {self.rank.number} changed the tensor of its send {self.number} before it had waited for "
                "that send. The next rank may get the old numbers or the new"
            )
        return True

    def is_completed(self) -> bool:
        if not self.waited:
            reject(f"line {self.rank.line()}: over gloo is_completed() is False until wait() returns: call wait()")
        return True

    def __getattr__(self, name):
        return getattr(self.work, name)


class Rank:
    """A rank: what it starts in a call of the answer, and whether it computes meanwhile."""

    def __init__(self, path: str, number: int):
        self.path, self.number = path, number

    def begin(self, everybody: list[torch.Tensor]) -> None:
        """Before a call; everybody: q, k and v of each rank."""
        self.everybody, self.share = everybody, 2 * everybody[0][0].numel()
        self.transfers, self.attended, self.idle = [], 0, None
        self.given, self.options = {}, False

    def of(self, kind: str, waited: bool | None = None) -> list[Transfer]:
        return [t for t in self.transfers if t.kind == kind and waited in (None, t.waited)]

    def line(self) -> int:
        """The innermost line of the answer that is being executed."""
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return frame.f_lineno if frame else 0

    def check_start(self, new: Transfer, peer: int | None) -> None:
        after, before = (self.number + 1) % RANKS, (self.number - 1) % RANKS
        does = f"line {self.line()}: rank {self.number} {new.kind}s"
        turned = _TURNED if peer in (after, before) else ""
        if new.kind == "send" and peer != after:
            reject(f"{does} to {self._named(peer)}, where rank {after} is the next one{turned}")
        if new.kind == "receive" and peer not in (before, None):
            reject(f"{does} from {self._named(peer)}, where rank {before} is the one before{turned}")
        for other in self.transfers:
            if other is new or other.waited or not _overlap(new.tensor, other.tensor):
                continue
            if new.kind == "receive" and other.kind == "send":
                reject(f"{does} into the tensor that it is sending: receive into another one")
            if new.kind == "send" and other.kind == "receive":
                reject(f"{does} what may not have come yet: {_FIRST}")
            if new.kind == other.kind == "receive":
                reject(f"{does} into a tensor into which its receive {other.number} comes: wait first")
        opposite = self.of("receive" if new.kind == "send" else "send")
        if len(opposite) >= new.number:
            mine, other = new.tensor.nbytes, opposite[new.number - 1].tensor.nbytes
            if mine != other:
                reject(
                    f"{does} {mine} bytes, and its {opposite[0].kind} {new.number} has {other}. All shards have one "
                    "shape and dtype: so must have what is sent and what it is received into"
                )

    def _named(self, peer):
        return "itself" if peer == self.number else f"rank {peer}"

    def attend(self, q, k, v, *args, **options):
        """attention_forward, watched."""
        if any(_overlap(t.tensor, x) for t in self.of("receive", False) for x in (k, v)):
            does = f"line {self.line()}: rank {self.number} attends to keys or values"
            reject(f"{does} that may not have come yet: {_FIRST}")
        moves = ("receive", True), ("send", False), ("receive", False)
        came, leaving, coming = (sum(t.tensor.numel() for t in self.of(*which)) for which in moves)
        if came < (RANKS - 1) * self.share and min(leaving, coming) < self.share:
            still = f"line {self.line()}: rank {self.number} computes while keys or values stand still"
            self.idle = self.idle or still
        self.attended += 1
        names = " ".join(map(self._whose, (q, k, v)))
        self.given[names] = self.given.get(names, 0) + k.numel()
        self.options |= bool(args or options)
        return _ATTEND(q, k, v, *args, **options)

    def _whose(self, x: torch.Tensor) -> str:
        """ "K2": x is of the keys of rank 2."""
        for rank, tensors in enumerate(self.everybody):
            for name, whole in zip("QKV", tensors, strict=True):
                if torch.isin(x, whole).all():
                    return f"{name}{rank}"
        return "?"

    def wanted(self) -> dict[str, int]:
        """What attention_forward must be given, and how many keys' numbers in all."""
        ring = [(self.number - step) % RANKS for step in range(RANKS)]
        return {f"Q{self.number} K{rank} V{rank}": self.share // 2 for rank in ring}

    def signs(self) -> dict[str, bool]:
        """Sentences on a wrong result, by what attention_forward was given."""
        whole = self.share // 2
        given = ", ".join(names if n == whole else f"{names} ({n / whole:g} times)" for names, n in self.given.items())
        beside = " and at its further arguments" if self.options else ""
        return {
            f"attention_forward was given {given}, as is right: look at the merge{beside}": self.given == self.wanted(),
            f"attention_forward was given {given}, where {', '.join(self.wanted())} is right": bool(given),
        }

    def check_wait(self, transfer: Transfer) -> None:
        if transfer.before == self.attended and not self.idle:
            self.idle = (
                f"line {self.line()}: rank {self.number} waits for its {transfer.kind} {transfer.number} and has "
                "computed nothing since it started it"
            )

    def check_end(self) -> None:
        for kind in ("send", "receive"):
            if self.of(kind, False):
                reject(f"rank {self.number} has not waited for a {kind} that it started")
        for names in self.given:
            if names[0] == "Q" and names.split()[0] != f"Q{self.number}":
                reject(
                    f"rank {self.number} gives attention_forward {names}: queries of another rank. Q stays, "
                    "keys and values travel"
                )
        sent, enough = sum(t.tensor.numel() for t in self.of("send")), (RANKS - 1) * self.share
        if sent > enough:
            reject(
                f"rank {self.number} sends {sent} numbers, where {enough} are enough: in each step but the last its "
                "keys and values, once. In the last step nobody needs them any more"
            )
        if not self.attended:
            reject("attention_forward was not called, so it cannot be seen what is computed while the keys travel")
        if self.idle:
            reject(f"{self.idle}: start both transfers, attend, and then wait for them")

    @contextlib.contextmanager
    def watched(self):
        """Inside, torch.distributed and attention_forward tell this rank what they are called for."""

        def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
            peer = dst if group_dst is None else group_dst
            return Transfer(self, "send", tensor, peer, tag, _ISEND)

        def irecv(tensor, src=None, group=None, tag=0, group_src=None):
            peer = src if group_src is None else group_src
            return Transfer(self, "receive", tensor, peer, tag, _IRECV)

        def batch_isend_irecv(p2p_op_list):
            return [op.op(op.tensor, op.peer, tag=op.tag) for op in p2p_op_list]

        def refused(what):
            return lambda *_, **__: reject(f"line {self.line()}: {what}")

        replaced = dict(isend=isend, irecv=irecv, batch_isend_irecv=batch_isend_irecv)
        why = "is a collective of all ranks. Here a rank talks to its neighbors alone, by isend and irecv"
        replaced |= {name: refused(f"dist.{name} {why}") for name in COLLECTIVES.split()}
        why = (
            "returns when the transfer is done, so nothing is computed meanwhile. If all ranks send first, nobody "
            "gets to receiving: a deadlock. Start both, with {} here, then wait"
        )
        replaced |= {name: refused(f"dist.{name} {why.format(instead)}") for name, instead in BLOCKING.items()}
        start = refused("a thread is started. isend and irecv return at once, so none is needed")

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading.Thread, "start", start))
            for module in (forward, given):
                stack.enter_context(mock.patch.object(module, "attention_forward", self.attend))
            for module in (dist, dist.distributed_c10d):  # P2POp compares with the latter's
                stack.enter_context(mock.patch.multiple(module, **replaced))
            yield


_ATTEND, _ISEND, _IRECV = forward.attention_forward, dist.isend, dist.irecv
_FIRST = "wait() of the receive first, or let it receive into another tensor"
_TURNED = (
    ". Without a mask a ring that turns the other way gives the same result; with one (section 3.2) a rank must know "
    "whose keys it holds"
)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _play(answer, here: Rank) -> str:
    """One rank's calls of the answer, each judged."""
    for shape in SHAPES:
        everybody = [torch.randn(3, *shape, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
        q, k, v = (t.clone() for t in everybody[here.number])
        here.begin(everybody)
        got = answer.ring_attention(q, k, v)
        if not (isinstance(got, tuple | list) and len(got) == 2):
            reject(f"expected (o, lse) from each rank, got {type(got).__name__}")
        if not all(map(torch.equal, (q, k, v), everybody[here.number])):
            reject(f"rank {here.number} has written into its inputs")
        _check_result(here, everybody, got)
        here.check_end()
    return "right"


def _check_result(here: Rank, everybody: list[torch.Tensor], got) -> None:
    number, (q, _, own_v) = here.number, everybody[here.number]
    parts = [_attend(q, k, v) for _, k, v in everybody]
    own, next_one = parts[number], (number + 1) % RANKS
    others = [of for rank, of in enumerate(parts) if rank != next_one]
    wrong = {
        "these are the keys of the last step alone: merge each part into the result": parts[next_one],
        "the parts are added up: merge them": tuple(map(sum, zip(*parts, strict=True))),
    }
    with_own_v = [_attend(q, k, own_v) for _, k, _ in everybody]
    if here.given != here.wanted():
        wrong |= {
            "these are its own keys alone": own,
            "its own keys were merged again and again: attend to what came": _merged([own] * RANKS),
            f"the keys of rank {next_one} are missing: {RANKS} ranks take {RANKS} steps": _merged(others),
            f"its own keys count twice: {RANKS} ranks take {RANKS} steps": _merged([*parts, own]),
            "keys of all ranks, with the values of its own: values must travel too": _merged(with_own_v),
        }

    def signs(got):
        unread = isinstance(got, torch.Tensor) and bool(got.isnan().any())
        return {"it has NaN: was something used before wait() of its receive?": unread} | here.signs()

    require_o_lse(f"rank {number}", got, _merged(parts), wrong, signs)


def _attend(q, k, v):
    return attention(q @ k.mT / q.shape[-1] ** 0.5, v)


def _merged(parts):
    os, lses = map(torch.stack, zip(*parts, strict=True))
    lse = torch.logsumexp(lses, dim=0)
    return (torch.exp(lses - lse)[..., None] * os).sum(dim=0), lse


def _live(number: int, path: str, folder: str) -> None:
    """A rank from its first to its last moment; its verdict is in folder/number.json."""
    stack = open(f"{folder}/{number}.stack", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True, file=stack)
    store, limit = f"file://{folder}/store", datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=RANKS, timeout=limit)
    here, barrier = Rank(path, number), dist.barrier
    with here.watched():
        verdict = judge.judge(lambda answer: _play(answer, here), Path(path))
    if verdict["kind"] == STUCK:
        behind, tagged = len(here.of("receive")) < len(here.of("send")), any(t.tag for t in here.transfers)
        verdict["advice"] = SEND_FIRST if behind else _TAGGED if tagged else _UNMATCHED
    Path(folder, f"{number}.json").write_text(json.dumps(verdict))
    if verdict["kind"] == "passed":
        with contextlib.suppress(Exception):  # another one failed
            barrier()  # a rank that leaves early breaks connections


_UNMATCHED = "Does every rank start as many receives as the rank before starts sends, and both before it waits?"
_TAGGED = "A receive takes a send of its own tag alone: does every receive have the tag of a send of the rank before?"


def _main(path: str, folder: str) -> None:
    torch.set_num_threads(1)
    sys.stdout, sys.stderr = judge.Capped(sys.stdout), judge.Capped(sys.stderr)
    ranks = []
    for number in range(RANKS):
        ranks.append(os.fork())
        if not ranks[-1]:
            try:
                _live(number, path, folder)
            finally:
                sys.stdout.flush()
                os._exit(0)
    for rank in ranks:
        os.waitpid(rank, 0)


if __name__ == "__main__":
    _main(*arguments("file", "folder"))
