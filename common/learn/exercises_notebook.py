"""`check` for notebooks: the verdict on an exercise in a line."""

from common.learn import exercises, progress
from common.learn.check import runner


def check(name: str) -> None:
    """Check the learner's file of an exercise and print the verdict. Raises KeyError for an unknown name."""
    exercise = exercises.find(name)
    if exercise is None:
        raise KeyError(f"there is no exercise {name!r}; similar: {', '.join(exercises.similar(name)) or 'none'}")
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
