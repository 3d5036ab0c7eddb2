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
        shipped(tmp_path, exercise).write_text(exercise.stub)
    return tmp_path


def shipped(copy, exercise):
    return copy / exercise.shipped.relative_to(phases.ROOT)


def write(copy, exercise, answer):
    (copy / exercise.file).parent.mkdir(parents=True, exist_ok=True)
    (copy / exercise.file).write_text(answer)


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


@pytest.mark.slow
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
    assert (copy / first.file).read_text() == first.stub
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

    write(copy, first, first.solution.read_text() + "\nm = [][0:m:2]\n")
    assert "[0:m:2]" in terminal.run(f"course check {first.name}")[0]  # and not an emoji

    write(copy, first, wrong.applied_to(first.solution.read_text()))
    shown, code = terminal.run(f"course check {first.name}")
    assert code == 1
    assert "not yet right" in shown
    assert wrong.says in " ".join(shown.split())
    assert f"{first.explained} explains" in " ".join(shown.split())

    for done, exercise in enumerate(PHASE_1, start=1):
        write(copy, exercise, exercise.solution.read_text())
        shown, code = terminal.run(f"course check {exercise.number}")
        assert code == 0, shown
        assert "PASS" in shown
        shown, code = terminal.run("course")
        assert f"{done} of {len(PHASE_1)}" in shown
        assert exercise.file not in shown
    assert "2.1" in shown

    assert "They are the same." in terminal.run(f"course solution {second.name}")[0]
    masked_add = exercises.find("masked_add")
    write(copy, masked_add, masked_add.solution.read_text().replace("inside", "exist"))
    assert terminal.run("course check masked_add")[1] == 0
    shown, code = terminal.run("course solution masked_add")
    assert code == 0
    assert f"- {masked_add.file}" in shown
    assert "-    exist = offsets < n" in shown
    assert "+    inside = offsets < n" in shown
    assert "end of your code" not in shown

    shown, code = terminal.run(f"course reset {second.name}")
    assert code == 0
    assert (copy / second.file).read_text() == second.stub
    assert (copy / second.file).with_suffix(".py.old1").read_text() == second.solution.read_text()
    assert second.file in terminal.run("course")[0]


def test_watch_checks_on_save(copy, terminal):
    first, second = PHASE_1[:2]
    terminal.shell.sendline("course watch")
    terminal.shell.expect("not finished")
    write(copy, first, first.solution.read_text())
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
    assert "There are 1.1 to 1.6, 2.1 to" in " ".join(terminal.run("course check xyz")[0].split())


def test_check_of_a_phase_and_what_is_piped_is_not_wrapped(copy, terminal):
    shown, code = terminal.run("course check 2")
    assert code == 1
    assert f"0 of {len(PHASE_2)} exercises passed" in shown
    terminal.run("course solution 2.1 --give-up --whole > out.py")
    assert PHASE_2[0].solution.read_text() in (copy / "out.py").read_text()
    assert "They are the same" in terminal.run("course diff 2 2")[0]


def test_a_file_changed_after_it_passed_is_not_solved(copy, terminal):
    write(copy, PHASE_1[0], PHASE_1[0].solution.read_text())
    assert terminal.run("course check 1.1")[1] == 0
    assert f"1 of {len(PHASE_1)}" in terminal.run("course")[0]
    write(copy, PHASE_1[0], PHASE_1[0].stub)
    assert f"1 of {len(PHASE_1)}" not in terminal.run("course")[0]


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
    for exercise in exercises.load():
        write(copy, exercise, exercise.stub)
    hashes = {e.name: hashlib.sha256(e.stub.encode()).hexdigest()[:16] for e in exercises.load()}
    (copy / ".course" / "progress.json").write_text(json.dumps(dict(passed=hashes, hints={})))
    assert "All exercises are solved" in terminal.run("course")[0]
    for command in ("next", "hint", "watch"):
        shown, code = terminal.run(f"course {command}")
        assert code == 0
        assert "All exercises are solved" in shown


