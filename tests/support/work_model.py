"""A small model with work beside its step: each piece writes down what ran before it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

DONE = "ZBSOLVE_TEST_WORK"  # a folder: a file a rank


def pipeline() -> Any:
    """Four layers, 3 rows a microbatch."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return layers, (torch.randn(3, 6), torch.randn(3, 6)), nn.functional.mse_loss


def work(rank: int, piece: int, pieces: int) -> None:
    """Note the piece."""
    path = Path(os.environ[DONE]) / f"{rank}.json"
    done = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*done, [piece, pieces]]))
