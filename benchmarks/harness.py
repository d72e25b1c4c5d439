"""What all benchmarks share: tables and their options, rows as they come, timed repeats, other checkouts, files of results.

A script has one table or several: functions with `@table`, whose keyword parameters are their options. The result is stored
in `results/<name of the function>.json`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from zbsolve import Problem, Schedule

Results = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MAX_LINE, MAX_SAID = 1000, 5000  # characters of a row in a file; of a line that a part printed
STOPPED = threading.Event()  # by whoever runs this process


# --- Tables ---


@dataclass(frozen=True)
class Table:
    """`python -m benchmarks SCRIPT TABLE`. measure: prints rows as they come, and returns the results. stem: the name of the
    file of results, if options decide it; by default the table's name. ending: called with results when the file is written;
    if it returns something, the exit code is 1. folder: of the file, if none is given."""

    measure: Callable[..., Results]
    stem: Callable[..., str] | None = None
    ending: Callable[[Results], Any] | None = None
    folder: Path = RESULTS

    @property
    def name(self) -> str:
        """Of the table."""
        return self.measure.__name__

    @property
    def text(self) -> str:
        """What it measures: its docstring, or the script's."""
        return inspect.getdoc(self.measure) or ""

    def main(self, argv: Sequence[str]) -> Results:
        """Read options, measure, write the file; returns the results."""
        given = vars(self._parser().parse_args(argv))
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        path: Path = given.pop("output")
        self._check_device(given.get("device"), path)
        if path.suffix != ".json":
            path = path / f"{self.name if self.stem is None else self.stem(**given)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        load, began = os.getloadavg()[0], time.monotonic()
        more = {"output": path} if "output" in inspect.signature(self.measure).parameters else {}
        results = self.measure(**given, **more)
        facts = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "seconds": round(time.monotonic() - began, 1)}
        write(self.name, results, path, arguments=_plain(given), **facts, load=load)
        return results

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.measure.__module__.rpartition('.')[2]} {self.name}",
            description=f"{sys.modules[self.measure.__module__].__doc__}\n{self.name}: {self.text}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        hints = get_type_hints(self.measure)
        for name, one in inspect.signature(self.measure).parameters.items():
            if name != "output":
                required = one.default is one.empty
                how = {"required": True} if required else {"default": one.default, "help": str(one.default) or "all"}
                parser.add_argument(f"--{name.replace('_', '-')}", **how, **_type_of(hints[name]))
        parser.add_argument("-o", "--output", type=Path, default=self.folder, help="the file, or its folder")
        return parser

    def _check_device(self, device: Any, path: Path) -> None:
        """Exit code 2 if there is no GPU, or if a CPU's numbers would be stored as a GPU's."""
        said = ""
        if device == "cuda":
            import torch

            if not torch.cuda.is_available():
                said = f"torch {torch.__version__} sees no CUDA device here: nothing was run"
        if device == "cpu" and (path.parent if path.suffix == ".json" else path).resolve() == RESULTS.resolve():
            said = "with --device cpu, name another place for the file: --output"
        if said:
            print(f"{self.name}: {said}", file=sys.stderr)
            raise SystemExit(2)


TABLES: dict[str, Table] = {}


def table(*how: Any, **more: Any) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Register a function as a table; other fields of `Table` may be given."""

    def register(measure: Callable[..., Results]) -> Callable[..., Results]:
        TABLES[measure.__name__] = Table(measure, *how, **more)
        return measure

    return register


def tables_of(script: str) -> dict[str, Table]:
    """The tables of a script, by name."""
    name = import_module(f"benchmarks.{script}").__name__
    return {one.name: one for one in TABLES.values() if one.measure.__module__ == name}


def scripts() -> list[str]:
    """All scripts that have tables."""
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    return [path.stem for path in files if "\n@table(" in path.read_text(encoding="utf-8")]


def _type_of(hint: Any) -> dict[str, Any]:
    """How argparse reads an option of this type: a tuple is several words, None is an option that was not given."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_type_of(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    return {"type": get_args(hint)[0] if isinstance(hint, UnionType) else hint}


# --- Rows ---


def rows_of(rows: Iterable[tuple[str, Results | None]]) -> Results:
    """Labelled rows that come one after the other, each printed when it comes; None is left out."""
    found = {}
    for label, row in rows:
        if row is not None:
            found[label] = row
            print(f"{label}  {brief(row)}", flush=True)
    return found


def listed(rows: Iterable[Results | None]) -> list[Results]:
    """Rows without labels, each printed when it comes."""
    return list(rows_of((f"{number}:", row) for number, row in enumerate(rows, 1)).values())


def brief(row: Results) -> str:
    """A row in one line: numbers to four digits, without lists and long texts."""
    said = []
    for name, value in row.items():
        if isinstance(value, dict):
            said += [f"{name}: ({inside})"] if (inside := brief(value)) else []
        elif not isinstance(value, list | tuple) and len(str(value)) < 80:
            said.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(said)


