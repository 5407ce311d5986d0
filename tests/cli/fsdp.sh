#!/usr/bin/env bash
# ctest: TIMEOUT 600 PROCESSORS 2
# Sharded training: checkpoints that any sharding reads and all write alike, how much is gathered at
# a time, what memory is saved, the calls of the ranks, mistakes.
source "$(dirname "$0")/lib.sh"
FSDP_LLAMA=$SHARD_BUILD/03_fsdp/llama
FSDP_MNIST=$SHARD_BUILD/03_fsdp/mnist
if [[ ! -x $FSDP_LLAMA ]]; then
    echo "skipped: no $FSDP_LLAMA (MPI was not found)"
    exit 77
fi

make_text text 20000
make_images n101 101

# value LOG KEY: a number of a log's summary.
value() {
    compare column "$1" "$2" 2>/dev/null | tail -n 1
}

# ---- checkpoints -------------------------------------------------------------------------------

# Nothing divides, and the clip is tight.
odd=(--vocab 257 --dim 66 --heads 3 --kv-heads 3 --hidden 100 --layers 2 --seq 16 --threads 1
    --data text --batch 8 --steps 20 --warmup 5 --weight-decay 0.1 --clip 0.5 --eval-every 0)

test_odd() { # RANKS, flags of the first ten steps, --, flags of the others
    local n=$1 first=()
    shift
    while [[ $1 != -- ]]; do
        first+=("$1")
        shift
    done
    shift
    begin "$n ranks, odd sizes: 10 steps (${first[*]}), saved, loaded, 10 steps ($*)"
    rm -rf whole one two half end
    works "$LLAMA" "${odd[@]}" --micro-batches "$n" --dump whole --save whole.end --log whole.log
    works_on "$n" "$FSDP_LLAMA" "${odd[@]}" "${first[@]}" --stop-after 10 --dump one --save half
    works_on "$n" "$FSDP_LLAMA" "${odd[@]}" "$@" --resume half --dump two --save end --log log
    expect "the losses and norms of chapter 01" cmp <(cat {one,two}/steps.txt 2>&1) whole/steps.txt
    expect "its gradients" cmp one/grads.safetensors whole/grads.safetensors
    expect "its weights" cmp two/final.safetensors whole/final.safetensors
    expect "its checkpoint" diff -r end whole.end
    expect "its number of parameters" \
        test "$(value log parameters)" = "$(value whole.log parameters)"
    end
}

test_odd 3 --prefetch 0 -- --prefetch 2
test_odd 5 --shard gradients -- --wrap-params 40000
test_odd 7 --keep-gathered -- --shard optimizer

begin "saved on 4 ranks, resumed on 3 and on 1 and saved again: the same bytes"
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --dump whole4
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --dump four --stop-after 10 --save on4
works_on 3 "$FSDP_LLAMA" "${odd[@]}" --resume on4 --stop-after 0 --save on3
works_on 1 "$FSDP_LLAMA" "${odd[@]}" --resume on3 --stop-after 0 --save on1
works "$LLAMA" "${odd[@]}" --resume on1 --stop-after 0 --save on01
for folder in on3 on1 on01; do
    expect "$folder" diff -r on4 $folder
done
end

begin "10 more steps of it give the losses of 20 at once"
tail -n 10 whole4/steps.txt >last
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --resume on1 --dump more4
expect "on 4 ranks" cmp more4/steps.txt last
expect "on 4 ranks, the weights" cmp more4/final.safetensors whole4/final.safetensors
works_on 1 "$FSDP_LLAMA" "${odd[@]}" --resume on1 --dump more1 --micro-batches 4
expect "on 1 rank" cmp more1/steps.txt last
works "$LLAMA" "${odd[@]}" --resume on3 --dump more01 --micro-batches 4
expect "chapter 01" cmp more01/steps.txt last
works_on 3 "$FSDP_LLAMA" "${odd[@]}" --resume on3 --dump more3
expect "on 3 ranks" compare steps more3/steps.txt last 1e-6
end

begin "--load takes the weights of 4 ranks, also in chapter 01"
works "$LLAMA" "${odd[@]}" --load on4 --stop-after 0 --dump loaded01
works_on 3 "$FSDP_LLAMA" "${odd[@]}" --load on4 --stop-after 0 --dump loaded3
expect "chapter 01" compare tensors loaded01/final.safetensors on4/model.safetensors 0
expect "3 ranks" cmp loaded3/final.safetensors loaded01/final.safetensors
works "$LLAMA" "${odd[@]}" --load on4 --stop-after 2 --dump first01 --micro-batches 3
works_on 3 "$FSDP_LLAMA" "${odd[@]}" --load on4 --stop-after 2 --dump first3
expect "two steps from there" diff -r first3 first01
end

