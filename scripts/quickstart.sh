#!/bin/sh
# From a bare Debian to a trained model, in under three minutes on two cores:
#   make quickstart                 on a corpus that make_corpus writes
#   make quickstart DATA=any.txt    on your own text
#   make quickstart STEPS=300       shorter, or longer
# Installs what is missing (as root; otherwise it prints the command), builds, tokenizes to bytes,
# trains a small Llama in two parts with a stop between them, samples, and says what to try next.
set -u
cd "$(dirname "$0")/.." || exit 1
unset MAKEFLAGS MFLAGS # the jobs of the make that calls this script are not ours to share

folder=run/quickstart
sequence=256 # the preset llama-quickstart's
batch=8
begin=$(date +%s)

die() {
    echo "error: $*" >&2
    exit 1
}

title() {
    printf '\n== %s\n' "$*"
}

check_arguments() {
    steps=${STEPS:-1200}
    case $steps in
    '' | *[!0-9]* | 0*) die "STEPS=$steps: must be a whole number, 30 or more" ;;
    esac
    [ "$steps" -ge 30 ] || die "STEPS=$steps: must be a whole number, 30 or more"
    [ -n "${DATA:-}" ] || return 0
    [ -e "$DATA" ] || die "DATA=$DATA: no such file"
    [ -f "$DATA" ] && [ -r "$DATA" ] || die "DATA=$DATA: not a file that can be read"
    bytes=$(wc -c <"$DATA")
    least=$((3 * sequence * batch))
    [ "$bytes" -ge "$least" ] ||
        die "DATA=$DATA: $bytes bytes, too small for one batch; it needs at least $least"
    # a small text is learned by heart, so it is not seen more than some 20 times
    most=$((18 * bytes / (sequence * batch)))
    if [ -z "${STEPS:-}" ] && [ "$most" -lt "$steps" ]; then
        steps=$((most > 90 ? most : 90))
    fi
}

has_header() {
    echo "#include <$1>" | ${CC:-cc} -E -x c - >/dev/null 2>&1
}

missing_packages() {
    command -v "${CC:-cc}" >/dev/null || echo gcc
    has_header stdlib.h || echo libc6-dev
    has_header cjson/cJSON.h || echo libcjson-dev
    has_header zlib.h || echo zlib1g-dev
}

apt_install() {
    # shellcheck disable=SC2086 # one word a package
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages
}

install_packages() {
    packages=$(missing_packages | tr '\n' ' ')
    packages=${packages% }
    [ -n "$packages" ] || return 0
    command -v apt-get >/dev/null ||
        die "missing: $packages (Debian's names); install them, then run this again"
    if [ "$(id -u)" -ne 0 ]; then
        install="apt-get update && apt-get install -y $packages"
        if command -v sudo >/dev/null; then
            install="sudo apt-get update && sudo apt-get install -y $packages"
        else
            install="su -c '$install'"
        fi
        printf 'missing: %s. Type this once, then make quickstart again:\n    %s\n' \
            "$packages" "$install" >&2
        exit 1
    fi
    title "installing $packages"
    log=$(mktemp)
    apt_install >"$log" 2>&1 || { apt-get update -q && apt_install; } >"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        die "apt-get could not install $packages; the whole log is $log"
    }
    rm -f "$log"
    packages=$(missing_packages | tr '\n' ' ')
    [ -z "$packages" ] || die "still missing after the installation: $packages"
}

build() {
    title "building"
    make -s -j "$(nproc)" train_gpt tokenize make_corpus || die "the build failed"
    echo "./train_gpt ./tokenize ./make_corpus"
}

# An earlier run is kept under the next free name.
move_old_run() {
    [ -e "$folder" ] || return 0
    n=1
    while [ -e "$folder.$n" ]; do n=$((n + 1)); done
    mv "$folder" "$folder.$n" || die "$folder: could not be moved to $folder.$n"
    echo "the earlier run is now $folder.$n"
}

