#!/usr/bin/env bash
#
# memory_formula: the lesson's formula predicts the peak that the program's account measures.
#
# All categories but the workspace are exact; the whole is within one percent.
source "$(dirname "$0")/lib.sh"

if [[ ! -r /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ]]; then
    echo "skipped: needs dataset-fashion-mnist (./run setup installs it)"
    exit 77
fi
"$SHARD_ROOT/tools/small_data" data

# measured <tab> formula, in bytes, of a category.
differences() {
    local category
    for category in params grads optimizer activations comm; do
        printf '%s\t%s\n' "$("$SHARD_ROOT/tools/log_values" log.jsonl "peak_${category}_bytes")" \
            "$(awk -v name="$category" '$1 == name { print $2 }' formula)" |
            awk -v name="$category" '$1 != $2 { print name ": measured " $1 ", formula " $2 }'
    done
    printf '%s\t%s\n' "$("$SHARD_ROOT/tools/log_values" log.jsonl peak_bytes)" \
        "$(awk '$1 == "total" { print $2 }' formula)" |
        awk '$1 > 1.01 * $2 || $1 < 0.99 * $2 { print "together: measured " $1 ", formula " $2 }'
}

begin "it reads nothing from a terminal that waits"
expect "the end" timeout 10 "$SHARD_ROOT/tools/memory_formula" llama < <(sleep 30)
end

# same_peak PROGRAM FLAGS...
same_peak() {
    local program=$1 data=data/images found
    shift
    [[ $program != "$LLAMA" ]] || data=data/text.txt
    begin "${program##*/} $*"
    works "$program" "$@" --data $data --stop-after 2 --eval-every 0 --log log.jsonl
    expect "the formula" "$SHARD_ROOT/tools/memory_formula" --tsv "${program##*/}" "$@"
    cp "$WORK/expect" formula
    found=$(differences)
    [[ -z $found ]] || fault "$found"
    end
}

same_peak "$LLAMA"
same_peak "$LLAMA" --micro-batches 3
same_peak "$LLAMA" --micro-batches 8
same_peak "$LLAMA" --optimizer sgd --batch 5 --seq 100
same_peak "$LLAMA" --dim 96 --heads 6 --kv-heads 3 --hidden 250 --vocab 300 --layers 2
same_peak "$LLAMA" --vocab 2000 --layers 1 --eval-batch 2
same_peak "$MNIST"
same_peak "$MNIST" --micro-batches 5 --eval-batch 3
same_peak "$MNIST" --batch 10 --eval-batch 60

finish
