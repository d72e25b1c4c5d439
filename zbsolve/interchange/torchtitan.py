"""torchtitan: the CSV that torch's runtime reads, and flags for the order, the partition and a plan's layout
(`distributed/pipeline_parallel.py`, `config/configs.py` of 0.3.0 and of main in August 2026). Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..planner.candidate import Choice
from ..planner.engines import target
from ..planner.layout import RECOMPUTE, SELECTIVE
from ..problem import Problem
from ..problem.placement import describe
from ..schedule import Schedule
from ..util.errors import BadInput
from .exports import Export, Options, layer_letters, stage_letters
from .order import Order, Refused
from .torch_csv import TorchOrder, torch_order

# Placement → the schedule's name in torchtitan, which sets its placement. With a CSV the name sets nothing else.
SCHEDULES = {"single": "1F1B", "loop": "PipelineScheduleMulti", "vee": "ZBVZeroBubble"}
MODULES = {"E": ("tok_embeddings",), "L": ("norm", "lm_head")}  # of its decoders; "t" is layers.0, layers.1, …
PARTITION = "--parallelism.module_fqns_per_model_part"
NO_CHECKPOINTING = "activation-checkpoint:none"
SPLIT_NEEDS = (
    " (selective checkpointing, its default, ends in an error where torch splits the backward: 'Trying to backward an "
    "extra time'; with `import zbsolve.exec.torchtitan` in your configuration it runs. Any checkpointing makes forwards "
    "again that the schedule does not count)"
)
TARGET = target("torchtitan")


@dataclass(frozen=True)
class Titan:
    """torchtitan's flags. flags: for every version. counts: version → its flags for the number of microbatches. last: words
    after all flags ("": none). parts: stage → names of its modules; None if not known, and `why`. says: differences between
    torchtitan and the plan, a line each."""

    flags: str
    counts: dict[str, str]
    last: str
    parts: tuple[tuple[str, ...], ...] | None
    why: str = ""
    says: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """For programs."""
        return {"flags": self.flags, **self.counts, "last": self.last, "module_fqns_per_model_part": self.parts}

    def notes(self) -> list[str]:
        """Notes for the user of torchtitan, a line each."""
        lines = [f"torchtitan: {self.flags}"]
        lines += [f"torchtitan {version}, also: {flags}" for version, flags in self.counts.items()]
        if self.parts is None:
            lines.append(f"torchtitan: {self.why}: give each stage's modules yourself with {PARTITION}")
        else:
            lines.append("torchtitan's modules are those of its decoders (tok_embeddings, layers.N, norm, lm_head)")
        if self.last:
            lines.append(f"torchtitan, after all flags: {self.last}{SPLIT_NEEDS if self.last == NO_CHECKPOINTING else ''}")
        lines += self.says
        return lines


def write(schedule: Schedule, options: Options) -> Export:
    """The CSV of a schedule, and torchtitan's flags for it or its plan. Raises as `torch_order` and `titan_for`."""
    if options.plan is not None and (reason := TARGET.lacks(options.plan.best.layout)):
        raise Refused(reason)
    made = torch_order(schedule, defer_recv=options.defer_recv, engine=TARGET)
    return replace(described(made, options), text=made.csv, rows=[list(row) for row in made.rows])


def described(made: TorchOrder, options: Options) -> Export:
    """The export of an order without the file's text: its notes and facts. Raises as `titan_for`."""
    titan = titan_for(made, options)
    return Export("", (*made.notes(), *titan.notes()), made.facts() | titan.facts())


def titan_for(made: TorchOrder, options: Options) -> Titan:
    """torchtitan's flags to run an order from the file `options.path`. options.layers: the kind of each layer. Raises
    BadInput for layers that the schedule or torchtitan does not have."""
    order = made.order
    parts, why = modules_of(order.schedule.problem, options.layers)
    flags = _pipeline_flags(order, options.path, parts)
    count, last = len(made.microbatches), NO_CHECKPOINTING if order.split else ""
    if options.plan is None:
        local, microbatch, number = _counts(count, 1)
        return Titan(flags, {"0.3.0": f"{local} {microbatch}", "main": number}, last, parts, why)
    layout = options.plan.best.layout
    flags = f"{flags} {layout_flags(options.plan)}" if layout.pp > 1 else layout_flags(options.plan)
    local, microbatch, number = _counts(count if layout.pp > 1 else 1, layout.size)
    counts = {"0.3.0": local, "main": local}
    if layout.pp > 1:
        counts = {"0.3.0": f"{local} {microbatch}", "main": f"{local} {number}"}
    last = f"activation-checkpoint:{RECOMPUTE[layout.recompute]}"
    says = ("torchtitan's selective checkpointing keeps other activations than the plan counts",)
    return Titan(flags, counts, last, parts, why, says if layout.recompute == SELECTIVE else ())


def _pipeline_flags(order: Order, path: str, parts: tuple[tuple[str, ...], ...] | None) -> str:
    name = SCHEDULES[describe(order.placement).rstrip("0123456789")]
    flags = (
        f"--parallelism.pipeline_parallel_degree {len(order.rows)} --parallelism.pipeline_parallel_schedule {name} "
        f"--parallelism.pipeline_parallel_schedule_csv {path}"
    )
    return flags if parts is None else f"{flags} {PARTITION} {' '.join(map(','.join, parts))}"


def _counts(count: int, size: int) -> tuple[str, str, str]:
    """Flags for `count` microbatches of `size` sequences: a replica's batch, a microbatch's size, their number."""
    each = f"--parallelism.pipeline_parallel_microbatch_size {size}"
    return f"--training.local_batch_size {count * size}", each, f"--parallelism.num_pp_microbatches {count}"


def layout_flags(plan: Choice) -> str:
    """torchtitan's flags for the parts of a plan's layout other than the pipeline. It shards with FSDP: parameters are kept
    whole after the forward (ZeRO's stage 2) or sharded again (stage 3)."""
    layout = plan.best.layout
    shard, copies = (layout.dp, 1) if layout.zero else (1, layout.dp)
    names = {
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.data_parallel_replicate_degree": copies,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "training.global_batch_size": plan.batch,
        **({"training.seq_len": plan.shape.sequence} if plan.shape.sequence else {}),  # a profile may lack it
    }
    parallel = [] if layout.tp == 1 or layout.sequence else ["--parallelism.no-enable_sequence_parallel"]
    return " ".join([*(f"--{name} {value}" for name, value in names.items()), *parallel])


def modules_of(problem: Problem, layers: str | None) -> tuple[tuple[tuple[str, ...], ...] | None, str]:
    """torchtitan's names of each stage's modules; or None and why. Raises BadInput if `layers` does not fit the stages."""
    if layers is None:
        if not problem.layers:
            return None, "the schedule does not say how many layers its stages have"
        if problem.source.startswith("given") or sum(problem.layers) <= len(problem.layers):
            return None, "the schedule's layers seem to be whole stages (where they are not, --layers says what each is)"
    letters = layer_letters(problem, layers, "torchtitan")
    if "m" in letters:
        raise BadInput("layers: torchtitan's decoders have no multi-token prediction (m)")
    number, parts = 0, []
    for stage, chars in enumerate(stage_letters(letters, problem.layers)):
        names: list[str] = []
        for letter in chars:
            names += MODULES.get(letter, (f"layers.{number}",))
            number += letter == "t"
        if not names:
            if layers is None:
                return None, f"stage {stage} has no layers"
            raise BadInput(f"layers '{layers[:40]}': stage {stage} has none of torchtitan's modules")
        parts.append(tuple(names))
    return tuple(parts), ""
