#!/usr/bin/env bash
# Every flag of both programs: its default in --help, values that it takes, and values that it
# refuses. A flag that --help lists and no table below names is a failure, so that a new flag is not
# forgotten here.
source "$(dirname "$0")/lib.sh"

LIMIT=10
make_text ../text 1000
make_images n10 10 && mv n10 ..
make_text ../short 40
printf 'abc\200def%.0s' {1..100} >../bytes

# name | kind | default in --help | values taken | numbers out of range
COMMON='
--seed          | int    | 1 | 0 7 9007199254740992 | -1 9007199254740993
--threads       | int    | 0 | 0 3 | -1 4097
--epochs        | int    | | 0 3 1000000 | -1 1000001
--stop-after    | int    | off | 0 1 | -1 1000000000001
--micro-batches | int    | 1 | 1 3 1024 | 0 -4 65537
--print-every   | int    | about 20 lines | 1 1000000000000 | 0 -1
--save-every    | int    | 0 | 0 | -1 1000000000001
--optimizer     | choice | | sgd adamw adadelta |
--schedule      | choice | | constant cosine step |
--lr            | double | | 0 1e-3 .5 2. 1E-2 +1 1000000 | -1 1000001 1e999
--min-lr        | double | | 0 1e-5 1e6 | -0.1 1e7
--warmup        | int    | | 0 5 1000000000 | -1 1000000001
--gamma         | double | | 0 0.5 1 | -0.5 1.5
--beta1         | double | 0.9 | 0 0.5 | -0.1 1 2
--beta2         | double | 0.95 | 0 0.999 | -0.1 1 2
--rho           | double | 0.9 | 0 0.95 | -0.1 1
--eps           | double | | 1e-8 1e-30 1 | 0 -1e-8 2
--weight-decay  | double | | 0 0.1 1000 | -0.1 1001
--clip          | double | | 0 1 1e9 | -1 1e10
--data          | string | | |
--save          | string | | new |
--load          | string | | |
--resume        | string | | |
--log           | string | | new |
--dump          | string | | new |
--memory        | string | | new |
--logits        | string | | new |
--trace         | string | | new |
'
LLAMA_FLAGS='
--steps       | int    | 6000 | 0 1 1000000000000 | -1 1000000000001
--batch       | int    | by --size | 1 5 16777216 | 0 -1 16777217
--eval-every  | int    | 0 | 0 1000000000000 | -1 1000000000001
--eval-batch  | int    | 8 | 1 100 1048576 | 0 1048577
--size        | choice | tiny | tiny small medium |
--vocab       | int    | by --size | 256 300 | 0 -1 1048577
--dim         | int    | by --size | 4 64 | 0 -8 1048577
--layers      | int    | by --size | 1 3 | 0 1001
--heads       | int    | by --size | 1 4 | 0 4097
--kv-heads    | int    | by --size | 1 2 | 0 4097
--hidden      | int    | by --size | 1 7 | 0 1048577
--seq         | int    | by --size | 1 2 32 | 0 1048577
--norm-eps    | double | 1e-05 | 0 1e-6 1 | -1 2
--rope-theta  | double | 10000 | 1 5e5 1e9 | 0.5 1e10
--dropout     | double | 0 | 0 0.99 | -0.1 1
--sample      | int    | 0 | 0 3 | -1 1048577
--temperature | double | 0.8 | 0 1 100 | -1 101
'
LLAMA_DEFAULTS='--optimizer adamw; --schedule cosine; --lr 0.002; --min-lr a tenth of --lr;
--warmup 100; --gamma 0.7; --weight-decay 0.1; --clip 1; --epochs by --steps'
MNIST_FLAGS='
--steps      | int    | | 0 1 1000000000000 | -1 1000000000001
--batch      | int    | 64 | 1 5 16777216 | 0 -1 16777217
--eval-every | int    | an epoch | 0 1000000000000 | -1 1000000000001
--eval-batch | int    | 64 | 1 100 1048576 | 0 1048577
--dropout    | double | 0.5 | 0 0.99 | -0.1 1
'
MNIST_DEFAULTS='--optimizer adadelta; --schedule step; --lr 1; --warmup 0; --gamma 0.7;
--weight-decay 0; --clip 0; --epochs 5; --steps by --epochs'

