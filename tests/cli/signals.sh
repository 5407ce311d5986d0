#!/usr/bin/env bash
# Ctrl-C, SIGTERM, and SIGHUP from a terminal that goes away: the step under way is finished, the
# checkpoint saved, and from there the training goes on as if nothing had happened. A second Ctrl-C
# ends the program at once. Who has set a signal to be ignored is not stopped by it.
source "$(dirname "$0")/lib.sh"

make_text text 80000
make_images n101 101
llama=("$LLAMA" "${SMALL[@]}" --data text --batch 4 --steps 1000000 --warmup 50)
mnist=("$MNIST" --threads 1 --data n101 --batch 16 --steps 1000000 --eval-every 0)

# Starts a program whose signals are as at a terminal: in the background bash ignores SIGINT.
start() {
    local tries
    rm -f ../started
    python3 -c '
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
open("../started", "w").close()
os.execv(sys.argv[1], sys.argv[1:])' "$@" >../out 2>../err </dev/null &
    pid=$!
    for ((tries = 0; tries < 500; tries++)); do
        [[ ! -e ../started ]] || return
        sleep 0.01
    done
    fault "python3 does not start"
}

# Waits until the log has so many lines.
wait_for_lines() {
    local file=$1 count=$2 tries
    for ((tries = 0; tries < 400; tries++)); do
        [[ -f $file ]] && (($(wc -l <"$file") >= count)) && return
        kill -0 $pid 2>/dev/null || break
        sleep 0.05
    done
    fault "no $count lines in $file; stderr: $(head -c 300 ../err)"
}

# Waits for the end; the exit code in $code, or 999 if there is none in time.
wait_for_end() {
    local tries
    for ((tries = 0; tries < $1 * 20; tries++)); do
        if ! kill -0 $pid 2>/dev/null; then
            { wait $pid; } 2>/dev/null
            code=$?
            return
        fi
        sleep 0.05
    done
    kill -9 $pid
    wait $pid 2>/dev/null
    code=999
}

test_stopped() { # MODEL SIGNAL CODE
    local model=$1 signal=$2 expected=$3 last
    local -a command=("${llama[@]}")
    [[ $model == llama ]] || command=("${mnist[@]}")
    begin "$model, SIG$signal: exit code $expected, saved, resumed bit by bit"
    start "${command[@]}" --log log --dump one --save ck
    wait_for_lines log 4
    kill -s "$signal" $pid
    wait_for_end 20
    ((code == expected)) || fault "expected exit code $expected; found $code"
    expect "whole lines in the log" compare json log step loss grad_norm lr ms samples
    last=$(compare column log step | sort -n | tail -n 1)
    expect "it says that it was stopped, after which step" \
        eval "cat ../out ../err | grep -iE '(stopped|interrupted).*step $last([^0-9]|\$)'"
    expect "the steps dumped are those logged" test "$(wc -l <one/steps.txt)" = "$last"
    expect "a checkpoint" test "$(ls -A ck | wc -l)" = 3
    expect "the summary was printed" grep -q '^peak memory' ../out
    works "${command[@]}" --resume ck --stop-after 3 --dump two
    works "${command[@]}" --stop-after $((last + 3)) --dump whole
    expect "the same steps as without" cmp <(cat one/steps.txt two/steps.txt) whole/steps.txt
    expect "the same weights" cmp two/final.safetensors whole/final.safetensors
    expect "nothing else is left" test "$(ls -A | sort | tr '\n' ' ')" = \
        "ck log n101 one text two whole "
    rm -rf ck log one two whole
    end
}

test_stopped llama INT 130
test_stopped llama TERM 143
test_stopped mnist INT 130
test_stopped mnist TERM 143
test_stopped llama HUP 129

begin "signals that are ignored stay so: SIGINT in the background, SIGHUP under nohup"
trap '' INT HUP
"${llama[@]}" --log log >../out 2>../err </dev/null &
pid=$!
trap 'exit 130' INT
trap - HUP
wait_for_lines log 3
for signal in INT HUP INT; do
    kill -s $signal $pid
    lines=$(wc -l <log)
    wait_for_lines log $((lines + 20))
done
expect "it goes on" kill -0 $pid
kill -s TERM $pid
wait_for_end 20
((code == 143)) || fault "SIGTERM: expected exit code 143; found $code"
expect "a line that it was stopped" grep -q '^stopped .*by a signal' ../out
rm log
end

