"""Where the repository is, and the path its programs need in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What the caller has on its path stays: packages may be installed outside the interpreter's folder.
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
