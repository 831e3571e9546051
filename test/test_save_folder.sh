#!/usr/bin/env bash
# What a run may do to its --save folder: one run at a time, its own checkpoints only, nothing
# outside of it, whatever else lies there.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
common=(--model llama-tiny --data d/x_train.bin --micro-batch-size 2 --log-interval 1)

prepare() {
    make_shards 1500
}

# train FOLDER STEPS OPTIONS...
train() {
    local folder=$1 steps=$2
    shift 2
    expect_status 0 train_gpt "${common[@]}" --lr-decay-iters 100 \
        --save "$folder" --train-iters "$steps" "$@"
}

# refused TEXT FOLDER STEPS OPTIONS...: as `train`, which must leave the folder as it is
refused() {
    local says=$1 folder=$2 steps=$3
    shift 3
    find "$folder" -type f ! -name .lock -exec cksum {} + | sort >before
    expect_said 1 "$says" train_gpt "${common[@]}" --save "$folder" --train-iters "$steps" "$@"
    find "$folder" -type f ! -name .lock -exec cksum {} + | sort | cmp -s before - ||
        fail "$folder has changed: $*"
}

# $1: the program and its options; who holds the lock is $2, and how its line begins $3
check_lock() {
    local program=$1 starter holder words on=("${common[@]}" --train-iters 1000000 --save-interval 7)
    read -ra words <<<"$program"
    rm -rf s
    start first.log "${words[@]}" "${on[@]}" --save s
    starter=$started
    wait_until grep -q '^step ' first.log
    holder=$starter
    if [[ $program == *--gpus* ]]; then holder=$(pgrep -P "$starter" | sort -n | head -n 1); fi
    for words in '' '--resume latest'; do
        # shellcheck disable=SC2086 # the program's words, and options or none
        expect_said 1 "--save s: in use by another run: host $(uname -n), pid $holder, since 20" \
            $program "${common[@]}" --save s --lock-timeout 0 $words
    done
    read -ra words <<<"$program"
    start second.log "${words[@]}" "${on[@]}" --save s --resume latest --lock-timeout 60
    wait_until grep -q "in use by another run: host .*; waiting up to 60 s" second.log
    kill -TERM "$starter"
    wait "$starter"
    [[ $? -eq 75 ]] || fail "the first run: $(tail -n 2 first.log)"
    wait_until grep -q "^resuming from s/$(readlink s/latest): " second.log
    wait_until grep -q '^step ' second.log
    kill -9 "$started"
    wait "$started" 2>/dev/null
    # ranks end just after their starter
    # shellcheck disable=SC2086
    expect_status 0 $program "${common[@]}" --save s --resume latest --lock-timeout 5 --train-iters 1
}

test_a_second_run_waits_or_leaves() {
    check_lock "$root/train_gpt"
}

# A requeued job gives only --resume latest, and starts before the run that it continues has saved.
test_a_run_that_waits_takes_the_last_options() {
    local first second
    start first.log "$root/train_gpt" "${common[@]}" --lr 1e-3 --seed 5 --valid-data d/x_val.bin \
        --train-iters 1000000 --save-interval 1000000 --save late
    first=$started
    wait_until grep -q '^step ' first.log
    start second.log "$root/train_gpt" --save late --resume latest --lock-timeout 20
    second=$started
    wait_until grep -q 'waiting up to 20 s' second.log
    # what is only looked at does not wait, nor does what contradicts itself
    expect_status 0 train_gpt "${common[@]}" --save late --resume latest --plan || return
    expect_said 1 'list-checkpoints: none under late' train_gpt --save late --list-checkpoints
    expect_said 1 'error: --min-lr 1: must be at most' train_gpt "${common[@]}" --save late --min-lr 1
    kill -TERM "$first"
    wait "$first"
    wait_until grep -q '^step ' second.log
    has second.log '--valid-data d/x_val.bin' || fail "no validation: $(cat second.log)"
    has second.log '--seed 5' || fail "another seed: $(cat second.log)"
    ! has second.log ' in the checkpoint' || fail "$(grep ' in the checkpoint' second.log)"
    kill -9 "$second"
    wait "$second" 2>/dev/null
}

