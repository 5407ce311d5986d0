#!/usr/bin/env bash
# Collectives on 1 to 8 ranks: every result bit by bit, through shared memory and through messages.
# ctest: TIMEOUT 900 PROCESSORS 2
source "$(dirname "$0")/../cli/lib.sh"
source "$(dirname "$0")/lib.sh"

LIMIT=240
ranks=8
quick=()
if have_sanitizer; then # ten times slower
    ranks=4
    quick=(--quick)
fi

# passes N FLAGS…: all cases on N ranks.
passes() {
    local n=$1
    shift
    run "${MPIRUN[@]}" "${mca[@]}" -n "$n" "$TEST_COMM" --timeout 100 "$@"
    ((code == 0)) || fault "exit code $code"
    grep -q "^PASS: [0-9]* cases on $n ranks, transport mpi$" ../out || fault "no PASS line"
    while read -r line; do
        fault "$line"
    done < <(head -n 8 ../err)
    left_nothing
}

mca=()
for ((n = 1; n <= ranks; n++)); do
    begin "$n ranks, shared memory"
    passes "$n" "${quick[@]}"
    end

    begin "$n ranks, messages"
    passes "$n" --messages "${quick[@]}"
    end
done

# In many containers ranks may not read each other's memory. Open MPI must be told; we notice.
mca=(--mca btl_vader_single_copy_mechanism none)
for n in 2 3 4; do
    begin "$n ranks that may not read each other's memory"
    passes "$n" --no-reading "${quick[@]}"
    end
done

begin "3 ranks that may not read each other's memory, messages"
passes 3 --no-reading --messages "${quick[@]}"
end

begin "4 ranks, messages over TCP"
mca=(--mca btl "self,tcp")
passes 4 --messages "${quick[@]}"
end
mca=()

for way in shared messages; do
    begin "4 ranks compare their calls, and log them, $way"
    flags=(--quick --check --log calls)
    [[ $way != messages ]] || flags+=(--messages)
    passes 4 "${flags[@]}"
    for rank in 0 1 2 3; do
        # Ranks differ in what they send and receive, and in their other groups.
        awk -F '\t' '$3 == "world" && $2 != "send" && $2 != "recv"' calls.$rank |
            cut -f 2- >world.$rank
        expect "a log of rank $rank" test "$(wc -l <world.$rank)" -gt 10000
        expect "ranks 0 and $rank made the same calls" cmp world.0 world.$rank
    done
    rm -f calls.* world.*
    end
done
finish
