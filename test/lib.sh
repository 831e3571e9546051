#!/usr/bin/env bash
# What the shell tests share, as test.h is for the C ones: functions that are tests, called
# test_..., run by run_tests, that call `fail` when something is wrong. Tests run in a folder of
# their own.
set -u
root=${LLM8_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # quicker, for models this small
script=$(realpath "$0")
mkdir -p work && cd work || exit 1 # test/run.sh keeps its log in the folder above
passed=0 failed=0 skipped=0 failing=0 skipping=0

fail() {
    printf '  %s: %s\n' "${FUNCNAME[1]}" "$*" >&2
    failing=1
}

skip() {
    echo "  skipped: $*"
    skipping=1
}

# Runs a file's functions `prepare` and test_..., in the order in which they stand.
run_tests() {
    local test
    for test in $(grep -oE '^(prepare|test_[a-z0-9_]+)\(\)' "$script" | tr -d '()'); do
        failing=0 skipping=0
        "$test"
        if [[ $failing -ne 0 ]]; then
            echo "  FAILED $test" >&2
            failed=$((failed + 1))
        elif [[ $skipping -ne 0 ]]; then
            skipped=$((skipped + 1))
        else
            passed=$((passed + 1))
        fi
    done
    summary
}

# The last line, which test/run.sh adds up.
summary() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [[ $failed -eq 0 ]]
}

# Ends a file of tests, none of which can run here, as one skipped test.
skip_all() {
    echo "  skipped: $*"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

# Checks a command's exit status; its output goes to the file `log`.
expect_status() {
    local expected=$1 status=0
    shift
    "$@" >log 2>&1 || status=$?
    if [[ $status -ne $expected ]]; then
        fail "exit status $status, not $expected: $* | $(tail -n 3 log)"
        return 1
    fi
}

# Whether a file contains a text.
has() {
    grep -qF -- "$2" "$1"
}

# Checks a command's exit status and that its output has a text.
expect_said() {
    local status=$1 says=$2
    shift 2
    expect_status "$status" "$@" || return
    has log "$says" || fail "$* does not say '$says': $(tail -n 5 log)"
    ! has log Traceback || fail "$*: $(cat log)"
}

train_gpt() {
    "$root/train_gpt" "$@"
}

# The Python environment of `make scripts`, made by one test at a time.
make_scripts() {
    mkdir -p "$root/build" && flock "$root/build/scripts.lock" \
        env -u MAKEFLAGS -u MFLAGS timeout 600 make -s -C "$root" scripts >scripts.log 2>&1
}

# start LOG COMMAND...: in the background, what it says in a new LOG; its id goes to `started`.
start() {
    rm -f "$1" # so that what is waited for is this run's
    "${@:2}" >"$1" 2>&1 &
    # shellcheck disable=SC2034 # the caller's
    started=$!
}

# Waits for the end of a background process; its exit status goes to `status`.
await_end() {
    wait_until is_gone "$1" || kill -9 "$1"
    status=0
    wait "$1" 2>/dev/null || status=$?
}

# Waits until a command succeeds, 20 seconds at most.
wait_until() {
    local i
    for ((i = 0; i < 2000; i++)); do
        if "$@" 2>/dev/null; then return; fi
        sleep 0.01
    done
    fail "not within 20 seconds: $*"
    return 1
}

is_gone() {
    ! kill -0 "$1"
}

# About $2 bytes of text on standard output; the same for the same $1.
make_text() {
    awk -v seed="$1" -v size="$2" 'BEGIN {
        split("Anna Ben Clara David sees finds draws counts three seven red blue apples boats", w)
        for (n = 0; n < size; ) {
            line = ""
            for (i = 0; i < 8; i++) {
                seed = (seed * 1103515245 + 12345) % 2147483648
                line = line w[1 + int(seed / 65536) % 14] " "
            }
            print line
            n += length(line) + 1
        }
    }'
}

# Shards d/x_train.bin and d/x_val.bin of about $1 bytes, which stay in the file `text`.
make_shards() {
    make_text 1 "$1" >text
    expect_status 0 "$root/tokenize" --output-prefix d/x text
}

# Overwrites bytes of a file: $1 file, $2 offset, $3 as printf's escapes.
poke() {
    printf '%b' "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# The newest step in a --save folder.
newest_step() {
    printf '%s\n' "$1"/step_* | sed -n 's,.*/step_0*\([0-9]\+\)$,\1,p' | sort -n | tail -n 1
}

# The files that say what a checkpoint holds; meta.json has times and paths in it besides.
same_checkpoint() {
    local file
    for file in model.safetensors config.json optimizer-0-of-1.safetensors scaling.safetensors; do
        if [[ ! -e $1/$file && ! -e $2/$file ]]; then continue; fi
        cmp -s "$1/$file" "$2/$file" || return 1
    done
    cmp -s <(progress_of "$1") <(progress_of "$2")
}

progress_of() {
    grep -E '"(step|samples|tokens|skipped|skipped_in_row|loss|valid_loss|best_valid_loss)"|"window_' \
        "$1/meta.json"
}
