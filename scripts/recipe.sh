#!/usr/bin/env bash
# How a recipe (run_*.sh) is called:
#   scripts/run_gpt2_124m.sh                              all GPUs of this machine, in FP8
#   GPUS=1 PRECISION=bf16 scripts/run_gpt2_124m.sh        one GPU, in BF16
#   sbatch --nodes 2 --gpus-per-node 8 scripts/run_gpt2_124m.sh
#   LAUNCH=torchrun scripts/run_gpt2_124m.sh              ranks started by torchrun
#   SMOKE=1 scripts/run_gpt2_124m.sh                      a tiny model on the CPU
# A recipe resumes from its newest checkpoint after a failure, or when it is called again.
# Environment:
#   GPUS=N         GPUs of each machine [all of this one]
#   PRECISION=     fp8 [the default], bf16, or both: one after the other, and scripts/compare says
#                  how they differ; SEEDS=1,2,3 with that many seeds, which a verdict takes
#   LAUNCH=        self [the trainer starts its ranks], slurm [the default in a job], torchrun
#   TORCHRUN=      options for torchrun, as --nnodes 2 --rdzv-endpoint host:29500 [--standalone]
#   DATA=DIR       prepared data [data/NAME]   OUT=DIR  checkpoints and metrics [run/NAME_PRECISION]
#   PREPARE=1      prepare the data and exit        DRY=1    print the command and exit
#   SMOKE=1        a tiny model on the CPU, in seconds, over a text of our own: does it work?
# Arguments go to the trainer, after the recipe's; --data and --valid-data in place of the recipe's.
# The global batch is the recipe's on any GPUs that can share it evenly.

# What the recipes share: the programs, the data, one command for any launcher, and the restart loop. A
# recipe sets name, data_set, tokenizer, model=() and training=(), perhaps data_files (of the set),
# data_options=() of scripts/prepare_data, default_precision and adapt() (once the GPUs are counted),
# then calls recipe "$@".
set -u
if [ -n "${BASH_VERSION:-}" ]; then set +o posix; else exec bash "$0" "$@"; fi # as of `sh FILE`
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")
data_options=() choices=
unset MAKEFLAGS MFLAGS # the jobs of a make that calls a recipe are not ours to share

die() {
    echo "error: $*" >&2
    exit 1
}

# Warns of environment variables that are a recipe's but for the case or for one letter. Names of fewer
# than five letters with another letter are other words: DATE, CPUS.
warn_of_near_misses() {
    local known pattern at name other
    while read -r known; do
        if [[ -v $known ]]; then continue; fi
        pattern=$known other='.?'
        if [[ ${#known} -lt 5 ]]; then other=; fi
        for ((at = 0; at < ${#known}; at++)); do # a letter replaced, left out, added, or two swapped
            pattern+="|${known:0:at}$other${known:at+1}|${known:0:at+1}.${known:at+1}"
            pattern+="|${known:0:at}${known:at+1:1}${known:at:1}${known:at+2}"
        done
        for name in $(compgen -e | grep -ixE "$pattern"); do
            echo "warning: $name is not read; did you mean $known?" >&2
        done
    done < <(grep -ohP '(?<=\$\{)[A-Z]+(?=:-)' "$0" "${BASH_SOURCE[0]}" | sort -u)
}

check_environment() {
    smoke=${SMOKE:-0} precision=${PRECISION:-${default_precision:-fp8}}
    launch=${LAUNCH:-}
    if [[ -z $launch && -n ${SLURM_JOB_ID:-} && $precision != both ]]; then launch=slurm; fi
    launch=${launch:-self}
    bf16=(--bf16) fp8=(--fp8-format hybrid --fp8-recipe delayed --fp8-lm-head)
    case $precision in
    bf16) numbers=("${bf16[@]}") ;;
    fp8)
        numbers=("${fp8[@]}")
        if has bf16 "$@" && ! has fp8-format "$@"; then numbers=(); fi # the user's own --bf16
        ;;
    both) numbers=() ;;
    *) die "PRECISION=$precision: must be fp8, bf16 or both" ;;
    esac
    case $launch in
    self | slurm | torchrun) ;;
    *) die "LAUNCH=$launch: must be self, slurm or torchrun" ;;
    esac
    if [[ $precision == both && $launch != self ]]; then
        die "LAUNCH=$launch: not with PRECISION=both, whose ranks the trainer starts"
    fi
    gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c .)}
    trainer=$root/train_gptcu
    if [[ $smoke == 1 ]]; then gpus=1 trainer=$root/train_gpt; fi
    [[ $gpus =~ ^[0-9]+$ ]] || die "GPUS=$gpus: must be a whole number"
    if [[ $gpus -eq 0 ]]; then
        [[ ${DRY:-0} == 1 || ${PREPARE:-0} == 1 ]] || die "no GPU here (nvidia-smi lists none);" \
            "GPUS=N says how many, SMOKE=1 tries it on the CPU"
        gpus=1 # of the machine that will train
    fi
    data=${DATA:-$root/data/$name} out=${OUT:-$root/run/${name}_$precision}
    if [[ $smoke == 1 ]]; then
        data=${DATA:-$root/run/smoke/data} out=${OUT:-$root/run/smoke/${name}_$precision}
    fi
    if declare -F adapt >/dev/null; then adapt; fi
    if has epochs "$@"; then # in place of the recipe's --train-iters
        drop_iters training
        drop_iters tiny_run
    fi
    if has config "$@"; then echo "note: the recipe's own options override those of --config" >&2; fi
    count_nodes
    if [[ $smoke != 1 && ${PREPARE:-0} != 1 ]]; then share_batch "$@"; fi
}

