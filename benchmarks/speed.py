"""How fast this code itself is: building and verifying at scale, pages, the playground, installing, and the executor's time
for a pass, here and in another checkout. Functions import the modules of zbsolve that they need: other checkouts may lack
some."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from zbsolve import Layer, Link, Problem, Profile, Schedule, pipeline, preset, verify

from .harness import ROOT, Results, Served, in_turn, rows_of, table, timed


def step(ranks: int, microbatches: int, placement: str, more: int = 0) -> Problem:
    """A step with memory, whose stages differ by up to `more` µs."""
    from zbsolve.problem.placement import parse

    spot = parse(placement, ranks)
    times = ([us + i * more % 3 for i in range(len(spot))] for us in (300, 320, 210))
    return pipeline(*times, placement=spot, microbatches=microbatches, comm=8, held_until_B=6 << 20, held_until_W=4 << 20)


# ranks, microbatches, placement, named schedule
SIZES = ((32, 64, "loop", "interleaved"), (64, 256, "loop", "interleaved"), (128, 1024, "single", "1f1b"))


@table()
def sizes(repeats: int = 5, first: int = len(SIZES)) -> Results:
    """Seconds to build a problem, simulate a named schedule and verify it (`make bench`), for the first sizes."""

    def rows() -> Iterator[tuple[str, Results]]:
        for ranks, microbatches, placement, name in SIZES[:first]:
            build, problem = timed(lambda: step(ranks, microbatches, placement), repeats)  # noqa: B023
            orders = [preset(name, problem) for _ in range(repeats)]  # a schedule keeps its timeline
            simulate, _ = timed(lambda: orders.pop().timeline(), repeats)  # noqa: B023
            schedule = preset(name, problem)
            check, violations = timed(lambda: verify(problem, schedule), repeats)  # noqa: B023
            assert violations == ()
            seconds = {"build": build, "simulate": simulate, "verify": check}
            medians = ", ".join(f"{what} {median(samples):.3f} s" for what, samples in seconds.items())
            print(medians, end="  ")
            yield f"{len(problem.passes):,} passes", {"passes": len(problem.passes), **seconds}

    return rows_of(rows())


# The same of schedules that pages show.
SHOWN = ((64, 256, "loop", "interleaved"), (128, 1024, "single", "1f1b-split"), (128, 1024, "loop4", "interleaved-zb"))


@table()
def pages(repeats: int = 3, first: int = len(SHOWN)) -> Results:
    """Bytes of a schedule's page, seconds to write it, and seconds until a browser shows it, with opening a new window.
    Needs chromium and playwright."""
    from tests.support.browser import chromium, opened
    from zbsolve.show import schedule_as_page

    def show(browser: Any, path: Path) -> None:
        with opened(browser, path) as page:
            page.wait_for_selector("#chart[data-ready]")
            page.evaluate("new Promise(requestAnimationFrame)")

    def rows() -> Iterator[tuple[str, Results]]:
        with chromium() as browser, tempfile.TemporaryDirectory() as folder:
            for ranks, microbatches, placement, name in SHOWN[:first]:
                schedule = preset(name, step(ranks, microbatches, placement, 1))
                schedule.timeline()
                write, page = timed(lambda: schedule_as_page(schedule), repeats)  # noqa: B023
                path = Path(folder) / "page.html"
                path.write_text(page, encoding="utf-8")
                shown, _ = timed(lambda: show(browser, path), repeats)  # noqa: B023
                passes = len(schedule.problem.passes)
                yield f"{passes:,} passes", {"passes": passes, "bytes": len(page), "write": write, "show": shown}

    return rows_of(rows())


STATES = (
    "",
    "ranks=8&microbatches=24&placement=vee&memory=4",
    "ranks=8&microbatches=32&output=1&comm=1",
    "ranks=8&microbatches=32&placement=loop4&slow_part=3&memory=9",
    "ranks=16&microbatches=64&placement=vee&memory=12",
    "ranks=16&microbatches=64&system=zb-v",
    "ranks=32&microbatches=64&placement=vee&output=1",
    "ranks=32&microbatches=128",
    "ranks=32&microbatches=128&placement=vee",
    "ranks=64&microbatches=256",
)


@table()
def explore(repeats: int = 3, count: int = 60, first: int = len(STATES)) -> Results:
    """Seconds until the page of `zbsolve explore` has drawn its answer and table, for the first listed steps; and CPU
    seconds of one core for the answers to so many random steps: searches by effort do not run in parallel."""
    from zbsolve.explore.page import answer_part, table_part
    from zbsolve.explore.playground import Playground
    from zbsolve.explore.state import State

    def answer(state: State) -> int:
        found, seconds = Playground().answer(state)
        answer_part(found, seconds, (), 1000)
        return len(found.schedule.problem.passes)

    def row(query: str) -> Results:
        state = State.parse(query)
        seconds, passes = timed(lambda: answer(state), repeats)
        rest, _ = timed(lambda: table_part(list(Playground().compared(state))[-1]), 1)
        return {"median": median(seconds), "passes": passes, "answer": seconds, "table": rest}

    def core_seconds(state: State) -> float:
        began = time.process_time()
        answer(state)
        return round(time.process_time() - began, 4)

    answer(State())  # loads kernels
    found = rows_of((query or "as usual", row(query)) for query in STATES[:first])
    several = [core_seconds(State(ranks, microbatches, **more)) for ranks, microbatches, more in random_states(count)]
    quick = sum(sample <= 1 for sample in several)
    print(f"{quick} of {len(several)} random steps in a second of one core, the longest {max(several, default=0):.2f} s")
    return {**found, "random steps, seconds of one core": several}


def random_states(count: int) -> Iterator[tuple[int, int, Results]]:
    """Steps of up to 32 ranks and 96 microbatches, with and without memory limits, even and uneven, either objective."""
    pick = random.Random(3).choice
    for _ in range(count):
        ranks = pick((2, 4, 6, 8, 12, 16, 24, 32))
        memory, times = pick((0, 0.5, 0.8)) * ranks, {"F": pick((5, 10.3)), "B": pick((10, 12.7)), "W": pick((4, 8.1))}
        uneven = {"comm": pick((0.0, 0.7, 3.0)), "slow_part": pick((0, 1, 2)), "output": pick((0.0, 0.6))}
        placed = {"placement": pick(("single", "loop", "vee", "loop4")), "objective": pick(("makespan", "span"))}
        yield ranks, pick((4, 8, 16, 24, 48, 64, 96)), {"memory": memory, **times, **uneven, **placed}


@table()
def install() -> Results:
    """Seconds of `pip install .` into a new environment, and of the first solve after it, if the wheel has compiled kernels
    and if it does not. pip takes packages from its configured source; the time includes downloads."""
    limit, solve = 1200.0, ("--ranks", "8", "--microbatches", "24", "--seconds", "2")
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}

    def seconds(*words: object) -> float:
        command, began = [str(word) for word in words], time.monotonic()
        subprocess.run(command, check=True, timeout=limit, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=alone)
        return round(time.monotonic() - began, 2)

    def rows(folder: str) -> Iterator[tuple[str, Results]]:
        layer = Layer("block", 20_000, 22_000, 18_000, 40_000, 4096, 4096, 2048, 100)
        profile, source = Path(folder, "profile.json"), Path(folder, "source")
        Profile("estimated: made up", "toy", (layer,) * 16, Link(20, 1e4), 1, None, {}, {}).save(profile)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True, timeout=limit)
        for name, words in (("compiled kernels", ()), ("without", ("--config-settings", "kernels=none"))):
            home = Path(folder, name.split()[0])
            venv.create(home, with_pip=True)
            row = {"install": seconds(home / "bin" / "python", "-m", "pip", "install", "--quiet", *words, source)}
            for turn in ("first solve", "second solve"):
                row[turn] = seconds(home / "bin" / "zbsolve", "solve", profile, *solve)
            yield name, row

    with tempfile.TemporaryDirectory() as folder:
        return {"solve": " ".join(solve), "seconds": rows_of(rows(folder))}


# --- What a pass costs the executor ---

CASES = {"interpreter": (1, 4, 64), "layers": (1, 4, 32), "messages": (2, 2, 32)}  # ranks, stages, microbatches
WARMUPS, STEPS, WIDTH, LIMIT = 5, 15, 64, 60  # LIMIT in seconds


@table()
def handlers(against: Path, launches: int = 8, turns: int = 12) -> Results:
    """The executor's time for a pass, here and in another checkout, turn by turn in one run. All times are CPU time of a
    rank's thread for a pass, µs. `interpreter`: of one rank whose stages do nothing, so only the interpreter with its table
    of handlers is left. `layers`: of one rank with a small layer a stage. `messages`: of two gloo ranks with such a stage
    each, by 1F1B. Each process waits while the others take their turn. Processes are restarted some times, because the same
    code takes up to 20 % longer in one pair of processes than in another. A ratio is this checkout's time over the other's,
    from the medians of one turn; all samples are kept. Only names that both checkouts have are used."""

    def rows() -> Iterator[tuple[str, Results]]:
        for what, size in CASES.items():
            both: dict[str, list[list[float]]] = {"here": [], "there": []}
            for _ in range(launches):
                _take_turns(what, {"here": ROOT, "there": against}, turns, both)
            ratios = [round(median(new) / median(old), 4) for new, old in zip(*both.values(), strict=True)]
            medians = {f"{name}_us": round(median(us for turn in each for us in turn), 2) for name, each in both.items()}
            spread = {"ratio": median(ratios), "least": min(ratios), "most": max(ratios), "ratios": ratios}
            yield (
                what,
                {
                    **dict(zip(("ranks", "stages", "microbatches"), size, strict=True)),
                    **medians,
                    **spread,
                    "samples_us": both,
                },
            )

    return rows_of(rows())


def _take_turns(what: str, roots: dict[str, Path], turns: int, found: dict[str, list[list[float]]]) -> None:
    """Both checkouts in turn, each first of a pair equally often; samples are means over ranks."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        served: dict[str, list[Served]] = {name: [] for name in roots}
        try:
            for name, root in roots.items():
                (Path(folder) / name).mkdir()
                for rank in range(CASES[what][0]):
                    served[name].append(Served(root, "benchmarks.speed:stepping", what, f"{folder}/{name}", str(rank)))
            for turn in range(turns):
                for k in in_turn(len(roots), turn):
                    name = list(roots)[k]
                    for rank in served[name]:
                        rank.ask()
                    each = [rank.told() for rank in served[name]]
                    found[name].append([round(sum(step) / len(step), 3) for step in zip(*each, strict=True)])
        finally:
            for rank in (rank for several in served.values() for rank in several):
                rank.end()


