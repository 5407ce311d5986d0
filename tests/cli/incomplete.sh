#!/usr/bin/env bash
# Output that cannot be written, or not to its end: one warning and exit code 1, the training goes on
# and nothing half is left. Pipes and devices are written like files.
source "$(dirname "$0")/lib.sh"

make_text text 4000
llama=("$LLAMA" "${SMALL[@]}" --data text --batch 4 --steps 6)
begin "a whole run, to compare with"
works "${llama[@]}" --logits ../logits --dump ../dump --save ../ck
end

fails() { # WARNING COMMAND…: exit code 1, one warning that matches, and the end is reached
    local pattern=$1
    shift
    run "$@"
    ((code == 1)) || fault_run "expected exit code 1" "$@"
    expect "a warning with \"$pattern\" ($(head -c 300 ../err))" grep -qE "^warning: $pattern" ../err
    expect "one line on stderr ($(head -c 300 ../err))" test "$(wc -l <../err)" = 1
}

limited() { # KIB COMMAND…: no file may grow beyond that, as `ulimit -f` says
    line=(bash -c "ulimit -f $1; exec \"\$@\"" bash "${@:2}")
}

# ---- --logits ----------------------------------------------------------------------------------

begin "--logits on a full disk: a warning, and no file"
fails '--logits /dev/full was not written: .*No space left' "${llama[@]}" --logits /dev/full
expect "the training was reported" grep -q '^peak memory' ../out
echo old >logits
limited 4 "${llama[@]}" --logits logits
fails '--logits logits was not written: .*File too large' "${line[@]}"
expect "what was there is untouched" test "$(cat logits)" = old
rm logits
expect "nothing is left" test "$(ls -A)" = text
end

begin "--logits into a device, a pipe, the standard output"
works "${llama[@]}" --logits /dev/null
mkfifo pipe
cat pipe >from_pipe &
works "${llama[@]}" --logits pipe
wait $!
expect "the pipe carries the whole file" cmp from_pipe ../logits
expect "it is still a pipe" test -p pipe
"${llama[@]}" --logits /dev/stdout 2>../err | cat >mixed
expect "no message ($(cat ../err))" test ! -s ../err
expect "the standard output has the file in it" grep -qa '"logits":{"dtype":"F32"' mixed
rm pipe from_pipe mixed
end

# ---- --log, --memory, the terminal -------------------------------------------------------------

begin "--log and --memory on a full disk"
fails '--log /dev/full is not complete' "${llama[@]}" --log /dev/full
fails '--memory /dev/full is not complete' "${llama[@]}" --memory /dev/full
end

begin "a standard output that is full"
run bash -c '"$@" >/dev/full' bash "${llama[@]}" --save ck
((code == 1)) || fault_run "expected exit code 1" "${llama[@]}"
expect "one warning ($(cat ../err))" \
    test "$(grep -c '^warning: the standard output is not complete' ../err)" = 1
expect "nothing else" test "$(wc -l <../err)" = 1
expect "the checkpoint is there" diff -r ck ../ck
run bash -c '"$0" --help >/dev/full' "$LLAMA"
((code == 1)) || fault_run "--help: expected exit code 1" "$LLAMA" --help
expect "a message" grep -q '^llama: --help could not be printed: No space left' ../err
run bash -c '"$0" --help >&-' "$LLAMA"
((code == 1)) || fault_run "--help >&-: expected exit code 1" "$LLAMA" --help
rm -r ck
end

# ---- --dump ------------------------------------------------------------------------------------

begin "--dump on a full disk: one warning, not one for each step"
limited 60 "${llama[@]}" --dump dump --save-every 3 --save ck
run "${line[@]}"
((code == 1)) || fault_run "expected exit code 1" "${llama[@]}"
expect "one on the dump ($(cat ../err))" \
    test "$(grep -c '^warning: the dump is not complete: .*File too large' ../err)" = 1
expect "one on each checkpoint" \
    test "$(grep -cE '^warning: no checkpoint saved after step [36]: .*File too large' ../err)" = 2
expect "nothing else" test "$(wc -l <../err)" = 3
expect "no folder is left beside the dump" test "$(ls -A | tr '\n' ' ')" = "dump text "
rm -r dump
end

begin "files that may not grow do not kill (SIGXFSZ)"
limited 100 "${llama[@]}" --save ck
fails 'no checkpoint saved after step 6: .*File too large' "${line[@]}"
expect "nothing is left" test "$(ls -A)" = text
end

begin "a dump has no file of an older one"
works "${llama[@]}" --dump dump
works "${llama[@]}" --stop-after 0 --dump dump
expect "only the last weights" test "$(ls dump)" = final.safetensors
works "${llama[@]}" --dump dump
expect "all of the new one" diff -r dump ../dump
refuses 'nowhere' "${llama[@]}" --dump dump --load nowhere
expect "a run that does not begin leaves it" diff -r dump ../dump
rm -r dump
end

# ---- pipes without a reader --------------------------------------------------------------------

begin "a pipe that nobody reads: a signal ends the waiting"
mkfifo pipe
for flag in --log --memory; do
    "${llama[@]}" $flag pipe >../out 2>../err </dev/null &
    pid=$!
    sleep 0.5
    expect "$flag: it waits" kill -0 $pid
    kill -TERM $pid
    for ((tries = 0; tries < 60; tries++)); do
        kill -0 $pid 2>/dev/null || break
        sleep 0.05
    done
    expect "$flag: it ended" eval "! kill -9 $pid 2>/dev/null"
    { wait $pid; } 2>/dev/null
    code=$?
    refusal "$flag pipe: is a pipe that nobody read" "${llama[@]}" $flag pipe
done
cat pipe >log &
works "${llama[@]}" --log pipe
wait $!
expect "with a reader it works" compare json log step loss
rm pipe log
end

# ---- --sample ----------------------------------------------------------------------------------

begin "--sample where the vocabulary has no newline"
printf '\1\2\3%.0s' {1..200} >low
vary --data low "${llama[@]}"
for vocab in 4 10 11; do
    works "${line[@]}" --vocab $vocab --sample 7
    expect "--vocab $vocab: a text" grep -q ^sample ../out
done
rm low
end
finish
