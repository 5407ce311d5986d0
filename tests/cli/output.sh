#!/usr/bin/env bash
# What the programs print: plain lines into a pipe, a progress bar on a terminal, JSON in the log.
source "$(dirname "$0")/lib.sh"

make_text t 20000
make_images n 101
llama=("$LLAMA" "${SMALL[@]}" --data t --batch 4 --steps 60)
mnist=("$MNIST" --threads 1 --data n --batch 16 --steps 60)

plain() {
    expect "no carriage return, no escape in $1" eval "! grep -qP '[\\r\\x1b\\x08]' '$1'"
}

# Runs a command in a terminal of so many columns: what is on the screen at the end, in `screen`, and
# each progress bar that was there in between, in `bars`; none may reach the last column.
on_screen() {
    local columns=$1
    shift
    run python3 "$CLI/screen.py" "$columns" frames "$@"
    mv ../out screen
    grep -E '^(\[[#.]*\])? *[0-9]+%' frames >bars
    expect "no bar as wide as the terminal" test "$(wc -L <bars)" -lt "$columns"
}

# The text on a screen without what the width and the moment make of it: in one line, each number a 0.
words() {
    tr -d ' \n' | sed -E 's/(0x)?[0-9]+([.][0-9]+)?(e[+-][0-9]+)?/0/g'
}

for model in llama mnist; do
    command=("${llama[@]}")
    [[ $model == llama ]] || command=("${mnist[@]}")

    begin "$model, into a pipe: plain lines, each once, at most 80 columns"
    "${command[@]}" --eval-every 20 2>../err | cat >piped
    [[ ${PIPESTATUS[0]} == 0 ]] || fault "exit code ${PIPESTATUS[0]}: $(head -c 300 ../err)"
    expect "nothing on stderr" test ! -s ../err
    plain piped
    expect "at most 80 columns" awk 'length > 80 { print length, $0; bad = 1 } END { exit bad }' piped
    expect "no line twice" test -z "$(grep '^step' piped | sort | uniq -d)"
    expect "the first step and the last" eval "grep -qE '^step +1 ' piped && grep -qE '^step +60 ' piped"
    expect "about 20 lines of steps" eval 'n=$(grep -c ^step piped); ((n >= 15 && n <= 30))'
    for what in 01_single_gpu device parameters batch f32; do
        expect "the header has $what" grep -q -- "$what" piped
    done
    expect "validation with loss and accuracy" \
        test "$(grep -cE '^validation .*loss [0-9.]+, accuracy [0-9.]+ %' piped)" = 3
    expect "a summary with time, speed, peak memory by category" \
        eval "grep -q '^time ' piped && grep -q '^speed ' piped && grep -q 'MB activations' piped"
    end

    for columns in 80 40; do
        begin "$model, on a terminal of $columns columns: a progress bar, and nothing left of it"
        on_screen $columns "${command[@]}" --eval-every 20
        if ((columns == 80)); then
            expect "a bar" grep -qE '^\[[#.]{30}\] ' bars
            expect "no line is longer than 80 columns" test "$(wc -L <screen)" -le 80
            expect "the lines of steps as in a pipe" \
                diff <(grep '^step' screen | cut -c 1-35) <(grep '^step' piped | cut -c 1-35)
        else
            expect "no room for a bar" eval "! grep -q '[[#]' bars"
        fi
        expect "it grows" test "$(grep loss bars | grep -oE '[0-9]+%' | sort -u | wc -l)" -gt 10
        expect "it says that it evaluates" \
            test "$(grep -cE '[0-9]+%  evaluating, [0-9]+ of [0-9]+$' bars)" -ge 3
        expect "on the screen is what goes into a pipe" diff <(words <screen) <(words <piped)
        end
    done

    begin "$model, on a terminal: the bar is full at the end of this run, wherever that is"
    on_screen 80 "${command[@]}" --stop-after 10
    expect "90 % after 9 of 10 steps" grep -qE '^\[#{27}\.{3}\]  90%  loss' bars
    works "${command[@]}" --stop-after 20 --save ck
    on_screen 80 "${command[@]}" --resume ck
    expect "a resumed run begins at 0 %" grep -qE '^\[#?\.{29,30}\]   [0-9]%  loss' bars
    expect "98 % before its last step" grep -qE '^\[#{29}\.\]  98%  loss' bars
    rm -r ck
    end

    begin "$model, on a terminal: very narrow ones, messages, Ctrl-C"
    on_screen 20 "${command[@]}"
    expect "no bar in 20 columns" test ! -s bars
    INTERRUPT=30 on_screen 80 "${command[@]/%60/100000}"
    expect "no bar is left after Ctrl-C" eval "! grep -q '%  ' screen"
    expect "the line after it is whole" grep -qE '^stopped +after step [0-9]+, by a signal$' screen
    on_screen 80 "$LLAMA" --bogus
    expect "a message stands alone" eval "grep -q '^llama: unknown flag' screen"
    end

    begin "$model: each line of --log is a JSON object with the keys of its kind"
    works "${command[@]}" --log log --eval-every 20
    unit=tokens_per_s
    [[ $model == llama ]] || unit=images_per_s
    expect "the keys of steps" compare json log step loss grad_norm lr ms $unit samples
    expect "three evaluations" test "$(compare column log val_loss | wc -l)" = 3
    expect "accuracies from 0 to 1" test -z "$(compare column log accuracy |
        awk '$1 < 0 || $1 > 1')"
    for k in 1 21 40 60; do
        expect "line $k alone" eval "sed -n ${k}p log | python3 -m json.tool >/dev/null"
    done
    expect "a line for each step and the summary" test "$(wc -l <log)" = 61
    expect "loss and norm as in the dump" \
        eval '"${command[@]}" --dump dump >/dev/null && python3 - <<END
