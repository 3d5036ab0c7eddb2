"""What runs beside a product, measured on a Hopper GPU."""

from phase5_tuning.bench import beside as hopper_beside

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")]


def test_every_row_has_the_clocks_of_what_it_names(monkeypatch):
    monkeypatch.setattr(hopper_beside, "TURNS", 50)
    rows = hopper_beside.run()
    assert len(rows) == len({(r["where"], r["left"], r["arithmetic"]) for r in rows}) == 17
    for row in rows:
        named = {"product": row["left"], "arithmetic": row["arithmetic"]}
        assert set(row["clocks"]) == {what for what, kind in named.items() if kind != "none"}
        # No faster than the tensor cores multiply, or than one instruction a clock.
        assert row["clocks"].get("product", 1e9) >= 2 * 64 * 128 * 128 / 4096
        assert row["clocks"].get("arithmetic", 1e9) >= (128 if "128" in row["arithmetic"] else 32 * 8)
