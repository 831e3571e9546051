#!/usr/bin/env bash
# What a run may do to its --save folder: one run at a time, its own checkpoints only, nothing
# outside of it, whatever else lies there.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
common=(--model llama-tiny --data d/x_train.bin --micro-batch-size 2 --log-interval 1)
on=(--train-iters 1000000 --save-interval 1000000) # a run that waits to be stopped

prepare() {
    make_shards 1500
}

# train FOLDER STEPS OPTIONS...
train() {
    expect_status 0 train_gpt "${common[@]}" --lr-decay-iters 100 --save "$1" --train-iters "$2" "${@:3}"
}

# sums FOLDER: of the files in it
sums() {
    find "$1" -type f ! -name .lock -exec cksum {} + | sort
}

# refused TEXT FOLDER STEPS OPTIONS...: as `train`, which must leave the folder as it is
refused() {
    sums "$2" >before
    expect_message 1 "$1" train_gpt "${common[@]}" --save "$2" --train-iters "$3" "${@:4}"
    sums "$2" | cmp -s before - || fail "$2 has changed"
}

# A second run waits for the first one, or leaves; a third takes the place of one that is killed.
test_a_second_run_waits_or_leaves() {
    local trainer holder words
    while read -ra trainer; do
        rm -rf s
        set -- "${trainer[@]}" "${common[@]}" --save s
        start first.log "$@" --train-iters 1000000 --save-interval 7
        wait_until grep -q '^step ' first.log
        holder=$started
        if [[ $* == *--gpus* ]]; then holder=$(pgrep -P "$started" | sort -n | head -n 1); fi
        for words in 1 '6 --resume latest'; do
            # shellcheck disable=SC2086 # a status, and options or none
            expect_message "${words:0:1}" "--save s: in use by another run: host $(uname -n), pid $holder, since 20" \
                "$@" --lock-timeout 0 ${words:1}
        done
        holder=$started
        start second.log "$@" --train-iters 1000000 --resume latest --lock-timeout 60
        wait_until grep -q "in use by another run: host .*; waiting up to 60 s" second.log
        kill -TERM "$holder"
        wait "$holder"
        is $? 75
        wait_until grep -q "^resuming from s/$(readlink s/latest): " second.log
        wait_until grep -q '^step ' second.log
        stop KILL 137
        expect_status 0 "$@" --resume latest --lock-timeout 5 --train-iters 1 # ranks end just after their launcher
    done < <(trainers)
}

# A requeued job gives only --resume latest, and starts before the run that it continues has saved.
test_a_run_that_waits_takes_the_last_options() {
    local first
    start first.log "$root/train_gpt" "${common[@]}" "${on[@]}" --lr 1e-3 --seed 5 --valid-data d/x_val.bin --save late
    first=$started
    wait_until grep -q '^step ' first.log
    start second.log "$root/train_gpt" --save late --resume latest --lock-timeout 20
    wait_until grep -q 'waiting up to 20 s' second.log
    # what is only looked at does not wait, nor does what contradicts itself
    check_rows <<'ROWS'
0|train_gpt "${common[@]}" --save late --resume latest --plan|
1|train_gpt --save late --list-checkpoints|list-checkpoints: none under late
1|train_gpt "${common[@]}" --save late --min-lr 1|error: --min-lr 1: must be at most
ROWS
    kill -TERM "$first"
    wait "$first"
    wait_until grep -q '^step ' second.log
    stop KILL 137
    cp second.log log
    says '--valid-data d/x_val.bin' '--seed 5' '! in the checkpoint'
}

test_checkpoints_of_another_run() {
    local path step
    train a 4 && train b 6 --save-interval 2 --keep 0 || return
    for path in a/step_00000004 "$PWD/a/latest/" a/../a/latest; do
        refused "holds checkpoints of another run than --resume $path" b 9 --resume "$path"
    done
    for path in b/latest b/../b/step_00000004 b/step_00000002 "$PWD/b/latest/"; do
        step=$(basename "$(readlink "${path%/}" || echo "$path")")
        train b 7 --save-interval 100 --keep 0 --resume "$path" || return
        says "resuming from $(dirname "$path")/$step: "
    done
    [[ -d b/step_00000006.aside-1 ]] || fail "not set aside: $(ls b)"
    ln -s b link
    train link 8 --resume b/latest && train b 9 --resume link/latest || return
    mv b/step_00000009 archive && ln -s ../archive b/step_00000009
    train b 10 --resume b/step_00000009 || return # in the run's folder, though it lies elsewhere
    train fresh 5 --resume a/latest || return
    mkdir empty && train empty 5 --resume a/latest || return
    ln -s a same
    refused 'a run has saved there up to step 4' same 6
}

