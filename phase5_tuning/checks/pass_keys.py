"""Runs an answer on rings of 1 to 5 ranks: results, deadlocks, races, and what travels meanwhile."""

from common.learn.check.require import reject, require
from phase5_tuning.ring import model as ring_model
from phase5_tuning.ring.attention import merge_
from phase5_tuning.ring.model import Deadlock, Race

import torch


def check(answer):
    for ranks in (2, 1, 3, 4, 5):
        inputs = [made(rank)[:2] for rank in range(ranks)]
        got, ring = played(f"{ranks} ranks", lambda rank, of: answer.forward(rank, *of), inputs, "(o, lse)")
        for rank, (o, lse) in zip(ring, got, strict=True):
            _check_result(f"{ranks} ranks: rank {rank.number}", rank.number, inputs, o, lse)
        for rank in ring:
            require_meanwhile(ranks, rank, "attend", "the keys")
            check_sends(rank)
    return "1 to 5 ranks: right, nobody waits for ever, keys travel while ranks attend"


def made(number):
    """q, kv, do of a rank."""
    generator = torch.Generator().manual_seed(number)
    q, k, v, do = torch.randn(4, 5, 3, generator=generator)
    return q, torch.stack((k, v)), do


def played(what, program, inputs, returns):
    """(results, ranks) of a ring; rejects a deadlock, a race, inputs that change and results of another kind."""
    ring, kept = [], [[x.clone() for x in of] for of in inputs]
    try:
        got = ring_model.run(program, inputs, ring)
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
    return got, ring


def _why_stuck(ring):
    if any(len(rank.sends) != len(rank.receives) for rank in ring):
        return (
            " A send is done when the next rank has started to receive. If all wait for their sends first, nobody "
            "gets to receiving: start both, then wait"
        )
    return " Does every rank start as many receives as the rank before starts sends?"


def require_meanwhile(ranks, rank, computed, what, kinds=1, first=0):
    """Rejects a step, from `first` on, in which fewer than `kinds` sends or receives are under way."""
    step, under_way = 0, dict(send=0, receive=0)
    for event, of in rank.log:
        if event in under_way:
            under_way[event] += 1
        elif event == "waited":
            under_way[of] -= 1
        else:
            if first <= step < ranks - 1 and min(under_way.values()) < kinds:
                reject(
                    f"{ranks} ranks: in step {step} rank {rank.number} computes while {what} stand still: start "
                    "both transfers before, and wait for them after"
                )
            step += 1


def check_sends(rank):
    if len(rank.sends) > rank.ranks - 1:
        reject(
            f"{rank.ranks} ranks: each rank sends {len(rank.sends)} times, where {rank.ranks - 1} are enough: keys and "
            "values travel together, and in the last step nobody needs them any more"
        )


def _check_result(what, number, inputs, o, lse):
    q, everybody = inputs[number][0], [kv for _, kv in inputs]
    attend = ring_model.Rank(None, 0, 1).attend
    right_o, right_lse = attend(q, torch.cat(everybody, dim=1))
    parts = [attend(q, kv) for kv in everybody]
    wrong = {}
    if len(parts) > 1:
        wrong["these are its own keys alone"] = parts[number]
        wrong["these are the keys of the last step alone: merge each part into the result"] = parts[
            (number + 1) % len(parts)
        ]
        wrong["the parts are added up: merge them"] = tuple(map(sum, zip(*parts, strict=True)))
        again = tuple(x.clone() for x in parts[number])
        for _ in range(len(parts) - 1):
            merge_(*again, *parts[number])
        wrong["its own keys were merged again and again: kv must become what came"] = again
    for i, name, got, right in ((1, "lse", lse, right_lse), (0, "o", o, right_o)):
        mistakes = {sentence: of[i] for sentence, of in wrong.items()}
        require(f"{what}: {name}", got, right, mistakes=mistakes, rtol=1e-4, atol=1e-4)
