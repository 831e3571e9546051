#!/bin/sh
# Which of Debian's packages are missing for building, and the one command that installs them:
#   scripts/packages.sh [--install] [--tests] WHAT   WHAT is to be typed again afterwards
# --install: as root, installs them. --tests: those too without which a part of the tests is
# skipped. CC and CFLAGS are the Makefile's.
set -u
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
root=no tests=no
while [ $# -gt 1 ]; do
    case $1 in
    --install) if [ "$(id -u)" -eq 0 ]; then root=yes; fi ;;
    --tests) tests=yes ;;
    esac
    shift
done
again=${1:-make}
compiler="${CC:-cc} ${CFLAGS:-}" # several words, as "ccache gcc -O3"

has_header() {
    echo "#include <$1>" | $compiler -E -x c - >/dev/null 2>&1
}

needed() {
    command -v "${compiler%% *}" >/dev/null || echo gcc
    command -v make >/dev/null || echo make
    has_header stdlib.h || echo libc6-dev
    has_header cjson/cJSON.h || echo libcjson-dev
    has_header zlib.h || echo zlib1g-dev
}

of_tests() {
    [ $tests = yes ] || return 0
    command -v g++ >/dev/null || echo g++
    command -v git >/dev/null || echo git
    command -v pgrep >/dev/null || echo procps
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

in_a_line() {
    tr '\n' ' ' | sed 's/ $//'
}

# apt_get LOG WORD...: waits, five minutes at most, while another one has the lock, as on a machine
# that has just been started.
apt_get() {
    out=$1 tries=0
    shift
    until LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get "$@" >"$out" 2>&1; do
        if [ $tries -ge 60 ] || ! grep -q 'Could not get lock' "$out"; then return 1; fi
        if [ $tries -eq 0 ]; then echo "waiting for another apt or dpkg, which has the lock"; fi
        tries=$((tries + 1))
        sleep 5
    done
}

install_packages() {
    printf '\n== installing %s\n' "$*"
    log=$(mktemp)
    set -- install -y -q --no-install-recommends "$@"
    apt_get "$log" "$@" || { apt_get "$log" update -q && apt_get "$log" "$@"; } || {
        tail -n 5 "$log" >&2
        shift 4
        echo "error: apt-get could not install $*; the whole log is $log" >&2
        return 1
    }
    rm -f "$log"
}

missing=$(needed | in_a_line) more=$(of_tests | in_a_line)
if [ $root = yes ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086 # one word a package
    if [ -n "$missing" ]; then install_packages $missing || exit 1; fi
    # shellcheck disable=SC2086
    if [ -n "$more" ]; then install_packages $more; fi
    missing=$(needed | in_a_line) more=$(of_tests | in_a_line)
fi
if [ -n "$more" ]; then echo "note: without $more a part of the tests is skipped"; fi
[ -n "$missing" ] || exit 0
if command -v apt-get >/dev/null; then
    install="apt-get update && apt-get install -y $missing"
    if [ "$(id -u)" -ne 0 ] && command -v sudo >/dev/null; then
        install="sudo apt-get update && sudo apt-get install -y $missing"
    elif [ "$(id -u)" -ne 0 ]; then
        install="su -c '$install'"
    fi
    printf 'error: missing: %s. Type this once, then %s again:\n    %s\n' \
        "$missing" "$again" "$install" >&2
else
    echo "error: missing: $missing (Debian's names). Install them, then $again again" >&2
fi
exit 1