# A run that would go back to where it has nothing to train stays where it is.
test_nothing_to_train_changes_nothing() {
    local words
    listed() { find ended ! -name .lock -exec ls -ld --time-style=full-iso {} +; }
    train ended 4 --save-interval 2 && train ended 8 --save-interval 2 --keep 0 --resume latest ||
        return
    listed >before
    for words in ended/step_00000004 'latest --train-iters 3' 'ended/step_00000006 --train-iters 6'; do
        # shellcheck disable=SC2086 # words
        expect_message 0 'nothing to train: step ' train_gpt --save ended --resume $words || return
        listed | cmp -s before - || fail "$words: $(listed | diff before -)"
    done
    train ended 10 --resume latest || return
    says 'resuming from ended/step_00000008'
}

# killed FOLDER OPTIONS...: a run into the folder, killed in its first steps, before it has saved
killed() {
    stopped KILL '^step ' "$root/train_gpt" "${common[@]}" --lr-decay-iters 100 --lr-wsd-decay-iters 20 \
        --save "$1" "${on[@]}" "${@:2}"
    [[ -z $(find "$1" -name 'step_*' -type d) ]] || fail "it has saved: $(ls "$1")"
}

# A run that is killed before its first save is the same run when it is started again by its
# config.txt. kills.py has those that begin at another run's checkpoint.
test_a_killed_start_is_the_same_run() {
    train origin 4 && train whole 9 --load origin/latest || return
    killed tuned --load origin/latest
    killed tuned --config tuned/config.txt --resume latest # and once more
    expect_status 0 train_gpt --config tuned/config.txt --resume latest --train-iters 9 || return
    same_checkpoint {tuned,whole}/latest || fail "another end: $(head -n 20 log)"
}

test_a_moved_folder_is_no_new_run() {
    local said='there/config.txt names --save here, but its own folder has checkpoints, too: give --save there or --save here'
    train here 4 && mv here there || return
    expect_message 1 "$said" train_gpt --config there/config.txt --resume latest --train-iters 6
    [[ ! -e here/latest ]] || fail "$(ls here)"
    cp -r there here # a copied run does not go on in the other folder
    expect_message 1 "$said" train_gpt --config there/config.txt --resume latest --train-iters 6
    ln -s here way_here
    check_rows <<'ROWS'
0|train_gpt --config there/config.txt --resume latest --train-iters 6 --save there|resuming from there/step_00000004
0|train_gpt --config way_here/config.txt --resume latest --train-iters 6|resuming from here/step_00000004
ROWS
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
link) ln -s "$(date +%N)" there/step_00000500 ;;
again) mkdir there/step_00000900 ;;
save) mkdir there/step_00000950 ;;
busy) exit 6 ;;
end) exit 0 ;;
esac
exit 1
END
    chmod +x fake/trainer
    # fails before it has gone back; then it goes back, and comes to the same name again
    mkdir there/step_00000500 there/step_00000900 there/step_00000950.aside-1
    printf '%s\n' none back again none save end >actions
    expect_status 0 "${restart[@]}" trainer --save there --resume there/step_00000500 || return
    is "$(xargs <said)" 'there/step_00000500 there/step_00000500 latest latest latest latest'
    says 'at step_00000500, failure 1 of 3' 'at step_00000950, failure 1 of 3'
    # without --resume, and from elsewhere into a new folder
    rm -r said there/step_*
    printf '%s\n' none link end >actions
    expect_status 0 "${restart[@]}" trainer --save there --resume elsewhere/step_00000500
    printf '%s\n' none end >actions
    expect_status 0 "${restart[@]}" trainer --save there
    is "$(xargs <said)" 'elsewhere/step_00000500 elsewhere/step_00000500 latest latest latest'
    # a folder in use by another run is no failure of this one
    printf '%s\n' none busy busy none busy end >actions
    expect_status 0 "${restart[@]}" trainer --save there
    says 'restart: there is in use by another run; again in 0 s' 'failure 2 of 3; again' '!failure 3'
    # --resume latest would replace one of a file
    echo 'resume = elsewhere/step_00000500' >resume.txt
    expect_message 1 'error: --config resume.txt has --resume elsewhere/step_00000500, which' \
        "${restart[@]}" trainer --save there --config resume.txt
    echo '--resume "run/latest/step_00000500"' >resume.txt
    expect_message 1 'has --resume run/latest/step_00000500, which' "${restart[@]}" trainer --save there \
        --config=resume.txt
    echo 'lr 1' >other.txt
    expect_message 1 'has --resume run/latest/step_00000500, which' "${restart[@]}" trainer --save there \
        --config=resume.txt --config other.txt
    printf '%s\n' 'config other.txt' '--config = resume.txt' >other.txt # and names itself
    expect_message 1 'error: --config resume.txt has --resume run/latest/step_00000500, which' \
        "${restart[@]}" trainer --save there --config other.txt
    local line
    for line in 'resume latest' 'resume = ""' 'config resume.txt'; do
        echo "$line" >resume.txt
        echo end >actions
        expect_status 0 "${restart[@]}" trainer --save there --config=resume.txt
    done
}

