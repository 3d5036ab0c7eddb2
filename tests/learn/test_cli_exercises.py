"""The learner's commands, typed into a real terminal, in a copy of the course."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import wrong_answers
from common import phases
from common.learn import cli, cli_exercises, doctor, exercises, progress
from common.learn.check import runner

import pexpect
import pytest
from typer.testing import CliRunner

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
    assert f"to read again: {first.explained}" in " ".join(shown.split())

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
    assert shown.count("not finished") == len(PHASE_2)
    assert "not finished" not in terminal.run("course check")[0], "without a name, what was not begun is only counted"
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
    assert "phase5_tuning/ladder/dkdv.py" in terminal.run("course diff 4 5")[0]  # dK, dV in both
    shown, code = terminal.run("course diff 2 7")
    assert code == 2
    assert "'7'" in shown


def test_diff_of_two_rungs(terminal):
    shown, code = terminal.run("course diff base2 late-sums")
    assert code == 0
    assert "+ phase5_tuning/ladder/forward.py: _attn_fwd_late_sums_kernel" in shown
    assert "+    l_i = tl.sum(l_i, axis=1)" in shown
    assert "+ phase5_tuning/ladder/dkdv.py" in terminal.run("course diff edges Transposed")[0]
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
    noted = {e.name: f"{hashlib.sha256(e.stub.encode()).hexdigest()[:16]} {e.version}" for e in exercises.load()}
    (copy / ".course" / "progress.json").write_text(json.dumps(dict(passed=noted, hints={})))
    assert "All exercises are solved" in terminal.run("course")[0]
    for command in ("next", "hint", "watch"):
        shown, code = terminal.run(f"course {command}")
        assert code == 0
        assert "All exercises are solved" in shown


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """A function that runs a command in this process, where nothing is solved; it returns (what was printed, exit
    code). `outcomes` are the verdicts of checks, which are not run then.
    """
    for phase in phases.PHASES:
        (tmp_path / phase.folder).symlink_to(phases.ROOT / phase.folder)
    monkeypatch.setattr(phases, "ROOT", tmp_path)

    def run(*arguments, outcomes=None):
        checks = mock.patch.object(runner, "check", side_effect=outcomes)
        with checks if outcomes else nullcontext():
            done = CliRunner().invoke(cli.app, arguments)
        return " ".join(done.output.split()), done.exit_code

    return run


PASSED, WRONG, ERROR = (runner.Verdict(kind, "some words") for kind in ("passed", "wrong", "error"))


def noted(exercise, limit):
    with progress.Progress.changed() as so_far:
        so_far.passed[exercise.name] = hash_of(exercise.answer.decode())
    return PASSED


def test_after_what_passed_comes_what_is_behind_it(typed):
    assert f"Next: {PHASE_1[3].number}" in typed("check", "1.3", outcomes=noted)[0]
    for exercise in PHASE_1:
        progress.begin(exercise)
    assert f"Next: {PHASE_2[0].number}" in typed("check", "1", outcomes=noted)[0]


def test_next_follows_what_was_worked_on_last(typed):
    assert typed("next")[0].startswith(PHASE_1[0].number)
    for command in ("next", "hint", "reset"):
        for exercise in (PHASE_2[1], PHASE_1[2]):
            typed(command, exercise.number)
            assert typed("next")[0].startswith(exercise.number)
            assert f"Next: {exercise.number}" in typed()[0]
    for exercise in PHASE_1[2:]:
        progress.begin(exercise)
    progress.Progress({e.name: f"{hash_of(e.stub)} {e.version}" for e in PHASE_1[2:]}, last=PHASE_1[2].name).save()
    assert typed("solution")[0].startswith(f"- {PHASE_1[2].file}")
    assert typed("next")[0].startswith(PHASE_2[0].number)


def test_several_exercises_and_phases_are_checked_at_once(typed):
    shown, code = typed("check", "1.3", "2", outcomes=[PASSED] * (1 + len(PHASE_2)))
    assert code == 0
    assert shown.startswith(f"{PHASE_1[2].number} {PHASE_1[2].name} PASS")
    assert f"{1 + len(PHASE_2)} of {1 + len(PHASE_2)} exercises passed" in shown
    assert typed("check", "1.3", "1.9")[1] == 2


@pytest.mark.parametrize("command", ["check", "watch"])
def test_ctrl_c_is_said_alike(command, typed):
    shown, code = typed(command, "1.3", outcomes=[KeyboardInterrupt])
    assert code == 130
    assert shown.endswith("Stopped.")


def test_a_file_in_the_place_of_a_folder_is_named(copy, attempt):
    (copy / "work").touch()
    for command in ("next", "hint"):
        printed, code = attempt(command)
        assert code == 1
        assert printed == f"{copy}/work is a file, and the course needs a folder of that name: move it away\n"


def test_of_all_exercises_only_what_is_to_be_done_is_said(typed):
    assert "some words" in typed("check", "1.3", outcomes=[PASSED])[0]
    shown, _ = typed("check", "1", outcomes=[PASSED] * (len(PHASE_1) - 1) + [WRONG])
    assert shown.count("some words") == 1


def test_a_mistake_is_explained_and_an_error_is_not(typed):
    assert f"to read again: {PHASE_1[2].explained}" in typed("check", "1.3", outcomes=[WRONG])[0]
    assert "softmax.ipynb, section 2.1, and" in typed("check", "1.3", outcomes=[replace(WRONG, section="2.1")])[0]
    assert "to read again" not in typed("check", "1.3", outcomes=[ERROR])[0]


def test_hints_end(typed):
    shown = [typed("hint", "1.1")[0] for _ in range(4)]
    assert ["These are all hints" in one for one in shown] == [False, False, True, True]
    assert progress.Progress.load().hints == {PHASE_1[0].name: 3}


def test_who_passed_a_former_version_of_a_task_is_told(typed, monkeypatch):
    first = PHASE_1[0]
    progress.begin(first)
    told = f"{first.number} {first.name} is open again: its task has changed since you passed it"
    for noted, version, open_again in (("", 1, False), ("", 2, True), (" 1", 2, True), (" 2", 2, False)):
        changed = replace(first, version=version)
        monkeypatch.setattr(exercises, "load", lambda changed=changed: (changed, *PHASE_1[1:]))
        progress.Progress({first.name: hash_of(first.stub) + noted}).save()
        shown, _ = typed()
        assert (told in shown) == open_again
        assert (f"Next: {first.number}" in shown) == open_again
    progress.Progress({first.name: hash_of("another answer") + " 1"}).save()
    assert told not in typed()[0]


def test_a_solution_is_for_who_has_solved_it_or_gives_up(typed):
    shown, code = typed("solution", "1.1")
    assert code == 1
    assert "add --give-up" in shown
    for exercise in PHASE_1[:2]:
        progress.begin(exercise)
    progress.Progress({e.name: hash_of(e.stub) for e in PHASE_1[:2]}).save()
    shown, code = typed("solution")  # of the last one solved
    assert code == 0
    assert f"- {PHASE_1[1].file} +" in shown


def test_who_watches_one_exercise_is_done_when_it_passes(typed):
    assert typed("watch", "1.3", outcomes=[PASSED, KeyboardInterrupt])[0].endswith("Solved.")


def test_a_file_that_is_away_for_a_moment_is_not_checked(typed, monkeypatch):
    path, there, stat = phases.ROOT / PHASE_1[2].file, [], Path.stat

    def gone(file, **options):  # between a look whether it is there and the next one
        return stat(path.with_suffix(".new") if file == path else file, **options)

    def check(exercise, limit):
        there.append(path.exists())
        if len(there) == 2:
            raise KeyboardInterrupt
        path.unlink()
        return WRONG

    def save():
        monkeypatch.setattr(Path, "stat", stat)
        path.write_text("# saved\n")

    pauses = iter([lambda: monkeypatch.setattr(Path, "stat", gone), save, lambda: None])
    monkeypatch.setattr(cli_exercises.time, "sleep", lambda _: next(pauses)())
    typed("watch", "1.3", outcomes=check)
    assert there == [True, True]


def test_a_task_keeps_its_lists_and_joins_its_sentences(capsys):
    cli_exercises._print_task("one\nsentence\n\n- first\n- second")
    assert capsys.readouterr().out == "one sentence\n\n- first\n- second\n\n"


def hash_of(answer):
    return hashlib.sha256(answer.encode()).hexdigest()[:16]


@pytest.fixture
def attempt(copy):
    """A function that runs a command in the copy; it returns what was printed, all of it, and the exit code."""

    def run(*arguments, before="", **environment):
        command = shlex.join([sys.executable, "-m", "common.learn.cli", *arguments])
        done = subprocess.run(
            f"{before} {command}", shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=copy, env=os.environ | dict(COLUMNS="300", PYTHONPATH=str(copy)) | environment,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout, done.returncode

    return run


@pytest.fixture
def course(attempt):
    """A function that runs a command in the copy and returns the lines that it printed."""

    def run(*arguments):
        printed, code = attempt(*arguments)
        assert code == 0, printed
        return printed.splitlines()

    return run


def store(copy, **progress):
    (copy / ".course").mkdir(exist_ok=True)
    (copy / ".course" / "progress.json").write_text(json.dumps(progress))


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda path: path.write_text("[[exercise"), lambda path: path.write_text("")]
)
def test_a_manifest_that_cannot_be_read_is_named_and_the_machine_can_still_be_looked_at(spoil, copy, attempt):
    manifest = "phase2_tiling/checks/manifest.toml"
    spoil(copy / manifest)
    for command in ([], ["next"], ["check", "1.1"], ["watch"]):
        printed, code = attempt(*command)
        assert code == 1
        assert printed.startswith(f"{manifest}: ")
        assert printed.endswith(f"The course ships this file: git restore {manifest}\n")
        assert printed.count("\n") == 1
    assert attempt("verify", "9")[1] == 2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "No such file or directory"),
        (lambda path: path.write_text(""), "ValueError: nothing in it is the learner's part"),
        (lambda path: path.write_text(path.read_text().partition(exercises.END)[0]), "ValueError: '# your code' with"),
    ],
    ids=["missing", "empty", "cut off"],
)
def test_a_broken_solution_stops_its_own_exercise_alone(spoil, said, copy, attempt):
    broken = PHASE_1[1].solution.relative_to(phases.ROOT)
    spoil(copy / broken)
    for command in ("next", "check", "hint", "reset"):
        printed, code = attempt(command, "1.2")
        assert code == 1
        assert printed.startswith(f"{broken}: {said}")
        assert printed.endswith(f". The course ships this file: git restore {broken}\n")
        assert printed.count("\n") == 1
    assert shipped(copy, PHASE_1[1]).read_text() == PHASE_1[1].stub
    printed, _ = attempt("check", "1")
    assert f"raises an error\n{broken}: {said}" in printed
    assert f"0 of {len(PHASE_1)} exercises passed" in printed
    assert attempt()[1] == 0
    assert PHASE_1[2].title in attempt("next", "1.3")[0]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("phase1_softmax/checks/masked_add.py", "1 +", "SyntaxError"),
        ("phase1_softmax/online_softmax.py", "x", "phase1_softmax/online_softmax.py, line 1: NameError: name 'x'"),
    ],
)
def test_a_broken_file_of_the_course_is_not_blamed_on_the_answer(file, text, said, copy, attempt):
    write(copy, PHASE_1[0], "# mine\n")
    (copy / file).write_text(text)
    printed, code = attempt("check", "1.1")
    assert code == 1
    assert said in printed
    assert file in printed
    assert "Your answer was not looked at: a file of the course cannot be loaded. git status shows" in printed


def test_a_terminal_of_ascii_shows_what_it_can(copy, attempt):
    for command in ([], ["next", "1.4"], ["hint", "1.4"], ["solution", "1.4", "--give-up"], ["diff", "2", "3"]):
        printed, code = attempt(*command, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C", PYTHONCOERCECLOCALE="0")
        assert code == 0
        assert printed.isascii()


@pytest.mark.parametrize("command", ["check", "reset", "hint", "watch"])
@pytest.mark.parametrize("name", ["nowhere/masked_add.py", "masked_add.py", "phase1_softmax/solutions/masked_add.py"])
def test_a_path_of_another_file_is_refused(command, name, copy, attempt):
    write(copy, exercises.find("masked_add"), "# mine\n")
    (copy / "masked_add.py").write_text("# somebody else's\n")
    printed, code = attempt(command, name)
    assert code == 2
    assert printed == f"There is no exercise '{name}'. Did you mean masked_add?\n"
    assert (copy / exercises.find("masked_add").file).read_text() == "# mine\n"


def test_the_paths_of_an_exercise_are_taken_from_any_folder(copy, monkeypatch):
    monkeypatch.setattr(phases, "ROOT", copy)
    exercise = exercises.find("masked_add")
    write(copy, exercise, exercise.stub)
    monkeypatch.chdir(copy / "work/phase1_softmax")
    absolute = str(copy / exercise.file), str(shipped(copy, exercise))
    for name in ("masked_add.py", "./masked_add.py", "../phase1_softmax/masked_add.py", exercise.file, *absolute):
        assert exercises.find(name) is exercise
    assert exercises.find("../masked_add.py") is None


def test_where_no_file_can_be_created_each_answer_that_is_there_has_its_verdict(typed, monkeypatch):
    first, second, third = PHASE_1[:3]
    for exercise in (first, third):
        write(phases.ROOT, exercise, exercise.solution.read_text())

    def no_room(path, content):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(exercises, "write", no_room)
    monkeypatch.setattr(runner, "_in_child", lambda *_, **__: dict(kind="passed", message="all right"))
    shown, code = typed("check", "1")
    assert code == 1
    assert shown.count("PASS") == 2
    assert f"{second.number} {second.name} not finished" in shown
    assert f"2 of {len(PHASE_1)} exercises passed" in shown
    shown, code = typed("check", first.number)
    assert code == 0
    assert "This verdict is not noted" in shown
    assert f"Next: {first.number}" in shown  # as nothing is noted


def test_a_reset_on_a_full_disk_leaves_the_answer(copy, attempt):
    store(copy, passed={}, hints={})
    write(copy, PHASE_1[0], "# mine\n")
    printed, code = attempt("reset", "1.1", before="ulimit -f 0;")
    assert code == 1
    assert printed.endswith("Is there room on the disk, and may you read and write there?\n")
    assert printed.count("\n") == 1
    assert (copy / PHASE_1[0].file).read_text() == "# mine\n"
    assert [path.name for path in (copy / PHASE_1[0].file).parent.iterdir()] == [f"{PHASE_1[0].name}.py"]
    assert json.loads((copy / ".course" / "progress.json").read_text()) == dict(passed={}, hints={})


def test_a_reset_that_cannot_keep_the_answer_beside_it_leaves_it(copy, monkeypatch):
    monkeypatch.setattr(phases, "ROOT", copy)
    write(copy, PHASE_1[0], "# mine\n")

    def no_room(self, content):
        raise OSError(28, "No space left on device")

    progress.Progress().save()
    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(OSError, match="No space left on device"):
        progress.reset(PHASE_1[0])
    assert (copy / PHASE_1[0].file).read_text() == "# mine\n"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"passed": [], "hints": {}}',
        '{"passed": {}, "hints": {"masked_add": "2"}}',
        '{"passed": {}, "hints": {"masked_add": null}}',
        '{"passed": {}, "hints": {"masked_add": -3}}',
        '{"passed": {"masked_add": 3}, "hints": {}}',
        '{"passed": {}, "hints": {}, "begun": {"masked_add": []}}',
        b"\xff\xfe",
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_damaged_progress_is_set_aside_and_said(text, copy, monkeypatch):
    monkeypatch.setattr(phases, "ROOT", copy)
    text = text if isinstance(text, bytes) else text.encode()
    store(copy)
    for n in (1, 2):
        (copy / ".course" / "progress.json").write_bytes(text)
        (said,) = progress.notices()
        assert f"is now .course/progress.json.bad{n}." in said
        assert "course check notes anew" in said
        assert (copy / ".course" / f"progress.json.bad{n}").read_bytes() == text
    assert progress.notices() == []


def test_hint_counts_anew_after_damaged_progress(copy, attempt):
    store(copy, passed={}, hints={PHASE_1[0].name: "x"})
    printed, code = attempt("hint", "1.1")
    assert code == 0
    assert "progress.json.bad1" in printed
    assert "Hint 1 of 3" in printed


def test_where_progress_cannot_be_kept_a_hint_is_shown_all_the_same(copy, attempt):
    (copy / ".course").write_text("a file")
    write(copy, PHASE_1[0], "# mine\n")
    printed, code = attempt("hint", "1.1")
    assert code == 1
    *_, hint, question, error = printed.splitlines()
    assert hint.startswith("Hint 1 of 3") or question.startswith("Hint 1 of 3")
    assert error.endswith(".course is a file, and the course needs a folder of that name: move it away")
    assert (copy / ".course").read_text() == "a file"


HELD = """
import time
held = open({alive!r}, "w")
held.write("begun ")
held.flush()
time.sleep(10)
held.write("and left behind")
held.flush()
"""


@pytest.mark.parametrize("ending", [signal.SIGHUP, signal.SIGTERM], ids=["its terminal is closed", "it is ended"])
def test_an_answer_ends_with_its_check(ending, copy):
    alive = copy / "alive"
    os.mkfifo(alive)
    write(copy, PHASE_1[2], HELD.format(alive=str(alive)))
    check = subprocess.Popen(
        [sys.executable, "-m", "common.learn.cli", "check", "1.3"], cwd=copy,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored under nohup
    )  # fmt: skip
    with alive.open() as said:
        begun = said.read(6)
        check.send_signal(ending)
        check.wait()
        assert begun + said.read() == "begun "  # returns once the answer's process has ended


def git(*command, cwd):
    identity = "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"
    done = subprocess.run(["git", *identity, *command], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(copy):
    """The copy, committed."""
    git("init", "-q", cwd=copy)
    git("add", "--all", cwd=copy)
    git("commit", "-qm", "as shipped", cwd=copy)
    return copy


def test_an_answer_in_a_shipped_file_stays_and_the_way_to_work_is_said(repository, attempt):
    first, second = PHASE_1[2:4]
    for n, expected in enumerate((first.file, f"{first.file}.old1")):  # the second time another answer is there
        shipped(repository, first).write_text(f"# mine {n}\n")
        shipped(repository, second).write_text("# mine too\n")
        said = attempt()[0].splitlines()[0]
        assert said.startswith(
            f"phase1_softmax/exercises/{first.name}.py is not as shipped, and an answer belongs in work/"
        )
        assert said.endswith(f"; likewise phase1_softmax/exercises/{second.name}.py")
        assert shipped(repository, first).read_text() == f"# mine {n}\n"
        commands = said.partition("To bring it there: ")[2].partition("; likewise")[0]
        subprocess.run(commands, shell=True, cwd=repository, check=True)
        assert (repository / expected).read_text() == f"# mine {n}\n"
        assert shipped(repository, first).read_text() == first.stub
    git("checkout", "HEAD", "--", ".", cwd=repository)
    assert "as shipped" not in attempt()[0]


def test_a_checkout_that_git_would_give_crlf_has_none(repository, tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone") / "course"
    git("clone", "-q", "-c", "core.autocrlf=true", str(repository), str(clone), cwd=repository)
    command = [sys.executable, "-m", "common.learn.cli"]
    said = subprocess.run(
        command, cwd=clone, env=os.environ | dict(PYTHONPATH=str(clone)), capture_output=True, text=True
    )
    assert said.stdout.lstrip().startswith("1  ")  # the table of phases, and no message before it
    assert not git("status", "--porcelain", cwd=clone)
    assert b"\r" not in (clone / "Makefile").read_bytes()
    assert (clone / "common/site/overview.png").read_bytes() == (repository / "common/site/overview.png").read_bytes()


def test_line_ends_of_windows_are_no_answer_and_are_named(repository, attempt, monkeypatch):
    for exercise in PHASE_1[:2]:
        path = shipped(repository, exercise)
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    said = attempt("next")[0].splitlines()[0]
    file = f"phase1_softmax/exercises/{PHASE_1[0].name}.py"
    assert said == f"{file} and 1 more: line ends of Windows (CRLF); course doctor says what to do"
    monkeypatch.setattr(phases, "ROOT", repository)
    finding = doctor.check_line_ends()
    assert finding.level == "note"
    assert file in finding.found
    assert " 2 files: " in finding.found
    subprocess.run(["bash", "-c", finding.todo.partition(": ")[2]], cwd=repository, check=True)
    assert doctor.check_line_ends().level == "ok"
    assert "CRLF" not in attempt("next")[0]


def test_an_unwritable_work_folder_is_named_in_a_line(copy, attempt):
    (copy / "work").write_text("a file")
    printed, code = attempt("next")
    assert code == 1
    assert printed.count("\n") == 1
    assert str(copy / "work") in printed
    printed, code = attempt()
    assert "0 of" in printed  # how far one is


@pytest.mark.parametrize("name", ["numpy", "torch", "triton", "rich"])
def test_a_file_that_hides_a_package_is_named_in_a_line(name, copy):
    def run(*command, folder=copy):
        environment = os.environ | dict(PYTHONPATH=str(copy))
        done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
        return done.stderr.strip().splitlines()[-1:], done.returncode

    def said(folder):
        return f"{folder / name}.py hides the package {name}, which the course needs: rename it"

    write(copy, PHASE_1[2], PHASE_1[2].solution.read_text())
    for harmless in ("work", "work/phase1_softmax", "phase1_softmax"):
        (copy / harmless / f"{name}.py").write_text("")
    assert run("course.py", "next") == ([], 0)
    notebook = "-c", "import sys; sys.path[0] = ''; import common"
    for beside in ("work/phase1_softmax", "phase1_softmax"):
        assert run(*notebook, folder=copy / beside) == ([f"ImportError: {said(copy / beside)}"], 1)
    (copy / f"{name}.py").write_text("")
    for command in ("", "next", "check", "verify"):
        assert run("course.py", *filter(None, [command])) == ([said(copy)], 1)


def test_a_python_that_lacks_what_the_course_needs_says_so_in_a_line(copy):
    def run(*options, **environment):
        bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")}
        command = [sys.executable, *options, "course.py"]
        done = subprocess.run(command, cwd=copy, env=bare | environment, capture_output=True, text=True)
        return done.stdout, done.stderr, done.returncode

    missing = "No module named 'typer': .venv/bin/course has what the course needs; make course installs it\n"
    assert run("-S") == ("", missing, 1)  # without site-packages
    unseen = "Python does not look into the course's folder: unset PYTHONSAFEPATH\n"
    assert run("-S", PYTHONSAFEPATH="1") == ("", unseen, 1)