test_ranks_hold_one_lock() {
    if [[ ! -x $root/build/plain/standin_trainer ]]; then
        skip "no C++ compiler, so no stand-in trainer"
        return
    fi
    LD_LIBRARY_PATH=$root/build/standin check_lock "$root/build/plain/standin_trainer --gpus 2 \
        --distributed-timeout 20 --no-cuda-graphs"
}

test_another_runs_checkpoint_is_refused() {
    local path step
    train a 4 && train b 6 --save-interval 2 --keep 0 && train c 2 || return
    for path in a/latest a/step_00000004 "$PWD/a/latest/" a/../a/latest; do
        refused "holds checkpoints of another run than --resume $path" b 9 --resume "$path"
    done
    refused 'error: --resume a/step_00000005: no such folder; --list' b 9 \
        --resume a/step_00000005
    for path in b/latest b/../b/step_00000004 b/step_00000002 "$PWD/b/latest/"; do
        step=$(basename "$(readlink "${path%/}" || echo "$path")")
        train b 7 --save-interval 100 --keep 0 --resume "$path" || return
        has log "resuming from $(dirname "$path")/$step: " || fail "$path: $(cat log)"
    done
    ln -s b link
    train link 8 --resume b/latest && train b 9 --resume link/latest || return
    mv b/step_00000009 archive && ln -s ../archive b/step_00000009
    train b 10 --resume b/step_00000009 || return # in the run's folder, though it lies elsewhere
    train fresh 5 --resume a/latest || return
    mkdir empty && train empty 5 --resume a/latest || return
    refused 'a run has saved there up to step 2; resume it with --resume latest' c 3
    cd c && ln -s ../d d && expect_said 1 '.: a run has saved there up to step 2; resume it ' \
        train_gpt "${common[@]}" --save . --train-iters 3
    cd ..
}