test_links_are_unlinked_only() {
    local file
    mkdir -p elsewhere/a elsewhere/b
    train linked 2 --save-interval 1 --keep 0 || return
    mv linked/step_00000001 elsewhere/a/step && ln -s "$PWD/elsewhere/a/step" linked/step_00000001
    cp -r linked/step_00000002 elsewhere/b/step && ln -s ../elsewhere/b/step linked/.old-step_9
    ln -s ../elsewhere/b/step linked/.tmp-step_00000003
    sums elsewhere >before
    train linked 4 --save-interval 1 --keep 1 --resume latest || return
    sums elsewhere | cmp -s before - || fail "files outside the folder are deleted"
    for file in step_00000001 .old-step_9 .tmp-step_00000003; do
        [[ ! -L linked/$file ]] || fail "the link $file stays"
    done
    # the usual loss of step 4 shows that step 3 is good; no step has shown this of step 4 yet
    is "$(ls linked)" $'config.txt\nlatest\nmetrics.jsonl\nstep_00000003\nstep_00000004'
    # nor are they written through
    echo mine >notes && ln -sf ../notes linked/config.txt.new
    train linked 5 --resume latest || return
    ln -sf ../notes linked/.lock
    refused 'linked/.lock: a link; delete it, and let metrics.jsonl be no link' linked 6 --resume latest
    is "$(<notes)" mine
}

# Copies of every kind go on, and end as the run does. `cp -rL` makes folders of links, also of those
# that a kill left, as latest.new of version 1.0: none is read where steps are.
test_copies_go_on() {
    local how often=(--valid-data d/x_val.bin --eval-interval 1 --save-interval 1 --keep 2)
    train run 4 "${often[@]}" && cp -a run kept || return
    ln -s step_00000003 kept/latest.new && ln -s step_00000003 kept/.tmp-link || return
    train run 6 "${often[@]}" --resume latest || return
    while read -r how; do
        if [[ $how == rsync* ]] && ! command -v rsync >/dev/null; then continue; fi
        rm -rf copy
        eval "$how" || fail "$how"
        train copy 6 "${often[@]}" --resume latest || return
        says 'resuming from copy/step_00000004:'
        is "$(grep warning log | grep -vc 'links share it with another folder')" \
            "$(find copy/latest -prune -type d | wc -l)" # the warning of cp -al is of metrics
        same_checkpoint {run,copy}/step_00000006 || fail "$how: another end"
        expect_message 0 'from the weights of copy/step_00000006' train_gpt --load copy/latest/ \
            --sample-only --no-quiet
        [[ -d copy/latest && ! -L copy/latest || $(readlink copy/latest) == step_00000006 ]] ||
            fail "$how: $(ls -l copy)"
    done <<'ROWS'
cp -r kept copy
cp -rL kept copy
cp -al kept copy
cp -a kept old && mv old copy
mkdir copy && tar -C kept -cf - . | tar -C copy -xf -
rsync -a kept/ copy
mkdir copy && cp -r kept/step_00000004 copy
ROWS
}

