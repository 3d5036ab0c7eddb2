"""`python -m phase4_backward`: verify this phase against SDPA on this machine and print the table."""

from common.verify import suite
from phase4_backward.cases import cases

raise SystemExit(suite.main("Phase 4: the backward pass", cases()))