def stepping(what: str, folder: str, rank: str) -> Callable[[], list[float]]:
    """What a rank runs: samples of STEPS steps, µs a pass."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    how: dict[str, Any] = {"rank": int(rank), "world_size": CASES[what][0], "timeout": timedelta(seconds=LIMIT)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **how)
    one_step, passes = _stepper(what)
    for _ in range(WARMUPS):
        one_step()

    def answer() -> list[float]:
        samples = []
        for _ in range(STEPS):
            own = time.thread_time()
            one_step()
            samples.append(round(1e6 * (time.thread_time() - own) / passes, 3))
        return samples

    return answer


def _stepper(what: str) -> tuple[Callable[[], Any], int]:
    """One training step of this rank, and its passes."""
    import torch
    from torch import nn

    from zbsolve.exec import Pipeline

    ranks, stages, microbatches = CASES[what]

    def layers(numbers: list[int]) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in numbers]

    runner = Pipeline(layers, _schedule(ranks, stages, microbatches), loss=nn.functional.mse_loss, timeout=LIMIT)
    x = torch.zeros(4 * microbatches, WIDTH)
    if what == "interpreter":
        piece, loss = torch.zeros(4, WIDTH), torch.zeros(())
        for number, stage in runner.stages.items():
            output, gradient = loss if number == stages - 1 else piece, piece if number else None
            stage.forward = lambda *_, output=output, **__: output
            stage.backward = lambda *_, gradient=gradient: gradient
            stage.weights = lambda *_: None
    return lambda: runner.step(x, x), len(runner.program.actions)


def _schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """1F1B with one stage a rank, W directly after its B; on one rank, one microbatch after the other."""
    spot, ones = tuple(stage % ranks for stage in range(stages)), [10] * stages
    problem = pipeline(ones, ones, ones, placement=spot, microbatches=microbatches, layers=[1] * stages)
    if ranks == stages:
        return Schedule(problem, {f"compute:{r}": _one_f_one_b(r, ranks - 1 - r, microbatches) for r in range(ranks)})
    ups = [f"{s}{kind}" for s in reversed(range(stages)) for kind in "BW"]
    names = [f"{name}{m}" for m in range(microbatches) for name in (*(f"{s}F" for s in range(stages)), *ups)]
    return Schedule(problem, {"compute:0": tuple(names)})


def _one_f_one_b(stage: int, ahead: int, microbatches: int) -> tuple[str, ...]:
    """The passes of one stage, whose forwards are `ahead` of its backwards."""
    names = [f"{stage}F{m}" for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        names += [f"{stage}F{m + ahead}"] if m + ahead < microbatches else []
        names += [f"{stage}B{m}", f"{stage}W{m}"]
    return tuple(names)