# The only checkpoint of its step, under the name that a copy gave it: it is neither passed over in
# silence nor lost.
test_a_copy_of_a_link_is_kept() {
    train several 6 --save-interval 1 --keep 2 || return
    mkdir part && cp -rL several/latest part/latest && cp -r several/step_00000005 part/
    expect_message 0 'from the weights of part/step_00000005' train_gpt --load part/latest --sample-only --no-quiet
    train part 7 --resume latest || return
    says 'resuming from part/step_00000005' 'warning: part/latest: the link could not be written: '
    same_checkpoint {several,part}/latest || fail "the only copy is gone: $(ls -l part)"
    mkdir only && cp -r several/step_00000006 only/latest
    expect_message 0 'resuming from only/latest: step 6' train_gpt --load none --resume only/latest \
        --sample-only --no-quiet
    train only 7 --resume only/latest || return
    same_checkpoint {several/step_00000006,only/latest} || fail "the only copy is gone: $(ls -l only)"
}

# cp -al makes a folder whose files are the first one's, too.
test_a_copy_by_links_is_a_run_of_its_own() {
    train first 4 --save-interval 2 && cp -al first second || return
    sums first >before
    train second 6 --save-interval 2 --resume latest --seed 5 || return
    sums first | cmp -s before - || fail "the first one changed"
    is "$(steps_of second | wc -l)" 6
    is "$(steps_of first | wc -l)" 4
}

# A link of metrics is followed.
test_a_link_of_metrics_is_followed() {
    mkdir third disk && ln -s ../disk/m.jsonl third/metrics.jsonl
    train third 2 && train third 3 --resume latest
    [[ -L third/metrics.jsonl && $(grep -c '"kind":"run"' disk/m.jsonl) -eq 2 ]] || fail "$(ls -l third)"
}

test_other_names_are_no_checkpoints() {
    local name strays=(step_+5 step_6 step_000000007 'step_ 8' step_00000009x step_)
    train stray 1 || return
    for name in "${strays[@]}"; do mkdir "stray/$name" && echo mine >"stray/$name/file"; done
    echo mine >stray/step_00000077 # a file
    train stray 12 --save-interval 2 --keep 2 --resume latest || return
    says '!warning'
    for name in "${strays[@]}"; do [[ -f stray/$name/file ]] || fail "$name is gone"; done
    [[ -f stray/step_00000077 ]] || fail "the file is gone"
    [[ $(compgen -G 'stray/step_0000001*' | wc -l) -eq 2 && ! -e stray/step_00000001 ]] ||
        fail "not pruned: $(ls stray)"
    is "$(readlink stray/latest)" step_00000012
    echo mine >stray/step_00000014 # in the way
    train stray 14 --save-interval 2 --keep 2 --resume latest || return
    expect_status 0 train_gpt --save stray --list-checkpoints || return
    grep -qE '^ +12 +[0-9.]+ +- +FP32 ' log || fail "a validation loss without validation: $(cat log)"
    grep -qE '^ +14 .* whole, latest$' log || fail "$(cat log)"
    is "$(wc -l <log)" 3
}

# A checkpoint's name is its step's.
test_another_name_is_refused() {
    train named 2 || return
    cp -r named/step_00000002 named/step_00000009
    expect_message 1 'step_00000009: has the checkpoint of step 2 under another name; rename it to step_00000002, or remove it' \
        train_gpt --save named --resume latest --train-iters 4
    rm -r named/step_00000009
    expect_status 0 train_gpt --save named --resume latest --train-iters 4
}

test_long_paths_are_refused_at_once() {
    local folder length
    folder=$(printf '%.0sabcdefghijklmno/' {1..64})
    for length in 1005 990 976 961; do
        expect_message 1 '...: longer than 960 characters' train_gpt "${common[@]}" \
            --train-iters 2 --save "${folder:0:length-1}p" || return
    done
    [[ ! -e abcdefghijklmno ]] || fail "a folder was made"
    train "${folder:0:959}p" 2 || return
    [[ -e ${folder:0:959}p/latest/meta.json ]] || fail "not 960"
}

# Who shares a folder by its group resumes and prunes the checkpoints of others.
test_the_umask_says_who_may_write() {
    local made
    for umask in 002 077; do
        (umask "$umask" && train "shared/$umask" 4 --save-interval 2 --keep 1 &&
            expect_status 0 "$root/tokenize" --output-prefix "shared/$umask/x" text &&
            expect_status 0 train_gpt --load "shared/$umask/latest" --export "shared/$umask/export")
        made=$(find "shared/$umask" ! -type l -printf '%y%m\n' | sort -u | tr '\n' ' ')
        is "$made" "$([[ $umask == 002 ]] && echo 'd775 f664 ' || echo 'd700 f600 ')"
    done
}

run_tests
