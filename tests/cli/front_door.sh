#!/usr/bin/env bash
# What ./run says: help before anything else, names taken letter by letter, and what was meant by one
# that is not whole. Nothing is built here: a small copy of the tree stands for the repository.
source "$(dirname "$0")/lib.sh"

# A tree with two chapters, and with a build that somebody has made.
make_tree() {
    local program
    mkdir -p tree/01_single_gpu tree/02_ddp tree/build/cpu/01_single_gpu
    cp "$SHARD_ROOT/run" "$SHARD_ROOT/CMakePresets.json" tree
    for program in 01_single_gpu/llama 01_single_gpu/mnist 02_ddp/llama; do
        : >"tree/$program.c"
    done
    printf '#!/bin/sh\necho "here: $*"\n' >tree/build/cpu/01_single_gpu/llama
    chmod +x tree/build/cpu/01_single_gpu/llama
    : >tree/build/cpu/build.ninja
    : >tree/build/cpu/.ninja_log
    : >tree/build/cpu/run.log
}

# ./run must fail: exit code 2, one message that matches.
says() { # PATTERN ARGUMENT…
    local pattern=$1
    shift
    run tree/run "$@"
    ((code == 2)) || fault_run "expected exit code 2" run "$@"
    expect "run $*: a message with \"$pattern\" ($(head -c 300 ../err))" grep -qE "$pattern" ../err
    expect "run $*: nothing on stdout" test ! -s ../out
}

helps() { # ARGUMENT…
    run "$@"
    ((code == 0)) || fault_run "expected exit code 0" "$@"
    expect "$*: the usage text" grep -q '^usage: ./run COMMAND' ../out
}

make_tree
begin "the usage text, whatever else is wrong"
helps tree/run
helps tree/run --help
helps tree/run setup --help
helps tree/run build --help
helps tree/run build -h
helps tree/run docs --help
helps env SHARD_PRESET=zzz tree/run
helps env SHARD_PRESET=zzz tree/run help
end

begin "names are no patterns"
says "no program '01_single_gpu/llam\\.'" 01_single_gpu/llam.
says "no program '\\.\\*/llama'" '.*/llama'
says "no program '01_single_gpu/llama" $'01_single_gpu/llama\n01_single_gpu/mnist'
says "no preset 'c\\.u'" --preset c.u 01_single_gpu/llama
says "no preset 'c\\.u'" build c.u
says "no preset 'cpu" build $'cpu\nasan'
says "no preset ''" --preset= 01_single_gpu/llama
says "no preset 'zzz'; there are: cpu " build zzz
run env SHARD_PRESET=zzz tree/run 01_single_gpu/llama
((code == 2)) || fault_run "expected exit code 2" run
expect "a message on the preset" grep -q "no preset 'zzz'" ../err
end

begin "what was meant by half a name"
says 'which program\? ./run 01_single_gpu/llama, ./run 02_ddp/llama$' llama
says 'which program\? ./run 01_single_gpu/mnist$' mnist
says 'which program\? ./run 01_single_gpu/llama, ./run 01_single_gpu/mnist$' 01_single_gpu
says 'which program\? ./run 01_single_gpu/llama, ./run 01_single_gpu/mnist$' 01_single_gpu/
says 'which program\? ./run 02_ddp/llama$' ./02_ddp
says "unknown command 'lama'" lama
says "unknown command '01_single'" 01_single
says "no program '01_single_gpu/lama'; there are: 01_single_gpu/llama " 01_single_gpu/lama
end

if have_ordinary; then
    begin "in a tree that somebody else has built, what is there runs"
    chmod -R go+rX-w tree
    works "${ORDINARY[@]}" true
    run "${ORDINARY[@]}" tree/run 01_single_gpu/llama --steps 3
    ((code == 0)) || fault_run "expected exit code 0" run
    expect "it ran" grep -qx 'here: --steps 3' ../out
    expect "it says that nothing was built" grep -q '^Note: build/cpu is not yours' ../err
    expect "no other complaint ($(cat ../err))" eval '! grep -qi denied ../err'
    run "${ORDINARY[@]}" tree/run 01_single_gpu/mnist
    ((code == 2)) || fault_run "a program that is not there: expected exit code 2" run
    expect "it says so" grep -q 'there is no build/cpu/01_single_gpu/mnist' ../err
    end
else
    skip "a tree of somebody else: no ordinary user can start the programs"
fi
finish
