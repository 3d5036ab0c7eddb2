"""The learner's commands, typed into a real terminal, in a copy of the course."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import wrong_answers
from common import phases
from common.learn import exercises

import pexpect
import pytest

PHASE_1, PHASE_2 = ([e for e in exercises.load() if e.phase.number == n] for n in (1, 2))
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def copy(tmp_path):
    """A copy of the course as it is shipped, nothing solved."""
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        tracked, capture_output=True, text=True, cwd=phases.ROOT, check=True
    ).stdout.splitlines():
        if (phases.ROOT / name).suffix != ".ipynb" and (phases.ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(phases.ROOT / name, tmp_path / name)
    for exercise in exercises.load():
        (tmp_path / exercise.file).write_text(exercise.stub)
    return tmp_path


class Terminal:
    """A shell in a terminal of 80 columns; `run` types a command and returns (what it showed, exit code)."""

    def __init__(self, folder):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "NO_COLOR", "TRITON"))}
        self.shell = pexpect.spawn(
            "/bin/bash", ["--norc", "--noprofile"], cwd=str(folder), encoding="utf-8", timeout=60, dimensions=(40, 80),
            env=environment | dict(TERM="xterm-256color", PS1="$ ", PS2=""),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored under nohup
        )  # fmt: skip
        self.shell.setecho(False)
        self.run(f'course() {{ {sys.executable} -m common.learn.cli "$@"; }}')

    def run(self, command):
        self.shell.sendline(f'{command}; echo "<code $?>"')
        self.shell.expect(r"<code (\d+)>")
        return ESCAPES.sub("", self.shell.before), int(self.shell.match[1])


@pytest.fixture
def terminal(copy):
    opened = Terminal(copy)
    yield opened
    opened.shell.close(force=True)


def test_the_path_of_a_learner_through_phase_1(copy, terminal):
    first, second = PHASE_1[:2]
    wrong = wrong_answers.load()[first.name][0]

    shown, code = terminal.run("course")
    assert code == 0
    assert f"0 of {len(PHASE_1)}" in shown
    assert first.file in shown

    shown, code = terminal.run("course next")
    assert code == 0
    assert first.title in shown
    assert f"course check {first.number}" in shown
    assert f"about {first.minutes} minutes" in shown
    assert PHASE_1[2].title in terminal.run("course next 1.3")[0]

    shown, code = terminal.run(f"course check {first.name}")
    assert code == 1
    assert "not finished" in shown

    for number in (1, 2):
        shown, code = terminal.run("course hint")
        assert code == 0
        assert f"Hint {number} of 3" in shown
        assert f"Hint {number + 1} of 3" not in shown

    shown, code = terminal.run(f"course solution {first.name}")
    assert code == 1
    assert "--give-up" in shown

    (copy / first.file).write_text(first.solution.read_text() + "\nm = [][0:m:2]\n")
    assert "[0:m:2]" in terminal.run(f"course check {first.name}")[0]  # and not an emoji

    (copy / first.file).write_text(wrong.applied_to(first.solution.read_text()))
    shown, code = terminal.run(f"course check {first.name}")
    assert code == 1
    assert "not yet right" in shown
    assert wrong.says in " ".join(shown.split())

    for done, exercise in enumerate(PHASE_1, start=1):
        (copy / exercise.file).write_text(exercise.solution.read_text())
        shown, code = terminal.run(f"course check {exercise.number}")
        assert code == 0, shown
        assert "PASS" in shown
        shown, code = terminal.run("course")
        assert f"{done} of {len(PHASE_1)}" in shown
        assert exercise.file not in shown
    assert "2.1" in shown

    shown, code = terminal.run(f"course solution {first.name}")
    assert code == 0
    assert "def masked_add" in shown

    shown, code = terminal.run(f"course reset {second.name}")
    assert code == 0
    assert (copy / second.file).read_text() == second.stub
    assert (copy / second.file).with_suffix(".py.old1").read_text() == second.solution.read_text()
    assert second.file in terminal.run("course")[0]


def test_watch_checks_on_save(copy, terminal):
    first, second = PHASE_1[:2]
    terminal.shell.sendline("course watch")
    terminal.shell.expect("not finished")
    (copy / first.file).write_text(first.solution.read_text())
    terminal.shell.expect("PASS")
    terminal.shell.expect(re.escape(second.title[:30]))
    terminal.shell.expect("not finished")
    terminal.shell.sendintr()
    terminal.shell.expect("Stopped.")


def test_names_that_do_not_exist(terminal):
    for command in ("check", "hint", "solution", "reset", "watch"):
        shown, code = terminal.run(f"course {command} masked_ad")
        assert code == 2
        assert "Did you mean masked_add?" in " ".join(shown.split())
    assert "There are 1.1 to 1.5, 2.1 to" in " ".join(terminal.run("course check xyz")[0].split())


def test_check_of_a_phase_and_what_is_piped_is_not_wrapped(copy, terminal):
    shown, code = terminal.run("course check 2")
    assert code == 1
    assert "0 of 5 exercises passed" in shown
    terminal.run("course solution 2.1 --give-up > out.py")
    assert PHASE_2[0].solution.read_text() in (copy / "out.py").read_text()
    assert "They are the same" in terminal.run("course diff 2 2")[0]


def test_a_file_changed_after_it_passed_is_not_solved(copy, terminal):
    (copy / PHASE_1[0].file).write_text(PHASE_1[0].solution.read_text())
    assert terminal.run("course check 1.1")[1] == 0
    assert "1 of 5" in terminal.run("course")[0]
    (copy / PHASE_1[0].file).write_text(PHASE_1[0].stub)
    assert "1 of 5" not in terminal.run("course")[0]


def test_diff_shows_what_changed_in_color_and_without(terminal):
    shown, code = terminal.run("course diff 2 3")
    assert code == 0
    assert "+    pid_bh = tl.program_id(0) // tiles_m" in shown
    assert "\x1b[32m+" in terminal.shell.before
    plain, code = terminal.run("NO_COLOR=1 course diff 2 3 | cat")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*m", terminal.shell.before)
    assert "-    offs_d = tl.arange(0, HEAD_DIM)" in plain
    assert "phase5_tuning/dkdv_ladder.py" in terminal.run("course diff 4 5")[0]  # dK, dV in both
    shown, code = terminal.run("course diff 2 7")
    assert code == 2
    assert "'7'" in shown


def test_diff_of_two_rungs(terminal):
    shown, code = terminal.run("course diff base2 late-sums")
    assert code == 0
    assert "+ phase5_tuning/forward_ladder.py: _attn_fwd_late_sums_kernel" in shown
    assert "+    l_i = tl.sum(l_i, axis=1)" in shown
    assert "+ phase5_tuning/dkdv_ladder.py" in terminal.run("course diff edges Transposed")[0]
    shown, code = terminal.run('course diff base2 "masks at edges"')
    assert code == 2
    assert f"there are 1, 2, 3, 4, 5, {', '.join(phases.RUNGS)}." in " ".join(shown.split())


def test_diff_of_one_kind_of_kernel(terminal):
    for command, kernel in (
        ("edges descriptors", "_attn_fwd_descriptors_kernel"),
        ("edges descriptors --kernel dq", "_attn_bwd_dq_descriptors_kernel"),
        ("4 base2 --kernel dq", "_attn_bwd_dq_base2_kernel"),
        ("3 5", "_attn_fwd_descriptors_kernel"),
        ("1 2", "_attention_tiled_kernel"),  # nothing in common, and still two phases
    ):
        shown, code = terminal.run(f"course diff {command}")
        assert code == 0
        assert kernel in shown
    for command in ("heavy-first transposed", "base2 late-sums --kernel dq", "3 transposed"):
        shown, code = terminal.run(f"course diff {command}")
        assert code == 2
        assert "has forward" in " ".join(shown.split())


def test_help_comes_at_once(terminal):
    shown, code = terminal.run("course check --help")
    assert code == 0
    assert "--limit" in shown
    assert "torch" not in terminal.run(f"{sys.executable} -X importtime -m common.learn.cli --help 2>&1")[0]


def test_all_solved(copy, terminal):
    (copy / ".course").mkdir()
    hashes = {e.name: hashlib.sha256((copy / e.file).read_bytes()).hexdigest()[:16] for e in exercises.load()}
    (copy / ".course" / "progress.json").write_text(json.dumps(dict(passed=hashes, hints={})))
    assert "All exercises are solved" in terminal.run("course")[0]
    for command in ("next", "hint", "watch"):
        shown, code = terminal.run(f"course {command}")
        assert code == 0
        assert "All exercises are solved" in shown


def test_answers_and_progress_under_former_names_are_taken_over(copy):
    def course(*arguments):
        command = [sys.executable, "-m", "common.learn.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=copy, env=os.environ | dict(COLUMNS="200"))

    def former(exercise):
        return (copy / exercise.file).with_stem(exercise.formerly)

    def kept(exercise):
        return (copy / exercise.file).with_suffix(".py.old1")

    moved, alone, both, untouched, passed_anew = PHASE_1
    answers = {e.name: e.solution.read_text() + "# mine\n" for e in PHASE_1}
    former(moved).write_text(answers[moved.name])  # its file is as shipped
    former(alone).write_text(answers[alone.name])
    (copy / alone.file).unlink()
    former(both).write_text(answers[both.name])
    (copy / both.file).write_text("# another answer\n")
    former(untouched).write_text(untouched.stub)
    (copy / passed_anew.file).write_text(answers[passed_anew.name])
    former(passed_anew).write_text(answers[passed_anew.name])

    hashes = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in answers.items()}
    passed = {e.formerly: hashes[e.name] for e in (moved, alone, both)} | {passed_anew.name: hashes[passed_anew.name]}
    (copy / ".course").mkdir()
    stored = copy / ".course" / "progress.json"
    stored.write_text(json.dumps(dict(passed=passed, hints={moved.formerly: 2, both.formerly: 1})))

    done = course()
    assert done.returncode == 0, done.stderr
    assert "3 of 5" in done.stdout
    said = [line for line in done.stdout.splitlines() if "Your ex" in line or "kept" in line]
    assert said == [
        f"Your {moved.formerly}.py is now {moved.file}.",
        f"Your {alone.formerly}.py is now {alone.file}.",
        f"{both.file} has been edited: {both.formerly}.py is kept beside it as {kept(both).name}.",
    ]
    for exercise in (moved, alone, passed_anew):
        assert (copy / exercise.file).read_text() == answers[exercise.name]
    assert (copy / both.file).read_text() == "# another answer\n"
    assert kept(both).read_text() == answers[both.name]
    assert (copy / untouched.file).read_text() == untouched.stub
    assert not any(former(e).exists() for e in PHASE_1)
    now = json.loads(stored.read_text())
    assert now["passed"] == {e.name: hashes[e.name] for e in (passed_anew, moved, alone, both)}
    assert now["hints"] == {moved.name: 2, both.name: 1}

    again = course("next", "ex1_masked_add")
    assert again.returncode == 0
    assert moved.title in again.stdout
    assert "is now" not in again.stdout


def test_no_former_name_is_lost():
    """Every exercise of the layout with numbers is one of today's."""
    old = {f"{e.phase.folder}/exercises/{e.formerly}.py" for e in exercises.load() if e.formerly}
    layout = """
        1 softmax: masked_add safe_softmax online_step merge erratum
        2 tiling: ragged_grid inner_loop predict_traffic loop_order
        3 forward: classify_tiles epilogue grouped_heads sliding_window split_kv
        4 backward: delta dv dq_loop dkdv_loop dropout varlen
        5 tuning: count_flops fold_log2e split_causal_loop pick_tiles cross_head_store fp8
    """
    for number, folder, names in re.findall(r"(\d) (\w+): (.*)", layout):
        for place, name in enumerate(names.split(), start=1):
            assert f"phase{number}_{folder}/exercises/ex{place}_{name}.py" in old
