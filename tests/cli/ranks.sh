#!/usr/bin/env bash
# ctest: TIMEOUT 400 PROCESSORS 2
# Programs on several ranks: help, mistakes, ranks that do not fit together, ranks that die or stop,
# what is printed, threads, files, Ctrl-C, going on with another number of ranks.
source "$(dirname "$0")/lib.sh"
# shellcheck disable=SC2034 # `shown` and `refusal` of lib.sh look at them
DDP_LLAMA=$SHARD_BUILD/02_ddp/llama
DDP_MNIST=$SHARD_BUILD/02_ddp/mnist
if [[ ! -x $DDP_LLAMA ]]; then
    echo "skipped: no $DDP_LLAMA (MPI was not found)"
    exit 77
fi

make_text text 20000
make_text other 20000
tr a-z A-Z <text >other
make_images n101 101 n10 10
tiny=("${SMALL[@]}" --data text)
small=("${tiny[@]}" --steps 4)

on() { # RANKS COMMAND…: the command line, in the array $line
    line=("${mpi[@]}" -n "$1" "${@:2}")
}

# ---- start -------------------------------------------------------------------------------------

begin "--help on one of the ranks: no hang, one message"
run "${mpi[@]}" -n 2 "$DDP_LLAMA" "${small[@]}" : -n 1 timeout 60 "$DDP_LLAMA" --help
refusal '--help is given to rank 2, but not to all ranks' "--help on rank 2"
end

begin "--help on 4 ranks: once, exit code 0"
on 4 "$DDP_LLAMA" --help
works "${line[@]}"
expect "one usage line" test "$(grep -c '^Usage:' ../out)" = 1
expect "the flags of the chapter and of communication" \
    grep -qE -- '^  --ddp |^  --check-comm' ../out
end

begin "mistakes on 1, 2 and 4 ranks: one message, exit code 2"
for n in 1 2 4; do
    refuses_on $n 'unknown flag --step;' "$DDP_LLAMA" --step 3
    refuses_on $n 'no_such_file' "$DDP_LLAMA" --data no_such_file
    refuses_on $n 'ck_absent' "$DDP_LLAMA" "${small[@]}" --load ck_absent
    refuses_on $n 'text/log' "$DDP_LLAMA" "${small[@]}" --log text/log
    refuses_on $n 'text/calls' "$DDP_LLAMA" "${small[@]}" --log-comm text/calls
    refuses_on $n 'bucket-mb' "$DDP_LLAMA" "${small[@]}" --bucket-mb 0
done
end

begin "ranks that do not fit together are refused before training"
two() { # PATTERN, flags of rank 0, --, flags of rank 1
    local pattern=$1 first=()
    shift
    while [[ $1 != -- ]]; do
        first+=("$1")
        shift
    done
    shift
    run "${mpi[@]}" -n 1 "$DDP_LLAMA" "${small[@]}" "${first[@]}" : \
        -n 1 "$DDP_LLAMA" "${small[@]}" "$@"
    refusal "$pattern" "$DDP_LLAMA" "${first[@]}" : "$@"
}
two '--seed is 2 on rank 1, but 1 on rank 0' --seed 1 -- --seed 2
two '--lr is 0.25 on rank 1, but 0.5 on rank 0' --lr 0.5 -- --lr 0.25
two '--micro-batches is 2 on rank 1' --batch 8 -- --batch 8 --micro-batches 2
mkdir -p a b
cp text a/data && cp other b/data
run "${mpi[@]}" -n 1 --wdir a "$DDP_LLAMA" "${SMALL[@]}" --data data --steps 2 : \
    -n 1 --wdir b "$DDP_LLAMA" "${SMALL[@]}" --data data --steps 2
refusal 'the hash of the data is [0-9a-f]{16} on rank 1' "other data under the same name"
run "${mpi[@]}" -n 1 "$DDP_LLAMA" "${small[@]}" : -n 1 "$DDP_MNIST" --data n10 --steps 1
refusal 'the program is mnist on rank 1, but llama on rank 0' "two programs"
works "$DDP_LLAMA" "${tiny[@]}" --steps 0 --seed 5 --save a/ck
works "$DDP_LLAMA" "${tiny[@]}" --steps 0 --seed 6 --save b/ck
cp other a/data
run "${mpi[@]}" -n 1 --wdir a "$DDP_LLAMA" "${SMALL[@]}" --data data --steps 2 --load ck : \
    -n 1 --wdir b "$DDP_LLAMA" "${SMALL[@]}" --data data --steps 2 --load ck