# drop_iters ARRAY: removes --train-iters and its value.
drop_iters() {
    local -n words=$1
    local at
    for at in "${!words[@]}"; do
        if [[ ${words[at]:-} == --train-iters ]]; then unset "words[at]" "words[at + 1]"; fi
    done
}

count_nodes() {
    nodes=1
    case $launch in
    self) nodes=${NNODES:-1} ;;
    slurm) nodes=${SLURM_NNODES:-1} ;;
    torchrun) # --nnodes N or LEAST:MOST
        if [[ ${TORCHRUN:-} =~ --nnodes[=\ ]([0-9]+:)?([0-9]+) ]]; then nodes=${BASH_REMATCH[2]}; fi
        ;;
    esac
    [[ $nodes =~ ^[1-9][0-9]*$ ]] || die "NNODES=$nodes: must be a whole number from 1 on"
    ranks=$((nodes * gpus))
}

# Makes the recipe's micro-batch smaller if the ranks can share the global batch only then. Ends if they
# cannot share it at all, before data are prepared. A --micro-batch-size of the user's stays as it is;
# check_options() refuses one that does not fit.
share_batch() {
    local global micro fewer more at
    global=$(value_of global-batch-size "${training[@]}" "$@")
    micro=$(value_of micro-batch-size "${training[@]}" "$@")
    [[ $global =~ ^[1-9][0-9]*$ && $micro =~ ^[1-9][0-9]*$ ]] || return 0 # the trainer says why not
    if ((global % ranks)); then
        fewer=$((ranks - 1)) more=$((ranks + 1))
        while ((global % fewer)); do fewer=$((fewer - 1)); done
        while ((more < global && global % more)); do more=$((more + 1)); done
        if ((more <= global)); then fewer+=" or $more"; fi
        die "--global-batch-size $global: $ranks GPUs cannot share it evenly; $fewer can"
    fi
    if has micro-batch-size "$@" || ((global % (micro * ranks) == 0)); then return; fi
    while ((global % (micro * ranks))); do micro=$((micro - 1)); done
    echo "note: --micro-batch-size $micro, for $ranks GPUs" >&2
    for at in "${!training[@]}"; do
        if [[ ${training[at]} == --micro-batch-size ]]; then training[at + 1]=$micro; fi
    done
}

# If a recipe runs on several nodes, one node builds and prepares; the others wait here until that is
# done. Descriptor 9 holds the lock.
alone() {
    mkdir -p "$root/run" && exec 9>>"$root/run/.recipe.lock" && flock 9 ||
        echo "going on without a lock: nothing keeps another recipe out"
}

