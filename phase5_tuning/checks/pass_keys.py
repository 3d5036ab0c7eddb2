"""Runs an answer on rings of 1 to 5 ranks: results, deadlocks, races, and what travels meanwhile."""

from common.learn.check.require import reject
from phase5_tuning.checks import require_o_lse
from phase5_tuning.ring import model as ring_model
from phase5_tuning.ring.attention import merge_
from phase5_tuning.ring.model import Deadlock, Race

import torch

SEND_FIRST = (
    "A send is done when the next rank has started to receive. If all wait for their sends first, nobody gets to "
    "receiving: start both, then wait"
)
RINGS = 2, 1, 3, 4, 5  # numbers of ranks
ALONE = ring_model.Rank(None, 0, 1)  # what a rank computes without a ring


def check(answer):
    for ranks in RINGS:
        inputs = [made(rank)[:2] for rank in range(ranks)]
        played_by = played(answer.forward, inputs, "(o, lse)")
        for rank, got in played_by:
            _check_result(rank, inputs, got)
        check_moves_of_keys(rank for rank, _ in played_by)
    return "1 to 5 ranks: right, nobody waits for ever, keys travel while ranks attend"


def made(number):
    """q, kv, do of a rank."""
    generator = torch.Generator().manual_seed(number)
    q, k, v, do = torch.randn(4, 5, 3, generator=generator)
    return q, torch.stack((k, v)), do


def played(program, inputs, returns):
    """[(rank, result)] of a ring; rejects a deadlock, a race, inputs that change and results of another kind."""
    what, ring, kept = f"{len(inputs)} ranks", [], [[x.clone() for x in of] for of in inputs]
    try:
        got = ring_model.run(lambda rank, of: program(rank, *of), inputs, ring)
    except Deadlock as error:
        reject(f"{what}: no rank goes on: {error}.{_why_stuck(ring)}")
    except Race as error:
        reject(f"{what}: {error}. The next rank may get the old numbers or the new")
    for rank, before, after in zip(ring, kept, inputs, strict=True):
        if not all(map(torch.equal, before, after)):
            reject(f"{what}: rank {rank.number} has written into its inputs")
        for kind, ends in (("send", rank.sends), ("receive", rank.receives)):
            if not all(end.waited for end in ends):
                reject(f"{what}: rank {rank.number} has not waited for a {kind} that it started")
    for pair in got:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            reject(f"{what}: expected {returns} from each rank, got {type(pair).__name__}")
    return list(zip(ring, got, strict=True))


def _why_stuck(ring):
    if any(len(rank.sends) != len(rank.receives) for rank in ring):
        return f" {SEND_FIRST}"
    return " Does every rank start as many receives as the rank before starts sends?"


def require_meanwhile(rank, what, kinds=1, first=0):
    """Rejects a step, from `first` on, in which fewer than `kinds` sends or receives are under way."""
    step, under_way = 0, dict(send=0, receive=0)
    for event, of in rank.log:
        if event in under_way:
            under_way[event] += 1
        elif event == "waited":
            under_way[of] -= 1
        else:
            if first <= step < rank.ranks - 1 and min(under_way.values()) < kinds:
                reject(
                    f"{rank.ranks} ranks: in step {step} rank {rank.number} computes while {what} stand still: start "
                    "both transfers before, and wait for them after"
                )
            step += 1


def check_moves_of_keys(ring):
    """Keys travel during each step but the last, and no further."""
    for rank in ring:
        require_meanwhile(rank, "the keys")
        if len(rank.sends) > rank.ranks - 1:
            reject(
                f"{rank.ranks} ranks: each rank sends {len(rank.sends)} times, where {rank.ranks - 1} are enough: keys "
                "and values travel together, and in the last step nobody needs them any more"
            )


def _check_result(rank, inputs, got):
    q, everybody = inputs[rank.number][0], [kv for _, kv in inputs]
    parts = [ALONE.attend(q, kv) for kv in everybody]
    own = parts[rank.number]
    again = tuple(x.clone() for x in own)
    for _ in range(len(parts) - 1):
        merge_(*again, *own)
    last = parts[(rank.number + 1) % len(parts)]
    mistakes = {
        "these are its own keys alone": own,
        "these are the keys of the last step alone: merge each part into the result": last,
        "the parts are added up: merge them": tuple(map(sum, zip(*parts, strict=True))),
        "its own keys were merged again and again: kv must become what came": again,
    }
    right = ALONE.attend(q, torch.cat(everybody, dim=1))
    require_o_lse(f"{len(inputs)} ranks: rank {rank.number}", got, right, mistakes)
