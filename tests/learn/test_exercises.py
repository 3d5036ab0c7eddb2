"""Every exercise fails as shipped, its solution passes, and wrong answers are rejected with a word on the mistake."""

import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import common
import wrong_answers
from common import phases, runtime
from common.learn import cli, exercises, exercises_notebook, progress
from common.learn.check import errors, judge, require, runner
from common.learn.check.answer import launches_of, load
from common.learn.check.runner import check
from common.learn.exercises import END, stub_of
from common.learn.progress import Progress
from phase4_backward.checks import varlen

import pytest
import torch
from helpers import interpreted_only, needs_interpreter
from typer.testing import CliRunner

EXERCISES = exercises.load()
WRONG = wrong_answers.load()
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
FIRST = {e.phase.folder: e for e in reversed(EXERCISES)}.values()
one_a_phase = pytest.mark.parametrize("exercise", FIRST, ids=lambda e: e.name)


FOLDERS = "work/phase1_softmax", "phase1_softmax/exercises"


def judged(exercise, text, tmp_path):
    """The verdict of the check on an answer with this text, in this process."""
    path = tmp_path / f"{exercise.name}.py"
    path.write_text(text)
    check_of_it = importlib.import_module(f"{exercise.phase.folder}.checks.{exercise.name}").check
    return judge.judge(check_of_it, path)


@each
def test_the_stub_asks_and_the_solution_answers_the_same_question(exercise):
    assert exercise.solution.read_text().count(END) >= 1
    assert exercise.task.splitlines()[0].rstrip(".?") == exercise.title.rstrip(".?")
    assert f"{exercise.phase.folder}/{exercise.notebook}" in exercise.task
    assert exercise.shipped.read_text() == exercise.stub, "python -m common.learn.exercises cuts it anew"


@interpreted_only  # as the runner judges first: compiled, less can be seen
@each
def test_the_stub_fails(exercise, tmp_path):
    assert judged(exercise, exercise.stub, tmp_path)["kind"] in ("unfinished", "wrong")


@pytest.mark.parametrize(
    "exercise",  # fit_hopper's check compiles Hopper kernels, as make test-slow does
    [pytest.param(e, id=e.name, marks=[pytest.mark.slow] * (e.name == "fit_hopper")) for e in EXERCISES],
)
def test_the_solution_passes(exercise, tmp_path):
    verdict = judged(exercise, exercise.solution.read_text(), tmp_path)
    assert verdict["kind"] == "passed", verdict["message"]
    assert verdict["message"], "a passed check says what was verified"


@interpreted_only
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [  # one of each exercise at once, the others in make test-slow
        pytest.param(name, wrong, marks=[] if i == 0 or wrong.at_once else pytest.mark.slow)
        for name, wrongs in WRONG.items()
        for i, wrong in enumerate(wrongs)
    ],
    ids=lambda x: getattr(x, "mistake", x),
)
def test_a_wrong_answer_is_rejected_and_the_mistake_is_named(name, wrong, tmp_path):
    exercise = exercises.find(name)
    verdict = judged(exercise, wrong.applied_to(exercise.solution.read_text()), tmp_path)
    assert verdict["kind"] == wrong.kind, verdict
    assert wrong.says in verdict["message"]
    assert not wrong.section or verdict["section"] == wrong.section


@interpreted_only
@pytest.mark.slow  # solutions pass at once
@pytest.mark.parametrize(
    ("name", "right"),
    [(name, right) for name, rights in wrong_answers.load("RIGHT").items() for right in rights],
    ids=lambda x: getattr(x, "mistake", x),
)
def test_another_right_answer_passes(name, right, tmp_path):
    exercise = exercises.find(name)
    verdict = judged(exercise, right.applied_to(exercise.solution.read_text()), tmp_path)
    assert verdict["kind"] == right.kind, verdict


def test_every_exercise_has_wrong_answers():
    assert sorted(WRONG) == sorted(e.name for e in EXERCISES)
    assert all(len(wrongs) >= 2 for wrongs in WRONG.values())


@each
def test_hints_rise(exercise):
    assert len(exercise.hints) == len(set(exercise.hints)) == 3
    assert exercise.hints[0].endswith("?"), "the first hint is a question"
    assert "`" in exercise.hints[2], "the last hint shows the line"


def test_manifest_folders_checks_and_notebooks_name_the_same_exercises():
    nbformat = pytest.importorskip("nbformat")
    for phase in phases.PHASES:
        folder = phases.ROOT / phase.folder
        names = [e.name for e in EXERCISES if e.phase == phase]
        assert names, phase.folder
        for kind in ("exercises", "solutions", "checks"):
            assert {p.stem for p in (folder / kind).glob("*.py")} - {"__init__"} == set(names)
        for notebook in dict.fromkeys(e.notebook for e in EXERCISES if e.phase == phase):
            stored = nbformat.read(folder / notebook, as_version=4)
            _check_notebook(stored, [e for e in EXERCISES if (e.phase, e.notebook) == (phase, notebook)])


