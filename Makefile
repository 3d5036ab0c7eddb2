# make course     set up if needed, verify every phase, execute every notebook
# make test       set up if needed, run the tests that a change is tried with
# make test-slow  the tests that take long
# make site       build the site from the stored notebooks, into build/site/html
# make lab        open JupyterLab at the README, with the chapters in work/
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready

# What a machine lacks, in one line, before anything is installed.
define CHECK
import sys
if not sys.platform.startswith("linux"):
    sys.exit("Triton runs on Linux only: use WSL2 on Windows, a Linux container on macOS, or Colab")
if not (3, 11) <= sys.version_info < (3, 15):
    sys.exit("Python 3.11 to 3.14 is needed, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("This Python lacks venv: apt install python%d.%d-venv, on Debian and Ubuntu" % sys.version_info[:2])
endef
export CHECK

.PHONY: course test test-slow test-gpu fuzz fuzz-gpu sanitize mutants compile-all site site-test lab style clean

course: $(READY)
	$(PY) -m common.learn.cli run

# Long files first, in the order given: else the one that comes last has one of two workers wait.
# Notebooks are stored as the interpreter executes them, so tests run there too, whatever the machine has.
test test-slow: export TRITON_INTERPRET = 1
test: $(READY) style
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" --nbval-lax --nbval-current-env \
		phase*/*.ipynb common/verify/*.ipynb tests/*/ tests/test_*.py

# The rest: a browser, compilations for other GPUs than Hopper, inputs at random, the exercises at length.
test-slow: $(READY)
	$(PY) -m pytest -n 2 --dist loadfile -m slow tests

# 2,000 inputs that nobody has tried; a failure prints how to repeat it.
fuzz: export FUZZ_EXAMPLES = 800
fuzz: export TRITON_INTERPRET = 1
fuzz: $(READY)
	$(PY) -m pytest -n 2 tests/test_fuzz.py

# 20,000, compiled: five minutes on an H200 with 16 cores.
fuzz-gpu: export FUZZ_EXAMPLES = 7100
fuzz-gpu: $(READY)
	$(PY) -m pytest -n 14 tests/test_fuzz.py

# Single mistakes in the code, each of which its tests must notice: half an hour. It can be stopped and continued.
mutants: $(READY)
	$(PY) -m tests.mutants

# The same phases compiled, and what only a GPU can show.
test-gpu: $(READY)
	$(PY) -m pytest tests/gpu tests/phase1 tests/phase2 tests/phase3 tests/phase4 tests/phase5 tests/learn/test_exercises.py

# Every kernel under sanitizers, on a GPU: NVIDIA's, and for Hopper Triton's.
sanitize: $(READY)
	$(PY) -m tests.sanitize

# Phase 5's rungs, and all tiles of the last, for three generations of GPUs, without one: about ten minutes.
compile-all: export TRITON_INTERPRET = 1
compile-all: $(READY)
	$(PY) -m phase5_tuning.bench.compile_all

site: export TRITON_INTERPRET = 1
site: $(READY)
	$(PY) -m common.site.build

# The site in a browser; part of make test-slow.
site-test: $(READY)
	$(PY) -m pytest -n 2 --dist loadfile tests/site

style: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Of copies, so that what a reader runs and fills in stands in the way of no git pull.
# Its terminals and cells find `course`; in a container one is root.
lab: export PATH := $(CURDIR)/.venv/bin:$(PATH)
lab: $(READY)
	$(PY) -m common.learn.cli chapters
	$(PY) -m jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.app_settings_dir=common/lab --LabApp.default_url=/lab/tree/work/README.md

$(READY): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11 to 3.14, or make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c "$$CHECK"
	$(PYTHON) -m venv .venv
	@echo "Installing PyTorch, Triton, Jupyter and others into .venv: gigabytes, and minutes."
	$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --disable-pip-version-check -q --no-deps --config-settings editable_mode=compat -e .
	@touch $(READY)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
