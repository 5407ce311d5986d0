# shellcheck shell=bash
# What the tests of communication share, besides tests/cli/lib.sh: how to start ranks, and what must
# be true after the end of a job.

TEST_COMM=$SHARD_BUILD/tests/comm/test_comm
if ! command -v mpirun >/dev/null || [[ ! -x $TEST_COMM ]]; then
    echo "skipped: no mpirun, or no $TEST_COMM"
    exit 77
fi
# A name of our own, so that pgrep finds the processes of this script alone.
ln -s "$TEST_COMM" "$WORK/test_comm"
TEST_COMM=$WORK/test_comm

MPIRUN=(mpirun --oversubscribe --bind-to none)
((EUID != 0)) || MPIRUN+=(--allow-run-as-root)

# Open MPI itself leaks.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0

# The job of the last run has left no process and no shared memory. mpirun may return a moment before
# the ranks are gone.
left_nothing() {
    local tries file pid left
    for ((tries = 0; tries < 20; tries++)); do
        pgrep -f "^$TEST_COMM" >/dev/null || break
        sleep 0.1
    done
    for left in $(pgrep -f "^$TEST_COMM"); do
        fault "process $left is left"
        kill -9 "$left"
    done
    for file in /dev/shm/shard-*; do
        [[ -e $file ]] || continue
        pid=${file#/dev/shm/shard-}
        kill -0 "${pid%%-*}" 2>/dev/null || fault "shared memory is left: $file"
    done
}