import json
steps = [line.split() for line in open("dump/steps.txt")]
rows = [json.loads(line) for line in open("log")][:60]
for (step, loss, norm), row in zip(steps, rows):
    assert row["step"] == int(step), step
    for key, value in (("loss", loss), ("grad_norm", norm)):
        assert abs(row[key] - float.fromhex(value)) <= 1e-8 * abs(row[key]), (step, key)
END'
    rm -r dump log
    end

    begin "$model: readers that go away, closed and full files"
    LIMIT=20
    timeout 20 "${command[@]}" 2>../err | head -n 1 >/dev/null
    code=${PIPESTATUS[0]}
    ((code == 0 || code == 141)) || fault "| head -n 1: exit code $code"
    expect "nothing on stderr" test ! -s ../err
    run bash -c '"$@" >&-' bash "${command[@]}"
    ((code < 124 || code == 141)) || fault "stdout closed: exit code $code"
    run bash -c '"$@" >/dev/full' bash "${command[@]}"
    ((code < 124)) || fault "stdout full: exit code $code"
    run bash -c '"$@" >&- 2>&-' bash "${command[@]}" --log log --save ck
    ((code < 124 || code == 141)) || fault "stdout and stderr closed: exit code $code"
    expect "files do not get what is meant for stdout" \
        eval "! grep -aqs '^device' log ck/* && compare json log"
    run "${command[@]}" --log /dev/full
    ((code < 124)) || fault "--log /dev/full: exit code $code"
    expect "it says that the log is not complete" grep -q -- '--log' ../err
    works "${command[@]}" --log /dev/null
    rm -rf log ck
    end
done

ddp=$SHARD_BUILD/02_ddp/llama
if [[ -x $ddp ]]; then
    begin "two ranks, on a terminal: one bar, and only where ./run has said that there is one"
    "${mpi[@]}" -n 2 "$ddp" "${llama[@]:1}" >piped 2>../err </dev/null || fault "exit code $?"
    on_screen 80 env SHARD_TERMINAL=1 "${mpi[@]}" -n 2 "$ddp" "${llama[@]:1}"
    expect "each bar once" test "$(grep -cE '^\[#+\.+\]  50%  loss' bars)" -le 2
    expect "it grows" test "$(grep loss bars | grep -oE '[0-9]+%' | sort -u | wc -l)" -gt 5
    expect "on the screen is what goes into a pipe" diff <(words <screen) <(words <piped)
    on_screen 80 "${mpi[@]}" -n 2 "$ddp" "${llama[@]:1}"
    expect "no bar without ./run" test ! -s bars
    end
fi

begin "errors go to stderr, whole, and never to stdout"
refuses 'unknown flag' "$LLAMA" --bogus
run bash -c '"$0" --bogus 2>&-' "$LLAMA"
((code == 2)) || fault "stderr closed: exit code $code"
expect "stdout is empty" test ! -s ../out
run bash -c '"$0" --bogus >&-' "$LLAMA"
((code == 2)) || fault "stdout closed: exit code $code"
end

begin "huge losses, infinity and NaN stay in their columns"
for lr in 100 1e5 1e6; do
    vary --steps 8 "${mnist[@]}" --optimizer sgd --schedule constant --print-every 1 --lr $lr
    run "${line[@]}"
    expect "--lr $lr: lines of one length" test "$(grep ^step ../out | awk '{ print length }' |
        sort -u | wc -l)" = 1
    expect "--lr $lr: no sign of NaN" eval "! grep -q -- -nan ../out"
done
end

begin "the header shows the batch that the data give"
vary --batch 1000 "${mnist[@]}" --stop-after 0 --micro-batches 3
works "${line[@]}"
expect "101 images are one batch" grep -qE '^batch +101 global, at most 34 per micro-batch' ../out
end

begin "--print-every: as many lines as asked for"
works "${llama[@]}" --print-every 1
expect "60 lines" test "$(grep -c '^step' ../out)" = 60
works "${llama[@]}" --print-every 30
expect "steps 1, 30, 60" test "$(grep '^step' ../out | awk '{ print $2 }' | tr '\n' ' ')" = "1 30 60 "
end

begin "--sample prints text, nothing that a terminal would obey"
head -c 9000 /dev/urandom >noise
vary --data noise "${llama[@]}"
works "${line[@]}" --sample 200 --temperature 100
plain ../out
expect "only ASCII" eval "! grep -qP '[^\\x20-\\x7e\\n]' ../out"
rm noise
end

begin "--logits writes the logits of the first validation sample of the trained model"
works "${llama[@]}" --logits one --dump dump
vary --threads 2 "${llama[@]}"
works "${line[@]}" --logits two --eval-every 3
expect "the same bits with 2 threads" cmp one two
expect "16 positions of 256 logits" compare shape one logits 16 256
expect "numbers in F32" grep -qa '"logits":{"dtype":"F32"\|"logits": {"dtype": "F32"' one
works "${mnist[@]}" --logits three
expect "10 classes" compare shape three logits 1 10
rm -r one two three dump
end

begin "the first step comes soon after the start"
start=$(date +%s%N)
first=
while read -r word _; do
    if [[ $word == step ]]; then
        first=$((($(date +%s%N) - start) / 1000000))
        break
    fi
done < <("${llama[@]}" 2>/dev/null)
[[ -n $first ]] || fault "no step"
printf '     first step after %s ms\n' "$first"
have_sanitizer || ((${first:-9999} < 3000)) || fault "it took $first ms, more than 3000"
end
finish
