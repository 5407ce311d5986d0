#!/usr/bin/env bash
# Ranks that call different things, do not come, die or find a mistake: the job ends within seconds,
# with one message that says what happened, and leaves nothing behind.
# ctest: TIMEOUT 600 PROCESSORS 2
source "$(dirname "$0")/../cli/lib.sh"
source "$(dirname "$0")/lib.sh"

LIMIT=20
WAIT=3 # --timeout
SLACK=12 # seconds that the rest may take on a busy machine

# Our program's messages on stderr, and those of Open MPI that should not be; mpirun may say more.
messages() {
    grep -E '^(rank [0-9]+ on |warning: rank |test_comm: |FAIL)|\*\*\* (An error occurred|Process received)' ../err
}

# ends CODE MESSAGES N FLAGS…: the job must end in time with this exit code ("+": any but 0) and so
# many messages. The message is in $message.
ends() {
    local expected=$1 most=$2 n=$3 before took count
    shift 3
    before=$(date +%s%N)
    run "${MPIRUN[@]}" -n "$n" "$TEST_COMM" --timeout "$WAIT" "$@"
    took=$((($(date +%s%N) - before) / 1000000000))
    message=$(messages)
    count=$(messages | wc -l)
    if [[ $expected == + ]]; then
        ((code != 0 && code != 124 && code != 137 || most == 0)) ||
            fault "$*: exit code $code; expected any but 0 and those of timeout"
    else
        ((code == expected)) || fault "$*: exit code $code, expected $expected"
    fi
    ((took <= WAIT + SLACK)) || fault "$*: took $took s"
    # Where ranks wait in different calls, the first of each call may speak.
    [[ $count == 2 && $* == *"--fault hang"*@(--in-group|"--in broadcast --messages") ]] ||
        ((count == most)) || fault "$*: $count messages, expected $most: ${message:0:400}"
    # Who sends, or is in another group, may go on.
    [[ $* == *--in-group* || $* == *"--in "@(send|recv|broadcast)* ]] ||
        expect "$*: nobody goes on" eval '! grep -q "nothing happened" ../out'
    left_nothing
}

# says PATTERN…: each must be in the message.
says() {
    local pattern
    for pattern in "$@"; do
        grep -qE -- "$pattern" <<<"$message" || fault "expected \"$pattern\" in: ${message:0:400}"
    done
}

# ---- different calls ---------------------------------------------------------------------------

# different IN WHAT PATTERN…: rank 0 differs from the rest.
different() {
    local in=$1 what=$2 way
    shift 2
    for way in shared messages; do
        begin "another $what in $in, $way"
        flags=(--check --mismatch "$what" --in "$in")
        [[ $way != messages ]] || flags+=(--messages)
        ends + 1 3 "${flags[@]}"
        says 'rank 0' 'rank 1' '(call|number) ?[0-9]+' "$@"
        end
    done
}

for in in all-reduce reduce-scatter all-gather broadcast; do
    different $in count 409600 409598
    different $in dtype '\bF16\b' '\bBF16\b'
done
for in in send recv; do # elements, or bytes
    different $in count '(409600|819200)' '(409598|819196)'
    different $in dtype '\bF16\b' '\bBF16\b'
done
different host count '(409600|3276800)' '(409598|3276784)'
different all-reduce op '\bmax\b' '\bsum\b'
different broadcast root 'root 1' 'root 0'
for in in reduce-scatter all-gather broadcast; do
    different $in kind "$in" "$([[ $in == all-gather ]] && echo all-reduce || echo all-gather)"
done
different all-reduce order all-reduce all-gather
different broadcast order broadcast all-gather

# Ranks 1, 3 and 5 are a group; the messages of a group name the ranks of the job, too.
begin "another count in a group"
ends + 1 6 --check --mismatch count --in all-reduce --in-group
says 409600 409598 'odd or even' 'rank 3'
end

# ---- ranks that do not come --------------------------------------------------------------------

