"""Checks both orders on the layouts of Triton's compiler: which thread holds what."""

import functools

from common.learn.check.require import after, reject
from phase5_tuning.fp8.parts import holders


def check(answer):
    for keys in (16, 32, 128):
        _check_values(answer.value_order(keys), keys)
    with after("the order of values"):
        for keys in (16, 32, 128):
            _check_rows(answer.row_order(keys), keys)
    return "every logit stays in its thread, whether values or rows of K are moved, for 16, 32 and 128 keys"


@functools.cache
def _threads(keys):
    """(the thread of four that holds each logit, the one that holds each place of the left operand)"""
    return holders(keys)


def _check_values(order, keys):
    what = f"value_order({keys})"
    _require_permutation(what, order, keys)
    of_logits, of_places = _threads(keys)
    wrong = [p for p in range(keys) if of_logits[order[p]] != of_places[p]]
    if not wrong:
        return
    inverse = sorted(range(keys), key=order.__getitem__)
    if all(of_logits[inverse[p]] == of_places[p] for p in range(keys)):
        reject(f"{what}: this says at which place each key stands. Wanted is which key stands at each place")
    p = wrong[0]
    reject(
        f"{what}: at place {p} stands key {order[p]}. Its logit is in thread {of_logits[order[p]]}, and place {p} of "
        f"the left operand in thread {of_places[p]}"
    )


def _check_rows(order, keys):
    what = f"row_order({keys})"
    _require_permutation(what, order, keys)
    of_logits, of_places = _threads(keys)
    wrong = [row for row in range(keys) if of_logits[row] != of_places[order[row]]]
    if not wrong:
        return
    inverse = sorted(range(keys), key=order.__getitem__)
    if all(of_logits[row] == of_places[inverse[row]] for row in range(keys)):
        reject(f"{what}: this says in which row each key stands. Wanted is which key stands in each row")
    row = wrong[0]
    reject(
        f"{what}: row {row} of K holds key {order[row]}, so that thread {of_logits[row]} gets its logit. But the value "
        f"stands at place {order[row]}, which belongs to thread {of_places[order[row]]}"
    )


def _require_permutation(what, order, keys):
    if not isinstance(order, list | tuple):
        reject(f"{what}: expected a list, got {type(order).__name__}")
    if len(order) != keys:
        reject(f"{what}: expected {keys} keys, got {len(order)}")
    missing = sorted(set(range(keys)) - set(order))
    if missing:
        reject(f"{what}: key {missing[0]} stands nowhere: each key stands at one place")
