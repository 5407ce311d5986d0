#!/usr/bin/env bash
#
# tour_quick: the tour with a few steps a row on a little data: table, pictures, failures, Ctrl-C.
#
# ctest: PROCESSORS 2
source "$(dirname "$0")/lib.sh"
tour=$SHARD_ROOT/tools/tour
export TOUR_QUICK=1 SHARD_BUILD

if ! command -v gnuplot >/dev/null || [[ ! -r /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ]]; then
    echo "skipped: needs gnuplot and dataset-fashion-mnist (./run setup installs both)"
    exit 77
fi

is_picture() {
    [[ $(head -c 8 "$1" | od -An -tx1 | tr -d ' ') == 89504e470d0a1a0a && $(wc -c <"$1") -gt 5000 ]]
}

# The summary has a line that begins with the words and has no missing number.
has_row() {
    sed -n '/^---- summary/,$p' "$WORK/out" | grep -E "^$1 " | grep -qvE ' -( |$)'
}

begin "trains every row of the list, prints the tables, draws the pictures"
works "$tour" --out tour
expect "row 01_llama" has_row '01_llama +803,968'
expect "row 01_mnist" has_row '01_mnist +1,199,882'
expect "memory of 01_llama" has_row '01_llama +3\.2 +3\.2 +6\.4'
expect "text by 01_llama" grep -q '^Text by 01_llama' "$WORK/out"
expect "command lines" grep -q "^+ .*/01_single_gpu/mnist .*--log tour/01_mnist.jsonl" "$WORK/out"
for picture in loss.png 01_llama.memory.png 01_mnist.memory.png; do
    expect "picture $picture" is_picture "tour/$picture"
    expect "$picture is announced" grep -qx "    tour/$picture" "$WORK/out"
done
wide=$(sed -n '/^---- summary/,$p' "$WORK/out" | awk 'length > 80')
[[ -z $wide ]] || fault "lines wider than 80 columns: $wide"
end

begin "says which row failed, and how"
echo "broken 01_single_gpu/mnist --batch none" >list.txt
run "$tour" --out tour --list list.txt
((code == 1)) || fault "expected exit code 1, found $code"
expect "message" grep -q '^tour: broken failed with exit code 2' "$WORK/err"
end

begin "says which program is not there"
echo "broken 99_nothing/mnist" >list.txt
run "$tour" --out tour --list list.txt
((code == 2)) || fault "expected exit code 2, found $code"
expect "message" grep -q '^tour: no program .*99_nothing/mnist' "$WORK/err"
end

# Ctrl-C reaches the tour and the program that runs in it.
interrupt() {
    python3 - "$@" <<'END'
import os, signal, subprocess, sys, time
tour = subprocess.Popen(sys.argv[2:], stdout=open(sys.argv[1], "w"), start_new_session=True,
                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
while "step " not in open(sys.argv[1]).read() and tour.poll() is None:
    time.sleep(0.05)
os.killpg(tour.pid, signal.SIGINT)
sys.exit(tour.wait(timeout=30))
END
}

begin "ends cleanly after Ctrl-C"
echo "long 01_single_gpu/llama --steps 100000 --sample 100" >list.txt
unset TOUR_QUICK
interrupt "$WORK/out" "$tour" --out tour --list list.txt 2>"$WORK/err"
code=$?
((code == 130)) || fault "expected exit code 130, found $code"
expect "summary of the program" grep -q '^peak memory' "$WORK/out"
expect "message" grep -q '^tour: stopped' "$WORK/out"
others=$(grep -v '^warning: stopping after this step; once more to quit now$' "$WORK/err")
[[ -z $others ]] || fault "stderr: ${others:0:300}"
end

finish
