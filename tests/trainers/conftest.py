"""Trainers as their users start them: processes of torchrun, whose results are files."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))