def _check_notebook(notebook, of_it):
    """The notebook checks these exercises in this order, each in its section or subsection."""
    sections, headings, section, subsection, heading = {}, {}, "", "", ""
    for cell in notebook.cells:
        for level, heading in re.findall(r"^(##+) (.*)", cell.source, re.MULTILINE):
            section = heading if level == "##" else section
            subsection = heading if re.match(r"\d+\.\d+ ", heading) else "" if level == "##" else subsection
        for name in re.findall(r'^check\("(\w+)"\)', cell.source, re.MULTILINE):
            sections[name], headings[name] = (section, subsection), heading
    assert list(sections) == [e.name for e in of_it], "the notebook checks other exercises, or in another order"
    for e in of_it:
        assert any(s.startswith(e.section) for s in sections[e.name]), (e.section, sections[e.name])
        assert headings[e.name].removeprefix("Exercise ").startswith(f"{e.number}")
        assert headings[e.name].endswith(f"(about {e.minutes} minutes)")


def test_numbers_names_and_titles_are_unique():
    for of in ("name", "number", "title"):
        values = [getattr(e, of) for e in EXERCISES]
        assert len(values) == len(set(values))
    # Answers lie in the folder where a chapter's copy runs: one of these names would hide the package.
    assert not {e.name for e in EXERCISES} & {*sys.stdlib_module_names, *common._NEEDED}


@each
def test_an_exercise_imports_what_its_phase_gives_from_one_place(exercise):
    if (phases.ROOT / exercise.phase.folder / "given.py").exists():
        own = re.findall(rf"^from ({exercise.phase.folder}\S*) import", exercise.solution.read_text(), re.MULTILINE)
        assert set(own) <= {f"{exercise.phase.folder}.given"}


# --- the runner ----------------------------------------------------------------------------------------------------


def test_a_stub_is_the_solution_without_the_learners_part():
    solution = (
        "a = 1\ndef f(x):\n    # your code: twice\n    #| return x\n    return 2 * x\n    # end of your code\n\nb = 2\n"
    )
    assert stub_of(solution) == "a = 1\ndef f(x):\n    # your code: twice\n    return x\n\nb = 2\n"
    assert "    raise NotImplementedError\n" in stub_of(solution.replace("    #| return x\n", ""))
    again = solution.replace("twice", "once more").replace("    #| return x\n", "")
    assert stub_of(solution + again) == stub_of(solution) + stub_of(again)
    with pytest.raises(ValueError, match="without"):
        stub_of(solution.replace(END, "#"))


@pytest.mark.parametrize("name", ["masked_add", "1.1", *(f"{of}/masked_add.py" for of in FOLDERS)])
def test_an_exercise_goes_by_many_names(name):
    assert exercises.find(name).name == "masked_add"


@interpreted_only
def test_an_error_in_a_kernel_names_the_line_of_the_kernel(tmp_path):
    exercise = exercises.find("2.2")  # its own launcher is in the traceback too
    verdict = judged(exercise, exercise.solution.read_text().replace("tl.trans(k)", "tl.trans(kk)"), tmp_path)
    assert verdict["kind"] == "error"
    assert "in _attention_kernel: s = tl.dot(q, tl.trans(kk)" in verdict["message"]


def ran(text, tmp_path, check=lambda answer: answer.run()):
    """The verdict on an answer with this text: what comes of running it."""
    path = tmp_path / "answer.py"
    path.write_text(text)
    return judge.judge(check, path)


@pytest.mark.parametrize(
    ("line", "said", "unsaid"),
    [
        ("raise TypeError('only 0-dimensional arrays')", "Python's float()", "Elements cannot be picked"),
        ("x[0] = int('only 0-dimensional arrays')", "Elements cannot be picked", "Python's float()"),
    ],
)
def test_an_error_is_told_with_the_advice_for_its_line_alone(line, said, unsaid, tmp_path):
    verdict = ran(f"def run():\n    x = {{}}\n    {line}\n", tmp_path)
    assert verdict["message"].startswith(f"answer.py, line 3, in run: {line}\n")
    assert said in verdict["message"]
    assert unsaid not in verdict["message"]


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("from phase5_tuning.hopper_model import (Ring,\n  arrive)", "from phase5_tuning.given import Ring, arrive"),
        ("from phase5_tuning import hopper_tma as tma", "from phase5_tuning.given import tma"),
        ("from phase5_tuning.launch import remember", "from phase5_tuning.launch.plans import remember"),
        (
            "from phase5_tuning.configs import Config, fastest",
            "from phase5_tuning.given import Config; from phase5_tuning.launch.configs import fastest",
        ),
        ("from phase5_tuning.configs import nothing_of_this_name", ""),
        ("from numpy.of_old import linspace", ""),
        ("raise ImportError('by itself')", ""),
    ],
)
def test_an_import_from_where_the_course_had_something_names_where_it_is_now(line, now, tmp_path):
    verdict = ran(f"{line}\n", tmp_path)
    assert verdict["kind"] == "error"
    assert verdict["message"].startswith("answer.py, line 1, in <module>: ")
    assert verdict["message"].partition("\nThe course has moved this: ")[2] == now


