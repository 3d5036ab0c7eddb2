"""The timelines that a page of the site stores are those that the model computes now; no browser is needed."""

import json

from common.site.pictures import pipeline_data
from phase5_tuning.hopper import model as hopper_model

import pytest

pytestmark = pytest.mark.slow


def test_the_stored_timelines_are_what_the_model_computes():
    assert json.loads(pipeline_data.write(pipeline_data.compute(hopper_model))) == pipeline_data.read(), (
        "run python -m common.site.pictures.pipeline_data"
    )