nothing_left() {
    if ! is_empty_here; then
        fault "something was left behind: $(ls -A | tr '\n' ' ')"
        rm -rf ./*
    fi
}

# ---- the help ----------------------------------------------------------------------------------

# The lines of --help that belong to one flag, in one line.
help_of() {
    awk -v flag="$1" '$1 == flag && /^  -/ { on = 1; print; next } /^  -|^[^ ]|^$/ { on = 0 } on' \
        "$help" | tr -s ' \n' '  '
}

test_help() {
    local program=$1 known=$2 flag
    begin "$kind --help: exit 0, on stdout, at most 80 columns"
    works "$program" --help
    cp ../out "$help"
    expect "no line is longer than 80 columns" \
        awk 'length > 80 { print; bad = 1 } END { exit bad }' "$help"
    expect "it names the program" grep -q "^$kind" "$help"
    expect "no line ends with a blank" eval '! grep -nE " $" "$help"'
    works "$program" --help --no-such-flag
    works "$program" --batch 3 --help
    expect "--help wins over what is before it" cmp -s ../out "$help"
    works "$program" -h
    end

    begin "$kind --help: every flag is tested here, and every flag tested is there"
    while read -r flag; do
        [[ $flag == --help || $known == *$'\n'"$flag "* ]] ||
            fault "$flag is not in this script's tables"
    done < <(awk '/^  --/ { print $1 }' "$help")
    while read -r flag _; do
        [[ -z $flag ]] || grep -qE "^  $flag " "$help" || fault "$flag is not in --help"
    done <<<"$known"
    [[ -z $(awk '/^  --/ { print $1 }' "$help" | sort | uniq -d) ]] || fault "a flag is there twice"
    end
}

# ---- one flag ----------------------------------------------------------------------------------

# The command that takes a flag: a tiny run of no steps, without this flag in its base.
base_for() {
    local flag=$1
    local -a small=(--data "$data" --stop-after 0 --threads 1)
    [[ $kind == llama ]] && small+=(--dim 32 --layers 1 --heads 2 --kv-heads 1 --hidden 48 --seq 16)
    base=()
    for ((i = 0; i < ${#small[@]}; i += 2)); do
        [[ ${small[i]} == "$flag" ]] || base+=("${small[@]:i:2}")
    done
    case $flag in
    --stop-after) base+=(--steps 1 --batch 2) ;;
    --heads | --kv-heads) [[ $kind == llama ]] && base+=(--vocab 256) ;;
    esac
}

test_taken() {
    local program=$1 flag=$2 values=$3 value
    base_for "$flag"
    for value in $values; do
        works "$program" "${base[@]}" "$flag" "$value"
        rm -rf new
    done
    if [[ -n $values && -z ${again-} ]]; then
        works "$program" "${base[@]}" "$flag=${values%% *}"
        rm -rf new
    fi
}

# Each flag is refused in a few ways, and one of each kind in all.
test_refused() {
    local program=$1 flag=$2 kind_of_value=$3 outside=$4 value
    local -a words=()
    refuses "^$kind: $flag needs an argument: $flag " "$program" "$flag"
    refuses "did you mean $flag\?" "$program" "--${flag:2:1}${flag:2}" 1
    for value in $outside; do
        refuses "$flag $value is out of range; expected" "$program" "$flag" "$value"
    done
    case $kind_of_value in
    int)
        words=(x 1.5)
        [[ $flag != --batch ]] || words+=(1e3 0x10 " 5" 5k 1, - 1-1 --5)
        ;;
    double)
        words=(x nan)
        [[ $flag != --lr ]] || words+=(inf -inf 0x1p3 1,5 "1 " 1e e5 . 1.2.3)
        ;;
    choice) words=(nonsense SGD "a|b" "s" 0) ;;
    esac
    for value in "${words[@]}"; do
        case $kind_of_value,$value in
        *,--*) refuses "$flag needs an argument.* $value" "$program" "$flag" "$value" ;;
        int,*) refuses "$flag takes a whole number; found \"$value\"" "$program" "$flag" "$value" ;;
        double,*) refuses "$flag takes a number; found \"$value\"" "$program" "$flag=$value" ;;
        choice,*) refuses "$flag takes one of [a-z|]+\|[a-z]+; found \"${value/|/.}\"" \
            "$program" "$flag" "$value" ;;
        esac
    done
    case $flag in
    --batch | --lr | --data | --optimizer)
        refuses "^$kind: $flag needs an argument: $flag=" "$program" "$flag="
        refuses "^$kind: $flag needs an argument: $flag " "$program" "$flag" ""
        refuses "^$kind: $flag needs an argument.* --help-me" "$program" "$flag" --help-me
        ;;
    --seed | --steps | --seq) # more than 64 bits
        value=99999999999999999999999
        refuses "$flag $value is out of range; expected" "$program" "$flag=$value"
        refuses "$flag -$value is out of range; expected" "$program" "$flag" "-$value"
        ;;
    esac
}

test_twice() {
    local program=$1 flag=$2 kind_of_value=$3 values=$4
    local value=${values%% *}
    : "${value:=x}"
    refuses "$flag is given twice" "$program" "$flag" "$value" "$flag=$value"
}

# All flags of a table "name | kind | default | values | outside".
test_flags() {
    local program=$1 table=$2 flag kind_of_value default values outside
    while IFS='|' read -r flag kind_of_value default values outside; do
        read -r flag <<<"$flag"
        read -r kind_of_value <<<"$kind_of_value"
        read -r default <<<"$default"
        read -r values <<<"$values"
        read -r outside <<<"$outside"
        [[ -n $flag ]] || continue
        begin "$kind $flag: default${default:+ $default}, values taken and refused"
        if [[ -n $default && $(help_of "$flag") != *"(default: $default)"* ]]; then
            fault "expected the default $default in --help; found: $(help_of "$flag")"
        fi
        if [[ -n ${again-} ]]; then # the table has been tested with the other program
            values=${values%% *}
            outside=${outside%% *}
            kind_of_value=again
        fi
        test_taken "$program" "$flag" "$values"
        test_refused "$program" "$flag" "$kind_of_value" "$outside"
        test_twice "$program" "$flag" "$kind_of_value" "$values"
        nothing_left
        end
    done <<<"$table"
}

test_defaults() {
    local entry flag
    begin "$kind --help: the model's own defaults"
    while IFS= read -r -d ';' entry; do
        read -r flag entry <<<"$(tr '\n' ' ' <<<"$entry")"
        [[ $(help_of "$flag") == *"(default: $entry)"* ]] ||
            fault "expected the default $entry of $flag; found: $(help_of "$flag")"
    done <<<"$1;"
    end
}

# ---- words that are no flags -------------------------------------------------------------------

test_words() {
    local program=$1
    begin "$kind: words that are not flags"
    refuses 'unexpected word train' "$program" train
    refuses 'unexpected word -n' "$program" -n 4
    refuses 'unexpected word 7' "$program" --seed 1 7
    refuses 'unknown flag --; ' "$program" --
    refuses 'unknown flag ---batch' "$program" ---batch 4
    refuses 'unknown flag --xyzzyplugh; --help lists' "$program" --xyzzyplugh 3
    refuses 'unknown flag --BATCH' "$program" --BATCH 4
    refuses 'did you mean --batch' "$program" batch=4
    refuses 'unknown flag --sizes; --help lists all flags of mnist' "$MNIST" --sizes tiny
    refuses 'unknown flag --size; --help lists all flags of mnist' "$MNIST" --size tiny
    refuses '--help takes no argument; found "1"' "$program" --help=1
    refuses 'unexpected word' "$program" ""
    refuses 'unknown flag' "$program" "--$(printf 'a%.0s' {1..3000})"
    refuses 'found "%s%n%d"' "$program" --batch %s%n%d
    refuses 'found "\?\[31mred' "$program" --batch $'\e[31mred\nx'
    nothing_left
    end
}

test_combinations() {
    local program=$1
    local -a all=(--data "$data" --stop-after 0)
    begin "$kind: flags that contradict each other"
    refuses '--steps 3 and --epochs 2 ' "$program" "${all[@]}" --steps 3 --epochs 2
    refuses '--load a and --resume b' "$program" "${all[@]}" --load a --resume b
    refuses '--save-every 2 needs --save' "$program" "${all[@]}" --save-every 2
    refuses 'nowhere' "$program" "${all[@]}" --load nowhere
    refuses 'nowhere' "$program" "${all[@]}" --resume nowhere
    refuses '(nowhere|No such file)' "$program" --data nowhere
    # The folder of --save is replaced as a whole: what is written into it besides would be lost.
    refuses '--(save|dump)' "$program" "${all[@]}" --save a --dump a
    refuses '--(save|log)' "$program" "${all[@]}" --save b --log b/log
    refuses '--(save|memory)' "$program" "${all[@]}" --save c --memory c/memory
    refuses '--(save|logits)' "$program" "${all[@]}" --save d --logits d/logits
    refuses '--(log|memory)' "$program" "${all[@]}" --log e --memory e
    refuses '--(logits|memory)' "$program" "${all[@]}" --memory e --logits e
    refuses '--(log|dump)' "$program" "${all[@]}" --log e/steps.txt --dump e
    nothing_left
    refuses '--log' "$program" "${all[@]}" --log .
    refuses '--memory' "$program" "${all[@]}" --memory .
    refuses '--logits' "$program" "${all[@]}" --logits .
    refuses '--log' "$program" "${all[@]}" --log new/
    nothing_left
    end
}

test_llama_sizes() {
    local -a all=(--data ../text --stop-after 0 --threads 1)
    begin "llama: sizes that do not go together"
    refuses '--dim 30 .*--heads 4 ' "$LLAMA" "${all[@]}" --dim 30 --heads 4
    refuses '--dim 12 .*--heads 4 ' "$LLAMA" "${all[@]}" --dim 12 --heads 4 --seq 8
    refuses '--heads 6 .*--kv-heads 4' "$LLAMA" "${all[@]}" --dim 48 --heads 6 --kv-heads 4
    refuses '--heads 2 .*--kv-heads 4' "$LLAMA" "${all[@]}" --dim 48 --heads 2 --kv-heads 4
    refuses '--heads 3 .*--kv-heads 2' "$LLAMA" "${all[@]}" --dim 48 --heads 3 --kv-heads 2
    works "$LLAMA" "${all[@]}" --dim 66 --heads 3 --kv-heads 3 --hidden 7 --vocab 257 --seq 5
    works "$LLAMA" "${all[@]}" --dim 48 --heads 3 --seq 5 --layers 1
    end

    begin "llama: sizes that no machine has the memory for"
    refuses '^llama: no memory for [0-9.]+ MB of params: .*--batch' \
        "$LLAMA" "${all[@]}" --hidden 1048576 --layers 1000
    refuses 'no memory for .* MB of params' "$LLAMA" "${all[@]}" --dim 1048576 --heads 4096
    refuses 'no memory for .* MB of params' "$LLAMA" "${all[@]}" --vocab 1048576 --dim 524288 \
        --heads 4096 --hidden 1
    refuses '--micro-batches 1025 cuts a step into more parts than --batch has samples' \
        "$LLAMA" "${all[@]}" --micro-batches 1025
    works "$LLAMA" "${all[@]}" --micro-batches 1025 --batch 1025
    end

    begin "llama: a text that is too short, bytes outside the vocabulary"
    refuses '../short: .* 40 bytes; expected at least [0-9]+: .*--seq 64' \
        "$LLAMA" "${all[@]:2}" --data ../short --seq 64
    refuses '../text: .* 1000 bytes; expected at least [0-9]+: .*--seq 1048576' \
        "$LLAMA" "${all[@]}" --seq 1048576 --dim 4 --heads 1 --kv-heads 1
    works "$LLAMA" "${all[@]:2}" --data ../short --seq 16
    refuses '../bytes: byte 3 has the value 128; with --vocab 128 ' \
        "$LLAMA" "${all[@]:2}" --data ../bytes --vocab 128 --seq 8
    works "$LLAMA" "${all[@]:2}" --data ../bytes --vocab 129 --seq 8
    refuses '../text: byte 0 .*--vocab 1 ' "$LLAMA" "${all[@]}" --vocab 1
    nothing_left
    end
}

test_threads() {
    local cores
    cores=$(nproc)
    local -a all=("$LLAMA" --data ../text --stop-after 0 --seq 16)
    begin "llama: threads and cores"
    refuses "--threads $((8 * cores + 1)) on $cores cores? .*; choose at most $((8 * cores))" \
        "${all[@]}" --threads $((8 * cores + 1))
    works "${all[@]}" --threads $((2 * cores))
    expect "a note that these are more than the cores" \
        grep -qE "^device .* $((2 * cores)) threads, more than there are cores" ../out
    works "${all[@]}" --threads 1
    expect "no such note for one" eval '! grep -q "more than" ../out'
    run env OMP_THREAD_LIMIT=1 "${all[@]}" --threads 2
    expect "OMP_THREAD_LIMIT counts" grep -qE '^device .* 1 thread,' ../out
    end
}

test_program() {
    local program=$1 flags=$2 defaults=$3
    kind=$(basename "$program")
    help=$WORK/help.$kind
    test_help "$program" "$(tr -s ' ' <<<"$COMMON$flags")"
    test_defaults "$defaults"
    test_flags "$program" "$flags"
    test_words "$program"
    test_combinations "$program"
}

data=../text
test_program "$LLAMA" "$LLAMA_FLAGS" "$LLAMA_DEFAULTS"
test_flags "$LLAMA" "$COMMON"
test_llama_sizes
test_threads
data=../n10
test_program "$MNIST" "$MNIST_FLAGS" "$MNIST_DEFAULTS"
again=yes
test_flags "$MNIST" "$COMMON"
finish