make_data() {
    title "data"
    move_old_run
    mkdir -p "$folder" || die "$folder: could not be made"
    text=${DATA:-}
    if [ -z "$text" ]; then
        text=$folder/corpus.txt
        ./make_corpus >"$text" || die "$text: could not be written"
        echo "$text: $(wc -c <"$text") bytes of simple English; it begins"
        head -n 3 "$text" | fold -s -w 90 | sed 's/^/    /'
    fi
    ./tokenize --output-prefix "$folder/corpus" -- "$text" >"$folder/tokenize.log" || exit 1
    cat "$folder/tokenize.log"
    entropy=$(sed -n 's/.*_train.bin:.* unigram entropy //p' "$folder/tokenize.log")
}

# train STEP [OPTION...]: on to that step
train() {
    until=$1
    shift
    ./train_gpt --model llama-quickstart \
        --data "$folder/corpus_train.bin" --valid-data "$folder/corpus_val.bin" \
        --train-iters "$until" --lr-decay-iters "$steps" --lr-warmup-iters $((steps / 20)) \
        --lr 3e-3 --micro-batch-size "$batch" \
        --eval-interval "$third" --save-interval "$third" --log-interval $((third / 8 + 1)) \
        --save "$folder" "$@"
    status=$?
    if [ $status -eq 75 ]; then
        die "stopped; go on with ./train_gpt --config $folder/config.txt --resume latest"
    fi
    [ $status -eq 0 ] || die "the training ended with status $status"
}

train_in_two_parts() {
    third=$((steps / 3))
    title "training: steps 1 to $((2 * third)) of $steps"
    train $((2 * third))
    title "the program has ended; another one resumes from its checkpoint and goes on to $steps"
    train "$steps" --resume latest
    loss=$(sed -n 's/.*"kind":"eval".*"valid_loss":\([-+.0-9e]*\).*/\1/p' \
        "$folder/metrics.jsonl" | tail -n 1)
}

# The model's own text, from its first whole paragraph on where it has paragraphs.
print_sample() {
    title "what the model writes, a letter at a time (temperature 0.6)"
    ./train_gpt --config "$folder/config.txt" --resume latest --sample-only --sample-length 900 \
        --sample-temperature 0.6 >"$folder/sample.log" || die "sampling failed"
    sed '1,/^sample after step/d' "$folder/sample.log" | awk '
        { line[NR] = $0; if ($0 == "" && !first && NR < 12) first = NR + 1 }
        END { for (i = first ? first : 1; i <= NR; i++) print line[i] }' |
        fold -s -w 90 | sed 's/^/    /'
}

print_summary() {
    took=$(($(date +%s) - begin))
    config="./train_gpt --config $folder/config.txt"
    title "done in $((took / 60)) min $((took % 60)) s"
    cat <<END
    loss of guessing by how often each letter occurs (unigram entropy)   $entropy
    loss of the model on text it has not seen (validation loss)          $loss

    checkpoints    $folder/latest and $folder/best (folders; Hugging Face opens them)
    every step     $folder/metrics.jsonl
    all options    $folder/config.txt
    data           $folder/corpus_train.bin, $folder/corpus_val.bin

Try next
    $config --sample-only --sample-temperature 1 --sample-seed 2
    $config --train-iters $((2 * steps)) --lr-decay-iters $((2 * steps)) --lr 1e-3
    $config --save run/fp8 --fp8-format hybrid
    $config --save run/wide --hidden-size 256 --ffn-hidden-size 704
    ./train_gpt --help
They sample again; train on from here; train afresh with FP8 emulated, to compare the losses; train
a larger model. $folder/config.txt holds the rest of their options.
END
    awk -v loss="$loss" -v entropy="$entropy" 'BEGIN { exit !(loss != "" && loss + 0 < entropy + 0) }' ||
        die "the validation loss is not below the unigram entropy"
}

trap : INT # the trainer saves and stops; then so does this script
check_arguments
install_packages
build
make_data
train_in_two_parts
print_sample
print_summary
