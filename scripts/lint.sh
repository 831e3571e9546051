#!/usr/bin/env bash
# make lint: the layout of .clang-format, what cppcheck, shellcheck and ruff find, and includes
# between folders (scripts/includes.py). Prints each violation as file:line and fails if it finds one.
set -u
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.." || exit 1
faults=0

# Files that git tracks or would add.
files() {
    git ls-files --cached --others --exclude-standard -- "$@" | while IFS= read -r file; do
        if [[ -e $file ]]; then echo "$file"; fi
    done
}

# The scripts whose first line names such a program, whatever their own name.
scripts_of() {
    files .ci/run scripts test | sort -u | while IFS= read -r file; do
        if head -n 1 "$file" | grep -qaE "^#!.*$1\$"; then echo "$file"; fi
    done
}

check() {
    echo "== $1"
    "${@:2}" || faults=$((faults + 1))
}

for tool in clang-format-14 cppcheck shellcheck; do
    if ! command -v "$tool" >/dev/null; then
        echo "error: $tool is missing: apt-get install -y clang-format-14 cppcheck shellcheck" >&2
        exit 1
    fi
done
mapfile -t c < <(files '*.c')
mapfile -t layout < <(files '*.c' '*.h' '*.cu' '*.cuh')
mapfile -t shell < <(scripts_of sh)
mapfile -t python < <(files '*.py' && scripts_of python3)
check clang-format clang-format-14 --dry-run -Werror "${layout[@]}"
# it reads no CUDA
check cppcheck cppcheck --quiet --std=c11 --enable=warning,performance --inline-suppr \
    --error-exitcode=1 --suppress=missingIncludeSystem \
    --template='{file}:{line}: {severity}: {message} [{id}]' -j "$(nproc)" "${c[@]}"
# a $ in single quotes is awk's or sed's here, and functions are called by their names in variables
check shellcheck shellcheck --external-sources --format=gcc --exclude=SC2016,SC2317 "${shell[@]}"
# pyproject.toml says what it looks for
check ruff .venv/bin/ruff check --quiet --output-format concise "${python[@]}"
check includes python3 scripts/includes.py "${layout[@]}"
if [[ $faults -gt 0 ]]; then
    echo "lint: $faults of 5 checks found something"
    exit 1
fi
echo "lint: nothing found"
