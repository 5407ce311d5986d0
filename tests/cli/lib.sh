# shellcheck shell=bash
# What the tests of the command line share. A script begins with
#
#     source "$(dirname "$0")/lib.sh"
#
# and ends with `finish`. It needs
#
#     SHARD_BUILD   folder of the build, with 01_single_gpu/llama and 01_single_gpu/mnist
#     SHARD_ROOT    folder of the sources
#
# and works in a temporary folder of its own: the current directory is $WORK/run, empty at the
# start; $WORK/out and $WORK/err hold what the last program printed. One line a case:
#
#     begin "what is tested"
#     works "$LLAMA" --steps 1              # exit 0, nothing on stderr
#     refuses "expected .* bytes" …         # exit 2, one message that matches, nothing on stdout
#     expect "the files are equal" cmp a b
#     end
set -u
export LC_ALL=C
: "${SHARD_BUILD:?the folder of the build}" "${SHARD_ROOT:?the folder of the sources}"
SHARD_BUILD=$(cd "$SHARD_BUILD" && pwd)
SHARD_ROOT=$(cd "$SHARD_ROOT" && pwd)
LLAMA=$SHARD_BUILD/01_single_gpu/llama
MNIST=$SHARD_BUILD/01_single_gpu/mnist
CLI=$SHARD_ROOT/tests/cli
WORK=$(mktemp -d "${TMPDIR:-/tmp}/shard-cli.XXXXXX")
LIMIT=60 # seconds that a program may take
passed=0
failed=0
skipped=0

