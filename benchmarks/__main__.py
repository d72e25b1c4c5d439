"""List the tables from which the numbers of the docs come, or run one or all.

    python -m benchmarks                              the scripts and their tables
    python -m benchmarks SCRIPT [TABLE] [OPTION …]    makes a table's file anew; without TABLE, all of the script's
    python -m benchmarks all                          makes all anew, which takes many hours

A table that needs something missing (a GPU, another checkout, a browser) says so.
"""

import signal
import subprocess
import sys
from textwrap import shorten

from .harness import scripts, tables_of


def main(words: list[str]) -> int:
    """The exit code: 1 if a result is wrong."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for script in scripts():
            for name, table in tables_of(script).items():
                print(f"{script:14} {name:20} {shorten(table.text.partition('. ')[0], 88)}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes end, too
    script, *rest = words
    if script != "all" and script not in scripts():
        sys.exit(f"no script is called {script!r}: {', '.join(scripts())}, all")
    several = scripts() if script == "all" else [script]
    jobs = [(one, name) for one in several for name in tables_of(one)]
    if rest and (script, rest[0]) in jobs:
        jobs, rest = [(script, rest.pop(0))], rest
    if len(jobs) == 1:
        ((script, name),) = jobs
        table = tables_of(script)[name]
        results = table.main(rest)
        return int(table.ending is not None and bool(table.ending(results)))
    if rest:
        sys.exit(f"{script} has several tables, say which one: {', '.join(name for _, name in jobs)}")
    codes = {job: subprocess.run([sys.executable, "-m", "benchmarks", *job], check=False).returncode for job in jobs}
    for (one, name), code in codes.items():
        print(f"{one:14} {name:20} {'done' if code == 0 else f'exit code {code}'}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