def timed_solve(problem: Problem, **how: Any) -> tuple[Schedule, float, list[tuple[float, int, int]]]:
    """`solve` with these options and without its search for less memory: the schedule, verified outside the measured time;
    wall seconds; each better value and bound, µs, with the seconds when it came."""
    from zbsolve import solve, verify

    found: list[tuple[float, int, int]] = []

    def note(state: Any) -> None:
        if state.schedule is not None:
            found.append((time.perf_counter() - began, state.value, state.bound.value))

    began = time.perf_counter()
    schedule = solve(problem, progress=note, prefer=None, **how)
    took = time.perf_counter() - began
    assert not verify(problem, schedule)
    return schedule, took, found


def solved(problem: Problem, scale: int = 1, seeds: int = 1, **how: Any) -> Results:
    """What `solve` finds with the first seed (see `_solved`), and, with several seeds, the median and the worst value."""
    rows = [_solved(problem, scale, seed=seed, **how) for seed in range(seeds)]
    values = [row["value"] for row in rows]
    return rows[0] | ({"median": median(values), "worst": max(values), "values": values} if seeds > 1 else {})


def _solved(problem: Problem, scale: int, **how: Any) -> Results:
    """What `solve` finds, verified: value, bound, gap, who found it, the proof, seconds, and each better value or bound as
    it came. scale: the factor that made times whole numbers."""
    schedule, seconds, changes = timed_solve(problem, **how)
    one = schedule.certificate
    assert one is not None
    whole = (
        {"value": one.value / scale, "bound": one.bound / scale} if scale > 1 else {"value": one.value, "bound": one.bound}
    )
    return {
        **whole,
        "gap": one.gap,
        "solver": one.solver,
        "proof": one.proof,
        "seconds": round(seconds, 2),
        "changes": [(round(when, 2), value / scale, bound / scale) for when, value, bound in changes],
    }