def hash_of(answer):
    return hashlib.sha256(answer.encode()).hexdigest()[:16]


@pytest.fixture
def course(copy):
    """A function that runs a command in the copy and returns the lines that it printed."""

    def run(*arguments):
        command = [sys.executable, "-m", "common.learn.cli", *arguments]
        environment = os.environ | dict(COLUMNS="200")
        done = subprocess.run(command, capture_output=True, text=True, cwd=copy, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def store(copy, **progress):
    (copy / ".course").mkdir()
    (copy / ".course" / "progress.json").write_text(json.dumps(progress))


def test_answers_in_the_shipped_files_move_to_work(copy, course):
    alone, begun, both, equal, untouched = PHASE_1[:5]
    answers = {e.name: f"# mine: {e.title}\n" for e in PHASE_1}
    for exercise in (alone, begun, both, equal):
        shipped(copy, exercise).write_text(answers[exercise.name])
    write(copy, begun, begun.stub)
    write(copy, both, "# another answer\n")
    write(copy, equal, answers[equal.name])
    store(copy, passed={e.name: hash_of(answers[e.name]) for e in (alone, begun, both, equal)}, hints={})

    said = course()
    assert said[:3] == [
        f"Your answer in {alone.phase.folder}/exercises/{alone.name}.py is now in {alone.file}: go on there.",
        f"Your answer in {begun.phase.folder}/exercises/{begun.name}.py is now in {begun.file}: go on there.",
        f"Your answer in {both.phase.folder}/exercises/{both.name}.py is now in {both.file}.old1: "
        f"{both.file} holds another one, which stays.",
    ]
    assert any(f"3 of {len(PHASE_1)}" in line for line in said)
    for exercise in (alone, begun, equal):
        assert (copy / exercise.file).read_text() == answers[exercise.name]
    assert (copy / both.file).read_text() == "# another answer\n"
    assert (copy / both.file).with_suffix(".py.old1").read_text() == answers[both.name]
    assert all(shipped(copy, e).read_text() == e.stub for e in PHASE_1)
    assert not (copy / untouched.file).exists()
    assert not any("exercises/" in line for line in course())


def test_answers_and_progress_under_former_names_are_taken_over(copy, course):
    def former(exercise):
        return shipped(copy, exercise).with_stem(exercise.formerly)

    renamed = [e for e in PHASE_1 if e.formerly]
    moved, alone, both, untouched, passed_anew = renamed
    answers = {e.name: e.solution.read_text() + "# mine\n" for e in PHASE_1}
    for exercise in (moved, alone, both, passed_anew):
        former(exercise).write_text(answers[exercise.name])
    shipped(copy, alone).unlink()
    shipped(copy, both).write_text("# another answer\n")
    former(untouched).write_text(untouched.stub)
    shipped(copy, passed_anew).write_text(answers[passed_anew.name])

    hashes = {name: hash_of(text) for name, text in answers.items()}
    passed = {e.formerly: hashes[e.name] for e in (moved, alone, both)} | {passed_anew.name: hashes[passed_anew.name]}
    store(copy, passed=passed, hints={moved.formerly: 2, both.formerly: 1})

    assert any(f"3 of {len(PHASE_1)}" in line for line in course())
    for exercise in (moved, alone, passed_anew):
        assert (copy / exercise.file).read_text() == answers[exercise.name]
    assert (copy / both.file).read_text() == "# another answer\n"
    assert (copy / both.file).with_suffix(".py.old1").read_text() == answers[both.name]
    assert not (copy / untouched.file).exists()
    assert not any(former(e).exists() for e in renamed)
    now = json.loads((copy / ".course" / "progress.json").read_text())
    assert now["passed"] == {e.name: hashes[e.name] for e in (passed_anew, moved, alone, both)}
    assert now["hints"] == {moved.name: 2, both.name: 1}

    again = course("next", moved.formerly)
    assert any(moved.title in line for line in again)
    assert not any("is now" in line for line in again)


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