refusal 'the hash of what --load has read is [0-9a-f]{16} on rank 1' "other weights to --load"
rm -r a/ck b/ck # the same weights with other moments
still=("${SMALL[@]}" --data a/data --lr 0 --weight-decay 0 --steps 2)
works "$DDP_LLAMA" "${still[@]}" --save a/ck
works "$DDP_LLAMA" "${still[@]}" --save b/ck --clip 0.01
expect "the same weights" cmp {a,b}/ck/model.safetensors
run "${mpi[@]}" -n 1 --wdir a "$DDP_LLAMA" "${SMALL[@]}" --data data --steps 9 --resume ck : \
    -n 1 --wdir b "$DDP_LLAMA" "${SMALL[@]}" --data data --steps 9 --resume ck
refusal 'the hash of what --resume has read is [0-9a-f]{16} on rank 1' "other moments to --resume"
end

# ---- failures ----------------------------------------------------------------------------------

# Starts a long run in the background and waits until it trains; pids of the ranks in $ranks.
start_long() { # RANKS FLAGS…
    local tries
    rm -f log
    on "$1" "$DDP_LLAMA" "${SMALL[@]}" --data text --steps 1000000 --eval-every 0 --log log \
        "${@:2}"
    "${line[@]}" >../out 2>../err </dev/null &
    pid=$!
    for ((tries = 0; tries < 400; tries++)); do
        [[ -f log ]] && (($(wc -l <log) > 20)) && break
        sleep 0.05
    done
    mapfile -t ranks < <(pgrep -P "$pid" -x llama)
    expect "training on $1 ranks (${#ranks[@]} found)" test "${#ranks[@]}" = "$1"
}

# Waits for the end of the job and its ranks: seconds in $seconds, at most 30.
wait_gone() {
    local begin=$SECONDS
    while kill -0 "$pid" 2>/dev/null || kill -0 "${ranks[@]}" 2>/dev/null; do
        if ((SECONDS - begin > 30)); then
            fault "still running after 30 s"
            kill -9 "$pid" "${ranks[@]}" 2>/dev/null
            break
        fi
        sleep 0.1
    done
    { wait "$pid"; } 2>/dev/null
    code=$?
    seconds=$((SECONDS - begin))
}

begin "a rank that is killed ends all within seconds"
start_long 3
kill -9 "${ranks[1]}"
wait_gone
expect "exit code not 0 ($code)" test "$code" != 0
expect "within 5 s ($seconds)" test "$seconds" -le 5
end

begin "a rank that is stopped: --comm-timeout names it and ends all"
start_long 3 --comm-timeout 2
kill -STOP "${ranks[2]}"
wait_gone
expect "exit code not 0 ($code)" test "$code" != 0
expect "within 10 s ($seconds)" test "$seconds" -le 10
expect "who has come and who has not ($(head -c 300 ../err))" \
    grep -qE 'not complete after 2 s .*entered by rank 0 1, not by rank 2' ../err
expect "one message" test "$(grep -c 'not complete' ../err)" = 1
end

# Before mpirun ends a stopped rank it continues it, and that rank then waits in vain for those that
# are gone. Here mpirun takes longer to end it than the limit. Small buckets go through slots, where
# a rank that is gone is not noticed.
begin "a rank that is stopped and continued does not complain of the others"
start_long 3 --comm-timeout 2 --bucket-mb 0.01
kill -STOP "${ranks[2]}" "$pid"
sleep 3.5 # rank 0 has printed and is gone
kill -CONT "${ranks[2]}"
sleep 3.5
kill -CONT "$pid"
wait_gone
expect "one message, of rank 0 ($(head -c 600 ../err))" \
    test "$(grep -oE '^rank [0-9] .*not complete' ../err | cut -d ' ' -f 2)" = 0
end

begin "Ctrl-Z and fg: the time in between does not count"
start_long 3 --comm-timeout 2
kill -STOP "${ranks[2]}"
sleep 1 # the others wait for it when they are stopped, too
kill -STOP "${ranks[@]:0:2}"
sleep 1.5
kill -CONT "${ranks[@]:0:2}"
sleep 0.5
kill -CONT "${ranks[2]}"
sleep 1
kill -INT "$pid"
wait_gone
expect "it went on ($(tail -n 1 ../out))" grep -q '^stopped *after step' ../out
expect "without a word ($(head -c 300 ../err))" test "$(grep -c 'not complete' ../err)" = 0
end

