"""What is printed in Balancing Pipeline Parallelism with Vocabulary Parallelism (arXiv 2411.05288), and what its authors
measured.

`tests/data/vocabulary_parallelism.csv` has the pass times (µs, one a rank) that the runs behind Table 5 on 8 GPUs measured,
from the authors' artifact (sail-sg/VocabularyParallelism, `artifact/exp_one_host.csv`): ST is S and T together, which that
code calls in one, and embedding the sharded input embedding's forward and backward together. comm: a message between ranks.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

HELD = 34  # bytes a token and hidden unit that one layer keeps, attention's scores made again (arXiv 2205.05198)
STATE = 18  # bytes a parameter: weight 2, gradient 4, Adam with a master copy 12
GIB = 2**30
SIZES = (32_000, 64_000, 128_000, 256_000)
METHODS = ("baseline", "redistribution", "two barriers", "one barrier")  # Vocab-1 has two barriers, Vocab-2 one

# Table 5 on 8 GPUs, 32 layers, hidden size 3072, 128 microbatches: sequence → method → MFU in % at SIZES.
TABLE_5 = {
    2048: {
        "baseline": (46.16, 40.48, 33.11, 25.23),
        "redistribution": (46.01, 46.37, 44.22, 38.91),
        "two barriers": (50.42, 50.28, 49.93, 50.12),
        "one barrier": (50.23, 50.18, 49.82, 49.69),
    },
    4096: {
        "baseline": (47.05, 41.87, 35.00, 26.75),
        "redistribution": (46.93, 46.78, 47.44, 43.01),
        "two barriers": (50.98, 50.98, 50.83, 50.66),
        "one barrier": (50.93, 50.75, 50.56, 50.40),
    },
}
# Table 5's peak memory, GB: (GPUs, layers, hidden size, sequence) → Vocab-1, Vocab-2, at the vocabularies of SIZES.
TABLE_5_PEAKS = {
    (8, 32, 3072, 2048): ((15.63, 16.02, 16.84, 18.59), (14.83, 15.23, 16.04, 17.78)),
    (8, 32, 3072, 4096): ((24.04, 24.47, 25.41, 27.34), (22.44, 22.89, 23.80, 25.73)),
    (16, 48, 4096, 2048): ((24.37, 24.63, 25.14, 26.26), (23.57, 23.83, 24.35, 25.47)),
    (16, 48, 4096, 4096): ((39.46, 39.73, 40.31, 41.53), (37.89, 38.18, 38.77, 39.92)),
    (32, 64, 5120, 2048): ((33.38, 33.55, 33.86, 34.51), (32.72, 32.88, 33.20, 33.84)),
    (32, 64, 5120, 4096): ((57.41, 57.56, 57.88, 58.58), (56.09, 56.26, 56.61, 57.31)),
}
# Table 6, V-Half: (GPUs, layers, hidden size, sequence) → MFU in % of baseline and Vocab-1, and GB of both, at 32k and 256k.
TABLE_6 = {
    (16, 32, 4096, 2048): ((46.41, 19.99), (52.82, 52.89), (15.57, 46.77), (13.20, 15.02)),
    (16, 32, 4096, 4096): ((50.01, 21.90), (58.69, 57.59), (21.22, 53.11), (20.14, 22.06)),
    (24, 48, 5120, 2048): ((51.07, 22.54), (56.70, 54.86), (23.94, 61.71), (21.08, 22.57)),
    (24, 48, 5120, 4096): ((54.53, 24.31), (60.09, 58.22), (33.60, 72.60), (32.55, 34.12)),
}


class Measured(NamedTuple):
    """Pass times of one run, µs, one a rank."""

    comm: int
    F: list[int]
    BW: list[int]
    ST: list[int]
    embedding: list[int]


@cache
def measured() -> dict[tuple[int, int, str], Measured]:
    """By sequence, vocabulary and method."""
    path = Path(__file__).parents[1] / "data" / "vocabulary_parallelism.csv"
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            lists = [[int(one) for one in row[name].split()] for name in Measured._fields[1:]]
            found[int(row["sequence"]), int(row["vocabulary"]), row["method"]] = Measured(int(row["comm"]), *lists)
    return found


def layer_flops(hidden: int, sequence: int) -> tuple[int, int, int]:
    """F, B and W of one transformer layer and one token (Table 4 and arXiv 2401.10241, table 1)."""
    return hidden * (24 * hidden + 4 * sequence), hidden * (24 * hidden + 8 * sequence), 24 * hidden * hidden


def model_flops(layers: int, hidden: int, sequence: int, vocabulary: int) -> int:
    """Of one microbatch of one sequence (Table 4: layers, input and output layer)."""
    output = 6 * hidden * vocabulary
    return sequence * (layers * sum(layer_flops(hidden, sequence)) + output + 3 * hidden)
