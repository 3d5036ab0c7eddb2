"""`python -m phase5_tuning`: verify this phase against SDPA on this machine and print the table."""

from common.verify import suite
from phase5_tuning.cases import cases

raise SystemExit(suite.main("Phase 5: both passes, tuned", cases()))