# A run that goes back and is killed before it has saved: what was ahead is neither resumed nor best,
# and not lost.
test_going_back_leaves_no_branch_in_silence() {
    local on=(--valid-data d/x_val.bin --eval-interval 2 --save-interval 2 --keep 0 --lr 2e-3)
    train back 8 "${on[@]}" || return
    [[ $(readlink back/best) == step_00000008 ]] || fail "best is $(readlink back/best)"
    cksum back/step_0000000[68]/* | sed 's/step_[0-9]*/&.aside-1/' >before
    start back.log "$root/train_gpt" "${common[@]}" --save back --resume back/step_00000004 \
        --train-iters 1000000 --save-interval 1000000
    wait_until grep -q '^step ' back.log
    kill -9 "$started"
    wait "$started" 2>/dev/null
    [[ $(readlink back/latest back/best) == $'step_00000004\nstep_00000004' ]] ||
        fail "latest, best: $(readlink back/latest back/best)"
    cksum back/step_0000000[68].aside-1/* | cmp -s before - || fail "not as it was: $(ls back)"
    has back.log 'back/step_00000008 is set aside as step_00000008.aside-1' || fail "$(tail -n 3 back.log)"
    train back 8 "${on[@]}" --lr 3 --resume latest || return
    has log 'resuming from back/step_00000004' || fail "$(cat log)"
    # its own losses are higher: meta.json of `best` is that of the lowest
    [[ $(readlink back/best) == step_00000004 ]] || fail "best is $(readlink back/best)"
    rm back/latest back/best # they are for other programs
    expect_said 0 'from the weights of back/step_00000004' train_gpt --load back/best --sample-only \
        --no-quiet
    train back 10 --resume back/best || return
    has log 'resuming from back/step_00000004' || fail "$(cat log)"
    [[ $(readlink back/latest) == step_00000010 && -d back/step_00000008.aside-2 ]] ||
        fail "$(ls -l back)"
}

# A run that would go back to where it has nothing to train stays where it is.
test_nothing_to_train_changes_nothing() {
    local words
    listed() { find ended ! -name .lock -exec ls -ld --time-style=full-iso {} +; }
    train ended 4 --save-interval 2 && train ended 8 --save-interval 2 --keep 0 --resume latest ||
        return
    listed >before
    for words in ended/step_00000004 'latest --train-iters 3' \
        'ended/step_00000006 --train-iters 6'; do
        # shellcheck disable=SC2086 # words
        expect_said 0 'nothing to train: step ' train_gpt --save ended --resume $words || return
        listed | cmp -s before - || fail "$words: $(listed | diff before -)"
    done
    train ended 10 --resume latest || return
    has log 'resuming from ended/step_00000008' || fail "$(cat log)"
}

# killed FOLDER OPTIONS...: a run into the folder, killed in its first steps, before it has saved
killed() {
    local folder=$1
    shift
    start killed.log "$root/train_gpt" "${common[@]}" --lr-decay-iters 100 --lr-wsd-decay-iters 20 \
        --save "$folder" --train-iters 1000000 --save-interval 1000000 "$@"
    wait_until grep -q '^step ' killed.log
    kill -9 "$started"
    wait "$started" 2>/dev/null
    ! compgen -G "$folder/step_*" >/dev/null || fail "it has saved: $(ls "$folder")"
}

# again FOLDER STEPS: by its config.txt
again() {
    expect_status 0 train_gpt --config "$1/config.txt" --resume latest --train-iters "$2"
}

# A run that is killed before its first save is the same run when it is started again.
test_a_killed_start_is_the_same_run() {
    local way
    train origin 4 || return
    for way in resume load; do
        train whole-$way 9 --$way origin/latest || return
        killed $way --$way origin/latest
        killed $way --config $way/config.txt --resume latest # and once more
        if [[ $way == resume ]]; then
            [[ $(readlink resume/latest) == "$PWD/origin/step_00000004" ]] || fail "$(ls -l resume)"
            expect_said 0 "from the weights of $PWD/origin/step_00000004" \
                train_gpt --load resume/latest --sample-only --no-quiet
        fi
        again $way 9 || return
        same_checkpoint $way/latest whole-$way/latest || fail "another end: $(head -n 20 log)"
        [[ $(readlink $way/latest) == step_00000009 ]] || fail "$(ls -l $way)"
    done
    ! same_checkpoint resume/latest load/latest || fail "--load is --resume"
    # another run in the same folder is another run
    killed other --resume origin/latest
    killed other --seed 7
    [[ ! -L other/latest ]] || fail "$(ls -l other)"
    again other 5 || return
    has log 'no checkpoint under other yet: starting from step 0' || fail "$(cat log)"
    # where it began is gone
    killed lost --resume origin/latest
    mv origin elsewhere
    expect_said 1 "where the run began: $PWD/origin/step_00000004: no such folder" \
        train_gpt --config lost/config.txt --resume latest --train-iters 5
    mv elsewhere origin
    again lost 5
}

test_a_moved_folder_is_no_new_run() {
    train here 4 || return
    mv here there
    expect_said 1 "here, which there/config.txt names, has no checkpoint, and there has: give --save there" \
        train_gpt --config there/config.txt --resume latest --train-iters 6
    [[ ! -e here/latest ]] || fail "$(ls here)"
    expect_said 0 "resuming from there/step_00000004" \
        train_gpt --config there/config.txt --resume latest --train-iters 6 --save there
}

# What too few files may be open to read is whole.
test_what_cannot_be_opened_is_not_passed_over() {
    local files refused=0
    train open 4 --save-interval 2 --keep 0 || return
    for ((files = 4; files < 40; files++)); do
        # shellcheck disable=SC2016 # bash's own
        bash -c 'ulimit -n "$1" && shift && exec "$@"' _ $files "$root/train_gpt" "${common[@]}" \
            --save open --train-iters 4 --resume latest >log 2>&1
        case $? in
        0) has log 'resuming from open/step_00000004' || fail "$files: $(cat log)" ;;
        1) if has log 'Too many open files'; then refused=$((refused + 1)); fi ;;
        esac
        ! has log 'trying an earlier' || fail "$files: $(cat log)"
        [[ $(readlink open/latest) == step_00000004 ]] || fail "$files: $(ls -l open)"
    done
    [[ $refused -gt 4 && -d open/step_00000002 && -z $(compgen -G 'open/*aside*') ]] ||
        fail "$refused $(ls open)"
    has log 'resuming from open/step_00000004' || fail "$(cat log)"
}

# The trainer's place is taken by one that goes back, begins elsewhere or saves, and fails.
test_restarts_begin_where_they_are_told() {
    local restart=(env PATH="$PWD/fake:$PATH" "$root/scripts/restart.sh" --pause 0)
    mkdir -p fake there
    cat >fake/trainer <<'END'
#!/usr/bin/env bash
echo "${*: -1}" >>said
read -r action <actions && sed -i 1d actions
case $action in
back) mv there/step_00000900 there/step_00000900.aside-1 ;;
link) ln -sfn "$(date +%N)" there/latest ;;
again) mkdir there/step_00000900 ;;
save) mkdir there/step_00000950 ;;
end) exit 0 ;;
esac
exit 1
END
    chmod +x fake/trainer
    # fails before it has gone back; then it goes back, and comes to the same name again
    mkdir there/step_00000500 there/step_00000900 there/step_00000950.aside-1
    printf '%s\n' none back again none save end >actions
    expect_status 0 "${restart[@]}" trainer --save there --resume there/step_00000500 || return
    [[ $(tr '\n' ' ' <said) == 'there/step_00000500 there/step_00000500 latest latest latest latest ' ]] ||
        fail "$(cat said log)"
    has log 'at step_00000500, failure 1 of 3' || fail "$(cat log)"
    has log 'at step_00000950, failure 1 of 3' || fail "$(cat log)"
    # without --resume, and from elsewhere into a new folder
    rm -r said there/step_*
    printf '%s\n' none link end >actions
    expect_status 0 "${restart[@]}" trainer --save there --resume elsewhere/step_00000500
    printf '%s\n' none end >actions
    expect_status 0 "${restart[@]}" trainer --save there
    [[ $(tr '\n' ' ' <said) == 'elsewhere/step_00000500 elsewhere/step_00000500 latest latest latest ' ]] ||
        fail "$(cat said)"
}

test_links_are_unlinked_only() {
    local file
    mkdir -p elsewhere/a elsewhere/b
    train linked 2 --save-interval 1 --keep 0 || return
    mv linked/step_00000001 elsewhere/a/step && ln -s "$PWD/elsewhere/a/step" linked/step_00000001
    cp -r linked/step_00000002 elsewhere/b/step && ln -s ../elsewhere/b/step linked/.old-step_9
    ln -s ../elsewhere/b/step linked/.tmp-step_00000003
    find elsewhere -type f | sort >before
    train linked 4 --save-interval 1 --keep 1 --resume latest || return
    find elsewhere -type f | sort | cmp -s before - || fail "files outside the folder are deleted"
    for file in step_00000001 .old-step_9 .tmp-step_00000003; do
        [[ ! -L linked/$file ]] || fail "the link $file stays"
        has log "warning: linked/$file is a link: the link alone is deleted" ||
            fail "$file: $(grep warning log)"
    done
    [[ $(ls linked) == $'config.txt\nlatest\nmetrics.jsonl\nstep_00000003\nstep_00000004' ]] ||
        fail "$(ls linked)" # step 3 is proven by step 4, which nothing follows yet
    # nor are they written through
    echo mine >notes && ln -sf ../notes linked/config.txt.new
    train linked 5 --resume latest || return
    ln -sf ../notes linked/.lock
    refused 'linked/.lock: a link; delete it' linked 6 --resume latest
    [[ $(cat notes) == mine ]] || fail "a file outside the folder is written: $(cat notes)"
}

# Copies of every kind go on, and end as the run does. `cp -rL` makes folders of links, also of those
# that a kill left, as latest.new of version 1.0: none is read where steps are.
test_copies_go_on() {
    local how on=(--valid-data d/x_val.bin --eval-interval 1 --save-interval 1 --keep 2)
    train run 4 "${on[@]}" && cp -a run kept || return
    ln -s step_00000003 kept/latest.new && ln -s step_00000003 kept/.tmp-link || return
    train run 6 "${on[@]}" --resume latest || return
    for how in 'cp -r kept copy' 'cp -rL kept copy' 'cp -al kept copy' 'cp -a kept old && mv old copy' \
        'mkdir copy && tar -C kept -cf - . | tar -C copy -xf -' 'rsync -a kept/ copy' \
        'mkdir copy && cp -r kept/step_00000004 copy' 'mkdir copy && cp -rL kept/latest copy'; do
        if [[ $how == rsync* ]] && ! command -v rsync >/dev/null; then continue; fi
        rm -rf copy
        eval "$how" || fail "$how"
        train copy 6 "${on[@]}" --resume latest || return
        grep -q 'resuming from copy/\(step_00000004\|latest\):' log || fail "$how: $(cat log)"
        grep warning log | grep -v 'links share it with another folder' >warnings # of cp -al
        [[ $(wc -l <warnings) -eq $(find copy/latest -prune -type d | wc -l) ]] ||
            fail "$how: $(cat warnings)"
        same_checkpoint run/step_00000006 copy/step_00000006 || fail "$how: another end"
        expect_said 0 'from the weights of copy/step_00000006' train_gpt --load copy/latest/ \
            --sample-only --no-quiet
        [[ -d copy/latest && ! -L copy/latest || $(readlink copy/latest) == step_00000006 ]] ||
            fail "$how: $(ls -l copy)"
    done
}

# The only checkpoint of its step, under the name that a copy gave it: it is neither passed over in
# silence nor lost.
test_a_copy_of_a_link_is_kept() {
    train several 6 --save-interval 1 --keep 2 || return
    mkdir part && cp -rL several/latest part/latest && cp -r several/step_00000005 part/
    expect_said 0 'part/latest is a folder, not a link; part/step_00000005 is read instead' \
        train_gpt --load part/latest --sample-only
    train part 7 --resume latest || return
    has log 'resuming from part/step_00000005' || fail "$(cat log)"
    has log 'warning: part/latest: the link could not be written: ' || fail "$(cat log)"
    same_checkpoint several/latest part/latest || fail "the only copy is gone: $(ls -l part)"
    # where nothing else of the run is left, the folder is not taken for an empty one
    mkdir only && cp -r several/step_00000006 only/latest
    refused 'only: a run has saved there; resume it with --resume latest, or give another' only 9
    expect_said 0 'resuming from only/latest: step 6' train_gpt --load none --resume only/latest \
        --sample-only --no-quiet
    train only 7 --resume latest || return
    same_checkpoint several/latest only/latest || fail "the only copy is gone: $(ls -l only)"
}

are_apart() {
    [[ $(stat -c %h "$1/metrics.jsonl" "$2/metrics.jsonl") == 1$'\n'1 ]]
}

# cp -al and cp -rs make folders whose files are the first one's, too.
test_copies_by_links_are_runs_of_their_own() {
    local way status metrics=$root/test/metrics_tool.py
    local on=("$root/train_gpt" "${common[@]}" --train-iters 1000000 --save first --resume latest)
    for way in -al -rs; do
        rm -rf first second
        train first 4 --save-interval 2 && cp $way "$PWD/first" second || return
        if [[ $way == -rs ]]; then
            expect_said 1 'second/.lock: a link; delete it' train_gpt --resume latest --save second
            rm second/.lock
        fi
        find first -type f -exec cksum {} + >before
        train second 6 --save-interval 2 --resume latest --seed 5 || return
        find first -type f -exec cksum {} + | cmp -s before - || fail "$way: the first one changed"
        start first.log "${on[@]}"
        wait_until grep -q '^step ' first.log # beside it:
        train second 8 --resume latest --lock-timeout 0 || return
        kill -TERM "$started"
        await_end "$started"
        "$metrics" second/metrics.jsonl >steps || fail "$way: $(tail -n 3 steps)"
        [[ $(grep -c '^step' steps) -eq 8 ]] || fail "$way: $(cat steps)"
        "$metrics" first/metrics.jsonl >steps || fail "$way: $(tail -n 3 steps)"
        tail -n 1 first/metrics.jsonl | grep -q '"status":75' || fail "$way: no end of the first"
    done
    # made while the run goes on: apart from its next save on
    start first.log "${on[@]}" --save-interval 20
    wait_until grep -q '^step ' first.log
    rm -rf second && cp -al first second
    wait_until are_apart first second
    kill -TERM "$started"
    await_end "$started"
    ! tail -n 1 second/metrics.jsonl | grep -q '"kind":"end"' || fail "the copy has its end"
}

# A link that leads into no run's folder is followed.
test_a_link_of_metrics_is_followed() {
    mkdir third disk && ln -s ../disk/m.jsonl third/metrics.jsonl
    train third 2 && train third 3 --resume latest
    [[ -L third/metrics.jsonl && $(grep -c '"kind":"run"' disk/m.jsonl) -eq 2 ]] ||
        fail "$(ls -l third)"
}

test_other_names_are_no_checkpoints() {
    local name strays=(step_+5 step_6 step_000000007 'step_ 8' step_00000009x step_)
    train stray 1 || return
    for name in "${strays[@]}"; do mkdir "stray/$name" && echo mine >"stray/$name/file"; done
    echo mine >stray/step_00000077 # a file
    train stray 12 --save-interval 2 --keep 2 --resume latest || return
    ! has log warning || fail "$(grep warning log)"
    for name in "${strays[@]}"; do [[ -f stray/$name/file ]] || fail "$name is gone"; done
    [[ -f stray/step_00000077 ]] || fail "the file is gone"
    [[ $(compgen -G 'stray/step_0000001*' | wc -l) -eq 2 && ! -e stray/step_00000001 ]] ||
        fail "not pruned: $(ls stray)"
    [[ $(readlink stray/latest) == step_00000012 ]] || fail "latest: $(readlink stray/latest)"
    echo mine >stray/step_00000014 # in the way
    train stray 14 --save-interval 2 --keep 2 --resume latest || return
    expect_said 0 '12 ' train_gpt --save stray --list-checkpoints || return
    grep -qE '^ +12 +[0-9.]+ +- +FP32 ' log || fail "a validation loss without validation: $(cat log)"
    grep -qE '^ +14 .* whole, latest$' log || fail "$(cat log)"
    [[ $(wc -l <log) -eq 3 ]] || fail "$(cat log)"
}

# A run follows from its folders: what somebody has deleted there is no part of it.
test_a_deleted_step_is_gone() {
    train gone 6 --save-interval 2 --keep 3 && rm -r gone/step_00000006 || return
    train gone 6 --save-interval 2 --resume latest || return
    has log 'resuming from gone/step_00000004' || fail "$(head -n 3 log)"
    # but a run of which nothing is left does not begin anew in silence
    rm -r gone/step_*
    refused 'nothing is saved yet, and where the run began: gone/step_00000006: no such' gone 6 \
        --resume latest
    rm gone/latest && train gone 1 --resume latest
}

test_long_paths_are_refused_at_once() {
    local folder length
    folder=$(printf '%.0sabcdefghijklmno/' {1..64})
    for length in 1005 990 976 961; do
        expect_said 1 '...: longer than 960 characters' train_gpt "${common[@]}" \
            --train-iters 2 --save "${folder:0:length-1}p" || return
    done
    [[ ! -e abcdefghijklmno ]] || fail "a folder was made"
    train "${folder:0:959}p" 2 || return
    [[ -e ${folder:0:959}p/latest/meta.json ]] || fail "not 960"
}

run_tests
