"""`zbsolve plan`: how to split a model over devices."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..profile.profile import Profile
from ..util.errors import BadInput
from ..util.files import document_kind, write_text
from . import tools

if TYPE_CHECKING:
    from ..planner.answers import Front
    from ..planner.candidate import Candidate
    from ..planner.cluster import Cluster
    from ..planner.plan_file import Plan
    from ..planner.profiled_model import Model

_Fields = dict[str, Any]
ESTIMATED = (1, 4, 32)  # sequences a microbatch: a model by name is estimated with each of these sizes
FURTHER_SHARE = 0.25  # of the plan's search time, for each change and each point of a front


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "model",
        nargs="*",
        help="a name such as gpt-175b or llama3-70b@sequence=4096, or any that profile --estimate takes; or profile.json … "
        "of one model, each with other tensor ranks or sequences a microbatch",
    )
    parser.add_argument("--devices", type=int, help="all of them")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument(
        "--cluster",
        default="h100",
        help="a100, h100, h200, b200, mi300x, or a cluster.json; after a comma also rows.csv, measured steps to fit its "
        "constants to, and profile.json, whose collectives (profiled under torchrun) are its links",
    )
    parser.add_argument("--memory", help="of a device, such as 80GiB (default: the cluster's)")
    parser.add_argument(
        "--for",
        dest="engine",
        metavar="ENGINE",
        help="only layouts that it can run, with its own orders: megatron, galvatron, torchtitan, torch, zbsolve",
    )
    parser.add_argument(
        "--fix", metavar="FIELD=VALUE,…", help="only such layouts, such as tp=8,pp=8,dp=2 or placement=loop,recompute=full"
    )
    tools.add_search_limits(parser, 60.0, "seconds to search at most", "plan")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        help="the plan again with one number changed, such as memory=96GiB, devices=72, nodes+1, between.bandwidth=2x, or "
        "links (each twice as fast), in a quarter of the time in addition; may be given more than once",
    )
    parser.add_argument(
        "--front",
        metavar="OVER",
        help="the shortest step over memory or devices, memory=40GiB,60GiB or devices=32,64; a quarter of the time a point",
    )
    tools.add_workers(parser)
    tools.add_outputs(
        parser,
        "the plans within 1 %%",
        "plan.json, which solve, run, export and show read, or - for standard output; x.html: a page of the space, "
        "value and bound of each layout, and by what it was pruned; without a model: the cluster",
    )


def command(options: argparse.Namespace) -> int:
    """Plan, write the plan, print it."""
    from ..planner.answers import changed_cases, parse_front
    from ..planner.case import Case
    from ..planner.plan_file import model_of
    from ..planner.planning import compiled, memory_of, plan
    from ..planner.space import parse_only
    from ..show.plan_report import plan_as_page, plan_as_text

    cluster = _cluster(options.cluster)
    if not options.model:
        if not options.output:
            raise BadInput("model: name one, such as gpt-175b or llama3-70b, or its profiles")
        for path in options.output:
            cluster.save(path)
        return 0
    for name in ("devices", "batch"):
        if getattr(options, name) is None:
            raise BadInput(f"--{name} is needed")
    model, limits = model_of(options.model, partial(_estimated, cluster=cluster)), tools.search_limits(options)
    only = parse_only(options.engine, options.fix)
    base = Case(model, options.devices, options.batch, cluster, memory_of(cluster, options.memory), only)
    changed_cases(base, options.what_if)  # reports bad changes before the search
    over = parse_front(options.front) if options.front else None
    with tools.workers_of(options, "plan") as workers, tools.searching("plan", further=compiled) as (_, pressed):
        limits |= {"progress": tools.progress_line, "stop": pressed, "workers": workers}
        best = plan(model, options.devices, options.batch, cluster, memory=options.memory, only=only, **limits)
        best, texts, fields = _further(best, options.what_if, over, limits)

    def save(path: str) -> None:
        if path.endswith(".html"):
            write_text(path, plan_as_page(best.space))
        else:
            best.save(path)

    saves = [partial(save, path) for path in options.output]
    tools.tell(options, lambda: _as_json(best) | fields, lambda: "\n".join([plan_as_text(best), *texts]), *saves)
    return 0


def _further(plan: Plan, changes: list[str], over: Front | None, limits: dict[str, Any]) -> tuple[Plan, list[str], _Fields]:
    """Plan the changes and the front. Returns the plan (a better one, if found on the way), and both as texts and fields."""
    from ..planner.answers import plan_front, what_if
    from ..show.plan_report import answer_as_json, front_as_text, what_if_as_text

    texts: list[str] = []
    fields: _Fields = {}
    limits = limits | {name: limits[name] * FURTHER_SHARE for name in ("seconds", "effort") if name in limits}
    if changes:
        plan, answers = what_if(plan, changes, **limits)
        texts, fields = [what_if_as_text(plan, answers)], {"what_if": [answer_as_json(plan, answer) for answer in answers]}
    if over:
        front = plan_front(plan, *over, **limits)
        plan, texts, fields = front.plan, [*texts, front_as_text(front)], {**fields, "front": front.to_json()}
    return plan, texts, fields


def _estimated(spec: str, cluster: Cluster) -> Model:
    """A model by a name that `profile` knows, from its estimates on the cluster's devices. Raises BadInput."""
    from ..planner.profiled_model import ProfiledModel
    from ..planner.shape import shape_by_name

    tools.need_torch()
    from profiler.devices import DEVICES
    from profiler.roofline import estimates

    from ..models.by_name import NAMES, knows

    if not knows(spec):
        return shape_by_name(spec, NAMES)  # raises BadInput with the known names
    if cluster.name not in DEVICES:
        raise BadInput(f"model '{spec[:60]}': estimates know {', '.join(DEVICES)}, not '{cluster.name}': profile it")
    with redirect_stdout(sys.stderr):  # what the model prints
        profiles = estimates(spec, cluster.name, ESTIMATED, cluster.node)
    return ProfiledModel.of(profiles, [f"model '{spec[:60]}'"] * len(profiles))


def _cluster(text: str) -> Cluster:
    """The cluster of --cluster: a name or a file, optionally followed by files of measured steps, to which its constants are
    fitted, and profiles, whose links it gets. Raises BadInput."""
    from ..planner.cluster import cluster_of, with_links_of
    from ..planner.fitting import fit, read_rows

    name, *further = text.split(",")
    cluster = cluster_of(name)
    for path in further:
        if document_kind(path) == "profile":
            cluster = with_links_of(Profile.load(path), cluster, path)
        else:
            cluster = replace(fit(read_rows(path), cluster), name=cluster.name)
    return cluster


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "source": plan.cluster.source,
        "error": plan.cluster.error,
        "model": plan.shape.source,
        "layouts": len(plan.bounds.rule),
        "open": plan.open,
        "bound": plan.bound,
        "gap": plan.gap,
        "plans": [_candidate(plan, candidate) for candidate in plan.near],
    }


def _candidate(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    from ..planner.bounds.space_bounds import RULES

    row = plan.number(candidate)
    return {
        "layout": candidate.layout.numbers,
        "step": candidate.value,
        "mfu": plan.mfu(candidate),
        "tokens_per_second_and_device": plan.tokens(candidate) if plan.shape.sequence else None,
        "memory": candidate.memory(),
        "bubble": candidate.schedule.timeline().bubble_rate,
        "exposed_exchange": candidate.exposed,
        "behind": candidate.behind,
        "bound": float(plan.bounds.step[row]),
        "bounded_by": RULES[plan.bounds.rule[row]],
    }
