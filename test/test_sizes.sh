#!/usr/bin/env bash
# The limits of `make lint`: each is kept up to its last line, and the next one is a fault.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# $1 times the line $2.
lines() {
    local i
    for ((i = 0; i < $1; i++)); do echo "$2"; done
}

# A function of $2 lines whose declaration is $1.
function_of() {
    echo "$1 {"
    lines $(($2 - 2)) '    x = f(x);'
    echo '}'
}

# $1: file, $2: what its faults must be ("" for none), each as "LINE: WHAT".
expect() {
    local status=0 expected=$2
    awk -f "$root/scripts/sizes.awk" "$1" >found || status=$?
    if [[ $(sed '$d' found) != "${expected:+$1:$expected}" ]]; then
        fail "$1: $(sed '$d' found), not '$expected'"
    fi
    [[ $status -eq $((${#expected} > 0)) ]] || fail "$1: exit status $status"
}

functions() {
    {
        function_of 'static int short_one(int x)' 60
        echo
        echo 'static const Struct *long_one(const char *name, int x,'
        function_of '                              int y)' 60
        function_of 'int after_it(void)' 3
    } >f.c
    expect f.c '62: function long_one, lines: 61, more than 60'
    has found '; 3 functions, median 60 lines, the longest 61' || fail "$(cat found)"
    { printf 'usage() {\n' && lines 59 '    echo' && printf '}\n'; } >f.sh
    expect f.sh '1: function usage, lines: 61, more than 60'
}

kernels() {
    function_of '__global__ void k(int x)' 100 >k.cu
    expect k.cu ''
    printf 'template <int N>\n' >k.cu
    function_of 'static __global__ void __launch_bounds__(size(N)) k(int x)' 101 >>k.cu
    expect k.cu '2: kernel k, lines: 101, more than 100'
}

# A table, a struct and a list of declarations may be as long as they need.
other_blocks() {
    {
        printf 'static const Row table[] = {\n' && lines 70 '    {"a", 1},' && echo '};'
        printf 'typedef struct {\n' && lines 70 '    int x;' && echo '} T;'
        printf 'extern "C" {\n' && lines 70 'void f(int x);' && echo '}'
    } >b.c
    expect b.c ''
}

files() {
    lines 400 'int x;' >a.c
    expect a.c ''
    lines 401 'int x;' >a.c
    expect a.c '401: lines: 401, more than 400'
    lines 900 'int x;' >train_gpt.cu
    expect train_gpt.cu ''
    lines 901 'int x;' >train_gpt.c
    expect train_gpt.c '901: lines: 901, more than 900'
}

columns() {
    printf '%100s\n%101s\n%100s\n' a b c >c.c
    expect c.c '2: columns: 101, more than 100'
}

for test in functions kernels other_blocks files columns; do run $test; done
summary
