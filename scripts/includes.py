"""Checks the includes of the repository's files: each points to a folder of a lower level or to
another file of the same folder, and no chain of includes is a cycle. A header and its source are
one module.

    python3 scripts/includes.py FILE...   prints each fault as file:line and fails when it finds one

A program (a file in the top folder, scripts/ or test/) has the highest level.
"""
import graphlib
import os
import re
import sys

LEVELS = ["base", "kernels", "model", "ranks", "dataloader", "checkpoints", "train"]
INCLUDE = re.compile(r'^#\s*include "([^"]+)"')


def level(path):
    folder = path.split("/")[0]
    return LEVELS.index(folder) if folder in LEVELS else len(LEVELS)


def includes(path):
    """Line number and path of each file of the repository that `path` includes."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            match = INCLUDE.match(line)
            target = match and os.path.normpath(os.path.join(os.path.dirname(path), match[1]))
            if target and os.path.exists(target):
                yield number, target


def main(files):
    if "--help" in files:
        print(__doc__)
        return 0
    faults, graph = 0, {}
    for path in files:
        module = os.path.splitext(path)[0]
        for number, target in includes(path):
            graph.setdefault(module, set()).add(os.path.splitext(target)[0])
            if level(target) > level(path):
                print(f"{path}:{number}: {target} is above {path.split('/')[0]}/")
                faults += 1
    try:
        graphlib.TopologicalSorter({one: others - {one} for one, others in graph.items()}).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1][::-1] # each includes the next
        print(f"{cycle[0]}: include cycle: {' -> '.join(cycle)}")
        faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
