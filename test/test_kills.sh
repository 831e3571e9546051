#!/usr/bin/env bash
# A short form of test/kills.py, which kills runs at random moments; and the faults it must see.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null || skip_all "no python3"

test_killed_runs_end_as_others_do() {
    expect_message 0 ' 0 wrong, ' python3 "$root/test/kills.py" --kills 20 --jobs 2
}

test_sanitized_runs_survive_kills() {
    expect_message 0 ' 0 wrong, ' python3 "$root/test/kills.py" --kills 3 --steps 10 --jobs 2 \
        --kinds cpu --bin "$root/build/asan"
}

test_faults_are_seen() {
    expect_message 1 ', and before [' python3 "$root/test/kills.py" --kills 1000 --kinds cpu \
        --plant order
    expect_message 1 'damaged: its checksum is' python3 "$root/test/kills.py" --kills 1000 \
        --kinds cpu-fp8 --plant damage
}

run_tests
