"""A small model, and its work beside a step: each piece is noted in a file beside the model's."""

SOURCE = """
import json
from pathlib import Path

import torch
from torch import nn


def pipeline():
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return layers, (torch.randn(3, 6), torch.randn(3, 6)), nn.functional.mse_loss


def work(rank, piece, pieces):
    path = Path(__file__).parent / f"{rank}.json"
    done = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*done, [piece, pieces]]))
"""
