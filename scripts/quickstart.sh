#!/bin/sh
# From a bare Debian to a trained model, in two to six minutes on two cores:
#   make quickstart                 on a corpus that make_corpus writes
#   make quickstart DATA=any.txt    on your own text
#   make quickstart STEPS=300       shorter, or longer
#   make quickstart GPU=no          on the CPU, though there is a GPU
# Installs what is missing (as root; otherwise it prints the command), builds, tokenizes to bytes,
# trains a small Llama in two parts with a stop between them, samples, and says what to try next.
# Where nvidia-smi shows a GPU and nvcc is there, the GPU trainer does it.
set -u
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
unset MAKEFLAGS MFLAGS # the jobs of the make that calls this script are not ours to share

folder=run/quickstart
sequence=128 # the preset llama-quickstart's
batch=8
begin=$(date +%s)

die() {
    echo "error: $*" >&2
    exit 1
}

title() {
    printf '\n== %s\n' "$*"
}

check_steps() {
    steps=${STEPS:-1200}
    case $steps in
    *[!0-9]* | 0* | [0-9] | [12][0-9] | ??????????*)
        die "STEPS=$steps: must be a whole number from 30 to 999999999"
        ;;
    esac
}

check_arguments() {
    [ $# -eq 0 ] || die "$1: takes no arguments, but DATA=, STEPS= and GPU= before it (--help)"
    check_steps
    case ${GPU:-yes} in
    yes | no) ;;
    *) die "GPU=$GPU: must be yes or no" ;;
    esac
    [ -n "${DATA:-}" ] || return 0
    [ -e "$DATA" ] || die "DATA=$DATA: no such file"
    if [ ! -f "$DATA" ] || [ ! -r "$DATA" ]; then die "DATA=$DATA: not a file that can be read"; fi
    bytes=$(wc -c <"$DATA")
    least=$((48 * sequence)) # the validation text is a tenth of it, or a twentieth
    [ "$bytes" -ge "$least" ] ||
        die "DATA=$DATA: $bytes bytes, too small to learn from; give at least $least"
    # a small text is overfitted, so it is not seen more than some 20 times
    most=$((18 * bytes / (sequence * batch)))
    if [ -z "${STEPS:-}" ] && [ "$most" -lt "$steps" ]; then
        steps=$((most > 90 ? most : 90))
    fi
}

# ---- build --------------------------------------------------------------------------------------

# Whether there are a GPU and a compiler for it.
find_gpu() {
    nvcc=${NVCC:-${CUDA_HOME:-/usr/local/cuda}/bin/nvcc}
    if [ "${GPU:-yes}" = no ] || ! nvidia-smi >/dev/null 2>&1; then return 1; fi
    if ! command -v "$nvcc" >/dev/null; then
        echo "a GPU, but no nvcc under $nvcc (CUDA_HOME says where CUDA is): the CPU trains"
        return 1
    fi
}

# --verify runs a matmul and an attention kernel: it knows whether driver and libraries fit together. It
# sees one GPU, as NCCL between several does not matter here.
build_for_gpu() {
    log=$(mktemp)
    gpu=${CUDA_VISIBLE_DEVICES-0}
    gpu=${gpu%%,*}
    echo "the GPU trainer; this takes a minute or two"
    if ! make -s -j "$(nproc)" train_gptcu >"$log" 2>&1; then
        reason='it could not be built'
    elif ! CUDA_VISIBLE_DEVICES="$gpu" ./train_gptcu --verify >"$log" 2>&1; then
        reason='--verify failed'
    else
        rm -f "$log"
        trainer=./train_gptcu
        return
    fi
    tail -n 3 "$log" >&2
    echo "warning: no GPU trainer: $reason; the whole log is $log. The CPU trains" >&2
}

build() {
    title "building"
    trainer=./train_gpt
    if find_gpu; then build_for_gpu; fi
    make -s -j "$(nproc)" train_gpt tokenize make_corpus || die "the build failed"
    echo "$trainer ./tokenize ./make_corpus"
}

