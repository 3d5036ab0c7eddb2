"""`python -m phase3_forward`: verify this phase against SDPA on this machine and print the table."""

from common.verify import suite
from phase3_forward.cases import cases

raise SystemExit(suite.main("Phase 3: the forward pass", cases()))
