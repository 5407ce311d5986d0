#!/usr/bin/env bash
#
# Tests of compare_dumps and of run: they are green where they should be, and red for every reason
# that there is. Dumps are made up; runs are those of chapter 01, and of a stand-in for a chapter
# with ranks: rank 0 trains with as many micro-batches as there are ranks, the others do nothing.
#
# ctest: TIMEOUT 300

set -uo pipefail
export LC_ALL=C
unset CDPATH
: "${SHARD_BUILD:?the folder of the build}"
SHARD_ROOT=${SHARD_ROOT:-$(cd "$(dirname "$0")/../.." && pwd)}
SHARD_BUILD=$(cd "$SHARD_BUILD" && pwd)
here=$SHARD_ROOT/tests/equivalence
compare=$SHARD_BUILD/tests/equivalence/compare_dumps
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch" || exit 1
passed=0
failed=0

# expect NAME STATUS PATTERN COMMAND…: the command ends so and says something that matches.
expect() {
    local name=$1 wanted=$2 pattern=$3 out status
    shift 3
    out=$("$@" 2>&1)
    status=$?
    if [[ $status -eq $wanted ]] && grep -qE -- "$pattern" <<<"$out"; then
        passed=$((passed + 1))
        echo "ok   $name"
    else
        failed=$((failed + 1))
        echo "FAIL $name: exit code $status, expected $wanted and '$pattern'"
        echo "     | ${out//$'\n'/$'\n     | '}"
    fi
}

for program in "$compare" "$SHARD_BUILD/01_single_gpu/llama"; do
    if [[ ! -x $program ]]; then
        echo "FAIL no program $program; build it first"
        exit 1
    fi
done

# ---- compare_dumps -----------------------------------------------------------------------------

# Two dumps and their variations, each with one difference from `a`.
make_dumps() {
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$SHARD_ROOT/tests/cli python3 - <<'END'
import array
import math
import os
import shutil

from compare import write_safetensors

STEPS = [(1, 5.5, 2.0), (2, 5.25, 1.5), (3, 5.0, 1.25)]
TENSORS = {"w": ([2, 3], [1.0, -2.0, 3.0, 0.0, 5.0, 6.0]), "b": ([2], [0.5, 0.25])}


def steps_text(steps):
    return "".join("%d %s %s\n" % (n, float.hex(x), float.hex(y)) for n, x, y in steps)


def write_tensors(path, tensors, metadata=None):
    packed = {n: ("F32", shape, array.array("f", x).tobytes()) for n, (shape, x) in tensors.items()}
    write_safetensors(path, packed, metadata or {})


def dump(name, steps=None, text=None, grads=None, final=None, metadata=None):
    os.makedirs(name)
    with open(name + "/steps.txt", "w") as file:
        file.write(steps_text(steps or STEPS) if text is None else text)
    write_tensors(name + "/grads.safetensors", grads or TENSORS, metadata)
    write_tensors(name + "/final.safetensors", final or TENSORS)


def changed(index, value, name="w"):
    tensors = {n: (shape, list(x)) for n, (shape, x) in TENSORS.items()}
    tensors[name][1][index] = value
    return tensors


dump("a")
dump("same")
dump("loss", steps=[STEPS[0], (2, 5.25 * (1 + 1e-9), 1.5), STEPS[2]])
dump("far_loss", steps=[STEPS[0], (2, 5.25 * (1 + 2e-6), 1.5), STEPS[2]])
dump("norm", steps=[STEPS[0], STEPS[1], (3, 5.0, 1.25 * (1 - 1e-9))])
dump("far_norm", steps=[STEPS[0], STEPS[1], (3, 5.0, 1.25 * (1 - 2e-6))])
dump("nan_loss", steps=[STEPS[0], STEPS[1], (3, math.nan, 1.25)])
dump("nan_loss_too", steps=[STEPS[0], STEPS[1], (3, math.nan, 1.25)])
dump("infinite_norm", steps=[STEPS[0], STEPS[1], (3, 5.0, math.inf)])
dump("fewer_steps", steps=STEPS[:2])
dump("other_steps", steps=[STEPS[0], STEPS[1], (4, 5.0, 1.25)])
dump("no_steps", text="")
dump("half_a_step", text=steps_text(STEPS)[:-12])
dump("third_number", text=steps_text(STEPS).replace("\n", " 0x1p+0\n", 1))
dump("zero", grads=changed(3, -0.0))
dump("gradient", grads=changed(1, -2.000001))
dump("far_gradient", grads=changed(1, -2.001))
dump("weight", final=changed(4, 5.000001))
dump("far_weight", final=changed(1, 0.2501, "b"))
dump("nan_weight", final=changed(1, math.nan, "b"))
dump("nan_weight_too", final=changed(1, math.nan, "b"))
dump("infinite_gradient", grads=changed(0, math.inf))
dump("fewer_tensors", grads={"w": TENSORS["w"]})
dump("other_name", grads={"w": TENSORS["w"], "c": TENSORS["b"]})
dump("other_shape", final={"w": ([3, 2], TENSORS["w"][1]), "b": TENSORS["b"]})
dump("other_order", final={"b": TENSORS["b"], "w": TENSORS["w"]})
dump("metadata", metadata={"ranks": "4"})
dump("another_file")
open("another_file/rank1.txt", "w").close()
for name in ("steps.txt", "grads.safetensors", "final.safetensors"):
    shutil.copytree("a", "no_" + name)
    os.remove("no_%s/%s" % (name, name))
dump("cut")
os.truncate("cut/final.safetensors", os.path.getsize("cut/final.safetensors") - 4)
END
}