def test_an_error_names_the_file_as_the_learner_calls_it(tmp_path):
    verdict = ran("def walk(): pass\n", tmp_path)
    assert "answer.py has no attribute 'run'" in verdict["message"]
    verdict = ran("1 +\n", tmp_path)
    assert 'File "answer.py", line 1' in verdict["message"]


def test_only_an_empty_not_implemented_error_is_what_the_stub_raises(tmp_path):
    verdict = ran("def run():\n    raise NotImplementedError('for Bool')\n", tmp_path)
    assert verdict["kind"] == "error"
    verdict = ran("def part():\n    raise NotImplementedError\ndef run():\n    part()\n", tmp_path)
    assert verdict == dict(kind="unfinished", message="line 2 still raises NotImplementedError (in part)")


def test_what_is_right_so_far_is_said_where_a_part_is_to_be_written_alone(tmp_path):
    def check(answer):
        with require.after("the first part"):
            try:
                answer.run()
            except Exception as error:  # as the interpreter does
                raise RuntimeError("in a kernel") from error

    verdict = ran("def run():\n    raise NotImplementedError\n", tmp_path, check)
    assert verdict["message"].startswith("right so far: the first part. Next: line 2 still raises")
    verdict = ran("def run():\n    raise ValueError('else')\n", tmp_path, check)
    assert verdict["message"].endswith("ValueError: else")


def test_the_root_of_an_error_is_its_cause_before_what_was_handled_meanwhile():
    handled, cause, outer = KeyError("handled"), TypeError("cause"), ValueError("outer")
    outer.__context__ = handled
    assert errors.root_of(outer) is handled
    outer.__cause__ = cause
    assert errors.root_of(outer) is cause


IN_EXCEPT = """
def run():
    try:
        {}["missing"]
    except ValueError.of_mine:
        pass
"""


def test_a_mistake_in_an_except_is_named_before_what_was_handled_there(tmp_path):
    message = ran(IN_EXCEPT, tmp_path)["message"]
    assert "line 5, in run: except ValueError.of_mine:" in message
    assert "AttributeError" in message
    assert "KeyError" not in message


BRANCH = """
import torch, triton
import triton.language as tl

@triton.jit
def _kernel(x_ptr):
    if tl.program_id(0) == 0:
        if tl.arange(0, {}) < {}:
            tl.store(x_ptr, 1.0)

def run():
    _kernel[(2,)](torch.zeros(2))
"""


@interpreted_only
def test_a_block_of_an_answers_kernel_is_no_yes_or_no(tmp_path):
    verdict = ran(BRANCH.format(2, 1), tmp_path)
    assert verdict["kind"] == "error"
    assert "line 8, in _kernel: if tl.arange(0, 2) < 1:" in verdict["message"]
    assert "a block has no single truth value" in verdict["message"]
    beside = tmp_path / "beside.py"  # a kernel of the course
    beside.write_text(BRANCH.format(2, 3))
    verdict = ran("", tmp_path, lambda answer: load(beside, "beside").run())
    assert verdict["kind"] == "passed", verdict


def test_a_misspelled_name_is_recognized():
    assert exercises.find("masked_ad") is None
    assert exercises.similar("maskd_ad") == ["masked_add"]
    assert exercises.similar("zzzzzz") == exercises.similar(".") == []


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """An exercise whose file and progress lie in a scratch folder; a function that writes an answer and checks it."""

    class Scratch(exercises.Exercise):
        path = tmp_path / "Käse 1.0 (neu)" / "answer.py"  # as a learner may call a folder

    Scratch.path.parent.mkdir()

    monkeypatch.setattr(Progress, "path", staticmethod(lambda: tmp_path / ".course" / "progress.json"))

    def prepare(name):
        made = Scratch(**{field: getattr(exercises.find(name), field) for field in exercises.Exercise.__annotations__})

        def answer(text, **options):
            made.path.write_text(text)
            return check(made, **options)

        answer.exercise = made
        return answer

    return prepare


