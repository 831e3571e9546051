#!/usr/bin/env bash
# Runs a training command until it is done, from its newest checkpoint after every failure:
#   scripts/restart.sh [--failures N] [--pause SECONDS] ./train_gptcu --gpus 8 --save DIR ...
# The command needs --save DIR; --resume latest is added to it. A given --resume PATH is used until a
# run has read PATH, which is then the newest checkpoint of DIR; from then on --resume latest
# replaces it.
#
# It goes on after a crash, a lost rank or a kill, and gives up when N runs in a row (3) have failed
# with no new checkpoint between them; a run that finds DIR in use by another one (6) is started
# again and does not count. It does not start again what is done (0), was asked to end (75), or has
# skipped too many steps (3). SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and SIGHUP are passed on. Its exit
# status is the last run's. On several machines each rank, or each --gpus, has a loop of its own: when
# one rank fails all end, and all connect again, within --distributed-timeout.
set -u
# as `sh FILE` runs it: another shell, or bash in its POSIX mode, whose `wait` forgets a status
if [ -n "${BASH_VERSION:-}" ]; then set +o posix; else exec bash "$0" "$@"; fi

failures=3
pause=5

die() {
    echo "error: $*" >&2
    exit 1
}

say() {
    echo "restart: $*" >&2
}

need_number() {
    [[ $2 =~ ^[0-9]+$ ]] || die "$1 $2: must be a whole number"
}

while [[ $# -gt 0 ]]; do
    case $1 in
    --failures | --pause)
        [[ $# -gt 1 ]] || die "$1 needs a value"
        need_number "$1" "$2"
        if [[ $1 == --failures ]]; then failures=$2; else pause=$2; fi
        shift 2
        ;;
    --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    -*) die "unknown option $1 (--failures, --pause; the command comes after them)" ;;
    *) break ;;
    esac
done
[[ $# -gt 0 ]] || die "no command: scripts/restart.sh [--failures N] [--pause SECONDS] COMMAND..."
[[ $failures -gt 0 ]] || die "--failures 0: must be at least 1"
command -v "$1" >/dev/null || die "$1: no such program"

# values --NAME COMMAND: prints the option's values in the command (--NAME VALUE or --NAME=VALUE), one a
# line.
values() {
    local name=$1 previous='' word
    shift
    for word in "$@"; do
        case $word in
        "$name="*) echo "${word#*=}" ;;
        *) if [[ $previous == "$name" ]]; then echo "$word"; fi ;;
        esac
        previous=$word
    done
}

option() {
    values "$@" | tail -n 1
}

# The values of an option in a file of --config.
lines() {
    sed -nE "s/^[[:space:]]*(--)?$1[[:space:]=]+\"?([^\"[:space:]=][^\"[:space:]]*).*/\2/p" "$2"
}

# The arguments are files of --config, which may name others; the trainer reads no deeper ones.
refuse_resume() {
    local file resume
    for file in "$@"; do
        [[ -f $file && ${#FUNCNAME[@]} -lt 18 ]] || continue
        resume=$(lines resume "$file" | tail -n 1)
        if [[ -n $resume && $resume != latest ]]; then
            die "--config $file has --resume $resume, which is not seen: give it in the command"
        fi
        mapfile -t inner < <(lines config "$file")
        refuse_resume "${inner[@]}"
    done
}

save=$(option --save "$@")
[[ -n $save ]] || die "the command has no --save DIR (one in a --config file is not seen):" \
    "without checkpoints there is nothing to resume"

if [[ -z $(option --resume "$@") ]]; then
    mapfile -t configs < <(values --config "$@")
    refuse_resume "${configs[@]}"
fi

# Prints the name of the newest checkpoint; nothing if there is none.
newest() {
    printf '%s\n' "$save"/step_* | sed 's,.*/,,' | grep -xE 'step_[0-9]{8,}' | sort -V | tail -n 1
}

# Prints the newest checkpoint's name, inode and time, because a later checkpoint may have the same name.
moved() {
    local name
    name=$(newest)
    if [[ -n $name ]]; then stat -c '%n %i %y' "$save/$name" 2>/dev/null; fi
}

child='' stopped='' early=''
pass_on() {
    stopped=$1
    if [[ -n $child ]]; then kill -"$1" "$child" 2>/dev/null; else early=$1; fi
}
# shellcheck disable=SC2064 # each signal has its own name in it
for name in TERM INT USR1 USR2 HUP; do trap "pass_on $name" "$name"; done

# Runs a command and sets `status`. The command has a process group of its own (-m), so Ctrl-C reaches
# it only through pass_on(), once. A signal ends `wait` early, even one that came just before. So `wait`
# is repeated until the command has ended; bash remembers its exit status.
run() {
    set -m
    "$@" &
    child=$!
    set +m # else `wait` ends where the child is stopped, too
    if [[ -n $early ]]; then pass_on "$early"; fi
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    wait "$child"
    status=$?
    child=''
}

in_a_row=0
first=$(moved)
before=$first
while true; do
    if [[ $before != "$first" || -z $(option --resume "$@") ]]; then
        run "$@" --resume latest
    else
        run "$@"
    fi
    case $status in
    0 | 3 | 75 | 126 | 127) exit "$status" ;;
    esac
    if [[ $(moved) != "$before" ]]; then in_a_row=0; fi
    if [[ $status -ne 6 ]]; then in_a_row=$((in_a_row + 1)); fi
    before=$(moved)
    after=$(newest)
    if [[ -n $stopped ]]; then
        say "the run ended with status $status after SIG$stopped"
        exit "$status"
    fi
    if [[ $in_a_row -ge $failures ]]; then
        say "status $status; $in_a_row runs in a row failed at ${after:-the start}: giving up"
        exit "$status"
    fi
    what="status $status at ${after:-the start}, failure $in_a_row of $failures"
    if [[ $status -eq 6 ]]; then what="$save is in use by another run"; fi
    say "$what; again in $pause s"
    sleep "$pause" &
    wait $!
    if [[ -n $stopped ]]; then exit 75; fi
done
