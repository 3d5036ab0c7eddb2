"""What this phase's exercises import: these names stay here, wherever the course keeps what they stand for."""

from phase5_tuning.fp8.reference import rotation, rounded
from phase5_tuning.hopper import tma
from phase5_tuning.hopper.forward import ROWS
from phase5_tuning.hopper.model import (
    Consumer,
    Operation,
    Ring,
    arrive,
    load,
    product,
    simulate,
    wait,
    wait_products,
    work,
)
from phase5_tuning.hopper.parts import await_count, release_count, tma_add
from phase5_tuning.launch.configs import Config
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.ring.attention import merge_

__all__ = [
    "ROWS", "Config", "Consumer", "Operation", "Ring", "arrive", "attention_forward", "await_count", "load", "merge_",
    "product", "release_count", "rotation", "rounded", "simulate", "tma", "tma_add", "wait", "wait_products", "work",
]  # fmt: skip
