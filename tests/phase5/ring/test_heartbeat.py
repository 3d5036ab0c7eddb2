"""Who is lost, by signs and ticks that the test gives itself; test_context_parallel.py loses real processes."""

import socket
from unittest import mock

from phase5_tuning.ring import heartbeat
from phase5_tuning.ring.heartbeat import NO_STORE, Pulse

import pytest
import torch.distributed as dist

LIMIT = 3


@pytest.fixture
def pulses():
    store = dist.HashStore()
    return [Pulse(store, rank, 3, LIMIT) for rank in range(3)]


def turns(pulses, giving, count):
    """So many ticks, in which the ranks in `giving` give a new sign; rank 0 listens."""
    for turn in range(count):
        for rank in giving:
            pulses[rank].give(f"{turn} of {count}")
        pulses[0].listen()
        pulses[0].tick()


def test_slow_is_not_dead(pulses):
    turns(pulses, (0, 1, 2), 10 * LIMIT)
    assert pulses[0].lost() == []


def test_a_silent_rank_is_lost_after_the_limit(pulses):
    turns(pulses, (0, 1, 2), 2)
    turns(pulses, (0, 1), LIMIT - 1)
    assert pulses[0].lost() == []
    turns(pulses, (0, 1), 1)
    assert pulses[0].lost() == ["rank 2 gives no sign of life"]


def test_a_rank_that_has_not_begun_or_has_left_is_not_lost(pulses):
    pulses[1].give("left")
    turns(pulses, (0,), 10 * LIMIT)
    assert pulses[0].lost() == []


def test_a_rank_that_was_stopped_itself_blames_nobody(pulses):
    turns(pulses, (0, 1, 2), 2)
    # However long it was, the stopped rank counts one tick, and hears the others before the next.
    turns(pulses, (0, 1, 2), 1)
    assert pulses[0].lost() == []


def test_what_a_rank_has_raised_is_said_where_nobody_is_silent(pulses):
    turns(pulses, (0, 1, 2), 2)
    pulses[2].give("raised ValueError: k is wrong")
    turns(pulses, (0, 1), LIMIT + 1)
    assert pulses[0].lost() == ["rank 2 raised ValueError: k is wrong"]
    turns(pulses, (0,), LIMIT + 1)
    assert pulses[0].lost() == ["rank 1 gives no sign of life"]


def test_the_store_is_named_where_a_rank_does_not_hear_itself(pulses):
    turns(pulses, (0, 1, 2), 2)
    for _ in range(LIMIT + 1):
        pulses[0].tick()
    assert pulses[0].lost() == [NO_STORE]


def test_after_an_error_the_silent_rank_is_named(pulses):
    turns(pulses, (0, 1, 2), 2)
    pulses[2].give("its last sign, which rank 0 has not heard yet")
    pulses[1].give("raised RuntimeError: connection closed by peer")
    assert pulses[0].blamed("raised RuntimeError: closed", 0) == ["rank 2 gives no sign of life"]


def test_after_an_error_that_all_have_raised_nobody_is_named(pulses):
    turns(pulses, (0, 1, 2), 2)
    same = "raised RuntimeError: out of luck"
    for rank in (1, 2):
        pulses[rank].give(same)
    assert pulses[0].blamed(same, 0) == []


def test_after_an_error_the_other_one_is_named(pulses):
    turns(pulses, (0, 1, 2), 2)
    pulses[1].give("raised ValueError: k is wrong")
    pulses[2].give("left")
    assert pulses[0].blamed("raised RuntimeError: closed", 0) == ["rank 1 raised ValueError: k is wrong"]


def test_after_an_error_a_store_that_is_gone_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, is_master=True)
    pulse = Pulse(dist.TCPStore("127.0.0.1", port), 0, 2, LIMIT)
    pulse.give("0")
    del server
    assert pulse.blamed("raised RuntimeError: closed", 0) == [NO_STORE]


@pytest.fixture
def block(monkeypatch):
    """`heartbeat`, with a store in which rank 1 of 2 has given a sign; nobody ends this process."""
    store = dist.HashStore()
    store.set("1", "7")
    group = mock.Mock(
        PrefixStore=lambda *_: store,
        get_process_group_ranks=lambda *_: [0, 1],
        get_world_size=lambda *_: 2,
        get_rank=lambda *_: 0,
    )
    monkeypatch.setattr(heartbeat, "dist", group)
    monkeypatch.setattr(heartbeat, "_watch", lambda *_: None)
    return heartbeat.heartbeat


@pytest.mark.parametrize("interval", [0, -1, 2, float("nan")])
def test_an_interval_beyond_the_limit_is_refused(interval, block):
    refused = pytest.raises(ValueError, match="interval: expected more than 0 and at most limit 1 s")
    with refused, block(None, interval, 1):
        pass


@pytest.mark.parametrize(("limit", "ticks"), [(0.02, 1), (0.05, 3)])
def test_a_limit_is_at_least_as_many_ticks(limit, ticks, block):
    with mock.patch.object(heartbeat, "Pulse", wraps=Pulse) as made, block(None, 0.02, limit):
        pass
    assert made.call_args.args[-1] == ticks


def test_an_error_of_ones_own_blames_nobody(block):
    with pytest.raises(ValueError, match=r"^k is wrong"), block(None, 0.01, 0.02):
        raise ValueError("k is wrong")
    with pytest.raises(RuntimeError, match="rank 1 gives no sign of life"), block(None, 0.01, 0.02):
        raise RuntimeError("Connection closed")
