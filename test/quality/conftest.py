"""The demo's world lies with the scripts that train its checkpoint."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools" / "train_demo"))
