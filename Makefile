# make course   set up if needed, verify every phase, execute every notebook
# make test     set up if needed, run all tests
# make lab      open JupyterLab at the first notebook
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready

.PHONY: course test test-gpu compile-all lab style clean

course: $(READY)
	$(PY) -m common.learn.cli run

# Notebooks are stored as the interpreter executes them, so tests run there too, whatever the machine has.
test: export TRITON_INTERPRET = 1
test: $(READY) style
	$(PY) -m pytest -n 2 --dist loadfile --nbval-lax --nbval-current-env tests phase*/*.ipynb

# The same phases compiled, and what only a GPU can show.
test-gpu: $(READY)
	$(PY) -m pytest tests/gpu tests/test_phase*.py tests/test_extensions*.py tests/test_train.py tests/test_exercises.py

# Phase 5's rungs, and all tiles of the last, for three generations of GPUs, without one: about ten minutes.
compile-all: export TRITON_INTERPRET = 1
compile-all: $(READY)
	$(PY) -m phase5_tuning.compile_all

style: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lab: $(READY)
	$(PY) -m jupyter lab phase1_softmax/softmax.ipynb

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -q -r requirements.txt
	$(PY) -m pip install --disable-pip-version-check -q --no-deps --config-settings editable_mode=compat -e .
	@touch $(READY)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