# Builds the programs, and has the trainer check all options before data are prepared.
build() {
    if [[ $smoke == 1 ]]; then
        make -s -C "$root" train_gpt tokenize make_corpus || die "the build failed"
        check_options --version "$@" # its tokenizer is not there yet
    elif [[ ${PREPARE:-0} != 1 ]]; then
        make -s -C "$root" train_gpt train_gptcu || die "the build failed"
        local absent=() # what prepare_data() has yet to make
        if ! compgen -G "$data/train_*.bin" >/dev/null; then
            has data "$@" || absent+=(--data= --epochs 0)
            has valid-data "$@" || absent+=(--valid-data=)
        fi
        check_options --plan "$@" "${absent[@]}"
    fi
}

# check_options ACTION ARGUMENTS: has the trainer check all options. The restart loop would start a refused
# command again.
check_options() {
    local why
    build_command "${@:2}"
    if [[ $launch != self ]]; then # the ranks that the launcher will start
        local -x NNODES=$nodes NODE_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29500
        options+=(--gpus "$gpus")
    fi
    why=$("$trainer" "${options[@]}" "${@:2}" "$1" 2>&1 >/dev/null) || {
        echo "$why" >&2
        exit 1
    }
}

# Prints a note if the data were not made with the user's TOKENIZER.
note_tokenizer() {
    local json=${TOKENIZER:-}
    # shellcheck disable=SC2154 # the recipe sets tokenizer
    if [[ $smoke == 1 || -z $json || $json != "$tokenizer" ]]; then return; fi
    if [[ -d $json ]]; then json+=/tokenizer.json; fi
    cmp -s "$json" "$data/tokenizer.json" ||
        grep -qsF "\"tokenizer\": \"$TOKENIZER\"" "$data/manifest.json" ||
        echo "note: the data in $data are used as they are; TOKENIZER=$TOKENIZER is ignored" \
            "(another DATA=DIR is made with it)"
}

# Existing data are used as they are; but if the user gives CHAT, scripts/prepare_data checks that they
# were made from it.
prepare_data() {
    if compgen -G "$data/train_*.bin" >/dev/null && [[ ! -d $data/.work ]] &&
        [[ $smoke == 1 || -z ${CHAT:-} ]]; then
        note_tokenizer
        return
    fi
    if [[ $smoke == 1 ]]; then
        mkdir -p "$data" || exit 1
        "$root/make_corpus" >"$data/corpus.txt" || die "$data/corpus.txt: could not be written"
        "$root/tokenize" --output-prefix "$data/all" "$data/corpus.txt" >/dev/null || exit 1
        mv "$data/all_val.bin" "$data/val_00000.bin" || exit 1
        mv "$data/all_train.bin" "$data/train_00000.bin" || exit 1
        mv "$data/all_tokenizer.bin" "$data/tokenizer.bin" || exit 1
        return
    fi
    # shellcheck disable=SC2154 # the recipe sets data_set and tokenizer
    "$scripts/prepare_data" "$data_set" --download-files "${data_files:-0}" --output "$data" \
        --downloads "$root/data/downloads" --tokenizer "$tokenizer" "${data_options[@]}" || exit 1
}

prepare_choices() { # the text that llm.c scores
    if [[ $smoke != 1 && ! -e $data/hellaswag.bin ]]; then
        "$scripts/prepare_choices" hellaswag --context-field ctx --output "$data/hellaswag.bin" \
            --downloads "$root/data/downloads" --tokenizer "$data/tokenizer.json" ||
            echo "going on without HellaSwag"
    fi
    if [[ -e $data/hellaswag.bin ]]; then choices=$data/hellaswag.bin; fi
}

# What SMOKE=1 trains: two blocks over bytes, for six steps. START has a model of its own.
tiny_model=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128
    --vocab-size 257)
tiny_run=(--seq-length 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 6
    --lr-warmup-iters 2 --eval-interval 3 --eval-iters 1 --save-interval 3 --sample-length 16
    --sample-interval 3 --log-interval 1)

