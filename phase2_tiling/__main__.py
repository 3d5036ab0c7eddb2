"""`python -m phase2_tiling`: verify this phase against SDPA on this machine and print the table."""

from common.verify import suite
from phase2_tiling.cases import cases

raise SystemExit(suite.main("Phase 2: tiling", cases()))
