# lesson_lib.sh: what the scripts tools/lesson_* share. They source it, with their own arguments,
# after they have defined usage().
#
# It understands
#
#     WHAT [--build DIR]       the word that says what to print, and where the programs are
#     WHAT [DIR]               for a WHAT that begins with `pictures`: where they go
#
# and leaves the word in $what, goes to the repository's root, and makes a folder $work.
# shellcheck shell=bash

set -euo pipefail
export LC_ALL=C
root=$(cd "$(dirname "$0")/.." && pwd)

die() {
    echo "${0##*/}: $*" >&2
    exit "${code:-2}"
}

[[ $# -ge 1 ]] || { usage >&2 && exit 2; }
what=$1
shift
build=${SHARD_BUILD:-build/cpu}
figures=docs/figures
if [[ $what == pictures* && $# -eq 1 ]]; then
    figures=$1
    shift
elif [[ $# -eq 2 && $1 == --build ]]; then
    build=$2
    shift 2
fi
[[ $# -eq 0 ]] || { usage >&2 && exit 2; }
cd "$root"

# need PROGRAM...: ends if one was not built.
need() {
    local program
    for program in "$@"; do
        [[ -x $build/$program ]] || die "no program $build/$program; ./run build makes it"
    done
}

work=$(mktemp -d "${TMPDIR:-/tmp}/lesson.XXXXXX")
jobs=()
clean_up() {
    local job
    for job in "${jobs[@]}"; do
        kill "$job" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
seq -s ' ' 5000 >"$work/numbers.txt" # a text that is the same everywhere

# ---- running -------------------------------------------------------------------------------------

mpirun=(mpirun -q --oversubscribe --bind-to none)
[[ $EUID -ne 0 ]] || mpirun+=(--allow-run-as-root)
short=(--data "$work/numbers.txt" --eval-every 0 --threads 1)

# run NAME RANKS CHAPTER/MODEL FLAGS...: a run on little data; leaves NAME.out and NAME.jsonl. Of
# one rank chapter 01 knows nothing, and needs no mpirun.
run() {
    local name=$1 ranks=$2 program=$3 command=()
    [[ $program == 01_* ]] || command=("${mpirun[@]}" -n "$ranks")
    command+=("$build/$program" "${short[@]}")
    if [[ $program == */mnist ]]; then
        [[ -d $work/images ]] || tools/small_data "$work"
        command=("${command[@]/"$work/numbers.txt"/"$work/images"}")
    fi
    "${command[@]}" --log "$work/$name.jsonl" "${@:4}" >"$work/$name.out" ||
        code=1 die "$program ${*:4} failed with exit code $?"
}

log_value() {
    tools/log_values "$work/$1.jsonl" "$2"
}

categories=(params grads optimizer activations comm workspace)

# memory_row TEXT NAME: the parts of the peak of a run, in MB.
memory_row() {
    local text=$1 name=$2 keys=() category
    for category in "${categories[@]}"; do
        keys+=("peak_${category}_bytes")
    done
    tools/log_values "$work/$name.jsonl" "${keys[@]}" peak_bytes |
        awk -F '\t' -v text="$text" '{
            printf "%-25s", text
            for (i = 1; i <= NF; i++) {
                printf " %*.2f", i == 4 ? 11 : 9, $i / 1e6
            }
            print ""
        }'
}

# Shows a command and what it prints on stderr: names of this machine and places in the sources, which
# change, become words.
show() {
    local shown=$1 result=0
    shift
    echo "\$ $shown"
    "$@" >/dev/null 2>"$work/err" || result=$?
    sed -E "s/\<$(hostname)\>/HOST/g; s/(\.c:)[0-9]+:/\1LINE:/; s/PID [0-9]+/PID …/; s,$PWD/,,g" \
        "$work/err" | fold -s -w 96 | sed 's/ *$//'
    echo "exit code $result"
}

# ---- sources -------------------------------------------------------------------------------------

# The section of train.c with the training step.
section() {
    awk '/^\/\/ ---- / { inside = /^\/\/ ---- one step / } inside' "$1"
}

# diff_step PARENT CHILD: the training step of a chapter against that of the one before.
diff_step() {
    section "$1/train.c" >"$work/a"
    section "$2/train.c" >"$work/b"
    { diff -U 2 --show-function-line='^[a-z].*{$' --label "$1/train.c" --label "$2/train.c" \
        "$work/a" "$work/b" || [[ $? -eq 1 ]]; } |
        hunk_heads
}

# Instead of lines' numbers, which are those in the section, the head of a hunk names the function
# that is changed first. diff names the one before where the hunk begins with another's end.
hunk_heads() {
    awk '
        function name_of(line) {
            return match(line, /[a-z0-9_]+\(/) ? substr(line, RSTART, RLENGTH - 1) : ""
        }
        function flush(    i) {
            if (n > 0) {
                print "@@ in " name "()"
                for (i = 1; i <= n; i++) {
                    print hunk[i]
                }
            }
            n = changed = 0
        }
        /^@@/ { flush(); name = name_of(substr($0, index(substr($0, 3), "@@") + 4)); next }
        /^(---|\+\+\+) / { print; next }
        {
            hunk[++n] = $0
            if (!changed && /^[ +-][a-z].*\{$/) {
                name = name_of($0)
            }
            changed = changed || /^[-+]/ && !/^[-+]\/\//
        }
        END { flush() }'
}

# build_with CHAPTER FILE SED: builds the chapter's llama, by the commands of the build, with FILE
# as the sed command changes it; as $work/llama.
build_with() {
    local chapter=$1 file=$2 compile link object
    sed "$3" "$chapter/$file" >"$work/$file"
    ! cmp -s "$chapter/$file" "$work/$file" || die "the line to change is not in $chapter/$file"
    compile=$(ninja -C "$build" -t commands "${chapter}_llama" |
        grep -- "-c .*/$chapter/${file/./\\.}\$" | tail -n 1)
    link=$(ninja -C "$build" -t commands "${chapter}_llama" | tail -n 1)
    [[ $compile != "" && $link == *"$file.o"* ]] || die "$build was not made by Ninja"
    object=$(grep -oE "[^ ]*$chapter/$file\.o" <<<"$compile" | tail -n 1)
    compile=${compile//"$object"/$work/changed.o}
    compile=${compile/%-c */-c $work/$file}
    link=${link//"$object"/$work/changed.o}
    link=${link/-o $chapter\/llama/-o $work/llama}
    (cd "$build" && eval "$compile -I$root/$chapter" && eval "$link") || die "cannot build $file"
}

# ---- times ---------------------------------------------------------------------------------------

processor() {
    sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1
}

# The model of a short run with much to send: the batch is small, the gradients are not.
timed=(--size small --batch 2 --stop-after 12)

# trace NAME CHAPTER/MODEL FLAGS...: such a run on 2 ranks, with its timeline in NAME.json.
trace() {
    run "$1" 2 "$2" "${timed[@]}" --trace "$work/$1.json" "${@:3}"
}

# best_trace NAME CHAPTER/MODEL FLAGS...: five such runs; leaves the timeline with the fastest step.
best_trace() {
    local name=$1 i best="" ms
    for i in 1 2 3 4 5; do
        trace again "${@:2}"
        ms=$(tools/plot/trace_columns "$work/again.json" | sed -n '1s/.*\t//p')
        if [[ $best == "" ]] || awk -v a="$ms" -v b="$best" 'BEGIN { exit !(a < b) }'; then
            best=$ms
            mv "$work/again.json" "$work/$name.json"
        fi
    done
}

# The fastest step of a trace, and what the compute lane of a rank waits in it, by name of the span.
step_and_wait_ms() {
    tools/plot/trace_columns "$work/$1.json" |
        awk -F '\t' -v name="$2" '
            NR == 1 { ranks = $2; ms = $3 }
            $1 == name { sum += $5 - $4 }
            END { printf "%.1f\t%.1f", ms, sum / ranks }'
}

# axis_ms NAME...: the time of the longest of the traces' fastest steps, as a round number.
axis_ms() {
    local name
    for name in "$@"; do
        tools/plot/trace_columns "$work/$name.json" | sed -n 1p
    done | awk -F '\t' '$3 > longest { longest = $3 } END { print int(longest / 10 + 1) * 10 }'
}