begin "Ctrl-C on 3 ranks: stopped together, saved, resumed bit by bit on 2"
start_long 3 --save ck --dump one --warmup 5
kill -INT "$pid"
wait_gone
steps=$(awk 'END { print $1 }' one/steps.txt)
expect "a line on it ($(tail -n 3 ../out))" grep -q "^stopped *after step $steps" ../out
on 2 "$DDP_LLAMA" "${SMALL[@]}" --data text --steps 1000000 --eval-every 0 --warmup 5 \
    --stop-after 3 --resume ck --dump two
works "${line[@]}"
expect "the step after is the next one" test "$(awk 'NR == 1 { print $1 }' two/steps.txt)" = \
    $((steps + 1))
end

# ---- what is printed and written ---------------------------------------------------------------

begin "8 ranks, redirected: each line once, no carriage return or escape"
on 8 "$DDP_LLAMA" "${tiny[@]}" --steps 20 --print-every 1 --batch 9
works "${line[@]}"
expect "no control characters" test "$(tr -d '\n[:print:]' <../out | wc -c)" = 0
expect "every step once" test "$(grep -c '^step ' ../out)" = 20
expect "one header" test "$(grep -c '^ranks ' ../out)" = 1
end

begin "compute threads: cores divided by ranks, unless the user says otherwise"
cores=$(nproc)
for n in 1 2 4; do
    threads=$((cores / n > 0 ? cores / n : 1))
    on $n "$DDP_LLAMA" --dim 32 --layers 1 --heads 2 --kv-heads 1 --hidden 48 --seq 16 \
        --data text --steps 1
    run "${line[@]}"
    expect "$n ranks: $threads threads" grep -qE "^device .* $threads threads?," ../out
    works "${line[@]}" --threads 3
    expect "--threads 3" grep -qE "^device .* 3 threads," ../out
done
end

begin "--log-comm: the calls of all ranks are the same, also with evaluation and saving"
on 4 "$DDP_LLAMA" "${tiny[@]}" --eval-every 1 --save-every 2 --steps 6 --save saved \
    --log-comm calls --check-comm --micro-batches 2
works "${line[@]}"
for r in 1 2 3; do
    expect "rank $r as rank 0" cmp calls.0 calls.$r
done
expect "all-reduces in it" grep -q all-reduce calls.0
end

begin "bytes a step do not depend on --micro-batches; the header tells the batch sizes"
for m in 1 4; do
    on 2 "$DDP_LLAMA" "${small[@]}" --batch 16 --micro-batches $m --log log$m
    works "${line[@]}"
done
bytes() { sed -nE 's/.*"sent_bytes_per_step": ([0-9]+).*/\1/p' "$1"; }
expect "$(bytes log1) and $(bytes log4) bytes" test "$(bytes log1)" = "$(bytes log4)"
expect "more than nothing" test "$(bytes log1)" -gt 0
expect "batch" grep -qE '^batch +16 global, at most 8 per rank, 2 per micro-batch' ../out
end

begin "a checkpoint does not depend on the number of ranks"
works "$MNIST" --threads 1 --data n101 --batch 10 --steps 2 --save m --eval-every 0
for n in 1 2 3; do
    on $n "$DDP_MNIST" --threads 1 --data n101 --batch 10 --steps 2 --stop-after 0 --resume m \
        --save m$n
    works "${line[@]}"
done
for n in 1 2 3; do
    expect "the files of $n ranks" diff -r m m$n
done
end

begin "one line in a checkpoint's folder is written once, new folders included"
on 4 "$DDP_LLAMA" "${small[@]}" --save new/deep/dir
works "${line[@]}"
expect "files" test -f new/deep/dir/model.safetensors
expect "no leftovers" test "$(find new/deep -mindepth 1 -maxdepth 1 | wc -l)" = 1
end

begin "--trace: one file with all ranks"
on 3 "$DDP_LLAMA" "${small[@]}" --trace trace.json
works "${line[@]}"
expect "JSON with the spans of 3 ranks" python3 -c '
import json
events = json.load(open("trace.json"))["traceEvents"]
spans = [e for e in events if e["ph"] == "X"]
assert {e["pid"] for e in spans} == {0, 1, 2}
for rank in range(3):
    names = [e["name"] for e in spans if e["pid"] == rank]
    assert "backward 0" in names and "all-reduce" in names, names
reduces = [e for e in spans if e["name"] == "all-reduce"]
assert all(e["args"]["Group size"] == 3 and e["args"]["bytes"] > 0 for e in reduces)'
end

finish
