"""The timelines that a page of the site stores are those that the model computes now; no browser is needed."""

import json

from phase5_tuning.hopper import timelines

import pytest

pytestmark = pytest.mark.slow


def test_the_stored_timelines_are_what_the_model_computes():
    stored = json.loads(timelines.write(timelines.compute()))
    assert stored == timelines.read(), "run python -m phase5_tuning.hopper.timelines"
