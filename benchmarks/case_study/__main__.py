"""``python benchmarks/case_study``: see study.py."""

import sys
from pathlib import Path

# not this folder, whose files are imported as case_study.numbers, but the one of all benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from case_study.study import main  # noqa: E402

main()
