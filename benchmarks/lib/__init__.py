"""What the benchmarks share. They import tools/lint and tools/tiny too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
