#!/usr/bin/env bash
# The Makefile in a tree of links to this one, with compilers that only note what they were called
# with: what is built anew when sources, flags or the GPU are others, what is missing, make clean,
# make help.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
unset MAKEFLAGS MFLAGS CFLAGS NATIVE BLAS ARCHS PTX CUDA_HOME NVCC CC CXX BUILD

prepare() {
    local file
    mkdir -p tree bin
    for file in "$root"/*/ "$root"/*.c "$root"/*.cu "$root"/*.toml; do
        if [[ $file != */build/ && $file != */run/ ]]; then ln -s "${file%/}" tree; fi
    done
    cp "$root/Makefile" tree
    cat >bin/compiler <<'END'
#!/bin/sh
for word; do
    if [ "$last" = -o ]; then out=$word; fi
    last=$word
done
case " $* " in *' -E '*) exit ;; esac
echo "$*" >"$out" && echo "$out" >>"$MADE"
END
    cp bin/compiler bin/nvcc
    printf '#!/bin/sh\necho asked >>"$MADE.gpu"\n[ -n "$GPU" ] && printf "$GPU"\n' >bin/nvidia-smi
    chmod +x bin/*
    export MADE=$PWD/made GPU=
}

# build ARGUMENT...: what is made goes to the file `made`.
build() {
    rm -f made made.gpu
    : >made
    expect_status 0 env PATH="$PWD/bin:$PATH" make -C tree -j4 CC=compiler CXX=compiler NVCC=nvcc "$@"
}

# made OBJECTS CUDA: how many objects of C and of CUDA the last call made.
made() {
    local c cuda
    c=$(grep -c '\.c\.o$' made)
    cuda=$(grep -c '\.cu\.o$' made)
    [[ $1 == some && $c -gt 5 || $1 == "$c" ]] || fail "$3: $c objects of C"
    [[ $2 == some && $cuda -gt 4 || $2 == "$cuda" ]] || fail "$3: $cuda of CUDA"
    [[ $(wc -l <made) -eq 0 || $c -gt 0 || $cuda -gt 0 ]] || fail "$3: $(cat made)"
}

# Rows: what nvidia-smi says, what is made, how many objects of C and of CUDA; with what the trainer's
# CUDA is compiled then.
check_builds() {
    local gpu words c cuda flags
    while IFS='|' read -r gpu words c cuda flags; do
        # shellcheck disable=SC2086 # words
        GPU=$gpu build $words && made "$c" "$cuda" "$gpu $words"
        [[ -z $flags ]] || grep -qE -- "$flags" tree/build/plain/train_gpt.cu.o || fail "$words: $(cat tree/build/plain/train_gpt.cu.o)"
    done
}

test_flags_are_part_of_what_is_built() {
    build && made some 0 first
    [[ -e tree/train_gpt && -e tree/tokenize && ! -e made.gpu ]] || fail "$(cat made)"
    check_builds <<'ROWS'
||0|0|
|WERROR=1|0|0|
|train_gpt NATIVE=|some|0|
|train_gpt NATIVE=|0|0|
|train_gpt CFLAGS=-O1|some|0|
|train_gpt CFLAGS=-O1|0|0|
ROWS
    grep -q -- '-O1' tree/build/plain/base/io.c.o || fail "built without -O1"
    build train_gpt
    touch -h tree && touch "$PWD/newer" && ln -sf "$PWD/newer" tree/train_gpt.c
    build train_gpt && made 1 0 'a changed source'
    ln -sf "$root/train_gpt.c" tree/train_gpt.c
}

test_the_gpu_is_part_of_what_is_built() {
    GPU='9.0\n9.0\n' build train_gptcu && made some some first
    is "$(wc -l <made.gpu)" 1 # nvidia-smi is asked once
    check_builds <<'ROWS'
9.0\n9.0\n|train_gptcu|0|0|-gencode arch=compute_90a,code=sm_90a -MMD
9.0\n|train_gptcu ARCHS=100a PTX=100|0|some|sm_100a -gencode arch=compute_100,code=compute_100 -MMD
8.9\n12.0\n|train_gptcu|0|some|code=sm_120 .*code=sm_89 -MMD
NVIDIA-SMI has failed|train_gptcu|0|some|sm_80 .*sm_89 .*sm_90a -gencode arch=compute_90,code=compute_90 -MMD
ROWS
    grep -qx train_gptcu made || fail "not linked anew"
    # the tests' PTX for older GPUs has its own flags
    build build/plain/test_gpu_kernels_ptx80 && build train_gptcu && made 0 0 'beside other PTX'
    rm -rf tree/build
    build train_gptcu && made some some 'without build/'
    rm tree/build/plain/kernels/gpu.c.o
    build train_gptcu && made 1 0 'without an object'
    build WERROR=1 train_gptcu && made 0 0 'the same programs'
    rm -rf tree/build/cuda.flags
    PATH="$PWD/bin:$PATH" expect_message 2 'error: no absent: the GPU trainer needs CUDA; make CUDA_HOME=' \
        make -C tree CC=compiler NVCC=absent train_gptcu
}

test_tests_are_kept() {
    build build/plain/test_io && made 1 0 first
    build build/plain/test_io && made 0 0 again
    [[ -e tree/build/plain/test/test_io.c.o ]] || fail "its object is removed"
}

test_missing_packages_are_named() {
    printf '#!/bin/sh\nexit 1\n' >bin/no-headers
    printf '#!/bin/sh\necho 1000\n' >bin/id
    # the lock of dpkg is another one's until it is asked for the third time
    printf '#!/bin/sh\necho x >>%q; [ $(wc -l <%q) -ge 3 ] || %s\necho "$*" >>%q; touch %q\n' \
        asked asked '{ echo "E: Could not get lock /var/lib/dpkg/lock-frontend."; exit 100; }' \
        "$PWD/installed" "$PWD/headers" >bin/apt-get
    printf '#!/bin/sh\n' >bin/sleep
    chmod +x bin/*
    local path=$PWD/bin:$PATH missing='missing: libc6-dev libcjson-dev zlib1g-dev'
    PATH=$path expect_message 2 "error: $missing. Type this once, then make again:" \
        make -C tree CC='no-headers -g' # such as "ccache gcc"
    says 'apt-get install -y libc6-dev libcjson-dev zlib1g-dev'
    PATH=$path expect_message 2 'missing: gcc libc6-dev' make -C tree CC=no-such-compiler
    PATH=$path expect_message 2 "error: $missing. Type this once, then make test again:" \
        make -C tree CC=no-headers test
    [[ ! -e installed ]] || fail "installed: $(cat installed)"
    # as root, make test installs
    printf '#!/bin/sh\necho 0\n' >bin/id
    printf '#!/bin/sh\n[ -e %q ]\n' "$PWD/headers" >bin/no-headers
    expect_message 0 '== installing libc6-dev libcjson-dev zlib1g-dev' \
        env PATH="$path" CC=no-headers "$root/scripts/packages.sh" --install 'make test'
    has installed '--no-install-recommends libc6-dev libcjson-dev zlib1g-dev' ||
        fail "$(cat installed)"
    [[ $(wc -l <asked) -eq 3 && $(grep -c 'waiting for another apt' log) -eq 1 ]] || fail "$(cat log)"
    # any other error is none to wait for
    printf '#!/bin/sh\necho y >>asked; echo "E: no such package"; exit 100\n' >bin/apt-get
    expect_message 1 'E: no such package' \
        env PATH="$path" CC=no-such-compiler "$root/scripts/packages.sh" --install 'make test'
    says 'error: apt-get could not install gcc libc6-dev'
    is "$(grep -c y asked)" 2
    expect_status 0 env PATH="$path" CC=no-headers "$root/scripts/packages.sh" make
    is "$(<log)" '' # nothing is missing
    rm bin/id bin/apt-get bin/sleep
    # libraries that a user has built in the home folder
    printf '#!/bin/sh\ncase " $* " in *" -I/home/include "*) exec compiler "$@" ;; esac; exit 1\n' >bin/at-home
    chmod +x bin/at-home
    PATH=$path expect_status 0 make -C tree CC=at-home CFLAGS='-O3 -I/home/include' || fail
}

# A machine without make, g++, git and Python, and with no right to install.
test_without_make_it_is_said() {
    mkdir -p few
    ln -s /usr/bin/* few 2>/dev/null
    rm -f few/make few/g++ few/git few/pgrep few/python3
    printf '#!/bin/sh\necho 1000\n' >few/id.new && mv few/id.new few/id && chmod +x few/id
    ln -s "$root/scripts/quickstart.sh" few/quickstart
    expect_message 1 'error: missing: make. Type this once, then make quickstart again' \
        env PATH="$PWD/few" few/quickstart # a link, as of a user's
    ln -s "$(command -v make)" few/make
    expect_message 0 'note: without g++ git procps python3-venv a part of the tests is skipped' \
        env PATH="$PWD/few" "$root/scripts/packages.sh" --install --tests 'make test'
}

# Ubuntu 22.04's compiler. clang needs another library's omp.h.
test_an_older_compiler_takes_the_sources() {
    command -v gcc-11 >/dev/null || { skip "no gcc-11" && return; }
    expect_status 0 gcc-11 -fsyntax-only -std=gnu11 -fopenmp -Wall -Werror "$root"/train_gpt.c \
        "$root"/{base,model,ranks,checkpoints,train,dataloader,scripts}/*.c \
        "$root"/kernels/{cpu,cpu_gemm,rope}.c || fail
}

# What a user types stands in make help, and what stands there is a target.
test_help_lists_the_targets() {
    expect_status 0 make -C tree --no-print-directory help || return
    local target
    while read -r target; do
        grep -qE "\bmake $target\b" log || fail "$target is not in make help"
    done < <(sed -n 's/^\.PHONY: //p' tree/Makefile | tr ' ' '\n' |
        grep -vxE 'all|help|FORCE|run-tests')
    while read -r target; do
        make -C tree -n "$target" >/dev/null 2>said || fail "make $target: $(cat said)"
    done < <(grep -oE '(^ *|; )make [a-z][a-z_-]+' log | sed 's,.* ,,')
    [[ $(wc -L <log) -le 100 ]] || fail "too wide"
}

# A line of a Dockerfile, with its arguments' defaults put in; $1: the file, $2: the line's first word.
lines_of() {
    local name value line
    line=$(sed -n "s/^$2 //p" "$1")
    while IFS='=' read -r name value; do
        value=${value%\"}
        line=${line//\$$name/${value#\"}}
    done < <(sed -n 's/^ARG //p' "$1")
    echo "$line"
}

# What the container runs while it is built, in a tree of the files that git has, on a machine of
# which every package is missing; then its own command.
container_builds() {
    local line bin=$PWD/bin
    rm -rf image apt && mkdir image
    git -C "$root" ls-files -z | tar -C "$root" --null -T - -c | tar -C image -x
    while read -r line; do
        (cd image && PATH=$bin:$PATH CC=compiler NVCC=nvcc sh -euc "$line") >log 2>&1 || return
    done < <(lines_of "$1" RUN)
    has apt python3-venv 2>>log && has log 'pip installs' &&
        [[ $(lines_of "$1" FROM) =~ ^nvidia/cuda:[0-9.]+-cudnn-devel-ubuntu[0-9.]+$ ]] || return
    printf '#!/bin/sh\necho "asked $*"\n' >image/train_gptcu && chmod +x image/train_gptcu
    (cd image && sh -c "$(lines_of "$1" CMD)") >log 2>&1 && has log 'asked --verify'
}

# Misspelt ones would leave their default in use, in silence; what make help lists is known.
test_unknown_variables_are_refused() {
    local unknown given
    while read -r unknown given; do
        # shellcheck disable=SC2086 # words
        expect_message 2 "no variable of this Makefile: $unknown (make help)" make -n -C tree quickstart $given
    done <<<$'data data=x\nARCH ARCH=90a\nSPETS DATA=x SPETS=2\nSTEP STEP=300'
    for given in $(make -s -C tree help | grep -oE '\b[A-Z_0-9]+=' | sort -u) CC= CXX= CFLAGS= STEPS= GPU= JOBS=; do
        expect_status 0 make -n -C tree help "${given}1"
    done
}

test_the_container_builds() {
    git -C "$root" ls-files >tracked 2>&1 || { skip "not a git checkout"; return; }
    printf '#!/bin/sh\necho "$*" >>%q\n' "$PWD/apt" >bin/apt-get
    printf '#!/bin/sh\necho 0\n' >bin/id
    cat >bin/python3 <<'END'
#!/bin/sh
case $* in
*'import ensurepip, venv') exit 1 ;; # its package is missing
'-m venv .venv') mkdir -p .venv/bin && cp ../bin/pip .venv/bin ;;
esac
END
    printf '#!/bin/sh\necho pip installs "$@"\n' >bin/pip
    chmod +x bin/*
    container_builds "$root/Dockerfile" || fail "$(tail -n 3 log)"
    grep -q -- 'sm_80 .*sm_90a -gencode' image/build/plain/train_gpt.cu.o || fail "not for every GPU"
    ! grep -q march image/build/plain/base/io.c.o || fail "for the machine that builds it alone"
    local fault
    for fault in s/packages.sh/package.sh/ 's/all train_gptcu/all/;s/\$PROGRAMS/$PROGRAM/' /FROM/d \
        '/packages/d' s/--verify/--version/; do
        sed "$fault" "$root/Dockerfile" >faulty
        ! container_builds faulty || fail "$fault is not seen"
    done
    rm bin/apt-get bin/id bin/python3 bin/pip
}

test_clean_leaves_the_packages_alone() {
    rm -rf tree/build tree/train_gpt tree/train_gptcu tree/tokenize tree/make_corpus
    mkdir -p tree/.venv/scripts
    find tree -maxdepth 1 | sort >before
    build all train_gptcu build/plain/test_io
    build clean
    find tree -maxdepth 1 | sort | diff before - >log || fail "left: $(cat log)"
}

# A test that outlives its run would hold a GPU, or the cores, beside the next one.
test_a_run_that_is_stopped_ends_its_programs() {
    printf '#!/bin/sh\necho $$ >%s/pid\nexec sleep 60\n' "$PWD" >slow
    chmod +x slow
    start log "$root/test/run.sh" "$PWD/slow"
    wait_until test -s pid
    stop TERM 130
    wait_until is_gone "$(cat pid)" || kill "$(cat pid)"
}

run_tests