# value_of NAME ARGUMENTS: prints the last value of the option --NAME; fails without one.
value_of() {
    local option=--$1 value='' status=1
    while shift && [[ $# -gt 0 ]]; do
        if [[ $1 == "$option" ]]; then value=${2:-} status=0; fi
        if [[ $1 == "$option="* ]]; then value=${1#*=} status=0; fi
    done
    echo "$value"
    return $status
}

# has NAME ARGUMENTS: whether the arguments have the option --NAME.
has() {
    value_of "$@" >/dev/null
}

# add_shards ARGUMENTS: adds the recipe's data, unless the arguments name others: the trainer would warn
# of a pattern that is given twice.
add_shards() {
    local row
    for row in "data=$data/train_*.bin" "valid-data=$data/val_*.bin" \
        ${choices:+"eval-choices=$choices"}; do
        has "${row%%=*}" "$@" || options+=("--${row%%=*}" "${row#*=}")
    done
}

build_command() {
    local tiny=("${tiny_model[@]}")
    options=("${model[@]}" "${training[@]}" "${numbers[@]}")
    add_shards "$@"
    if [[ $smoke == 1 ]]; then
        if [[ " ${model[*]} " == *" llama"* ]]; then tiny+=(--num-query-groups 2); fi
        if [[ -n ${START:-} ]]; then tiny=(); fi
        options+=("${tiny[@]}" "${tiny_run[@]}" --tokenizer "$data/tokenizer.bin")
    elif [[ $launch == self ]]; then
        options+=(--gpus "$gpus")
    fi
    if [[ $precision == both ]]; then
        local name variant=("${fp8[@]}") # then the user's own FP8, which the variant's would override
        for name in fp8-format fp8-recipe; do
            if has "$name" "$@"; then variant+=("--$name" "$(value_of "$name" "$@")"); fi
        done
        if has no-fp8-lm-head "$@"; then variant+=(--no-fp8-lm-head); fi
        command=("$scripts/compare" --out "$out" --trainer "'${trainer//\'/\'\\\'\'}'"
            --seeds "${SEEDS:-1234}" --variant "bf16: ${bf16[*]}" --variant "fp8: ${variant[*]}"
            -- "${options[@]}" "$@")
        return
    fi
    command=("$trainer" "${options[@]}" --save "$out" "$@")
    local restart=$scripts/restart.sh torchrun
    case $launch in
    self) command=("$restart" "${command[@]}") ;;
    slurm) command=(srun --ntasks-per-node "$gpus" "$restart" "${command[@]}") ;;
    torchrun)
        read -r -a torchrun <<<"${TORCHRUN:---standalone}"
        command=("$restart" torchrun "${torchrun[@]}" --nproc-per-node "$gpus" --no-python
            "${command[@]}")
        ;;
    esac
}

recipe() {
    if [[ ${1:-} == --help || ${1:-} == -h ]]; then
        sed -sn '2,/^\([^#]\|$\)/s/^# \{0,1\}//p' "$0" "${BASH_SOURCE[0]}" | grep -v ^shellcheck
        exit
    fi
    warn_of_near_misses
    check_environment "$@"
    if [[ ${DRY:-0} == 1 ]]; then
        build_command "$@"
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    alone
    build "$@"
    # if all data are the user's, none are prepared
    if [[ $smoke == 1 ]] || ! has data "$@" || ! has valid-data "$@"; then
        prepare_data
        prepare_choices
    fi
    exec 9>&-
    if [[ ${PREPARE:-0} == 1 ]]; then return; fi
    if [[ $smoke == 1 ]]; then check_options --plan "$@"; fi
    build_command "$@"
    if [[ $smoke != 1 ]]; then
        options=("${model[@]}" "${training[@]}")
        add_shards "$@" # --epochs needs them
        "$scripts/estimate" --gpus "$ranks" "${options[@]}" --fp8-lm-head "$@" ||
            echo "going on without an estimate"
    fi
    exec "${command[@]}"
}