def mean_of(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def timed(work: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Seconds of every repeat, and the last result."""
    samples, result = [], None
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        samples.append(round(time.perf_counter() - began, 4))
    return samples, result


# --- Files ---


def _plain(options: Results) -> Results:
    """Options as they are stored: of a file only its name, without its folder."""
    return {name: value.name if isinstance(value, Path) else value for name, value in options.items()}


def write(name: str, results: Results, path: Path, **facts: Any) -> None:
    """Write one file: the benchmark, further facts, machine, versions of loaded packages, results."""
    from zbsolve.util.machine import LIBRARIES, library_versions, machine_facts

    versions = library_versions((*LIBRARIES, *(("torch",) if "torch" in sys.modules else ())))
    body = {"benchmark": name, **facts, "machine": machine_facts(), "versions": versions, "results": results}
    path.write_text(as_lines(body) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def as_lines(value: Any, indent: str = "") -> str:
    """JSON in lines: a row, or a list of samples, is one line."""
    line = json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, list) and not any(isinstance(one, list | dict) for one in value)
    if plain or not isinstance(value, list | dict) or len(line) <= MAX_LINE:
        return line
    inside = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{inside}{as_lines(one, inside)}" for one in value) + f"\n{indent}]"
    rows = (f"{inside}{json.dumps(name)}: {as_lines(one, inside)}" for name, one in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def kept(path: Path) -> Results:
    """The results in a file that a benchmark wrote."""
    results: Results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


# --- Other checkouts ---

# The library is the checkout's, the benchmark is ours.
BOOT = """
import sys
checkout, ours, work, *words = sys.argv[1:]
sys.path.insert(0, checkout)
import zbsolve
assert zbsolve.__file__.startswith(checkout), zbsolve.__file__
sys.path.insert(0, ours)
from benchmarks.harness import answer
answer(work, words)
"""


class Served:
    """A process with the library of a checkout that answers questions: `work`, "module:function", takes `words` and returns
    the function that answers one question; questions and answers are JSON values. Raises SystemExit if it ends too early."""

    def __init__(self, folder: Path, work: str, *words: str) -> None:
        command = [sys.executable, "-c", BOOT, str(folder.resolve()), str(ROOT), work, *words]
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=environment, cwd=folder)

    def ask(self, *question: Any) -> None:
        """Send a question; the process works until `told` returns."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)

    def told(self) -> Any:
        """Its answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a checkout ended: {self.process.args[3:]}")  # type: ignore[index]
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def answer(work: str, words: Sequence[str]) -> None:
    """Answer until there are no more questions, in a `Served` process."""
    module, _, name = work.partition(":")
    answers = getattr(import_module(module), name)(*words)
    for line in sys.stdin:
        print(json.dumps(answers(*json.loads(line))), flush=True)


def in_turn(count: int, turn: int) -> Iterable[int]:
    """The order in which items take this turn: each is first as often as last."""
    return range(count) if turn % 2 else reversed(range(count))


# --- Parts ---

ENDING_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """One part. work: "module:function", which returns a dict of JSON values; it lists failures under `wrong`. seconds: its
    time limit, with its start. arguments: the function's, JSON values. beside: it measures no times, so it may run together
    with the part before it, if that measures none either."""

    name: str
    work: str
    seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)
    beside: bool = False


def results_of(
    parts: Sequence[Part], keep: Callable[[dict[str, Any]], None] = lambda found: None, until: float = math.inf
) -> dict[str, Any]:
    """Run every part, even if earlier ones fail. By name: seconds taken and allowed, and `found`, or the `error` that ended
    it with the last lines that it `said`. keep: called with all of that after each group. until: the time limit of all
    parts, monotonic s. After KeyboardInterrupt no part of this process runs any more."""
    found: dict[str, Any] = {}
    for group in groups(parts):
        print(f"{', '.join(part.name for part in group)} …", flush=True)
        with ThreadPoolExecutor(len(group)) as threads:
            try:
                for part, row in zip(group, threads.map(lambda part: _run(part, until), group), strict=True):
                    found[part.name] = row
                    lines = failures({part.name: row}) or [f"{part.name}: done in {row['seconds']} s"]
                    print("\n  ".join(lines + row.get("found", {}).get("says", [])), flush=True)
            except KeyboardInterrupt:
                STOPPED.set()
                keep(found)
                raise
        keep(found)
    return found


def groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups of parts that run at the same time, in order."""
    found: list[list[Part]] = []
    for part in parts:
        if part.beside and found and found[-1][-1].beside:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def longest(parts: Sequence[Part]) -> float:
    """The time limit of all parts, s."""
    return sum(max(part.seconds for part in group) for group in groups(parts))


def failures(results: dict[str, Any]) -> list[str]:
    """A line for each thing that failed in what `results_of` returned."""
    return [
        f"{name}: {line}"
        for name, row in results.items()
        for line in ([row["error"]] if "error" in row else row["found"].get("wrong", []))
    ]


def _run(part: Part, until: float) -> dict[str, Any]:
    began = time.monotonic()
    limit = min(part.seconds, until - began)
    if limit <= 0 or STOPPED.is_set():
        return {"seconds": 0.0, "limit": part.seconds, "error": "not begun: no time was left"}
    with tempfile.TemporaryDirectory(prefix="zbsolve-", ignore_cleanup_errors=True) as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said.txt"
        with said.open("w", encoding="utf-8") as sink:
            code = _code(part, result, sink, began + limit)
        row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 2), "limit": part.seconds}
        if code == 0 and (found := _result(result)) is not None:
            return row | {"found": found}
        lines = [line[:MAX_SAID] for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-30:]), file=sys.stderr)
        last = lines[-1][:MAX_LINE] if lines else "it said nothing"
        late = "stopped" if STOPPED.is_set() else f"not done after {limit:.0f} s"
        why = late if code is None else f"exit code {code}: {last}"
        return row | {"error": why if code != 0 else f"no results: {last}", "said": lines[-30:]}


def _result(path: Path) -> dict[str, Any] | None:
    """What a part has written; None if that is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _code(part: Part, result: Path, sink: TextIO, until: float) -> int | None:
    """The exit code of the part's process; None if it took too long. Its child processes are ended too. Before, it is asked
    to end those that would live on, such as MPS. If it does not, MPS is found by its files in the part's folder."""
    from zbsolve.util.machine import child_environment

    command = [sys.executable, "-m", "benchmarks.harness", part.work, str(result), json.dumps(part.arguments)]
    child = subprocess.Popen(
        command,
        env=child_environment() | {"TMPDIR": str(result.parent)},
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    done = _ended(child, lambda: time.monotonic() > until or STOPPED.is_set())
    if not done:
        late = time.monotonic() + ENDING_SECONDS
        child.send_signal(signal.SIGINT)
        _ended(child, lambda: time.monotonic() > late)
    os.killpg(child.pid, signal.SIGKILL)  # it was not waited for yet, so the group is still its own
    with suppress(subprocess.TimeoutExpired):  # killed, but still in a driver
        child.wait(ENDING_SECONDS)
    if not done:
        from zbsolve.exec.run.host import end_together

        end_together(result.parent)
    return child.returncode if done else None


def _ended(child: subprocess.Popen[bytes], given_up: Callable[[], bool]) -> bool:
    """Wait until the process has ended; False if this is given up before."""
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if given_up():
            return False
        time.sleep(0.05)
    return True


def run_part() -> None:
    """One part, in its process."""
    work, result, arguments = sys.argv[1:]
    module, _, name = work.partition(":")
    found = getattr(import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_part()
