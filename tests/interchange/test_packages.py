"""Exports in the engines' own files: Megatron's layout and orders, DeepSpeed's schedule, ColossalAI's executor.

The packages are downloaded without their dependencies; where that fails the tests are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zbsolve import Schedule, pipeline, preset
from zbsolve.interchange import Options, export
from zbsolve.planner import Layout, Shape
from zbsolve.planner.layout import FULL, LOOP
from zbsolve.systems.one_direction import interleaved_in_groups

from ..support import colossalai_ranks
from ..support.exports import a_step, in_order_schedule, run_python, walk
from ..support.packages import Package, installed
from ..support.plans import chosen

pytestmark = pytest.mark.slow


def passes(schedule: Schedule) -> list[list[str]]:
    return [list(schedule.order[f"compute:{rank}"]) for rank in range(schedule.problem.ranks)]


# --- Megatron ---


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package("megatron-core==0.16.1", tmp_path_factory.mktemp("megatron"))


LAYOUT = "megatron/core/transformer/pipeline_parallel_layer_layout.py"
ORDERS = "megatron/core/pipeline_parallel/schedules.py"


@pytest.mark.parametrize(("place", "ranks", "layers"), [("single", 3, None), ("loop", 2, None), ("loop", 3, "E-,t*14,m,L")])
def test_megatron_reads_the_layout(megatron: Package, place: str, ranks: int, layers: str | None) -> None:
    schedule = preset("1f1b" if place == "single" else "interleaved", a_step(place, ranks, 6, fused=True))
    made = json.loads(export(schedule, "megatron", Options(layers=layers)).text)
    files = {
        "megatron.core.transformer.enums": "megatron/core/transformer/enums.py",
        "megatron.core.transformer.pipeline_parallel_layer_layout": LAYOUT,
    }
    with megatron.loaded(files, {"megatron.core": {"parallel_state": None}}) as loaded:
        read = loaded["megatron.core.transformer.pipeline_parallel_layer_layout"]
        text, pp = made["pipeline_model_parallel_layout"], made["pipeline_model_parallel_size"]
        layout = read.PipelineParallelLayerLayout(text, pp)
        layout.validate_layer_layout(made["num_layers"], 1 if layers else None)
        found = [
            [type_.name for type_ in layout.layout[stage % pp][stage // pp]] for stage in range(len(schedule.problem.layers))
        ]
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    ours = layers.replace(",", "") if layers else "E" + "t" * (sum(schedule.problem.layers) - 2) + "L"
    ours = re.sub(r"(.)\*(\d+)", lambda run: run[1] * int(run[2]), ours)
    bounds = [0, *accumulate(schedule.problem.layers)]
    expected = [ours[a:b].replace("-", "") for a, b in zip(bounds, bounds[1:], strict=False)]
    assert ["".join(letters[one] for one in stage) for stage in found] == expected


@pytest.mark.parametrize(
    ("p", "v", "m", "g"), [(2, 2, 4, 2), (2, 3, 5, 3), (3, 2, 7, 4), (4, 2, 8, 8), (4, 3, 12, 4), (3, 2, 9, 6)]
)
def test_megatron_runs_the_order_that_we_cost(megatron: Package, p: int, v: int, m: int, g: int) -> None:
    """Forwards and backwards by its table and its number of warm-up forwards, as its loop takes them."""
    names = ("get_schedule_table", "get_pp_rank_microbatches")
    rank_of = {"rank": 0}
    state = SimpleNamespace(
        get_pipeline_model_parallel_world_size=lambda: p,
        get_pipeline_model_parallel_rank=lambda: rank_of["rank"],
        get_virtual_pipeline_model_parallel_world_size=lambda: v,
    )
    theirs = megatron.functions(ORDERS, names, {"parallel_state": state})
    table = theirs["get_schedule_table"](m, v, g)
    problem = pipeline([3] * (p * v), BW=[5] * (p * v), placement=tuple(range(p)) * v, microbatches=m)
    ours = passes(interleaved_in_groups(problem, g))
    for rank in range(p):
        rank_of["rank"] = rank
        total, _, warm, rest = theirs["get_pp_rank_microbatches"](m, v, g)
        forward = [f"{chunk * p + rank}F{i}" for i, chunk in table]
        backward = [f"{(v - 1 - chunk) * p + rank}BW{i}" for i, chunk in table]
        row = forward[:warm]
        for k in range(rest):
            row += [forward[warm + k], backward[k]]
        row += backward[rest:total]
        assert ours[rank] == row


CONFIG = """
import json, sys
from dataclasses import fields
import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig as Replicas
from megatron.core.transformer.transformer_config import TransformerConfig as Config
body = json.load(sys.stdin)
known = {one.name for one in fields(Config)}, {one.name for one in fields(Replicas)}
group = body.pop("microbatch_group_size_per_virtual_pipeline_stage", None)
sizes = {name: body.pop(name) for name in ("micro_batch_size", "global_batch_size")}
replicas = {name: body.pop(name) for name in list(body) if name in known[1]}
body.pop("ckpt_format")  # an argument of training
stages = body["pipeline_model_parallel_layout"].count("|") + 1
virtual = stages // body["pipeline_model_parallel_size"]
config = Config(hidden_size=64, num_attention_heads=8, pipeline_dtype=torch.bfloat16,
    virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None, microbatch_group_size_per_vp_stage=group, **body)