# ---- data ---------------------------------------------------------------------------------------

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
    text=${DATA:-}
    case $text in
    "$folder"/*) die "DATA=$text: in the folder of the last run; move it elsewhere" ;;
    esac
    move_old_run
    mkdir -p "$folder" || die "$folder: could not be made"
    if [ -z "$text" ]; then
        text=$folder/corpus.txt
        ./make_corpus >"$text" || die "$text: could not be written"
        echo "$text: $(wc -c <"$text") bytes of simple English; it begins"
        head -n 3 "$text" | fold -s -w 90 | sed 's/^/    /'
    fi
    ./tokenize --output-prefix "$folder/corpus" -- "$text" >"$folder/tokenize.log" || exit 1
    cat "$folder/tokenize.log"
    entropy=$(sed -n 's/.*_val.bin:.* unigram entropy //p' "$folder/tokenize.log")
}

# ---- training -----------------------------------------------------------------------------------

# train STEP [OPTION...]: on to that step
train() {
    until=$1
    shift
    $trainer --model llama-quickstart --micro-batch-size $batch \
        --data "$folder/corpus_train.bin" --valid-data "$folder/corpus_val.bin" \
        --train-iters "$until" --lr-decay-iters "$steps" --lr 2e-3 \
        --eval-interval "$third" --save-interval "$third" \
        --log-interval $((steps < 400 ? 10 : 50)) --save "$folder" "$@"
    status=$?
    if [ $status -eq 75 ]; then
        die "stopped; --train-iters $steps added to that command trains to the end"
    fi
    [ $status -eq 0 ] || die "the training ended with status $status"
}

train_in_two_parts() {
    third=$(((steps + 2) / 3))
    title "training: steps 1 to $((2 * third)) of $steps"
    train $((2 * third))
    title "the program has ended; another one resumes from its checkpoint, up to step $steps"
    train "$steps" --resume latest
    loss=$(sed -n 's/.*"kind":"eval".*"valid_loss":\([-+.0-9e]*\).*/\1/p' \
        "$folder/metrics.jsonl" | tail -n 1)
    [ -n "$loss" ] || die "no validation loss in $folder/metrics.jsonl"
}

# The model's own text, from its first whole paragraph on where it has paragraphs.
print_sample() {
    title "what the model writes, a letter at a time (temperature 0.6)"
    $trainer --config "$folder/config.txt" --resume latest --sample-only --quiet \
        --sample-length 500 --sample-temperature 0.6 >"$folder/sample.txt" || die "sampling failed"
    awk '{ line[NR] = $0; if ($0 == "" && !first && NR < 12) first = NR + 1 }
        END { for (i = first ? first : 1; i <= NR; i++) print line[i] }' "$folder/sample.txt" |
        fold -s -w 90 | sed 's/^/    /'
}

print_summary() {
    took=$(($(date +%s) - begin))
    config="$trainer --config $folder/config.txt"
    twice=$((2 * steps))
    early=$folder/step_$(printf %08d "$third")
    title "done in $((took / 60)) min $((took % 60)) s"
    printf '    %-72s %.4f\n' \
        "unigram baseline: guessing each byte by its frequency" "$entropy" \
        "the model: validation loss, on text it has not seen" "$loss"
    cat <<END

    checkpoints    $folder/latest and $folder/best (folders; Hugging Face opens them)
    every step     $folder/metrics.jsonl
    its options    $folder/config.txt, which --config reads
    data           $folder/corpus_train.bin, $folder/corpus_val.bin

Try next
  another sample, more daring
    $config --resume latest --sample-only --sample-temperature 1 --seed 2
  train on to twice as many steps, from the checkpoint before the learning rate fell
    $config --resume $early --save run/longer --train-iters $twice --lr-decay-iters $twice
  $in_fp8
    $config --save run/fp8 --fp8-format hybrid$larger
  a larger model
    $config --save run/wide --hidden-size 288
  your own text
    make quickstart DATA=any.txt
  every option
    $trainer --help
END
    awk -v loss="$loss" -v entropy="$entropy" 'BEGIN { exit !(loss + 0 < entropy - 0.1) }' ||
        die "the validation loss is not clearly below the unigram entropy: too few steps," \
            "or a text with nothing to learn"
}

trap : INT # the trainer saves and stops; then so does this script
check_arguments "$@"
scripts/packages.sh --install 'make quickstart' || exit 1
build
# what is suggested leaves $folder as it is, so that each works in any order
# a GPU computes so small a model in BF16, whatever is requested
in_fp8='the same from the start in FP8 (emulated on the CPU), to compare the losses' larger=''
if [ "$trainer" = ./train_gptcu ]; then
    in_fp8='a model large enough to gain from FP8'
    larger=' --hidden-size 768'
fi
make_data
train_in_two_parts
print_sample
print_summary
