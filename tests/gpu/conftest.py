"""Some tests here fill most of a GPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