if ! make_dumps; then
    echo "FAIL the dumps could not be made"
    exit 1
fi

expect "equal dumps" 0 '^same bits: 3 losses, 3 norms, 2 gradients, 2 weights$' "$compare" a same bitwise
expect "equal dumps are within bounds" 0 '^loss 0.0e\+00, .*weight 0.0e' "$compare" a same bounds
expect "a loss" 1 'step 2 loss: 0x.*the first of 1 of 3 steps' "$compare" loss a bitwise
expect "a loss, within" 0 'loss 1.0e-09, norm 0' "$compare" loss a bounds
expect "a loss, beyond" 1 'step 2 loss: .*relative 2.0e-06, bound 1.0e-06' "$compare" far_loss a bounds
expect "a loss, wider bound" 0 'loss 2.0e-06' "$compare" far_loss a bounds loss=1e-5
expect "a loss, no bound" 0 'loss 2.0e-06' "$compare" far_loss a bounds loss=inf
expect "a loss, another's bound" 1 'step 2 loss' "$compare" far_loss a bounds norm=1 weight=1 gradient=1
expect "a norm" 1 'step 3 norm' "$compare" norm a bitwise
expect "a norm, within" 0 'norm 1.0e-09' "$compare" norm a bounds
expect "a norm, beyond" 1 'step 3 norm' "$compare" far_norm a bounds
expect "the sign of a zero" 1 'gradient of w: 1 of 6 .*first: \[1, 0\] -0 and 0' "$compare" zero a bitwise
expect "the sign of a zero, within" 0 'gradient 0.0e' "$compare" zero a bounds
expect "a gradient" 1 'gradient of w: 1 of 6 elements.*\[0, 1\] -2.00000' "$compare" gradient a bitwise
expect "a gradient, within" 0 'gradient 1.1e-07' "$compare" gradient a bounds
expect "a gradient, beyond" 1 'gradient of w: .*bound 1.0e-05; largest: \[0, 1\]' "$compare" far_gradient a bounds
expect "a gradient, wider bound" 0 'gradient 1.2e-04' "$compare" far_gradient a bounds gradient=1e-3
expect "a weight" 1 'weight of w: .*\[1, 1\]' "$compare" weight a bitwise
expect "a weight, within" 0 'weight [0-9.]+e-07' "$compare" weight a bounds
expect "a weight, beyond, though small" 1 'weight of b: ' "$compare" far_weight a bounds
expect "a loss that is no number, in both" 1 'step 3 loss: nan' "$compare" nan_loss nan_loss_too bitwise
expect "a loss that is no number, no bound" 1 'step 3 loss: nan' "$compare" nan_loss nan_loss_too bounds loss=inf
expect "an infinite norm" 1 'step 3 norm: inf' "$compare" infinite_norm a bounds norm=inf
expect "a weight that is no number, in both" 1 'weight of b: .*not finite: \[1\] nan' \
    "$compare" nan_weight nan_weight_too bitwise