begin "stopped without --save: nothing is saved, exit code 130"
start "${llama[@]}" --log log
wait_for_lines log 3
kill -s INT $pid
wait_for_end 20
((code == 130)) || fault "expected exit code 130; found $code"
expect "nothing was written" test "$(ls -A | sort | tr '\n' ' ')" = "log n101 text "
expect "stderr has no crash" eval '! grep -qiE "abort|CHECK|segment" ../err'
rm log
end

# A step that takes seconds: thousands of micro-batches.
vary --dim 128 "${llama[@]}"
vary --hidden 512 "${line[@]}"
vary --batch 4000 "${line[@]}"
long=("${line[@]}" --micro-batches 4000)
for signal in INT TERM; do
    begin "a second SIG$signal in the same step ends the program at once, the old checkpoint stays"
    rm -rf ck log
    works "${llama[@]}" --stop-after 1 --save old
    cp -r old ck
    start "${long[@]}" --log log --save ck
    sleep 0.7
    kill -s $signal $pid
    sleep 0.3
    expect "the first signal lets the step go on" kill -0 $pid
    before=$(date +%s%N)
    kill -s $signal $pid
    wait_for_end 20
    took=$((($(date +%s%N) - before) / 1000000))
    ((took < 700)) || fault "it took $took ms to end"
    ((code == 130 || code == 143)) || fault "expected exit code 130 or 143; found $code"
    expect "no step was finished" test ! -s log
    expect "the old checkpoint is untouched" diff -r old ck
    expect "nothing else is left" eval '! ls -A | grep tmp'
    rm -rf ck log old
    end
done

begin "Ctrl-C and then SIGTERM end the program at once, too"
start "${long[@]}" --log log
sleep 0.7
kill -s INT $pid
sleep 0.3
kill -s TERM $pid
before=$(date +%s%N)
wait_for_end 20
took=$((($(date +%s%N) - before) / 1000000))
((took < 700)) || fault "it took $took ms to end"
expect "no step was finished" test ! -s log
rm -f log
end

begin "a signal as early as possible"
for delay in 0 0.01 0.03 0.06; do
    start "${llama[@]}" --save ck
    sleep $delay
    kill -s INT $pid
    wait_for_end 20
    ((code == 130)) || fault "after $delay s: expected exit code 130; found $code"
    expect "no checkpoint or a whole one" eval '[[ ! -e ck || $(ls ck | wc -l) == 3 ]]'
    rm -rf ck
done
expect "nothing else is left" test "$(ls -A | sort | tr '\n' ' ')" = "n101 text "
end

begin "stopped during --save-every 1: whole, and nothing is left"
for signal in INT TERM INT; do
    start "${llama[@]}" --log log --save ck --save-every 1
    wait_for_lines log 6
    kill -s $signal $pid
    wait_for_end 20
    ((code > 128 && code < 160)) || fault "SIG$signal: exit code $code"
    last=$(compare column log step | sort -n | tail -n 1)
    works "${llama[@]}" --resume ck --stop-after 1 --dump next
    expect "the checkpoint is that of the last step" \
        test "$(cut -d ' ' -f 1 <next/steps.txt)" = $((last + 1))
    expect "nothing else is left" test "$(ls -A | sort | tr '\n' ' ')" = "ck log n101 next text "
    rm -rf ck log next
done
end
# Libraries keep data where a signal's handler would put its own, below the stack's end: a handler
# that runs on the stack of a thread that computes breaks things now and then.
begin "stopped in the middle of a step, many times: no crash, the step is right"
works "${mnist[@]}" --stop-after 40 --dump whole
for ((round = 0; round < 16; round++)); do
    start "${mnist[@]}" --log log --dump dump
    wait_for_lines log 1
    sleep "0.0$((round * 3 % 10))$round"
    kill -s TERM $pid
    wait_for_end 20
    ((code == 143)) || fault "round $round: exit code $code; stderr: $(head -c 200 ../err)"
    last=$(wc -l <dump/steps.txt)
    expect "round $round: the same steps as undisturbed" \
        cmp <(head -n 40 dump/steps.txt) <(head -n "$((last < 40 ? last : 40))" whole/steps.txt)
    rm -rf dump log
done
rm -r whole
end
finish
