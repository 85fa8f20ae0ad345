"""The ops beside what else does their job. Rows and inputs are those of tests/cases.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