made = Replicas(**replicas)
layout = config.pipeline_model_parallel_layout.layout
layers = [["".join(kind.name[0] for kind in chunk) for chunk in rank] for rank in layout]
print(json.dumps([layers, config.microbatch_group_size_per_vp_stage, config.recompute_granularity, config.sequence_parallel,
    config.tensor_model_parallel_size, made.use_distributed_optimizer, made.data_parallel_sharding_strategy]))
"""


def test_megatrons_own_configuration_takes_a_plan(tmp_path: Path) -> None:
    """Its dataclasses check what belongs together: the layout's stages, recompute flags, sequence parallelism, FSDP."""
    layout = Layout(2, 2, 2, 2, LOOP, 2, 4, recompute=FULL, sequence=1, zero=3)
    choice = chosen(Shape.gpt(1024, 8, 6, vocabulary=8192), layout)
    body = export(choice.best.schedule, "megatron", Options(plan=choice)).text
    folder = installed(("megatron-core==0.16.1",), tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", CONFIG]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    layers, group, recompute, sequence, tensor, optimizer, sharding = json.loads(done.stdout.splitlines()[-1])
    stages = [layers[stage % 2][stage // 2] for stage in range(4)]
    assert "".join(stages) == "e" + 6 * "d" + "l"
    assert [len(one) for one in stages] == list(choice.best.schedule.problem.layers)
    assert group == json.loads(body)["microbatch_group_size_per_virtual_pipeline_stage"]
    assert (recompute, sequence, tensor, optimizer, sharding) == ("full", True, 2, True, "optim_grads_params")


# --- DeepSpeed ---


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package("deepspeed==0.19.8", tmp_path_factory.mktemp("deepspeed"))


PIPE = "deepspeed/runtime/pipe"


class PipelineModule:
    """What the exported module builds on."""

    def _set_bounds(self, start: int, stop: int) -> None:
        self.bounds = (start, stop)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = None


def in_deepspeed(package: Package, text: str) -> tuple[dict[str, Any], Any]:
    """The names of an exported file, and DeepSpeed's own module of schedules, which the file has changed."""
    stand_ins = {
        "deepspeed.runtime.utils": {"call_to_str": lambda *_, **__: ""},
        "deepspeed.runtime.pipe.module": {"PipelineModule": PipelineModule},
    }
    with package.loaded({"deepspeed.runtime.pipe.schedule": f"{PIPE}/schedule.py"}, stand_ins) as loaded:
        theirs = loaded["deepspeed.runtime.pipe.schedule"]
        return run_python(text, {}), theirs


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepspeed_runs_our_order(deepspeed: Package, ranks: int) -> None:
    engine = deepspeed.text(f"{PIPE}/engine.py")
    known = set(re.findall(r"schedule\.(\w+): _exec_", engine))
    for seed in range(6):
        schedule = in_order_schedule(a_step("single", ranks, 5, fused=True, seed=seed), seed)
        names, theirs = in_deepspeed(deepspeed, export(schedule, "deepspeed").text)
        make = deepspeed.functions(f"{PIPE}/engine.py", ("_train_schedule",), {"schedule": theirs})["_train_schedule"]
        ran, programs = [], []
        for stage in range(ranks):
            made = make(SimpleNamespace(micro_batches=5, num_stages=ranks, stage_id=stage))
            assert isinstance(made, theirs.PipeSchedule)
            steps = [command for step in made for command in step]
            assert {type(command).__name__ for command in steps} <= known
            assert [type(c).__name__ for c in steps[-3:]] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
            row, program = on_stage(steps[:-3], stage, ranks, made.num_pipe_buffers())
            ran.append(row)
            programs.append(program)
        assert ran == passes(schedule)
        walk(programs, blocking=True)
        with pytest.raises(ValueError, match="this schedule has 5 microbatches"):
            names["ZbsolveSchedule"](micro_batches=4, stages=ranks, stage_id=0)


def on_stage(steps: list[Any], stage: int, stages: int, buffers: int) -> tuple[list[str], list[tuple[str, Any]]]:
    """A stage's passes, and its messages by microbatch, as DeepSpeed's engine does them: in buffers, with batches in order
    and one received gradient. Microbatches are told apart by what was loaded or received first."""
    inputs: list[int | None] = [None] * buffers
    outputs: list[int | None] = [None] * buffers
    labels: list[int | None] = [None] * buffers
    gradient: int | None = None
    loaded = received = 0
    row: list[str] = []
    program: list[tuple[str, Any]] = []
    order = [s.kwargs["buffer_id"] for s in steps if type(s).__name__ == "BackwardPass"]
    assert len(order) == 5
    for step in steps:
        word, b = type(step).__name__, step.kwargs["buffer_id"]
        if word == "LoadMicroBatch":
            if stage == 0:
                inputs[b] = loaded
            labels[b] = loaded
            loaded += 1
        elif word == "RecvActivation":
            inputs[b] = received
            program.append(("receive", (stage - 1, ("F", received))))
            received += 1
        elif word == "ForwardPass":
            assert inputs[b] is not None
            assert stage not in (0, stages - 1) or labels[b] == inputs[b]
            assert outputs[b] is None
            outputs[b] = inputs[b]
            row.append(f"{stage}F{outputs[b]}")
        elif word == "SendActivation":
            assert outputs[b] is not None
            program.append(("send", (stage + 1, ("F", outputs[b]))))
        elif word == "RecvGrad":
            assert gradient is None
            gradient = outputs[b]
            program.append(("receive", (stage + 1, ("B", gradient))))
        elif word == "BackwardPass":
            assert outputs[b] is not None
            assert stage == stages - 1 or gradient == outputs[b]
            row.append(f"{stage}BW{outputs[b]}")
            gradient, outputs[b] = None, None
        elif word == "SendGrad":
            program.append(("send", (stage - 1, ("B", inputs[b]))))
            inputs[b] = None
    assert outputs == [None] * buffers
    return row, program


@pytest.mark.parametrize(("p", "m", "comm"), [(2, 3, 4), (4, 8, 2), (4, 16, 1), (8, 32, 5), (5, 12, 0)])
def test_1f1b_is_no_slower_than_deepspeeds_own(deepspeed: Package, p: int, m: int, comm: int) -> None:
    """The same passes in the same order; only the places of messages that block both ranks differ."""
    problem = pipeline([30] * p, BW=[60] * p, microbatches=m, comm=comm)
    schedule = preset("1f1b", problem)
    _, theirs = in_deepspeed(deepspeed, export(schedule, "deepspeed").text)
    with_ours = [theirs.TrainSchedule(m, p, stage) for stage in range(p)]
    text = deepspeed.text(f"{PIPE}/schedule.py")
    own: dict[str, Any] = {"__name__": "deepspeed.runtime.pipe.schedule", "call_to_str": None}
    exec(compile(text.replace("from ..utils import call_to_str", ""), "schedule.py", "exec"), own)
    with_theirs = [own["TrainSchedule"](m, p, stage) for stage in range(p)]
    ours, usual = (blocking_time(made, comm) for made in (with_ours, with_theirs))
    assert schedule.timeline().makespan <= ours <= usual


def blocking_time(stages: list[Any], comm: int) -> int:
    """When the last stage ends: passes of 30 and 60, messages of `comm` that sender and receiver do together."""
    rows = [[type(command).__name__ for step in stage for command in step] for stage in stages]
    times = {"ForwardPass": 30, "BackwardPass": 60}
    partner = {"SendActivation": (1, "RecvActivation"), "SendGrad": (-1, "RecvGrad")}
    clock, at = [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and not row[at[rank]].startswith("Recv"):
                word = row[at[rank]]
                if word in partner:
                    other, wanted = rank + partner[word][0], partner[word][1]
                    if rows[other][at[other] : at[other] + 1] != [wanted]:
                        break
                    clock[rank] = clock[other] = max(clock[rank], clock[other]) + comm
                    at[other] += 1
                clock[rank] += times.get(word, 0)
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows]
    return max(clock)


def test_deepspeed_cuts_the_layers_as_the_schedule_does(deepspeed: Package) -> None:
    schedule = preset("1f1b", a_step("single", 3, 4, fused=True))
    names, _ = in_deepspeed(deepspeed, export(schedule, "deepspeed").text)
    assert "def _partition_layers(self, method='uniform'):" in deepspeed.text(f"{PIPE}/module.py")
    for rank in range(3):
        one = names["ZbsolvePipelineModule"]()
        one.num_stages, one._layer_specs, one.global_rank = 3, [None] * 9, rank
        one._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        one._partition_layers()
        assert one.parts == [0, 3, 6, 9]
        assert one.bounds == (3 * rank, 3 * rank + 3)
    one._layer_specs = [None] * 8
    with pytest.raises(ValueError, match="this schedule has 9 layers on 3 stages"):
        one._partition_layers()


# --- ColossalAI ---


@pytest.fixture(scope="module")
def colossalai(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package("colossalai==0.5.0", tmp_path_factory.mktemp("colossalai"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_colossalais_executor_runs_our_order(colossalai: Package, ranks: int, fused: bool) -> None:
    pytest.importorskip("torch")
    below = "colossalai.pipeline.schedule"
    files = {f"{below}.v_schedule": "v_schedule.py", f"{below}.zero_bubble_pp": "zero_bubble_pp.py"}
    files = {name: f"colossalai/pipeline/schedule/{path}" for name, path in files.items()}
    for seed in range(4):
        schedule = in_order_schedule(a_step("vee", ranks, 2 * ranks, fused, seed), seed)
        with colossalai.loaded(files, colossalai_ranks.stand_ins(colossalai_ranks.Base)) as loaded:
            nodes = run_python(export(schedule, "colossalai").text, {})["scheduler_nodes"]
            assert type(nodes[0][0]) is loaded[f"{below}.v_schedule"].ScheduledNode
            scheduler = loaded[f"{below}.zero_bubble_pp"].ZeroBubbleVPipeScheduler
            found = colossalai_ranks.run(scheduler, nodes, 2 * ranks)
        ran = [
            [f"{r if not chunk else 2 * ranks - 1 - r}{kind}{m}" for kind, chunk, m in row] for r, row in enumerate(found)
        ]
        if fused:
            ran = [re.sub(r"(\d+)B(\d+) \1W\2", r"\1BW\2", " ".join(row)).split() for row in ran]
        assert ran == passes(schedule)