expect "a weight that is no number, no bound" 1 'not finite' "$compare" nan_weight nan_weight_too bounds weight=inf
expect "an infinite gradient" 1 'not finite' "$compare" infinite_gradient a bounds gradient=inf
for promise in bitwise bounds; do
    expect "fewer steps, $promise" 1 '2 steps and 3' "$compare" fewer_steps a $promise
    expect "more steps, $promise" 1 '3 steps and 2' "$compare" a fewer_steps $promise
    expect "other steps, $promise" 1 'is step 4 and 3' "$compare" other_steps a $promise
    expect "no steps, in both, $promise" 1 'has no step' "$compare" no_steps no_steps $promise
    expect "half a step, $promise" 1 'line 3 is not' "$compare" half_a_step a $promise
    expect "a third number, $promise" 1 'line 1 is not' "$compare" third_number a $promise
    expect "a missing tensor, $promise" 1 'fewer_tensors.*has no tensor b' "$compare" fewer_tensors a $promise
    expect "a tensor too many, $promise" 1 'fewer_tensors.*has no tensor b' "$compare" a fewer_tensors $promise
    expect "another name, $promise" 1 'a/.*has no tensor c' "$compare" other_name a $promise
    expect "another shape, $promise" 1 'w has another shape' "$compare" other_shape a $promise
    expect "a file too many, $promise" 1 'rank1.txt: is no part' "$compare" another_file a $promise
    expect "a file cut off, $promise" 1 'cut/final' "$compare" cut a $promise
    expect "no folder, $promise" 1 'nowhere: No such' "$compare" a nowhere $promise
    for file in steps.txt grads.safetensors final.safetensors; do
        expect "no $file, $promise" 1 "no_$file/$file" "$compare" "no_$file" a $promise
        expect "no $file in either, $promise" 1 "no_$file/$file" "$compare" "no_$file" "no_$file" $promise
    done
done
expect "another order of tensors" 1 'final.*not the same file' "$compare" other_order a bitwise
expect "metadata that tell the ranks" 1 'grads.*not the same file' "$compare" metadata a bitwise
expect "an unknown promise" 2 'unknown promise' "$compare" a same equal
expect "an unknown bound" 2 'unknown bound' "$compare" a same bounds time=1
expect "a bound that is no number" 2 'expected a number' "$compare" a same bounds loss=nan
expect "bitwise has no bounds" 2 'takes no bounds' "$compare" a same bitwise loss=1
expect "no promise" 2 'usage' "$compare" a same

# ---- run ---------------------------------------------------------------------------------------

# A build with chapter 01 and the stand-in, which adds to its log the bytes that an all-reduce of all
# gradients sends. It understands --wrong (clip at another norm), --hang, --silent (no bytes), --replicas
# (which changes nothing), and --rate and --evaluation (other numbers in the log alone).
build=$scratch/build
mkdir -p "$build/tests/equivalence" "$build/02_ddp"
ln -s "$SHARD_BUILD/01_single_gpu" "$build/01_single_gpu"
ln -s "$compare" "$build/tests/equivalence/compare_dumps"
cat >"$build/02_ddp/llama" <<'END'
#!/usr/bin/env bash
set -eu
n=${OMPI_COMM_WORLD_SIZE:?not under mpirun}
((OMPI_COMM_WORLD_RANK == 0)) || exit 0
here=$(dirname "$0")
flags=()
checked=no
silent=no
change=
log=
while (($# > 0)); do
    case $1 in
    --check-comm) checked=yes ;;
    --wrong) flags+=(--clip 0.01) ;;
    --hang) sleep 1000 ;;
    --replicas) shift ;;
    --silent) silent=yes ;;
    --rate) change='s/"lr": [^,]*/"lr": 0.25/' ;;
    --evaluation) change='s/"accuracy": [^,}]*/"accuracy": 0.25/' ;;
    --log) log=$2 && flags+=("$1" "$2") && shift ;;
    *) flags+=("$1") ;;
    esac
    shift
done
[[ $checked == yes ]]
"$here/../01_single_gpu/llama" "${flags[@]}" --micro-batches "$n"
bytes=$(sed -n 's/.*"peak_grads_bytes": \([0-9]*\).*/\1/p' "$log")
[[ -z $change ]] || sed -i "$change" "$log"
sed -i 's/, "sent_bytes_per_step": [0-9]*//' "$log"
[[ $silent == yes ]] ||
    echo "{\"sent_bytes_per_step\": $((2 * (n - 1) * ((bytes / 4 + n - 1) / n) * 4))}" >>"$log"
END
chmod +x "$build/02_ddp/llama"