clean_up() {
    local job
    for job in $(jobs -p); do
        kill -9 "$job" 2>/dev/null
    done
    cd /
    chmod -R u+rwx "$WORK" 2>/dev/null
    rm -rf "$WORK"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
chmod 755 "$WORK"
mkdir "$WORK/run"
cd "$WORK/run" || exit 1

for program in "$LLAMA" "$MNIST"; do
    if [[ ! -x $program ]]; then
        echo "FAIL no program $program; build it first"
        exit 1
    fi
done

# ---- cases -------------------------------------------------------------------------------------

begin() {
    name=$*
    faults=()
}

fault() {
    faults+=("$*")
}

end() {
    if ((${#faults[@]} == 0)); then
        printf 'ok   %s\n' "$name"
        passed=$((passed + 1))
    else
        printf 'FAIL %s\n' "$name"
        printf '     %s\n' "${faults[@]:0:12}"
        failed=$((failed + 1))
    fi
}

skip() {
    printf 'skip %s\n' "$*"
    skipped=$((skipped + 1))
}

finish() {
    printf '%d passed, %d failed' "$passed" "$failed"
    ((skipped == 0)) || printf ', %d skipped' "$skipped"
    printf '\n'
    ((failed == 0 && passed > 0))
    exit
}

# The command must succeed; else the case fails for the reason in the first argument.
expect() {
    local reason=$1
    shift
    "$@" >"$WORK/expect" 2>&1 || fault "$reason ($(head -c 300 "$WORK/expect" | tr '\n' ' '))"
}

# ---- programs ----------------------------------------------------------------------------------

# Runs a program with a time limit: its exit code in $code, its output in $WORK/out and $WORK/err.
run() {
    { # bash's own word on a program that was killed is of no interest
        timeout -k 5 "$LIMIT" "$@" >"$WORK/out" 2>"$WORK/err" </dev/null
        code=$?
    } 2>/dev/null
}

# A command line for a message, without the folders in front of the program.
shown() {
    local line="$*"
    line=${line//"$SHARD_BUILD/01_single_gpu/"/}
    line=${line//"$WORK/"/}
    printf '%s' "${line//[^[:print:]]/?}"
}

fault_run() {
    local reason=$1
    shift
    fault "$(shown "$@"): $reason; exit code $code; stderr: $(head -c 400 "$WORK/err" | tr '\n' ' ')"
}

# The program must end with 0 and say nothing on stderr.
works() {
    run "$@"
    if ((code != 0)); then
        fault_run "expected exit code 0" "$@"
    elif [[ -s $WORK/err ]]; then
        fault_run "expected nothing on stderr" "$@"
    fi
}

# The program must refuse: one message that matches the regular expression, exit code 2, nothing on
# stdout. The words that tell what was asked for must not be cut off either.
refuses() {
    local pattern=$1
    shift
    run "$@"
    refusal "$pattern" "$@"
}

# What `refuses` demands of the last run.
refusal() {
    local pattern=$1 message
    shift
    message=$(<"$WORK/err")
    if ((code != 2)); then
        fault_run "expected exit code 2" "$@"
    elif [[ -s $WORK/out ]]; then
        fault_run "expected nothing on stdout" "$@"
    elif [[ -z $message ]]; then
        fault_run "expected a message" "$@"
    elif [[ ! $message =~ ^(llama|mnist):\  ]]; then
        fault_run "expected the program's name in front of the message" "$@"
    elif [[ $message =~ $'\n'(llama|mnist):\  || $message =~ (ERROR|Sanitizer|CHECK\() ]]; then
        fault_run "expected one message" "$@"
    elif [[ $message =~ [[:cntrl:]] && ! $message =~ ^[^[:cntrl:]]+($'\n'[^[:cntrl:]]+)*$ ]]; then
        fault_run "the message has control characters" "$@"
    elif ! grep -qEe "$pattern" <<<"$message"; then
        fault_run "expected a message with \"$pattern\"" "$@"
    fi
}

# ---- ranks -------------------------------------------------------------------------------------

mpi=(mpirun -q --oversubscribe --bind-to none)
((EUID != 0)) || mpi+=(--allow-run-as-root)

# works_on RANKS COMMAND…: as `works`, on so many ranks.
works_on() {
    works "${mpi[@]}" -n "$1" "${@:2}"
}

# refuses_on RANKS PATTERN COMMAND…: as `refuses`.
refuses_on() {
    run "${mpi[@]}" -n "$1" "${@:3}"
    refusal "$2" "${@:3}"
}

# ---- users -------------------------------------------------------------------------------------

# What to put before a command so that a user runs it who may not do everything.
ORDINARY=()
((EUID != 0)) || ORDINARY=(setpriv --reuid=65534 --regid=65534 --clear-groups --)

# Whether an ordinary user can run the programs (they may lie in the superuser's home).
have_ordinary() {
    "${ORDINARY[@]}" "$LLAMA" --help >/dev/null 2>&1
}

have_strace() {
    command -v strace >/dev/null && strace -f -o /dev/null true 2>/dev/null
}

# Whether the programs were built with a sanitizer: they reserve terabytes and cannot be traced.
have_sanitizer() {
    grep -qE '__(asan|tsan)_init' "$LLAMA"
}

# The current folder holds nothing (no fork: this is asked after hundreds of runs).
is_empty_here() {
    local files
    shopt -s nullglob dotglob
    files=(*)
    shopt -u nullglob dotglob
    ((${#files[@]} == 0))
}

# ---- data --------------------------------------------------------------------------------------

# A text of so many bytes, the same every time.
make_text() {
    seq 1 $(($2 / 30 + 2)) |
        awk '{ printf "And verse %d begat verse %d, %s.\n", $1 * 7 % 31, $1 * 11 % 17,
               ($1 % 3 ? "and it was good" : "and the waters rose") }' |
        head -c "$2" >"$1"
}

# Small sets of images, good and broken, in the current folder; all of them, or those named by
# their numbers of images: make_images n10 10 n101 101
make_images() {
    local tool=$SHARD_ROOT/tests/data
    if (($# == 0)); then
        python3 "$tool/mkidx.py"
        return
    fi
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$tool python3 - "$@" <<'END'
import sys
import mkidx
for name, count in zip(sys.argv[1::2], sys.argv[2::2]):
    mkidx.write_set(name, int(count))
END
}

# A llama that takes a millisecond a step. The caller adds --data.
SMALL=(--dim 32 --layers 1 --heads 2 --kv-heads 1 --hidden 48 --seq 16 --threads 1)

# The command line with another value of a flag, or with the flag added, in the array $line:
# vary --steps 5 "${command[@]}"
vary() {
    local flag=$1 value=$2 found= i
    shift 2
    line=("$@")
    for i in "${!line[@]}"; do
        if [[ ${line[i]} == "$flag" ]]; then
            line[i + 1]=$value
            found=yes
        fi
    done
    [[ -n $found ]] || line+=("$flag" "$value")
}

compare() {
    python3 "$CLI/compare.py" "$@"
}