begin "what any sharding saves, each of the others loads and saves alike"
tiny=("${SMALL[@]}" --data text --steps 12 --warmup 2 --eval-every 0)
works "$LLAMA" "${tiny[@]}" --micro-batches 2 --dump whole2 --save whole2.end
: >steps
before=(--save chain)
for sharding in none optimizer gradients parameters "optimizer --wrap-params 5000" \
    "parameters --wrap-params 1000000"; do
    # shellcheck disable=SC2086 # flags
    works_on 2 "$FSDP_LLAMA" "${tiny[@]}" --shard $sharding --stop-after 2 --dump part \
        "${before[@]}"
    cat part/steps.txt >>steps 2>&1
    # shellcheck disable=SC2086 # flags
    works_on 4 "$FSDP_LLAMA" "${tiny[@]}" --shard $sharding --replicas 2 --resume chain \
        --stop-after 0 --save hybrid
    expect "$sharding, 4 ranks as 2 groups" diff -r hybrid chain
    before=(--resume hybrid --save chain)
done
expect "the losses" cmp steps whole2/steps.txt
expect "the end" diff -r chain whole2.end
end

begin "mnist: saved by 3 ranks, gone on with by 2, hybrid and chapter 01"
images=(--threads 1 --data n101 --batch 10 --eval-every 100)
works_on 3 "$FSDP_MNIST" "${images[@]}" --steps 4 --stop-after 2 --save m
works_on 4 "$FSDP_MNIST" "${images[@]}" --steps 4 --stop-after 0 --resume m --replicas 2 --save m4
expect "4 ranks as 2 groups" diff -r m4 m
works_on 2 "$FSDP_MNIST" "${images[@]}" --steps 4 --resume m4 --dump m2 --shard gradients
works "$MNIST" "${images[@]}" --steps 4 --resume m --dump m1 --micro-batches 2
expect "2 ranks and chapter 01" diff -r m2 m1
end

# ---- memory ------------------------------------------------------------------------------------

# Eight equal blocks of 9 × 32 × 32 floats and two norms; embedding and head are smaller.
blocks=(--vocab 128 --dim 32 --layers 8 --heads 2 --kv-heads 2 --hidden 64 --seq 16 --threads 1
    --data text --batch 4 --steps 3)
block=$((4 * (4 * 32 * 32 + 3 * 64 * 32 + 2 * 32)))

# highest_of TABLE: the largest number of bytes of communication in a timeline.
highest_of() {
    awk -F '\t' 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "comm") column = i }
                 NR > 1 && $column > highest { highest = $column } END { print highest }' "$1"
}

begin "units that are gathered: one, and --prefetch more"
for p in 0 1 2 4; do
    works_on 2 "$FSDP_LLAMA" "${blocks[@]}" --prefetch $p --log log$p --memory memory$p
    bytes=$(value log$p highest_comm_bytes)
    expect "--prefetch $p: $bytes bytes, at most $((1 + p)) units and 2 of fresh gradients" \
        test "$bytes" -le $(((3 + p) * block))
    expect "--prefetch $p: $bytes bytes, as many units as it may be" \
        test "$bytes" -gt $(((2 + p) * block))
    expect "--prefetch $p: the timeline says $(highest_of memory$p)" \
        test "$(highest_of memory$p)" = "$bytes"
done
works_on 2 "$FSDP_LLAMA" "${blocks[@]}" --keep-gathered --log log.kept
bytes=$(value log.kept highest_comm_bytes)
expect "--keep-gathered: $bytes bytes, all units" test "$bytes" -gt $((8 * block))
works_on 2 "$FSDP_LLAMA" "${blocks[@]}" --shard gradients --log log.gradients
bytes=$(value log.gradients highest_comm_bytes)
expect "--shard gradients: $bytes bytes, none" test "$bytes" -le $((2 * block))
end

begin "--micro-batches: the part's sum is all that there is more"
for p in 0 1; do
    works_on 2 "$FSDP_LLAMA" "${blocks[@]}" --prefetch $p --micro-batches 2 --log log.parts
    bytes=$(value log.parts highest_comm_bytes)
    expect "--prefetch $p: $bytes bytes" test "$bytes" -le $(((3 + p) * block + block / 2))
done
end

# Larger weights than activations: blocks of 3.2 MB.
weights=(--vocab 256 --dim 256 --heads 4 --kv-heads 4 --hidden 704 --seq 16 --threads 1
    --data text --batch 4 --steps 2 --eval-every 0)
unit=$((4 * (4 * 256 * 256 + 3 * 704 * 256 + 2 * 256)))

begin "a quarter of params, grads and optimizer on each of 4 ranks, and the process has it"
for level in none optimizer gradients parameters; do
    works_on 4 "$FSDP_LLAMA" "${weights[@]}" --layers 16 --shard $level --log log.$level
