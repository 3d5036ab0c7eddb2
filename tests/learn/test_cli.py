"""The commands, typed as the README says."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

from common import phases, runtime
from common.learn import cli, doctor, exercises, notebooks
from common.phases import PHASES, ROOT, find

import nbformat
import pytest
from typer.testing import CliRunner


def course(*arguments, **kwargs):
    command = [sys.executable, "-m", "common.learn.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **kwargs)


def test_help_names_every_command():
    done = course("--help")
    assert done.returncode == 0
    for name in ("doctor", "verify", "run", "next", "check", "hint", "solution", "diff", "reset", "watch"):
        assert f" {name} " in done.stdout


def test_without_a_command_it_shows_the_phases():
    done = course()
    assert done.returncode == 0
    assert all(phase.title in done.stdout for phase in PHASES)
    assert all(f"{phase.folder}/{chapter}" in done.stdout for phase in PHASES for chapter in phase.chapters)


def test_verify_one_phase_prints_its_table():
    done = course("verify", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Phase 1" in done.stdout
    assert "FAIL" not in done.stdout
    passed, total = re.search(r"^(\d+) of (\d+) cases passed", done.stdout, re.MULTILINE).groups()
    assert passed == total
    assert int(total) >= 10


def test_verify_fails_if_any_phase_does(monkeypatch):
    monkeypatch.setattr(cli, "_module", lambda folder: int(folder == PHASES[1].folder))
    assert CliRunner().invoke(cli.app, ["verify"]).exit_code == 1
    assert CliRunner().invoke(cli.app, ["verify", "1"]).exit_code == 0


def test_what_runs_a_module_on_this_terminal_can_be_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess.Popen, "wait", mock.Mock(side_effect=[KeyboardInterrupt, 0, 0]))
    monkeypatch.setattr(subprocess, "run", None)  # which would print where the module was
    done = CliRunner().invoke(cli.app, ["export", str(tmp_path / "x.py")])
    assert (done.exit_code, done.output) == (130, "\nStopped.\n")


def test_an_unknown_phase_is_named_with_those_that_exist():
    done = course("verify", "9")
    assert done.returncode == 2
    assert "'9'" in done.stdout
    assert all(phase.folder in done.stdout for phase in PHASES)


def test_doctor_finds_this_machine_in_order():
    done = course("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("system", "versions", "device", "canary kernel", "bf16 trap", "compiler", "notebooks"):
        assert what in done.stdout


def test_doctor_reports_a_gpu_that_is_asked_for_but_missing():
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "common.learn.doctor"],
        capture_output=True, text=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    findings = {f["what"]: f for f in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1
    assert findings["device"]["level"] == "problem"
    assert "unset TRITON_INTERPRET" in findings["device"]["todo"]
    problems = [what for what, finding in findings.items() if finding["level"] == "problem"]
    assert problems == ["device"]  # nothing that only follows from it


@pytest.mark.parametrize(
    ("capability", "interpreted", "level"),
    [((7, 5), True, "note"), ((7, 5), False, "note"), ((8, 0), False, "ok"), ((12, 0), False, "ok")],
)
def test_doctor_knows_which_gpus_triton_supports(monkeypatch, capability, interpreted, level):
    import torch

    monkeypatch.setattr(runtime, "INTERPRETED", interpreted)
    for name, value in dict(device_count=1, get_device_name="a GPU", get_device_capability=capability).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    finding = doctor.check_device()
    assert finding.level == level
    assert ("8.0" in finding.todo) == (level == "note")
    assert ("interpreted" in finding.found) == interpreted


SMI = "#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 470.82.01'\n"


@pytest.mark.parametrize(
    ("smi", "cuda", "available", "hidden", "level", "words"),
    [
        (SMI, "13.0", False, False, "problem", ("A100-SXM4-40GB with driver 470.82.01", "update the NVIDIA driver")),
        (SMI, None, False, False, "note", ("built without CUDA", "build with CUDA")),
        (SMI, "13.0", True, False, "ok", ("470.82.01", "")),
        (SMI, "13.0", False, True, "ok", ("470.82.01", "")),
        ("#!/bin/sh\necho 'has failed to communicate'\nexit 9\n", "13.0", False, False, "ok", ("no GPU", "")),
        (None, "13.0", False, False, "ok", ("no GPU", "")),
    ],
    ids=["old driver", "no CUDA", "in order", "hidden by the user", "no driver", "no nvidia-smi"],
)
def test_doctor_sees_a_gpu_that_pytorch_cannot_use(monkeypatch, tmp_path, smi, cuda, available, hidden, level, words):
    import torch

    if smi:
        (tmp_path / "nvidia-smi").write_text(smi)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    finding = doctor.check_driver()
    assert finding.level == level
    assert words[0] in finding.found
    assert words[1] in finding.todo


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        (dict(torch="2.13.0+cpu", triton="3.7.1", numpy="2.4.6"), "ok", ""),
        (dict(torch="2.11.0", triton="3.6.0", numpy="2.3.1"), "ok", ""),
        (dict(torch="2.11.0", triton="3.6.0", numpy="2.4.0"), "note", "numpy"),
        (dict(torch="2.11.0", triton="3.6.0", numpy="2.5.2"), "note", "numpy"),
        (dict(torch="2.13.0", triton="3.6.0", numpy="2.3.1"), "note", "torch/triton"),
    ],
)
def test_doctor_knows_the_version_pairs(monkeypatch, versions, level, words):
    monkeypatch.setattr(doctor, "version", versions.__getitem__)
    finding = doctor.check_versions()
    assert finding.level == level
    assert words in finding.todo


def test_a_check_that_crashes_is_a_finding(monkeypatch, capsys):
    def check_broken():
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", (check_broken,))
    assert doctor.main() == 1
    assert "no such thing" in json.loads(capsys.readouterr().out)["found"]


def test_phases_are_found_by_number_and_folder():
    assert find("2").folder == "phase2_tiling"
    assert find("phase3").number == 3
    assert find("phase3_forward").number == 3
    assert find("4x") is None
    assert find("phase") is find("") is None


def test_a_module_reports_a_failure_with_its_exit_code(tmp_path):
    code = (
        "from common import make_qkv, verify_results\nfrom common.verify import suite\n"
        "import sys\nimport torch.nn.functional as F\n"
        "q, k, v = make_qkv()\n"
        "wrong = lambda q, k, v, **_: 2 * q\n"
        "case = suite.Case('wrong on purpose', lambda: verify_results(wrong, q, k, v))\n"
        "right = suite.Case('right', lambda: verify_results(F.scaled_dot_product_attention, q, k, v))\n"
        "nan = suite.Case('no number', lambda: verify_results(lambda q, k, v, **_: q * float('nan'), q, k, v))\n"
        "sys.exit(suite.main('t', [case, nan, right], sys.argv[1:]))\n"
    )
    table = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert table.returncode == 1
    assert "FAIL" in table.stdout
    assert "1 of 3 cases passed" in table.stdout
    lines = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert lines.returncode == 1
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines.stdout.splitlines()]
    assert [row["passed"] for row in rows] == [False, False, True]  # the last one's is not the exit code
    assert rows[1]["z"] is None


def entry_points():
    """The modules that `python -m` runs, as it names them; an answer is no module of the course."""
    found = []
    for path in sorted(path for top in ("common", "phase*", "tests") for path in ROOT.glob(f"{top}/**/*.py")):
        *folders, name = path.relative_to(ROOT).with_suffix("").parts
        if name == "__main__":
            found.append(".".join(folders))
        elif folders[-1] not in ("exercises", "solutions") and "\nif __name__ == " in path.read_text():
            found.append(".".join([*folders, name]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("module", entry_points())
def test_a_module_explains_itself_and_refuses_nonsense(module):
    def run(*typed):
        command = [sys.executable, "-m", module, *typed]
        return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    explained, refused = run("--help"), run("nonsense", "--nonsense", *["more", "and", "more", "and", "more"])
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.lower().lstrip().startswith("usage:")
    assert refused.returncode == 2
    assert "nonsense" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_module_hands_its_exit_code_to_the_shell():
    """Where `main` returns a number, the process ends with it."""
    for module in entry_points():
        path = ROOT.joinpath(*module.split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(path.read_text())
        returns = {f.name: ast.unparse(f.returns) for f in tree.body if isinstance(f, ast.FunctionDef) and f.returns}
        calls = [node for node in ast.walk(tree.body[-1]) if isinstance(node, ast.Call)]
        ends = [node for node in calls if ast.unparse(node.func) in ("SystemExit", "sys.exit")]
        ending = {ast.unparse(node.func) for end in ends for node in ast.walk(end) if isinstance(node, ast.Call)}
        called = {name for node in calls if returns.get(name := ast.unparse(node.func)) == "int"}
        assert called <= ending, f"{module} ends with 0 whatever {called - ending} returns"


PAGES = [ROOT / "README.md", ROOT / "common/verify/README.md", *(ROOT / phase.folder / "README.md" for phase in PHASES)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_a_readme_names_only_what_exists(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), f"make {target}"
    for command in re.findall(r"^course ([a-z]+)|`course ([a-z]+)", text, re.MULTILINE):
        assert CliRunner().invoke(cli.app, ["".join(command), "--help"]).exit_code == 0, f"course {command}"
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / link).is_file(), link  # JupyterLab opens no folder


def test_the_readmes_list_chapters_hours_and_exercises():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 800
    for phase in PHASES:
        minutes = sum(e.minutes for e in exercises.load() if e.phase == phase)
        assert f"| {round(2 * sum(phase.hours)) / 2:g}, exercises {round(minutes / 30) / 2:g} |" in text
        page = (ROOT / phase.folder / "README.md").read_text()
        assert exercises.listed(page, phase) == page, "python -m common.learn.exercises lists them anew"
        for path in phase.notebook_paths:
            assert f"]({path.relative_to(ROOT)})" in text
            assert f"| [{path.stem}]({path.name}) |" in page


@pytest.fixture
def broken_course(tmp_path, monkeypatch):
    """A function that runs `course run` on a course whose only module is the given text."""
    monkeypatch.setattr(phases, "ROOT", tmp_path)
    chapters = "empty.ipynb", "second.ipynb"
    monkeypatch.setattr(phases, "PHASES", (phases.Phase("phase1_x", "t", ("__main__",), "kernel", chapters),))
    monkeypatch.setattr(phases, "APART", ("apart.ipynb",))
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "apart.ipynb")

    def run(text, spoil=lambda folder: None):
        folder = tmp_path / "phase1_x"
        folder.mkdir()
        (folder / "__main__.py").write_text(text)
        for chapter in chapters:
            nbformat.write(nbformat.v4.new_notebook(), folder / chapter)
        spoil(folder)
        return CliRunner().invoke(cli.app, ["run"])

    return run


ROW = json.dumps(dict(what="c", passed=True, z=1.0, seconds=0.1, done=1, of=1, text=None))


def test_a_module_may_print_what_it_likes(broken_course):
    """More to stderr than a pipe holds, and lines that are no JSON or not text."""
    done = broken_course(
        "import sys\n"
        "sys.stderr.write(300_000 * 'x')\n"
        "print({'a': 1}, 3, flush=True)\n"
        "sys.stdout.buffer.write(b'\\xff{\\n3\\n')\n"
        f"print({ROW!r})\n"
    )
    assert done.exit_code == 0, done.output
    assert "1/1" in done.output
    steps, summary = done.output.split("Summary")
    names = "phase 1: kernels", "phase 1: empty.ipynb", "phase 1: second.ipynb", "apart.ipynb"
    for number, name in enumerate(names, start=1):
        assert re.search(rf"^{number}/4  {name}.*  PASS ", steps, re.MULTILINE), steps
    assert summary.index("empty.ipynb") < summary.index("second.ipynb") < summary.index("apart.ipynb")


def test_of_all_cases_the_worst_z_is_shown(broken_course):
    rows = [json.loads(ROW) | dict(z=z, done=n, of=3) for n, z in enumerate((1.25, 3.5, 2.75), start=1)]
    done = broken_course("".join(f"print({json.dumps(row)!r})\n" for row in rows))
    assert re.search(r"kernels +│ +3/3 │ 3\.50 ", done.output), done.output


@pytest.mark.parametrize(("interpreted", "at_once"), [(True, 2), (False, 1)])
def test_two_steps_run_at_once_where_nothing_is_timed(interpreted, at_once, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", interpreted)
    with cli._at_once() as pool:
        assert pool._max_workers == at_once


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("NameError", 1)])
def test_running_notebooks_fails_where_one_does_and_stores_what_is_interpreted(error, code, monkeypatch):
    asked = []

    def execute(path, store):
        asked.append((store, os.environ.get("TRITON_INTERPRET")))
        return error if len(asked) == 1 else None

    monkeypatch.setattr(notebooks, "execute", execute)
    monkeypatch.setattr(notebooks.exercises, "load", list)  # there may be answers here
    monkeypatch.setattr(sys, "argv", ["notebooks", "--store", "softmax", "tiling"])
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.delenv("TRITON_INTERPRET")
    ending = signal.getsignal(signal.SIGTERM)
    assert notebooks.main() == code
    signal.signal(signal.SIGTERM, ending)
    assert asked == [(True, "1")] * 2


def test_a_module_that_ends_before_its_last_case_has_failed(broken_course):
    done = broken_course(f"print({json.dumps(json.loads(ROW) | dict(of=2))!r})")
    assert done.exit_code == 1
    assert "1/2" in done.output


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "empty.ipynb").unlink(), "No such file or directory"),
        (lambda folder: (folder / "empty.ipynb").write_text("{"), "does not appear to be JSON"),
        (lambda folder: (folder / "empty.ipynb").write_bytes(b"\xff\xfe\xff"), "Error: "),
        (lambda folder: (folder / "empty.ipynb").write_text("[]"), "Error: "),
        (lambda folder: (folder / "empty.ipynb").write_text("{}"), "Error: "),
    ],
    ids=["missing", "cut off", "not text", "a list", "an empty object"],
)
def test_a_notebook_that_cannot_be_read_is_a_failed_step(spoil, words, broken_course):
    done = broken_course(f"print({ROW!r})", spoil)
    assert done.exit_code == 1
    assert "1/1" in done.output  # the summary, with what the other steps found
    assert "second.ipynb" in done.output
    assert "1, empty.ipynb:" in done.output
    assert words in done.output


def test_a_notebook_whose_kernel_cannot_start_is_a_failed_step(broken_course, monkeypatch):
    def execute(self, **_):
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(notebooks.NotebookClient, "execute", execute)
    done = broken_course(f"print({ROW!r})")
    assert done.exit_code == 1
    assert "1/1" in done.output
    assert done.output.count("RuntimeError: Kernel died before replying") == 3


PHASE = """
import sys
from pathlib import Path
from common import phases
phases.ROOT = Path({folder!r})
phases.PHASES = (phases.Phase("phase1_x", "t", ("__main__",), "kernel", ("a.ipynb",)),)
"""
STOPPED = {
    "run": PHASE + "from common.learn import cli; sys.argv = ['course', 'run']; cli.main()",
    "verify": PHASE + "from common.learn import cli; sys.argv = ['course', 'verify']; cli.main()",
    "notebooks": PHASE + "from common.learn import notebooks; sys.argv = ['notebooks']; sys.exit(notebooks.main())",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("what", STOPPED)
def test_what_is_stopped_says_so_and_nothing_else(what, how, tmp_path):
    folder = tmp_path / "phase1_x"
    folder.mkdir()
    wait = f"import time\nopen({str(tmp_path / 'started')!r}, 'w').close()\nwhile True: time.sleep(1)"
    (folder / "__main__.py").write_text(wait if what == "verify" else "")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(wait)]), folder / "a.ipynb")
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED[what].format(folder=str(tmp_path))], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored under nohup
    )  # fmt: skip
    while not (tmp_path / "started").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    printed, _ = process.communicate()  # ends once all that it started has ended
    assert process.returncode == 130
    assert printed.endswith("Stopped.\n")
    assert "Traceback" not in printed


def without_gpu_and_asked_to_compile(value):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    return os.environ | dict(TRITON_INTERPRET=value, COLUMNS="200")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "2", "false", ""])
def test_a_variable_that_asks_for_a_missing_gpu_is_named(value):
    done = course("run", "1", env=without_gpu_and_asked_to_compile(value))
    assert done.returncode == 2
    assert done.stdout == (f"TRITON_INTERPRET={value} asks for compiled kernels, and there is no GPU: unset it.\n")
    assert not done.stderr


@pytest.mark.slow
def test_kernels_and_verification_name_the_variable_that_asks_for_a_missing_gpu():
    environment = without_gpu_and_asked_to_compile("0")
    done = course("verify", "1", env=environment)
    assert done.returncode == 2
    assert "TRITON_INTERPRET=0 asks for compiled kernels" in done.stderr
    assert "Traceback" not in done.stderr
    code = "import torch; from phase1_softmax import softmax; softmax(torch.ones(3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stderr.endswith("TRITON_INTERPRET=0 asks for compiled kernels, and there is no GPU: unset it\n")


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "HOME"])
def test_doctor_names_a_cache_that_cannot_be_written(variable):
    environment = os.environ | {"COLUMNS": "200", variable: "/dev/null/x"}
    if variable == "HOME":
        environment.pop("TRITON_CACHE_DIR", None)
    done = course("doctor", env=environment)
    assert done.returncode == 1
    assert re.search(r"folders +problem +/dev/null/x.*: Not a directory", done.stdout)
    assert "TRITON_CACHE_DIR names another" in done.stdout
    assert done.stdout.count("problem") == 1
    assert "reinstall" not in done.stdout


def test_doctor_names_a_folder_of_the_learner_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(phases, "ROOT", tmp_path)
    (tmp_path / "work").write_text("a file")
    finding = doctor.check_folders()
    assert finding.level == "problem"
    assert finding.found == f"{tmp_path / 'work'}: File exists"


def test_a_module_that_dies_fails_with_its_code(broken_course):
    done = broken_course(f"import os\nprint({ROW!r}, flush=True)\nos.kill(os.getpid(), 9)")
    assert done.exit_code == 1
    assert "ended with code -9" in done.output


def test_a_module_that_stops_after_a_failed_case_says_both(broken_course):
    row = json.loads(ROW) | dict(passed=False, text="a report", of=3)
    done = broken_course(f"print({json.dumps(row)!r}, flush=True)\nraise RuntimeError('stopped')")
    assert "a report" in done.output
    assert "RuntimeError: stopped" in done.output


def test_what_a_learner_prints_is_no_result(tmp_path, monkeypatch):
    printed = 'print("hello"); print(\'{"loss": 1.0}\'); print(\'{"what": "a case", "done": 1}\')'
    (tmp_path / "printing.py").write_text(printed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(cli._Child("printing").rows()) == [dict(what="a case", done=1)]


def test_doctor_prints_brackets_as_they_are(monkeypatch):
    finding = dict(what="x", level="problem", found="no [/such] thing", todo="see [link]")
    monkeypatch.setattr(cli._Child, "rows", lambda self: iter([finding]))
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert "no [/such] thing" in done.output
    assert "see [link]" in done.output
    assert "'[/x]'" in course("verify", "[/x]").stdout
