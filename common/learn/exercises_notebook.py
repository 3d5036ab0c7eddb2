"""Exercises in notebooks: the verdict on an answer in a line, and the answer itself, to be used in later cells."""

import importlib
from types import ModuleType

from common.learn import exercises, progress
from common.learn.check import answer, runner

import torch

torch.set_num_threads(1)  # the tensors of a chapter are small: threads would only wait for one another


def check(name: str) -> None:
    """Check the learner's file of an exercise and print the verdict. Raises KeyError for an unknown name."""
    exercise = _known(name)
    for sentence in progress.notices():
        print(sentence)
    verdict = runner.check(exercise)
    outcome = {"passed": "PASS", "unfinished": "not finished"}.get(verdict.kind, "not yet right")
    print(f"{exercise.number} {exercise.name}: {outcome}. {verdict.message}")
    if verdict.not_noted:
        print(f"    {verdict.not_noted}")
    for objection in runner.objections(exercise, verdict):
        print(f"    Warning: {objection}")
    if not verdict.passed:
        print(f"    your file: {exercise.file}    help: course hint {exercise.number}")


def solved(name: str) -> ModuleType:
    """The learner's answer as a module; as long as it has not passed, the course's. Prints which of them it is."""
    exercise = _known(name)
    if progress.Progress.load().solved(exercise):
        print(f"{exercise.number} {exercise.name}: yours")
        return answer.load(exercise.path, name)
    print(f"{exercise.number} {exercise.name}: the course's, until yours passes")
    return importlib.import_module(f"{exercise.phase.folder}.solutions.{name}")


def _known(name: str) -> exercises.Exercise:
    exercise = exercises.find(name)
    if exercise is None:
        raise KeyError(f"there is no exercise {name!r}; similar: {', '.join(exercises.similar(name)) or 'none'}")
    return exercise