@pytest.mark.slow
@needs_interpreter
@one_a_phase
def test_a_check_through_the_child_process(exercise, learner):
    answer, wrong = learner(exercise.name), WRONG[exercise.name][0]
    verdict = answer(wrong.applied_to(exercise.solution.read_text()))
    assert verdict.kind == "wrong"
    assert wrong.says in verdict.message
    assert exercise.name not in Progress.load().passed
    verdict = answer(exercise.solution.read_text())
    assert verdict.passed
    assert Progress.load().solved(answer.exercise)
    verdict = answer(exercise.stub)
    assert verdict.kind == "unfinished"


def stack_in(path):
    """What faulthandler writes of a function in the second line of a file."""
    escaped = str(path).encode("ascii", "backslashreplace").decode()
    return f'File "{escaped}", line 2 in f\n'


ADD = exercises.find("masked_add").solution.read_text()


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (
            "import os; os.kill(os.getpid(), 11)",
            "crashed",
            "SIGSEGV in the middle of the check, at line 25, in _masked",
        ),
        ("tl.store(out_ptr + 2**44, 0.0)", "crashed", "is it masked, and is its offset that of this tensor?"),
        ("breakpoint()", "error", "line 25: no debugger under check"),
        pytest.param("import pdb; pdb.set_trace()", "error", "no debugger under check", marks=pytest.mark.slow),
        ("import os; os.abort()", "crashed", "is it masked, and is its offset that of this tensor?"),
        ("import os; os._exit(3)", "crashed", "code 3"),
        ("import builtins; builtins.isinstance = 3", "crashed", "does the answer replace something of Python's"),
        ("raise NotImplementedError", "unfinished", "line 25 still raises"),
    ],
)
def test_whatever_an_answer_does_ends_in_a_verdict(line, kind, words, learner):
    verdict = learner("masked_add")(ADD.replace("    offsets =", f"    {line}\n    offsets =", 1))
    assert verdict.kind == kind, verdict
    assert words in verdict.message
    assert not Progress.load().passed


@interpreted_only
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import sys; sys.exit(0)", "SystemExit"),
        ("undefined_name", "undefined_name"),
        ("1 +", "SyntaxError"),
        ("raise KeyboardInterrupt", "line 25, in _masked_add_kernel"),
        ("e = ValueError('of itself'); raise e from e", "ValueError: of itself"),
        ("import torch; b = torch.ones(1, 2, 2) > 0; b @ b", "not implemented for 'Bool'"),
    ],
)
def test_whatever_an_answer_raises_is_an_error(line, words, tmp_path):
    text = ADD.replace("    offsets =", f"    {line}\n    offsets =", 1)
    verdict = judged(exercises.find("masked_add"), text, tmp_path)
    assert verdict["kind"] == "error", verdict
    assert words in verdict["message"]


CRASHED = "Python was ended by SIGSEGV in the middle of the check{on}, at line 4, in attention: "