# run_table [OPTION VALUE…] [--filter FILTER]: runs the table on stdin, after the lines that all
# have.
run_table() {
    local filter=()
    cat - >rows.txt
    {
        echo "data text text 380"
        echo "base llama --data text --dim 16 --layers 1 --heads 2 --kv-heads 1 --hidden 32 \\"
        echo "    --seq 16 --batch 6 --steps 3 --warmup 0 --optimizer sgd --lr 0.1 --threads 1"
        cat rows.txt
    } >table.txt
    local options=()
    while (($# > 0)); do
        if [[ $1 == --filter ]]; then
            filter=("$2")
        else
            options+=("$1" "$2")
        fi
        shift 2
    done
    SHARD_BUILD=$build SHARD_ROOT=$SHARD_ROOT bash "$here/run" "${options[@]}" table.txt "${filter[@]}"
}

# row FIELDS…: one row of a table with all columns of chapter 01.
row() {
    echo "columns name | program | own flags | reference | reference flags | promise | memory"
    printf '%s\n' "$@"
}

# ddp FIELDS…: one row of a table with all columns.
ddp() {
    echo "columns name | program | ranks | flags | own flags | reference | reference flags | \\"
    echo "    promise | sent | memory"
    printf '%s\n' "$@"
}

# case_is NAME STATUS PATTERN FIELDS…: a table of rows of chapter 01 ends so.
case_is() {
    local name=$1 status=$2 pattern=$3
    shift 3
    expect "$name" "$status" "$pattern" run_table < <(row "$@")
}

one=01_single_gpu/llama
case_is "itself" 0 '^1 cases: 1 bitwise, 0 within bounds, 0 failed$' \
    "a | $one | --micro-batches 2 | $one | --micro-batches 2 | bitwise | -"
case_is "other micro-batches are not bitwise" 1 'gradient of model.embed_tokens.weight: ' \
    "a | $one | --micro-batches 2 | $one | - | bitwise | -"
case_is "what failed is told with its command lines" 1 '\$ .*--micro-batches 2$' \
    "a | $one | --micro-batches 2 | $one | - | bitwise | -"
case_is "other micro-batches are within bounds" 0 '^1 cases: 0 bitwise, 1 within bounds, 0 failed$' \
    "a | $one | --micro-batches 2 | $one | - | bounds | -"
case_is "bounds that are too tight" 1 'bound 1.0e-12' \
    "a | $one | --micro-batches 2 | $one | - | bounds norm=1e-12 | -"
case_is "another rate is not within bounds" 1 'weight of .*bound' "a | $one | --lr 0.11 | $one | - | bounds | -"
case_is "one of two" 1 '^2 cases: 1 bitwise, 0 within bounds, 1 failed$' \
    "a | $one | - | $one | - | bitwise | -" "b | $one | --seed 2 | $one | - | bitwise | -"
case_is "the right memory" 0 ' 1 bitwise' \
    "a | $one | - | $one | - | bitwise | params=4*P grads=4*F optimizer=0 activations=ref comm<=4*F"
case_is "the wrong memory" 1 'peak_grads_bytes: found [0-9]+, expected [0-9]+ \(4\*P\+4' \
    "a | $one | - | $one | - | bitwise | params=4*P grads=4*P+4"
case_is "memory beyond its bound" 1 'peak_activations_bytes: found [0-9]+, expected at most' \
    "a | $one | - | $one | - | bitwise | activations<=ref-1"
case_is "an unknown category" 1 "memory 'weights=4" "a | $one | - | $one | - | bitwise | weights=4*P"
case_is "an unknown quantity" 1 'Q is not known' "a | $one | - | $one | - | bitwise | params=4*Q"
case_is "a function that pads" 0 '1 bitwise' \
    "a | $one | - | $one | - | bitwise | params=4*F+pad(1)-16+pad(16)-pad(2)+pad(17)-32"
case_is "no whole number" 1 'not a whole number' "a | $one | - | $one | - | bitwise | params=P/3"
case_is "no expression" 1 'not a whole number' "a | $one | - | $one | - | bitwise | params=4*"
case_is "an unknown promise" 1 "promise 'equal'" "a | $one | - | $one | - | equal | -"
case_is "too few fields" 1 '6 fields for 7 columns' "a | $one | - | $one | - | bitwise"
case_is "two cases of one name" 1 'two cases are called' \
    "a | $one | - | $one | - | bitwise | -" "a | $one | - | $one | - | bitwise | -"
case_is "a missing program" 1 'no program .*03_fsdp/llama; build it' "a | 03_fsdp/llama | - | $one | - | bitwise | -"
case_is "a missing reference" 1 'reference failed: no program' "a | $one | - | 03_fsdp/llama | - | bitwise | -"
case_is "a run that fails" 1 'unknown flag --stpes' "a | $one | --stpes 3 | $one | - | bitwise | -"
case_is "a reference that fails" 1 'reference failed: exit code 2' \
    "a | $one | - | $one | --stpes 3 | bitwise | -"
case_is "a name that was not set" 1 'sgd was not set' "a | $one | \$sgd | $one | - | bitwise | -"
case_is "a name that was set" 0 '1 bitwise' "set rate --lr 0.05" "set both \$rate --clip 0" \
    "a | $one | \$both | $one | --clip 0 --lr 0.05 | bitwise | params=4*P"
case_is "a line that is none" 1 "'flags'; expected" "flags --lr 1"
case_is "no rows" 1 'no case' "# nothing"
expect "an unknown column" 1 "unknown column 'speed'" run_table <<<"columns name | program | speed"
expect "a column that must be there" 1 "column 'promise' is missing" run_table <<<"columns name | program | reference"
expect "a row without columns" 1 'before the line' run_table <<<"a | $one"
expect "a missing table" 1 'cannot be read' env SHARD_BUILD="$build" bash "$here/run" nowhere.txt
expect "a build without the comparison" 1 'no program .*compare_dumps' \
    env SHARD_BUILD="$build/02_ddp" bash "$here/run" table.txt
expect "a filter" 0 '^1 cases: 1 bitwise, 0 within bounds, 0 failed$' run_table --filter 'llama a' \
    < <(row "a | $one | - | $one | - | bitwise | -" "b | $one | --seed 2 | $one | - | bitwise | -")
expect "a filter that nothing matches" 1 "no case matches 'c'" run_table --filter c \
    < <(row "a | $one | - | $one | - | bitwise | -")
expect "what is kept" 0 '1 bitwise' run_table --keep kept < <(row "a | $one | - | $one | - | bitwise | -")
expect "what was kept" 0 'steps.txt' ls kept/case.0/dump

if ! command -v mpirun >/dev/null; then
    echo "skip cases with ranks: no mpirun"
else
    two=02_ddp/llama
    expect "ranks" 0 '^3 cases: 3 bitwise, 0 within bounds, 0 failed$' run_table < <(ddp "a | $two | 1-3 | --lr 0.2 | - | \
        $one | --micro-batches {n} | bitwise | 2*(n-1)*ceil(F/n)*4 | params=4*F")
    expect "the wrong bytes" 1 'sent_bytes_per_step: found [0-9]+, expected' run_table < <(ddp "a | $two | 2 | - | - | \
        $one | --micro-batches {n} | bitwise | 2*(n-1)*ceil(F/n)*4+4 | -")
    expect "replicas and groups" 0 '1 bitwise' run_table < <(ddp "a | $two | 4 | - | --replicas 2 | \
        $one | --micro-batches {n} | bitwise | 2*(n-1)*ceil(F/n)*4+(R-2)+(g-2)+pad(33)-64 | -")
    expect "another rate in the log" 1 'step 1 lr: 0.25 and 0.1 in the logs' run_table < <(ddp \
        "a | $two | 2 | --lr 0.1 --schedule constant | --rate | $one | --micro-batches {n} | bounds | - | -")
    expect "another accuracy in the log" 1 'step 3 accuracy: 0.25 and 0' run_table < <(ddp \
        "a | $two | 2 | - | --evaluation | $one | --micro-batches {n} | bitwise | - | -")
    expect "within bounds an accuracy may differ" 0 '1 within bounds' run_table < <(ddp \
        "a | $two | 2 | - | --evaluation | $one | --micro-batches {n} | bounds | - | -")
    expect "bytes that the log has not" 1 'sent_bytes_per_step: the log has no such number' \
        run_table < <(ddp "a | $two | 2 | - | --silent | $one | --micro-batches {n} | bitwise | 0 | -")
    expect "another reference" 1 '^2 cases: 1 bitwise, 0 within bounds, 1 failed$' run_table < <(ddp \
        "a | $two | 1-2 | - | - | $one | - | bitwise | - | -")
    expect "a reference with ranks" 0 '^1 cases: 1 bitwise, 0 within bounds, 0 failed$' run_table < <(ddp \
        "a | $two | 2 | --lr 0.2 | - | $two x n | - | bitwise | 4*F | params=4*F grads=ref")
    expect "a reference with other ranks" 1 'gradient of' run_table < <(ddp \
        "a | $two | 2 | - | - | $two x n+1 | - | bitwise | - | -")
    expect "only the run is wrong" 1 'weight of' run_table < <(ddp \
        "a | $two | 2 | --lr 0.1 | --wrong | $one | --micro-batches {n} | bitwise | - | -")
    expect "a run that does not end" 1 'not done after 2 seconds' run_table --limit 2 < <(ddp \
        "a | $two | 2 | - | --hang | $one | - | bitwise | - | -")
fi

echo "$passed passed, $failed failed"
((failed == 0 && passed > 0))
