"""`python -m phase1_softmax`: verify this phase against SDPA on this machine and print the table."""

from common.verify import suite
from phase1_softmax.cases import cases

raise SystemExit(suite.main("Phase 1: softmax", cases()))
