"""A call in a forked process: what it returns, raises and prints arrives, and how the process died is said."""

import atexit
import ctypes
import linecache
import os
import signal
import sys
import threading
import time

from common.verify import verify_results
from common.verify.inputs import make_qkv
from common.verify.isolated import Died, isolated, note, noted

import pytest
import torch
import torch.nn.functional as F


def test_a_report_arrives_from_a_process_of_its_own():
    q, k, v = make_qkv(1, 2, 40, 16, device="cpu")
    do = torch.ones_like(q)
    wanted = verify_results(F.scaled_dot_product_attention, q, k, v, do=do)
    report = isolated(lambda: verify_results(F.scaled_dot_product_attention, q, k, v, do=do))
    assert report.passed
    assert report.verdict == wanted.verdict
    child = isolated(os.getpid)
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):  # nor is it a zombie
        os.kill(child, 0)


def test_products_of_many_threads_in_the_parent_do_not_stop_the_child():
    a, threads = torch.ones(300, 300), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (a @ a).sum()
        assert isolated(torch.get_num_threads) == 1
        assert isolated(lambda: (a @ a).sum().item()) == 300.0**3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_more_than_a_pipe_holds_comes_back():
    assert isolated(lambda: "x" * 2**20) == "x" * 2**20
    assert isolated(lambda: None) is None


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"])
def test_the_signal_that_ended_the_process_is_named(name):
    with pytest.raises(Died, match=f"^Python was ended by {name}") as died:
        isolated(lambda: os.kill(os.getpid(), getattr(signal, name)))
    assert died.value.signal == name
    assert died.value.hint.endswith("?")


def test_the_line_of_a_read_outside_of_all_memory_is_said():
    def read_at_0():
        ctypes.string_at(0)

    with pytest.raises(Died, match=r"test_isolated\.py, line \d+, in read_at_0: ctypes\.string_at\(0\)$") as died:
        isolated(read_at_0)
    assert "is it masked" in died.value.hint


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ends_itself_has_died_too(code):
    with pytest.raises(Died, match=f"^Python ended with code {code}$") as died:
        isolated(lambda: os._exit(code))
    assert (died.value.signal, died.value.hint) == ("", None)


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no"), ValueError, "no"),
        (SystemExit(0), SystemExit, "0"),
        (Unpicklable("this", "that"), RuntimeError, "test_isolated.Unpicklable: this and that"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_an_exception_of_the_child_is_raised_here(error, kind, text):
    def raises():
        raise error

    with pytest.raises(kind) as raised:
        isolated(raises)
    assert str(raised.value) == text
    assert "in raises\n    raise error" in raised.value.__notes__[0]


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        isolated(lambda: lambda: None)


def test_what_is_printed_is_printed_once_and_no_exit_handler_runs(tmp_path, monkeypatch):
    with open(tmp_path / "printed", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        atexit.register(print, "at exit")
        print("before", end=" ")  # stays in the buffer
        try:
            isolated(lambda: print("inside"))
        finally:
            atexit.unregister(print)
        print("after")
    assert (tmp_path / "printed").read_text() == "before inside\nafter\n"


def test_ctrl_c_ends_the_child_too(tmp_path):
    me = threading.get_ident()

    def waits():
        frame = sys._current_frames()[me]
        return "waitpid" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)

    def interrupt():
        while not (waits() and (tmp_path / "started").exists()):  # the hooks of a fork swallow an exception
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    def takes_long():
        (tmp_path / "started").write_text(str(os.getpid()))
        time.sleep(20)

    thread, start = threading.Thread(target=interrupt), time.monotonic()
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        isolated(takes_long)
    assert time.monotonic() - start < 15
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)


def test_a_note_is_written_where_a_file_was_chosen(tmp_path):
    note("nowhere")
    try:
        noted(tmp_path / "note")
        note("q (1, 2, 64, 32), float16")
        note("q (1, 2)")
        assert (tmp_path / "note").read_text() == "q (1, 2)"
        note("")
        assert (tmp_path / "note").read_text() == ""
    finally:
        noted(None)


def test_what_is_called_is_noted_until_it_has_returned(tmp_path):
    seen, path = [], tmp_path / "note"

    def fn(q, k, v, **options):
        seen.append(path.read_text())
        return F.scaled_dot_product_attention(q, k, v, **options)

    noted(path)
    try:
        verify_results(fn, *make_qkv(1, 2, 40, 16, device="cpu"))
    finally:
        noted(None)
    assert seen == ["q (1, 2, 40, 16), k (1, 2, 40, 16), float16"] * 2
    assert path.read_text() == ""
