"""The timelines that a page of the site stores are those that the model computes now; no browser is needed."""

import json

from phase5_tuning.hopper import figures

import pytest

pytestmark = pytest.mark.slow


def test_the_stored_timelines_are_what_the_model_computes():
    computed = json.loads(figures.as_json(figures.page_data()))
    assert computed == figures.stored(), "run python -m phase5_tuning.hopper.figures"