# missing FAULT IN [FLAGS…]: the last of three ranks.
missing() {
    local fault=$1 in=$2 way
    shift 2
    for way in shared messages; do
        begin "rank 2 does not come to the $in ($fault), $way"
        flags=(--fault "$fault" --in "$in" "$@")
        [[ $way != messages ]] || flags+=(--messages)
        ends + 1 3 "${flags[@]}"
        says "$WAIT s" 'rank 2'
        end
    done
}

for in in all-reduce reduce-scatter all-gather broadcast host barrier; do
    missing hang $in
done
missing stop all-reduce
missing hang all-reduce --check

begin "the message says who came and who did not"
ends + 1 4 --fault hang
says 'all-reduce' '409598' 'BF16' 'world' 'by ranks? 0,? 1,?( and)? 2\b' 'not by ranks? 3\b'
end

begin "a rank of a group does not come"
ends + 1 6 --fault hang --in-group
says 'odd or even' 'all-reduce' 'rank 5'
end

for n in 2 3; do
    begin "nobody sends or receives, $n ranks"
    if ((n == 2)); then # rank 1 does not receive
        ends + 1 2 --fault hang --in send
        says 'send' 'rank 1'
    else # rank 2 has nothing to do with it
        run "${MPIRUN[@]}" -n 3 "$TEST_COMM" --timeout "$WAIT" --fault exit --in send
        ((code != 0)) || fault "exit code 0"
        left_nothing
    fi
    end
done

for in in split finish; do
    begin "a rank does not come to comm_$in()"
    ends + 1 3 --fault hang --in $in
    end
done

# ---- ranks that end ----------------------------------------------------------------------------

for way in shared messages; do
    flags=()
    [[ $way != messages ]] || flags+=(--messages)

    begin "a rank is killed, $way"
    ends + 0 3 --fault die "${flags[@]}"
    expect "mpirun says so" grep -qE 'signal 9|killed' ../err
    end

    begin "error_fatal() on one rank, $way"
    ends + 1 3 --fault fatal "${flags[@]}"
    says '^rank 2 on .*misuse\.c:[0-9]+: the test wants it: found 1, expected 2$'
    end

    begin "error_user() after the start, $way"
    ends 2 1 3 --fault user "${flags[@]}"
    says '^test_comm: the test wants it'
    end

    begin "exit() in the middle, $way"
    ends + 1 3 --fault exit "${flags[@]}"
    end
done

# ---- mistakes of the user ----------------------------------------------------------------------

for n in 1 2 5; do
    begin "error_user() before the start, $n ranks"
    for rank in 0 $((n - 1)) -1; do
        ends 2 1 $n --user-error $rank
        says "^test_comm: rank $((rank < 0 ? 0 : rank)) found 1, expected 2; use 2$"
        expect "nothing on stdout" test ! -s ../out
    done
    end
done

begin "a flag that does not exist"
ends 2 1 3 --nonsense
says 'unknown flag --nonsense'
end

begin "a log that cannot be written"
ends 2 1 3 --log /nonexistent/calls
says '/nonexistent/calls' 'No such file'
end

for n in 2 4; do
    for rank in 0 $((n - 1)); do
        begin "a flag differs on rank $rank of $n"
        ends 2 1 $n --fact $rank
        says '^test_comm: ' '--seed' '\b7\b' '\b1\b' "rank $rank"
        end
    done
done

begin "--help is printed once"
run "${MPIRUN[@]}" -n 3 "$TEST_COMM" --help
((code == 0)) || fault "exit code $code"
expect "one line about --messages" test "$(grep -c -- '--messages' ../out)" = 1
expect "nothing on stderr" test ! -s ../err
end

begin "no timeout: a rank that is late is waited for"
run "${MPIRUN[@]}" -n 3 "$TEST_COMM" --timeout 0 --only paces
((code == 0)) || fault "exit code $code: $(head -c 300 ../err)"
end
finish