@pytest.mark.parametrize(
    ("end", "case", "said"),
    [
        ("os.kill(os.getpid(), 11)", "q (2, 3), float16", CRASHED.format(on=", on q (2, 3), float16")),
        ("os.kill(os.getpid(), 11)", "", CRASHED.format(on="")),
        ("pass", "q (2, 3), float16", "no result after 1 s, on q (2, 3), float16: is there a loop that never ends?"),
    ],
    ids=["dies", "dies elsewhere", "never ends"],
)
def test_the_inputs_of_an_answer_that_does_not_return_are_said(end, case, said, tmp_path, monkeypatch):
    """A check may note what it gives to the answer, and that the answer has returned."""
    checks = tmp_path / "judging" / "checks"
    checks.mkdir(parents=True)
    (checks / "noting.py").write_text(
        "from common.verify.isolated import note\n"
        "def check(answer):\n"
        "    for case in ('q (1, 3), float16', 'q (2, 3), float16', ''):\n"
        "        note(case)\n"
        "        answer.attention(case)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "answer.py"
    path.write_text(f"import os\ndef attention(case):\n    while case == {case!r}:\n        {end}\n")
    exercise = SimpleNamespace(phase=SimpleNamespace(folder="judging"), name="noting", path=path)
    limit = 1 if end == "pass" else 60
    assert runner._in_child(exercise, limit, interpret=True)["message"].startswith(said)


@pytest.mark.parametrize(
    ("before", "line", "function"),
    [
        pytest.param("    offsets =", 25, "_masked_add_kernel", id="in a kernel"),
        pytest.param("def masked_add(", 33, "<module>", id="at the top", marks=pytest.mark.slow),
    ],
)
def test_where_an_answer_never_ends_is_said(before, line, function, learner):
    indent = before[: -len(before.lstrip())]
    verdict = learner("masked_add")(ADD.replace(before, f"{indent}while True: pass\n{before}", 1), limit=10)
    assert verdict.kind == "timeout", verdict
    where = f"line {line}, in {function}: while True: pass"
    assert verdict.message == f"no result after 10 s: is there a loop that never ends? It was at {where}"
    assert not Progress.load().passed


def test_a_process_that_does_not_come_to_its_answer_is_ended(learner, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 5\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(runner, "STARTING", 0)
    verdict = learner("masked_add")(ADD, limit=0.1)
    assert (verdict.kind, verdict.message) == ("timeout", "no result after 0 s: is there a loop that never ends?")


def test_what_an_answer_prints_before_it_crashes_is_seen(learner, monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert learner("masked_add")(ADD + "\nprint('so far')\nimport os; os._exit(3)\n").kind == "crashed"
    assert capfd.readouterr().out == "so far\n"


without_gpu = pytest.mark.skipif(runtime.SUPPORTED, reason="an answer is compiled for the GPU that is here")
LOOP = "    for i in range(2):\n        if i == 1:\n            {}\n"


@needs_interpreter
@without_gpu
@pytest.mark.parametrize(
    ("name", "before", "line", "kernel"),
    [
        pytest.param("masked_add", "    tl.store(", "break", "_masked_add_kernel", marks=pytest.mark.slow),
        ("online_step", "    m_new = tl.maximum(", "continue", "_row_state_kernel"),  # which calls this function
    ],
)
def test_what_compiles_for_no_gpu_passes_with_a_warning(name, before, line, kernel, learner):
    answer = learner(name)
    text = answer.exercise.solution.read_text().replace(before, LOOP.format(line) + before, 1)
    number = text.splitlines().index(f"            {line}") + 1
    verdict = answer(text)
    assert verdict.passed
    (objection,) = runner.objections(answer.exercise, verdict, limit=300)
    assert objection.startswith(f"no GPU can run {kernel}: line {number}, `{line}`: unsupported")


@interpreted_only
@pytest.mark.parametrize("line", ["default_dtype(torch.float64)", "default_device('meta')", "grad_enabled(False)"])
def test_pytorchs_defaults_in_an_answer_change_no_verdict(line, tmp_path):
    for name in ("masked_add", "capped"):
        exercise = exercises.find(name)
        verdict = judged(exercise, f"{exercise.solution.read_text()}\ntorch.set_{line}\n", tmp_path)
        assert verdict["kind"] == "passed", verdict


@needs_interpreter
@without_gpu
def test_what_is_said_of_an_answer_in_latin_1_names_its_line(learner, tmp_path):
    answer = learner("online_step")
    text = answer.exercise.solution.read_text().replace(
        "    m_new = tl.maximum(", LOOP.format("break") + "    m_new = tl.maximum(", 1
    )
    answer.exercise.path.write_bytes(f"# coding: latin-1\n# é\n{text}".encode("latin-1"))
    verdict = check(answer.exercise)
    assert verdict.passed, verdict
    (objection,) = runner.objections(answer.exercise, verdict, limit=300)
    assert "`break`: unsupported" in objection
    assert runner._innermost_line(answer.exercise.path, stack_in(answer.exercise.path)) == "line 2, in f: # é"


@interpreted_only
def test_a_kernel_of_a_check_is_compiled_with_the_answers_function(learner):
    answer = learner("varlen")
    solution = answer.exercise.solution.read_text()
    body = "    first = tl.load(cu_seqlens_ptr + b)"
    text = solution.replace(body, LOOP.format("break") + body)
    answer.exercise.path.write_text(text)
    with launches_of(answer.exercise.path) as launches:
        varlen._check_first_in_64_bits(load(answer.exercise.path).sequence)
    (launch,) = launches.values()
    verdict = runner.Verdict("passed", "", launches=(launch,))
    (objection,) = runner.objections(answer.exercise, verdict, limit=300)
    line = 1 + next(n for n, written in enumerate(text.splitlines()) if written.strip() == "break")
    assert objection.startswith(f"no GPU can run _first_kernel: line {line}, `break`")


@pytest.mark.slow
def test_an_answer_may_say_what_the_terminal_cannot_show(learner, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    verdict = learner("masked_add")(
        ADD + "print('\N{GREEK SMALL LETTER ALPHA} \\udcff')\nraise ValueError('β \\udcff')\n"
    )
    assert capfd.readouterr().out == "? ?\n"
    assert verdict.kind == "error"
    assert "ValueError: β \udcff" in verdict.message


def test_an_answer_that_is_no_utf_8_is_an_answer(learner, tmp_path):
    answer = learner("masked_add")
    answer.exercise.path.write_bytes(ADD.encode() + b"# \xe9\n")
    assert runner._innermost_line(answer.exercise.path, stack_in(answer.exercise.path)) == ""
    assert progress.edited(answer.exercise)


@pytest.mark.slow
@without_gpu
@each
def test_a_solution_compiles(exercise, learner):
    answer = learner(exercise.name)
    verdict = answer(exercise.solution.read_text())
    assert verdict.passed, verdict
    assert bool(verdict.launches) == ("@triton.jit" in exercise.solution.read_text())
    assert runner.objections(answer.exercise, verdict, limit=300) == []


def test_what_an_answer_prints_is_capped(learner, capfd):
    assert learner("masked_add")(ADD + "\nfor _ in range(1000):\n    print('x' * 1000)\n").passed
    printed = capfd.readouterr().out
    assert printed.count("x") == 20_000 - 20_000 // 1001
    assert "the rest of what the answer prints is not shown" in printed


def test_what_is_right_interpreted_and_wrong_on_the_gpu_is_wrong(learner):
    answer, outcomes = learner("masked_add"), [dict(kind="passed", message="2 sizes", gpu=True)]
    outcomes += [dict(kind="wrong", message="x is 0", gpu=True), outcomes[0], dict(kind="passed", message="", gpu=True)]
    with mock.patch.object(runner, "_in_child", side_effect=outcomes):
        verdict = answer(ADD)
        assert (verdict.kind, verdict.message) == ("wrong", "right when interpreted, but compiled for the GPU: x is 0")
        assert not Progress.load().passed
        assert answer(ADD).message == "2 sizes; compiled too"
    outcome = dict(kind="wrong", message="x is 0", gpu=True, launches=[{}])
    with mock.patch.object(runner, "_in_child", return_value=outcome) as judged_once:
        assert answer(ADD).message == "x is 0"
        judged_once.assert_called_once()
    outcome = dict(kind="passed", message="", gpu=True, launches=[{}])
    with mock.patch.object(runner, "_in_child", return_value=outcome):
        assert answer(ADD).launches == ()  # it has been compiled here


def test_a_compiler_that_takes_too_long_has_no_objections(learner):
    answer, passed = learner("masked_add"), runner.Verdict("passed", "", launches=({},))
    assert runner.objections(answer.exercise, passed, limit=0.01) == []


def test_a_solved_exercise_that_is_broken_later_is_no_longer_solved(learner):
    answer = learner("masked_add")
    assert answer(ADD).passed
    assert not answer(ADD.replace("2 * x", "x")).passed
    assert not Progress.load().passed


def test_what_is_edited_during_a_check_is_not_what_was_checked(learner):
    answer = learner("masked_add")
    verdict = answer(ADD + "\nwith open(__file__, 'a') as file:\n    file.write('#')\n")
    assert verdict.passed
    assert not Progress.load().solved(answer.exercise)


def test_a_reset_overwrites_no_answer_that_was_kept(learner):
    answer = learner("masked_add")
    kept = []
    for n in range(4):
        answer.exercise.path.write_text(f"# attempt {n}")
        kept.append(progress.reset(answer.exercise))
        if n == 1:
            kept[0].unlink()
    assert [path.read_text() for path in (kept[1], kept[2], kept[3])] == ["# attempt 1", "# attempt 2", "# attempt 3"]


def test_progress_survives_a_damaged_file(learner, tmp_path):
    learner("masked_add")
    stored = Progress({"masked_add": "0"}, {"masked_add": 2}, {"masked_add": "1"})
    stored.save()
    assert Progress.load() == stored
    Progress.path().write_text('{"passed": {}, "hints": {"masked_add": 1}}')  # of an older copy
    assert Progress.load() == Progress(hints={"masked_add": 1})
    Progress.path().write_text("{")
    assert Progress.load() == Progress()


def test_progress_that_cannot_be_read_is_not_written_over(learner, monkeypatch):
    exercise = learner("masked_add").exercise
    Progress(passed={"online_step": "a"}, hints={"online_step": 2}).save()
    before, read = Progress.path().read_bytes(), exercises.read

    def forbidden(path):
        if path == Progress.path():
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(exercises, "read", forbidden)
    monkeypatch.setattr(runner, "_in_child", lambda *_, **__: dict(kind="passed", message="right"))
    exercise.path.write_text(ADD)
    verdict = check(exercise)
    assert verdict.passed
    assert "not noted, so check again later: [Errno 13] Permission denied" in verdict.not_noted
    with pytest.raises(PermissionError):
        progress.reset(exercise)
    assert Progress.path().read_bytes() == before
    assert exercise.path.read_text() == ADD
    assert Progress.load() == Progress()  # what course shows


def test_a_verdict_is_said_although_it_cannot_be_noted(learner, tmp_path, monkeypatch, capsys):
    answer = learner("masked_add")
    (tmp_path / ".course").write_text("a file")
    monkeypatch.setattr(runner, "_in_child", lambda *_, **__: dict(kind="passed", message="all right"))
    answer.exercise.path.write_text(ADD)
    monkeypatch.setattr(exercises, "find", lambda name: answer.exercise)
    monkeypatch.setattr(progress, "notices", list)
    exercises_notebook.check("masked_add")
    verdict, note = capsys.readouterr().out.splitlines()
    assert verdict == "1.1 masked_add: PASS. all right"
    assert note.startswith("    This verdict is not noted, so check again later: ")
    done = CliRunner().invoke(cli.app, ["check", "1.1"])
    assert done.output.index("all right") < done.output.index("This verdict is not noted")
    assert (tmp_path / ".course").read_text() == "a file"


def test_a_chapter_uses_the_learners_answer_once_it_has_passed(learner, monkeypatch, capsys):
    answer = learner("masked_add")
    monkeypatch.setattr(exercises, "find", lambda name: answer.exercise)
    monkeypatch.setattr(runner, "_in_child", lambda *_, **__: dict(kind="passed", message="all right"))
    answer.exercise.path.write_text(ADD)
    course = importlib.import_module("phase1_softmax.solutions.masked_add")
    assert exercises_notebook.solved("masked_add") is course
    answer(ADD)
    assert exercises_notebook.solved("masked_add").__file__ == str(answer.exercise.path)
    answer.exercise.path.write_text(f"{ADD}\n# edited since\n")
    assert exercises_notebook.solved("masked_add") is course
    course, own = "1.1 masked_add: the course's, until yours passes", "1.1 masked_add: yours"
    assert capsys.readouterr().out.splitlines() == [course, own, course]


def test_two_checks_at_once_forget_no_verdict(tmp_path):
    """Each process notes names of its own, one after the other."""
    code = (
        "import sys; from pathlib import Path\n"
        "from common.learn.progress import Progress\n"
        f"Progress.path = staticmethod(lambda: Path({str(tmp_path)!r}, '.course', 'progress.json'))\n"
        "for n in range(40):\n"
        "    with Progress.changed() as progress:\n"
        "        progress.hints[f'{sys.argv[1]} {n}'] = n\n"
    )
    at_once = [subprocess.Popen([sys.executable, "-c", code, str(i)], cwd=phases.ROOT) for i in range(4)]
    assert [process.wait() for process in at_once] == [0] * 4
    stored = json.loads((tmp_path / ".course" / "progress.json").read_text())
    assert len(stored["hints"]) == 160
    assert sorted(p.name for p in (tmp_path / ".course").iterdir()) == ["progress.json", "progress.lock"]


def test_reset_keeps_what_was_there(learner):
    answer = learner("masked_add")
    answer(ADD)
    kept = progress.reset(answer.exercise)
    assert answer.exercise.path.read_text() == answer.exercise.stub
    assert not Progress.load().passed
    assert progress.reset(answer.exercise) is None
    answer("# again")
    assert progress.reset(answer.exercise) != kept
    assert kept.read_text() == ADD


def test_the_next_exercise_is_the_last_one_that_is_not_solved(learner):
    learner("masked_add")
    assert Progress().next() is EXERCISES[0]
    assert Progress(last=EXERCISES[3].name).next() is EXERCISES[3]


def test_an_answer_that_is_gone_is_not_solved(learner):
    exercise = learner("masked_add").exercise
    assert not Progress({exercise.name: "0"}).solved(exercise)


def test_a_link_to_an_answer_stays_one(learner, tmp_path):
    exercise, elsewhere = learner("masked_add").exercise, tmp_path / "elsewhere.py"
    elsewhere.write_text(exercise.stub + "# older\n")
    exercise.path.symlink_to(elsewhere)
    progress.reset(exercise)
    assert exercise.path.is_symlink()
    assert elsewhere.read_text() == exercise.stub


def test_a_file_as_shipped_is_not_written_anew(learner):
    """Its time would change, and who watches it would check for ever."""
    exercise = learner("masked_add").exercise
    progress.begin(exercise)
    os.utime(exercise.path, (1, 1))
    progress.begin(exercise)
    assert exercise.path.stat().st_mtime == 1


def test_a_missing_file_is_created(learner):
    exercise = learner("masked_add").exercise
    assert check(exercise).kind == "unfinished"
    assert exercise.path.read_text() == exercise.stub


def test_an_update_of_the_course_reaches_a_file_that_nobody_has_edited(learner, monkeypatch):
    answer = learner("masked_add")
    exercise, stub = answer.exercise, answer.exercise.stub
    progress.begin(exercise)
    monkeypatch.setattr(type(exercise), "stub", stub + "# new\n")
    progress.begin(exercise)
    assert exercise.path.read_text() == stub + "# new\n"
    exercise.path.write_text("# mine\n")
    progress.begin(exercise)
    assert exercise.path.read_text() == "# mine\n"


@pytest.mark.parametrize("module", ["common.learn.check.runner", "common.learn.cli"])
def test_the_runner_does_not_load_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=phases.ROOT)
    assert done.stdout.strip() == "False False", done.stderr


def test_require_names_the_first_wrong_element():
    with pytest.raises(require.Rejected, match=r"x: 1 of 2 elements are wrong; the first: element \[1\] is nan"):
        require.require("x", torch.tensor([1, float("nan")]), torch.tensor([1.0, 2.0]))
    with pytest.raises(require.Rejected, match=r"is 1\.00000012 where 1 is right \(computed in torch.float32"):
        require.require("x", torch.tensor([1 + 2**-23]), torch.ones(1, dtype=torch.float64), rtol=0, atol=1e-9)
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(require.Rejected, match=r"is 1\.00000001 where 1 is right$"):  # in the same dtype
        require.require("x", one + 1e-8, one, rtol=0, atol=1e-9)
    with pytest.raises(require.Rejected, match="doubled"):
        require.require("x", torch.tensor([2.0]), torch.tensor([1.0]), mistakes={"doubled": torch.tensor([2.0])})
    with pytest.raises(require.Rejected, match=r"expected shape \(1,\), got \(2,\)"):
        require.require("x", torch.zeros(2), torch.zeros(1))
    with pytest.raises(require.Rejected, match=r"expected shape \(1, 2\), got \(2, 1\)"):
        require.require("x", torch.zeros(2, 1), torch.zeros(1, 2))
    with pytest.raises(require.Rejected, match="expected a tensor, got float"):
        require.require("x", 1.0, torch.zeros(1))


PRODUCT = """
import torch, triton
import triton.language as tl

IEEE = tl.constexpr("ieee")

@triton.jit
def kernel(x_ptr):
    offs = tl.arange(0, 16)
    x = tl.load(x_ptr + 16 * offs[:, None] + offs[None, :])
    acc = tl.zeros((16, 16), tl.float32)
    {product}
    tl.store(x_ptr + 16 * offs[:, None] + offs[None, :], acc)

def run():
    kernel[(1,)](torch.zeros(16, 16, dtype=torch.float16))
"""


@interpreted_only
@pytest.mark.parametrize(
    ("product", "full"),
    {
        "tl.dot(x, x, acc, 'ieee')": True,
        "tl.dot(x, x, input_precision='ieee')": True,
        "tl.dot(x, x, acc, 'tf32x3')": True,
        "tl.dot(x, x, allow_tf32=False)": True,
        "tl.dot(x, x, input_precision=IEEE)": True,
        "tl.dot(x, x, acc)": False,
        "tl.dot(x, x, acc, 'tf32')": False,
        "triton.language.dot(x, x)": False,
    }.items(),
)
def test_a_product_in_tf32_is_rejected_and_one_of_full_precision_is_not(product, full, tmp_path):
    (tmp_path / "answer.py").write_text(PRODUCT.format(product=f"acc = {product}"))
    answer = load(tmp_path / "answer.py")
    with nullcontext() if full else pytest.raises(require.Rejected, match=r"line 12: tl\.dot without"):
        require.require_tensor_cores(answer, answer.run)


def test_require_takes_what_fp32_makes_and_no_more():
    require.require("x", torch.tensor([100.005, 1e-5]), torch.tensor([100.0, 0.0]))
    for wrong in ([100.1, 0.0], [100.0, 2e-3]):
        with pytest.raises(require.Rejected, match="1 of 2 elements are wrong"):
            require.require("x", torch.tensor(wrong), torch.tensor([100.0, 0.0]))


@pytest.mark.parametrize(
    ("last", "beside", "said"),
    [
        (slice(0, 0), None, "lse: 1 of 3 elements were never stored, lse[2] first"),
        (slice(2, 3), 6, "something was stored outside of o: "),
        (slice(2, 3), -1, "something was stored outside of o: "),
    ],
    ids=["a hole", "a store after", "a store before"],
)
def test_guarded_rejects_what_is_stored_beside_a_result_and_what_never_is(last, beside, said):
    def attention(q):
        o, lse = torch.empty(3, 2), torch.empty(3)
        o[:], lse[:2], lse[last] = 1, 2, 3
        if beside is not None:
            o.as_strided((1,), (1,), o.storage_offset() + beside).zero_()
        return o, lse

    with pytest.raises(require.Rejected, match=re.escape(said)):
        require.guarded(attention)(None)
