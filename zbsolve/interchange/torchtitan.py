"""torchtitan's flags for an order and for the partition (`distributed/pipeline_parallel.py`, `config/configs.py` of 0.3.0
and of main in August 2026). Pure: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..placement import describe
from ..problem import Problem
from ..util.errors import BadInput
from .layer_kinds import layer_letters, stage_letters
from .order import Order

# What makes torchtitan lay stages out in our placement; it reads nothing else from the name when there is a CSV.
SCHEDULES = {"single": "1F1B", "loop": "PipelineScheduleMulti", "vee": "ZBVZeroBubble"}
MODULES = {"E": ("tok_embeddings",), "L": ("norm", "lm_head")}  # of its decoders; "t" is layers.0, layers.1, …
PARTITION = "--parallelism.module_fqns_per_model_part"
NO_CHECKPOINTING = "activation-checkpoint:none"


@dataclass(frozen=True)
class Titan:
    """What torchtitan is told. flags: for every version. counts: version → its flags for the number of microbatches. last:
    what comes behind all flags ("": nothing). parts: stage → names of its modules; None where nobody can say, and why."""

    flags: str
    counts: dict[str, str]
    last: str
    parts: tuple[tuple[str, ...], ...] | None
    why: str = ""

    def facts(self) -> dict[str, object]:
        """For programs."""
        return {"flags": self.flags, **self.counts, "last": self.last, "module_fqns_per_model_part": self.parts}

    def notes(self) -> list[str]:
        """What whoever starts torchtitan must know, a line each."""
        found = [f"torchtitan: {self.flags}"]
        found += [f"torchtitan {version}, also: {flags}" for version, flags in self.counts.items()]
        if self.parts is None:
            found.append(f"torchtitan: {self.why}: give each stage's modules yourself with {PARTITION}")
        else:
            found.append("torchtitan's modules are those of its decoders (tok_embeddings, layers.N, norm, lm_head)")
        if self.last:
            found.append(
                f"torchtitan, behind all flags: {self.last} (selective checkpointing, its default, ends in an error where "
                "torch splits the backward: 'Trying to backward an extra time'; with `import zbsolve.exec.torchtitan` in "
                "your configuration it runs. Any checkpointing makes forwards again that the schedule does not count)"
            )
        return found


def titan_for(order: Order, path: str, layers: str | None) -> Titan | None:
    """What torchtitan is told to run `order` from the file `path`; None where it cannot lay the stages out so. layers: what
    each layer is, as in `--layers`. Raises BadInput for layers that are not the schedule's, or that torchtitan lacks."""
    shape, ranks = describe(order.placement), len(order.rows)
    name = SCHEDULES.get(shape.rstrip("0123456789"))
    parts, why = modules_of(order.schedule.problem, layers)
    if name is None or (name == SCHEDULES["vee"] and shape != "vee"):
        return None
    flags = (
        f"--parallelism.pipeline_parallel_degree {ranks} --parallelism.pipeline_parallel_schedule {name} "
        f"--parallelism.pipeline_parallel_schedule_csv {path}"
    )
    if parts is not None:
        flags += f" {PARTITION} {' '.join(map(','.join, parts))}"
    count = len(order.microbatches)
    counts = {
        "0.3.0": f"--training.local_batch_size {count} --parallelism.pipeline_parallel_microbatch_size 1",
        "main": f"--parallelism.num_pp_microbatches {count}",
    }
    return Titan(flags, counts, NO_CHECKPOINTING if order.split else "", parts, why)


def modules_of(problem: Problem, layers: str | None) -> tuple[tuple[tuple[str, ...], ...] | None, str]:
    """Each stage's modules by torchtitan's names, or None and why not. Raises BadInput where `layers` is given and is not
    what the schedule's stages have."""
    if layers is None:
        if not problem.layers:
            return None, "the schedule does not say how many layers its stages have"
        if problem.source.startswith("given") or sum(problem.layers) <= len(problem.layers):
            return None, "the schedule's layers seem to be whole stages (where they are not, --layers says what each is)"
    letters = layer_letters(problem, layers, "torchtitan")
    if "m" in letters:
        raise BadInput("layers: torchtitan's decoders have no multi-token prediction (m)")
    number, parts = 0, []
    for stage, mine in enumerate(stage_letters(letters, problem.layers)):
        names: list[str] = []
        for letter in mine:
            names += MODULES.get(letter, (f"layers.{number}",))
            number += letter == "t"
        if not names:
            if layers is None:
                return None, f"stage {stage} has no layers"
            raise BadInput(f"layers '{layers[:40]}': stage {stage} has none of torchtitan's modules")
        parts.append(tuple(names))
    return tuple(parts), ""
