"""Only `pip install -e .`, which make runs: the course is read, run and solved in its checkout."""

import sys

from setuptools import setup

if "bdist_wheel" in sys.argv:
    sys.exit("The course lives in its checkout, notebooks and answers included: run make course, or pip install -e .")
setup()
