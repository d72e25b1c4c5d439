"""Commands and options that went, each with what to write now."""

from __future__ import annotations

from collections.abc import Sequence

REMOVED = {
    "frontier": "write zbsolve solve profile.json … --frontier [POINTS]",
    "partition": "zbsolve show profile.json --ranks N shows the partitions, and solve --partition alpa takes one",
    "period": "write zbsolve check schedule.json --period",
    "systems": "write zbsolve show systems",
}
PICTURES = "pictures have one look; in Python zbsolve.show.Style says another"
STEP = (
    "--ranks --microbatches --placement --partition --memory --objective --fused --no-fused --recompute --offload "
    "--vocabulary --slices --attention-exchange --shards --gathers --replicas --blocking --no-blocking"
)
WORDS = "--update --all-to-all --held-from-B --transient --frozen --message-bytes --latency --bandwidth --shard-latency "
WORDS += "--shard-bandwidth --host-bandwidth --host-bandwidth-both --host-latency --host-memory --host-ranks --host-bus "
WORDS += "--blocking --rank-factors --model"
# Command, options, what to write now.
OPTIONS = (
    ("show compare", "--size --title --palette --time-range", PICTURES),
    ("show", "--width", "say COLUMNS=90 before zbsolve"),
    ("show", "--html", "-o x.html draws the space of a plan"),
    ("compare", f"{STEP} --seconds --effort --seed", "say it to solve: --method 1f1b,auto races schedules of one step"),
    ("compare", "--with-memory", "show --with-memory draws what ranks hold"),
    ("solve", "--solver", "--method milp:highs says it"),
    ("bench", STEP, "say it behind the file: profile.json@ranks=4,microbatches=8,placement=vee"),
    ("explore", STEP, "say it in --state 'ranks=4&microbatches=8&placement=vee', or on the page"),
    ("explore", "--open", "open the address that it prints"),
    ("import", "--objective --recompute --blocking", "in Python import_schedule takes it"),
    ("numbers", WORDS, "write it as a word without --, such as bandwidth=50GB/s"),
    ("numbers", "--stages", "name the file alone: zbsolve numbers stages.csv --ranks 4 …"),
    ("numbers", "--json", "-o - writes the profile; show profile.json says what it means"),
    ("plan", "--fit --links", "--cluster a100,rows.csv,profile.json fits constants to rows and takes links from a profile"),
    ("plan", "--save-cluster", "-o cluster.json without a model writes the cluster"),
    ("plan", "--html", "-o x.html beside -o plan.json, or show plan.json -o x.html"),
    ("profile", "--diff --within", "write zbsolve compare old.json new.json [--within 5%]"),
    ("profile", "--profile", "name the base in place of MODEL: zbsolve profile base.json --from-trace TRACE"),
    ("profile", "--overrides", "write hf:LlamaConfig@config.json, or the fields behind the class"),
    ("profile", "--report --ranks --microbatches", "write zbsolve show profile.json --ranks 8 -o page.html"),
    ("profile", "--states", "--optimizer-states says it"),
    ("profile", "--neighbours", "--busy-processes says it"),
    ("run", "--replicas", "--mesh dp=2 says it"),
    ("run", "--start-timeout", "--timeout counts for the start too"),
)


def what_instead(command: str, given: Sequence[str]) -> str:
    """What to write in place of a command, or of the first of its options, that went; "" where none did."""
    if command in REMOVED:
        return f"went: {REMOVED[command]}"
    said = [word.partition("=")[0] for word in given]
    return next(
        (
            f"{word} went: {instead}"
            for commands, options, instead in OPTIONS
            for word in said
            if command in commands.split() and word in options.split()
        ),
        "",
    )