done
all=$((4 * $(value log.none parameters)))
near() { # KEY LEVEL EXPECTED
    local found
    found=$(value "log.$2" "peak_$1_bytes")
    expect "--shard $2, $1: $found bytes, about $3" compare near "$found" "$3" 0.01
}
for level in none optimizer gradients parameters; do
    case $level in
    none) parts=(1 1 1) ;;
    optimizer) parts=(1 1 4) ;;
    gradients) parts=(1 4 4) ;;
    parameters) parts=(4 4 4) ;;
    esac
    near params $level $((all / parts[0]))
    near grads $level $((all / parts[1]))
    near optimizer $level $((2 * all / parts[2]))
done
for level in optimizer gradients parameters; do
    account=$(($(value log.none peak_bytes) - $(value log.$level peak_bytes)))
    process=$(($(value log.none process_peak_bytes) - $(value log.$level process_peak_bytes)))
    expect "--shard $level saves $account bytes by the account, $process of the process" \
        compare near "$account" "$process" 0.15
done
end

begin "saving needs one unit more at most"
for level in parameters gradients; do
    line=("$FSDP_LLAMA" "${weights[@]}" --layers 8 --shard "$level")
    works_on 4 "${line[@]}" --log log.plain --memory memory.plain
    works_on 4 "${line[@]}" --log log.saved --memory memory.saved --save-every 1 --save big
    more=$(($(value log.saved peak_bytes) - $(value log.plain peak_bytes)))
    expect "--shard $level: $more bytes by the account" test "$more" -le $unit
    more=$(($(highest_of memory.saved) - $(highest_of memory.plain)))
    expect "--shard $level: $more bytes of communication by the timeline" test "$more" -le $unit
    more=$(($(value log.saved process_peak_bytes) - $(value log.plain process_peak_bytes)))
    expect "--shard $level: $more bytes of the process" test "$more" -le $((unit + 4000000))
done
end

# ---- calls -------------------------------------------------------------------------------------

# calls RANK GROUP: what a rank called in a group, without what goes from one rank to one other.
calls() {
    awk -F '\t' -v group="$2" '$3 == group && $2 != "send" && $2 != "recv"' "calls.$1" 2>/dev/null
}

begin "--log-comm: the calls of 4 ranks are the same, also with evaluation and saving"
for flags in "" "--shard optimizer" "--shard gradients --no-sync" \
    "--keep-gathered --wrap-params 5000"; do
    # shellcheck disable=SC2086 # flags
    works_on 4 "$FSDP_LLAMA" "${SMALL[@]}" --data text --eval-every 1 --save-every 2 --steps 6 \
        --save saved --log-comm calls --micro-batches 2 $flags
    for r in 1 2 3; do
        for group in world shard; do
            expect "rank $r as rank 0, $group, $flags" cmp <(calls 0 $group) <(calls $r $group)
        done
    done
    expect "calls in it" test "$(calls 0 shard | wc -l)" -gt 30
done
end

begin "--log-comm, 2 groups of 2: the calls are the same in each group"
works_on 4 "$FSDP_LLAMA" "${SMALL[@]}" --data text --eval-every 1 --save-every 2 --steps 6 \
    --save saved --log-comm calls --micro-batches 2 --replicas 2
for r in 1 2 3; do
    expect "rank $r, world" cmp <(calls 0 world) <(calls $r world)
done
expect "ranks 0 and 1, shard" cmp <(calls 0 shard) <(calls 1 shard)
expect "ranks 2 and 3, shard" cmp <(calls 2 shard) <(calls 3 shard)
expect "ranks 0 and 2, replicas" cmp <(calls 0 replicas) <(calls 2 replicas)
expect "ranks 1 and 3, replicas" cmp <(calls 1 replicas) <(calls 3 replicas)
expect "all-reduces of the replicas" grep -q all-reduce <(calls 0 replicas)
end

# ---- mistakes ----------------------------------------------------------------------------------

begin "mistakes: one message with the numbers, exit code 2"
small=("${SMALL[@]}" --data text --steps 2)
refuses_on 4 '--replicas 3 does not divide the 4 ranks' "$FSDP_LLAMA" "${small[@]}" --replicas 3
refuses_on 2 '--replicas 4 does not divide the 2 ranks' "$FSDP_MNIST" --data n101 --replicas 4
refuses_on 3 '--shard.*none.*optimizer.*gradients.*parameters' "$FSDP_LLAMA" "${small[@]}" \
    --shard zero3
refuses_on 2 '--replicas' "$FSDP_LLAMA" "${small[@]}" --replicas 0
refuses_on 2 '--prefetch' "$FSDP_LLAMA" "${small[@]}" --prefetch -1
refuses_on 2 '--wrap-params' "$FSDP_LLAMA" "${small[@]}" --wrap-params x
run "${mpi[@]}" -n 1 "$FSDP_LLAMA" "${small[@]}" : \
    -n 1 "$FSDP_LLAMA" "${small[@]}" --shard gradients
refusal '--shard is gradients on rank 1, but parameters on rank 0' "ranks with two levels"
end

finish
