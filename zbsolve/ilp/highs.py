"""HiGHS on a MILP in a process of its own: `python -m zbsolve.ilp.highs FOLDER`.

Its shared library and OR-tools' own copy of HiGHS do not load into one process (highspy 1.15 beside ortools 9.15).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..util.errors import BadInput
from ..util.files import temporary_folder

if TYPE_CHECKING:
    import pulp

SPARE_TIME = 30.0  # seconds beyond the solver's own limit, for reading and writing the model


def solve_with_highs(model: pulp.LpProblem, seconds: float, seed: int) -> tuple[dict[str, float], bool]:
    """The values of the model's variables by name ({}: none were found), and whether they are proven optimal.

    Values that variables have already start the search. Raises BadInput if HiGHS fails.
    """
    with temporary_folder("highs") as folder:
        model.writeMPS(str(folder / "model.mps"))
        start = {variable.name: variable.varValue for variable in model.variables() if variable.varValue is not None}
        (folder / "job.json").write_text(json.dumps({"seconds": seconds, "seed": seed, "start": start}), encoding="utf-8")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-m", "zbsolve.ilp.highs", str(folder)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                text=True,
                timeout=seconds + SPARE_TIME,
            )
        except subprocess.TimeoutExpired:
            return {}, False
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise BadInput(f"solver 'highs': {last}")
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer["values"], answer["optimal"]


def main(folder: Path) -> None:
    """Read `job.json`, solve, write `answer.json`."""
    import highspy

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    engine = highspy.Highs()  # type: ignore[no-untyped-call]
    engine.setOptionValue("output_flag", False)
    engine.readModel(str(folder / "model.mps"))
    for option, value in (("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0), ("time_limit", job["seconds"])):
        engine.setOptionValue(option, value)
    engine.setOptionValue("random_seed", int(job["seed"]))
    names = list(engine.getLp().col_names_)
    if job["start"]:
        first = highspy.HighsSolution()
        first.col_value = [job["start"].get(name, highspy.kHighsInf) for name in names]
        engine.setSolution(first)
    engine.run()
    solution = engine.getSolution()
    values = dict(zip(names, solution.col_value, strict=True)) if solution.value_valid else {}
    optimal = engine.getModelStatus() == highspy.HighsModelStatus.kOptimal
    (folder / "answer.json").write_text(json.dumps({"values": values, "optimal": optimal}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
