"""Errors that are planted one at a time, and the test that sees each; `python -m tests.planted` writes the notes' page.

Where code changed, so that a row's text is not there any more, the row is named and has to be mended.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from .support.house import ROOT

PAGE = ROOT / "docs" / "notes" / "planted.md"
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info")
HEAD = """# Which planted errors do tests catch?

Planted one at a time by `python -m tests.planted`, whose table has the text of each."""
SECONDS = 600  # for one file of tests


class Planted(NamedTuple):
    """What is wrong, where; the text that is there, and the one in its place; the tests that should see it."""

    error: str
    file: str
    right: str
    wrong: str
    tests: str


ROWS = (
    Planted(
        "bound: a stated bound is believed where CP-SAT refutes nothing",
        "zbsolve/ilp/proof_check.py",
        "return Bound(bound.value, ALL_ORDERS, WHOLE) if refutes(",
        "return Bound(bound.value, ALL_ORDERS, WHOLE) if True or refutes(",
        "tests/ilp/test_solvers.py",
    ),
    Planted(
        "verifier: memory at capacity + 1 is let through",
        "zbsolve/verifier.py",
        "over = np.flatnonzero(held > room[home])",
        "over = np.flatnonzero(held > room[home] + 1)",
        "tests/test_model.py",
    ),
    Planted(
        "verifier: overlaps in a timeline are not seen",
        "zbsolve/verifier.py",
        "            if begin < stop:\n",
        "            if begin < stop - 1:\n",
        "tests/test_model.py",
    ),
    Planted(
        "verifier: a bound above the value is believed",
        "zbsolve/verifier.py",
        "if certificate.bound > value:",
        "if certificate.bound > 2 * value:",
        "tests/test_model.py",
    ),
    Planted(
        "verifier: collectives in orders that differ are accepted",
        "zbsolve/verifier.py",
        "return (*_apart(problem, arcs), *_memory(",
        "return (*_memory(",
        "tests/exec/test_vocabulary.py",
    ),
    Planted(
        "memory: takes at a time are counted before frees",
        "zbsolve/schedule/timeline.py",
        "np.where(end == start, turn + 1, 0), turn])",
        "np.where(end == start, turn + 1, turn.max() + 2), turn])",
        "tests/test_model.py",
    ),
    Planted(
        "recompute: X frees one byte too many",
        "zbsolve/build/recompute.py",
        "waits = Edges.of(fs, place[fs], bytes=left[fs])",
        "waits = Edges.of(fs, place[fs], bytes=np.maximum(left[fs] - 1, 0))",
        "tests/build/test_recompute.py",
    ),
    Planted(
        "offload: host bytes are one short",
        "zbsolve/build/offload.py",
        "chain += Edges.of(out, back, bytes=total, pool",
        "chain += Edges.of(out, back, bytes=total - 1, pool",
        "tests/build/test_offload.py",
    ),
    Planted(
        "updates: forwards wait for an update too late",
        "zbsolve/build/updates.py",
        "behind.tolist(), size.tolist(), strict=True)",
        "(behind + 1).tolist(), size.tolist(), strict=True)",
        "tests/build/test_updates.py",
    ),
    Planted(
        "sharding: RS does not wait for the last W",
        "zbsolve/build/sharded.py",
        "users = np.union1d(np.concatenate(home.gradients), [first])",
        "users = np.union1d(np.concatenate(home.gradients)[:-1], [first])",
        "tests/build/test_sharded.py",
    ),
    Planted(
        "message: an activation goes to the wrong rank",
        "zbsolve/exec/lowering.py",
        "Message(names[a], names[b], int(p.rank[a]), int(p.rank[b]), behind",
        "Message(names[a], names[b], int(p.rank[a]), (int(p.rank[a]) + 1) % problem.ranks, behind",
        "tests/exec/test_lowering.py",
    ),
    Planted(
        "message: two microbatches of a pair are swapped on arrival",
        "zbsolve/exec/transport/mailbox.py",
        "            self._receive(waiting.popleft(), agreed)",
        "            self._receive(waiting.pop(), agreed)",
        "tests/exec/test_pipeline.py",
    ),
    Planted(
        "message: formats are kept by channel alone",
        "zbsolve/exec/transport/mailbox.py",
        "return message.channel, self._numbers[message.part]",
        "return message.channel, 0",
        "tests/exec/test_pipeline.py",
    ),
    Planted(
        "gradient: replicas' sums are not divided",
        "zbsolve/exec/exchange.py",
        "            total.div_(count)\n",
        "            total.div_(1)\n",
        "tests/exec/test_replicas.py",
    ),
    Planted(
        "gradient: FSDP's mean is over the shards alone",
        "zbsolve/exec/sharding/stage.py",
        "        pieces.div_(ranks)\n",
        "        pieces.div_(bucket.parameters[0].shard_group.size())\n",
        "tests/exec/test_sharded_parameters.py",
    ),
    Planted(
        "gradient: the weight of uneven microbatches is lost",
        "zbsolve/exec/backward/stage.py",
        "unit = self.unit if weight == 1 else self.unit * weight",
        "unit = self.unit",
        "tests/exec/test_loop.py",
    ),
    Planted(
        "gradient: auxiliary losses count twice",
        "zbsolve/exec/backward/layer_split.py",
        "torch.full_like(kept.extra[0], unit)",
        "torch.full_like(kept.extra[0], 2 * unit)",
        "tests/exec/test_auxiliary.py",
    ),
    Planted(
        "gradient: a norm counts tied parameters twice",
        "zbsolve/exec/loop/gradients.py",
        "if p.grad is not None and id(p) not in skipped]",
        "if p.grad is not None]",
        "tests/exec/test_loop.py",
    ),
    Planted(
        "gradient: earlier gradients of a shared parameter are dropped",
        "zbsolve/exec/exchange.py",
        "p.grad = kept if p.grad is None else kept.add_(p.grad)",
        "p.grad = kept if p.grad is None else kept.mul_(0).add_(p.grad)",
        "tests/exec/test_systems.py",
    ),
    Planted(
        "gradient: a convolution's bias has none",
        "zbsolve/exec/backward/split.py",
        "[False, True, _trained(bias)], dy, x, weight.to(dy.dtype), bias, args",
        "[False, True, False], dy, x, weight.to(dy.dtype), bias, args",
        "tests/exec/test_split.py",
    ),
    Planted(
        "dropout: a layer's seed is that of its place on the rank",
        "zbsolve/exec/backward/layer_split.py",
        "        seed_layer(seed, i)\n",
        "        seed_layer(seed, i - first)\n",
        "tests/exec/test_run.py",
    ),
    Planted(
        "vocabulary: label smoothing is over the shard's words, not all",
        "zbsolve/exec/vocabulary/shard.py",
        "each = each - epsilon / shard.vocabulary * sums[1]",
        "each = each - epsilon / len(shard.weight) * sums[1]",
        "tests/exec/test_vocabulary_math.py",
    ),
    Planted(
        "vocabulary: T adds a label's point at the wrong word",
        "zbsolve/exec/vocabulary/shard.py",
        "gradient.scatter_add_(1, kept.index[:, None], merged",
        "gradient.scatter_add_(1, (kept.index[:, None] + 1) % gradient.shape[1], merged",
        "tests/exec/test_vocabulary_math.py",
    ),
    Planted(
        "slices: a window hides one chunk more",
        "zbsolve/exec/slices/attention.py",
        "chunk.end <= own.start - rule.window + 1:",
        "chunk.end <= own.start - rule.window + 2:",
        "tests/exec/test_slices_math.py",
    ),
    Planted(
        "slices: gradients of values from later slices are lost",
        "zbsolve/exec/slices/attention.py",
        "piece.chunk.add((dk, dv), piece.tokens)",
        "piece.chunk.add((dk, dv * 0), piece.tokens)",
        "tests/exec/test_slices_math.py",
    ),
    Planted(
        "slices: a loss's gradient is not compared",
        "zbsolve/exec/slices/comparing.py",
        "if apart is None and alike:",
        "if alike:",
        "tests/exec/test_slices_math.py tests/exec/test_slices_compared.py",
    ),
    Planted(
        "updates: gradients of one group reach the next",
        "zbsolve/exec/updates.py",
        "gradients = self._gradients.pop(use.group)",
        "gradients = self._gradients[use.group + 1] = self._gradients.pop(use.group)",
        "tests/exec/test_systems.py",
    ),
    Planted(
        "offload: parameters are moved away too",
        "zbsolve/exec/offload/keeper.py",
        "if part.device != self.device or key in self._fixed or not",
        "if part.device != self.device or not",
        "tests/exec/test_offload.py",
    ),
    Planted(
        "memory: messages that wait are not predicted",
        "zbsolve/exec/memory.py",
        "held = held + handover.waiting(program.rank, np.array(each, np.int64))",
        "held = held + 0 * handover.waiting(program.rank, np.array(each, np.int64))",
        "tests/exec/test_lowering.py",
    ),
    Planted(
        "checkpoint: entries that are no tensors are lost",
        "zbsolve/exec/loop/checkpoint.py",
        'facts["entries"][key][name, entry] = local(value) if isinstance(value, Tensor) else value',
        'facts["entries"][key][name, entry] = 0 * local(value) if isinstance(value, Tensor) else value',
        "tests/exec/test_checkpoint.py",
    ),
    Planted(
        "checkpoint: random numbers are those of the moment",
        "zbsolve/exec/loop/checkpoint.py",
        '"random": random_state(),',
        '"random": [],',
        "tests/exec/test_checkpoint.py",
    ),
    Planted(
        "post-validation: a step that was too large is made again unscaled",
        "zbsolve/exec/post_validation.py",
        "scale_all(now, self._scale(whole))",
        "scale_all(now, 1.0)",
        "tests/exec/test_optimizer.py",
    ),
    Planted(
        "post-validation: the optimizer's state is not taken back",
        "zbsolve/exec/post_validation.py",
        "optimizer.state.update(zip(self._keys, self._state, strict=True))",
        "pass",
        "tests/exec/test_optimizer.py",
    ),
    Planted(
        "evaluation: rows of a last, smaller microbatch count more",
        "zbsolve/exec/loop/evaluation.py",
        "rows = {m: batch.rows[start + m] for m in range(count)} if with_loss else {}",
        "rows = {m: 1.0 for m in range(count)} if with_loss else {}",
        "tests/exec/test_loop.py",
    ),
    Planted(
        "CSV: W is written as I",
        "zbsolve/interchange/torch_csv.py",
        '"W": "W", "BW": "B"}',
        '"W": "I", "BW": "B"}',
        "tests/interchange/test_torch_csv.py",
    ),
    Planted(
        "CSV: messages that overtake are not seen",
        "zbsolve/interchange/torch_csv.py",
        "strict=True) if x != y), None)",
        "strict=True) if x is None), None)",
        "tests/interchange/test_torch_csv.py",
    ),
    Planted(
        "export: relabelled microbatches say the inverse order",
        "zbsolve/interchange/order.py",
        "number = {ours: i for i, ours in enumerate(order)}",
        "number = {i: ours for i, ours in enumerate(order)}",
        "tests/interchange/test_torch_csv.py",
    ),
    Planted(
        "DeepSpeed: a buffer is free one step early",
        "zbsolve/interchange/deepspeed.py",
        "last = {event.cell.microbatch: i for i, event in enumerate(row)}",
        "last = {event.cell.microbatch: i for i, event in enumerate(row[:-1])}",
        "tests/interchange/test_packages.py tests/interchange/test_exports.py",
    ),
    Planted(
        "profile: PO-H offloads half of the stages, rounded down",
        "zbsolve/features/offload.py",
        "first = -(-len(here) // 2)",
        "first = len(here) // 2",
        "tests/profile/test_offload.py",
    ),
    Planted(
        "page: copies count as work",
        "zbsolve/show/schedule_report.py",
        "busy = np.where(problem.computing, timeline.end - timeline.start, 0)",
        "busy = timeline.end - timeline.start",
        "tests/show/test_pages.py tests/show/test_show.py",
    ),
    Planted(
        "page: the share idle is that of the first rank",
        "zbsolve/show/schedule_report.py",
        'f"{1 - w / value:.1%}" for w in work.tolist()',
        'f"{1 - work[0] / value:.1%}" for w in work.tolist()',
        "tests/show/test_pages.py tests/show/test_show.py",
    ),
    Planted(
        "page: memory in the chart frees bytes that the pass takes",
        "zbsolve/show/schedule_report.py",
        '"freed": problem.freed,',
        '"freed": problem.taken,',
        "tests/show/test_pages.py tests/show/test_show.py tests/show/test_schedule_browser.py",
    ),
)


def seen_by(row: Planted, tree: Path) -> str:
    """The first test that fails with the error planted in a copy of the tree; "" where none does. Raises ValueError where
    the text is not there once."""
    path = tree / row.file
    text = path.read_text(encoding="utf-8")
    if text.count(row.right) != 1:
        raise ValueError(f"{row.file}: '{row.right.strip()}' is there {text.count(row.right)} times")
    path.write_text(text.replace(row.right, row.wrong), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *row.tests.split()]
    try:
        env = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    found = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[| - |$)", done.stdout, re.MULTILINE)
    if found is None and done.returncode:
        raise ValueError(f"{row.error}: {done.stdout[-2000:]}")
    return found[1] if found else ""


def main() -> None:
    """Plant each error, and write the page; with words: only errors that have them, and nothing is written."""
    chosen = [row for row in ROWS if not sys.argv[1:] or any(word in row.error for word in sys.argv[1:])]
    lines, missed = [], []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        for row in chosen:
            test = seen_by(row, tree)
            sys.stdout.write(f"{row.error} → {test or 'NOT SEEN'}\n")
            (lines if test else missed).append(f"| `{row.file}` | {row.error} | {f'`{test}`' if test else row.tests} |")
    if len(chosen) == len(ROWS):
        table = "| planted in | error | first test that fails |\n|---|---|---|\n"
        body = f"{HEAD} {len(lines)} of {len(ROWS)} are seen.\n\n{table}" + "\n".join(lines) + "\n"
        others = table.replace("first test that fails", "tried") + "\n".join(missed)
        more = f"\nNot seen by the files tried:\n\n{others}\n" if missed else ""
        PAGE.write_text(body + more, encoding="utf-8")


if __name__ == "__main__":
    main()
