#!/usr/bin/env bash
# Saving a checkpoint while the program is killed, the disk fills, or another job saves to the same
# place: what lies there afterwards is the old checkpoint or the new one, whole, never a mixture.
# ctest: TIMEOUT 600
source "$(dirname "$0")/lib.sh"

make_text text 2000
FILES="config.json model.safetensors training.safetensors"
command=("$LLAMA" "${SMALL[@]}" --data text --batch 2 --steps 4 --warmup 0)
# LeakSanitizer cannot work in a program that is traced; what it would find, others find.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0

same_files() {
    local file
    [[ $(ls -A "$1" 2>/dev/null | tr '\n' ' ') == "$FILES " ]] || return 1
    for file in $FILES; do
        cmp -s "$1/$file" "$2/$file" || return 1
    done
}

only() { # FOLDER NAME…: nothing else lies there
    local folder=$1
    shift
    [[ $(ls -A "$folder" | sort | tr '\n' ' ') == "$(printf '%s\n' "$@" | sort | tr '\n' ' ')" ]] ||
        { ls -A "$folder" && false; }
}

# What the checkpoint is after 2 steps and after 4.
works_or_stop() {
    begin "$1"
    shift
    works "$@"
    end
    ((failed == 0)) || finish
}
works_or_stop "a checkpoint after 2 steps" "${command[@]}" --stop-after 2 --save two
works_or_stop "a checkpoint after 4 steps" "${command[@]}" --save four --dump whole

# ---- killed at every step of the second save ---------------------------------------------------

# Runs with --save-every 2 under strace, which does something at the k-th call of some kinds.
traced() { # CALLS WHAT
    local calls=$1 what=$2
    run strace -f -o ../trace -e "trace=$calls" -e "inject=$calls:$what" \
        "${command[@]}" --save parent/ck --save-every 2
}

# Counts the calls of a run: all, and those until the first checkpoint is in place.
count_calls() { # CALLS EXTRA…
    local calls=$1 injected
    shift
    strace -f -o ../trace "$@" -e "trace=$calls" \
        "${command[@]}" --save count/ck --save-every 2 >/dev/null 2>&1
    all=$(grep -cE '^[0-9]+ +[a-z0-9_]+\(' ../trace)
    rm -rf count
    strace -f -o ../trace "$@" -e "trace=$calls" \
        "${command[@]}" --save count/ck --stop-after 2 >/dev/null 2>&1
    first=$(grep -cE '^[0-9]+ +[a-z0-9_]+\(' ../trace)
    rm -rf count
}

# After a kill: the checkpoint is one of the two, loads, and the next save tidies up.
check_survivor() { # HOW
    if ! same_files parent/ck two && ! same_files parent/ck four; then
        fault "$1: a mixture: $(ls -A parent parent/ck 2>&1 | tr '\n' ' ')"
    fi
    works "${command[@]}" --resume parent/ck --stop-after 0 --save parent/ck
    expect "$1: the next save removes what was left" only parent ck
    if ! same_files parent/ck two && ! same_files parent/ck four; then
        fault "$1: after the next save it is neither"
    fi
}

kill_at() { # CALL K
    rm -rf parent
    traced "$1" "signal=KILL:when=$2"
    if ((code != 137)); then
        fault "$1 $2: the program was not killed; exit code $code"
        return
    fi
    killed=$((killed + 1))
    check_survivor "$1 $2"
}

# Kills at each call of the second save, or at so many of them, the first and the last among them.
# (strace counts each kind of call by itself.)
test_killed() { # WHAT MOST CALL…
    local what=$1 most=$2 call number k
    shift 2
    begin "killed at $what of the second save"
    killed=0
    for call in "$@"; do
        count_calls "$call"
        number=$((all - first))
        ((number <= most)) || number=$most
        for ((k = 0; k < number; k++)); do
            kill_at "$call" $((first + 1 + (number > 1 ? k * (all - first - 1) / (number - 1) : 0)))
        done
    done
    ((killed > 0)) || fault "nothing was killed"
    end
}

if have_strace; then
    test_killed "the renames" 8 rename renameat renameat2
    test_killed "the syncs" 6 fsync fdatasync
    test_killed "the removals" 4 unlink unlinkat rmdir
    test_killed "the writes" 6 write pwrite64
    test_killed "the new files and folders" 5 mkdir mkdirat openat

    begin "killed at write 1, 5, 50 of the run"
    for k in 1 5 50; do
        rm -rf parent
        mkdir parent
        cp -r two parent/ck
        traced write "signal=KILL:when=$k"
        ((code == 137 || k == 50)) || fault "write $k: not killed; exit code $code"
        check_survivor "write $k"
    done
    end

    # File systems that cannot exchange two names: the old folder is moved away first.
    for error in EINVAL ENOSYS; do
        begin "a file system that cannot exchange names ($error)"
        rm -rf parent
        traced renameat2 "error=$error"
        ((code == 0)) || fault_run "expected exit code 0" "${command[@]}"
        expect "the new checkpoint is there" same_files parent/ck four
        expect "nothing else is" only parent ck
        end
    done

    begin "killed at the renames of such a file system"
    rm -rf parent
    strace -f -o ../trace -e trace=rename,renameat,renameat2 -e inject=renameat2:error=EINVAL \
        "${command[@]}" --save parent/ck --save-every 2 >/dev/null 2>&1
    renames=$(grep -cE ' rename(at)?\(' ../trace)
    ((renames >= 3)) || fault "expected three renames; found $renames"
    for ((k = 2; k <= renames; k++)); do
        rm -rf parent
        run strace -f -o ../trace -e trace=rename,renameat,renameat2 \
            -e inject=renameat2:error=EINVAL -e "inject=rename,renameat:signal=KILL:when=$k" \
            "${command[@]}" --save parent/ck --save-every 2
        ((code == 137)) || fault "rename $k: not killed; exit code $code"
        # The rule of recovery: a reader finds the checkpoint, wherever it lies.
        works "${command[@]}" --resume parent/ck --stop-after 0 --save copy
        same_files copy two || same_files copy four || fault "rename $k: a mixture"
        works "${command[@]}" --resume parent/ck --stop-after 0 --save parent/ck
        expect "rename $k: tidy" only parent ck
    done
    end

    # -- errors --
    for error in "write:error=ENOSPC" "write:error=EIO" "fsync:error=EIO" "fsync:error=ENOSPC" \
        "mkdir:error=ENOSPC" "renameat2:error=EACCES" "openat:error=EMFILE"; do
        calls=${error%%:*}
        begin "the second save fails: ${error/:error=/ gives }"
        count_calls "$calls"
        # The folder that is there is a checkpoint; the save of 2 steps succeeds.
        rm -rf parent
        at=$((first + 1))
        [[ $calls != write && $calls != openat ]] || at=$((first + 3))
        run strace -f -o ../trace -e "trace=$calls" -e "inject=$error:when=$at+" \
            "${command[@]}" --save parent/ck --save-every 2
        if ((code != 1)); then
            fault_run "expected exit code 1" "${command[@]}"
        fi
        if [[ $calls != write ]]; then # stderr fails, too
            expect "a warning" grep -q '^warning: no checkpoint saved after step 4: ' ../err
            expect "one line" test "$(wc -l <../err)" = 1
        fi
        expect "the old checkpoint is whole" same_files parent/ck two
        works "${command[@]}" --resume parent/ck --save parent/ck --dump rest
        expect "it goes on from there" cmp <(tail -n 2 whole/steps.txt) rest/steps.txt
        expect "nothing else is left" only parent ck
        end
    done
else
    skip "kills at system calls: strace cannot trace here"
fi

begin "killed at any moment"
LIMIT=20
rm -rf parent
vary --steps 400 "${command[@]}"
works "${line[@]}" --stop-after 2 --save parent/ck
for delay in 0.03 0.05 0.08 0.13 0.21 0.34; do
    "${line[@]}" --save parent/ck --save-every 1 >/dev/null 2>&1 &
    pid=$!
    sleep $delay
    kill -9 $pid
    wait $pid 2>/dev/null
    expect "three files after $delay s" only parent/ck $FILES
    works "${line[@]}" --resume parent/ck --stop-after 0 --save parent/ck
    expect "tidy after $delay s" only parent ck
    works "${line[@]}" --resume parent/ck --stop-after 1 --dump next
    step=$(cut -d ' ' -f 1 <next/steps.txt)
    works "${line[@]}" --stop-after "$step" --dump again
    expect "after $delay s, step $step: weights and moments of one step" \
        cmp next/final.safetensors again/final.safetensors
done
LIMIT=60
end

# ---- a full disk -------------------------------------------------------------------------------

# A limit of the size of a file: every save fails in training.safetensors, whoever runs this.
begin "files that may not grow: the old checkpoint stays, the run ends, exit code 1"
rm -rf parent
mkdir parent
cp -r two parent/ck
run bash -c 'ulimit -f 150; exec "$@"' bash "${command[@]}" --resume two --save parent/ck \
    --save-every 1 --dump ../limited
((code == 1)) || fault_run "expected exit code 1" "${command[@]}"
expect "two warnings" test "$(grep -c '^warning: no checkpoint saved after step [34]: ' ../err)" = 2
expect "nothing else on stderr" test "$(wc -l <../err)" = 2
expect "the training went on to its end" cmp ../limited/final.safetensors whole/final.safetensors
expect "the old checkpoint is whole" same_files parent/ck two
expect "nothing else is left" only parent ck
end

disk=$WORK/disk
mkdir "$disk"
size=$(du -k two | cut -f 1)
if mount -t tmpfs -o "size=$((size * 3 / 2))k" tmpfs "$disk" 2>/dev/null; then
    begin "a full disk: the old checkpoint stays, the run ends, exit code 1"
    run "${command[@]}" --save "$disk/ck" --save-every 2 --dump full
    ((code == 1)) || fault_run "expected exit code 1" "${command[@]}"
    expect "one warning" test "$(grep -c '^warning: no checkpoint saved after step 4: ' ../err)" = 1
    expect "it says why" grep -q 'No space left' ../err
    expect "the old checkpoint is whole" same_files "$disk/ck" two
    expect "nothing else is left" only "$disk" ck
    expect "the training went on to its end" cmp full/final.safetensors whole/final.safetensors
    refuses 'mount point' "${command[@]}" --save "$disk"
    end

    begin "a full disk for --dump and --log does not lose the checkpoint"
    run "${command[@]}" --save ck --dump "$disk/dump"
    ((code == 1)) || fault_run "expected exit code 1" "${command[@]}" --dump "$disk/dump"
    expect "one message, no crash" eval '[[ $(wc -l <../err) == 1 ]] && ! grep -q rank ../err'
    expect "the checkpoint is saved" same_files ck four
    dd if=/dev/zero of="$disk/rest" bs=4096 2>/dev/null
    rm -rf ck
    run "${command[@]}" --save ck --log "$disk/log"
    ((code <= 2)) || fault_run "expected no crash" "${command[@]}" --log "$disk/log"
    expect "it says that the log is not complete" grep -q -- '--log' ../err
    end
    umount "$disk"
else
    skip "a full disk: no permission to mount one"
fi

# ---- two jobs ----------------------------------------------------------------------------------

begin "two jobs that save to one path at once: one of the two whole results"
vary --steps 30 "${command[@]}"
for seed in 1 2; do
    works "${line[@]}" --seed $seed --save job$seed
done
for round in 1 2 3; do
    rm -rf parent
    pids=()
    for seed in 1 2; do
        "${line[@]}" --seed $seed --save parent/ck --save-every 1 \
            >"../job$seed.out" 2>"../job$seed.err" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
        code=$?
        ((code == 0)) || fault "round $round: exit code $code: $(cat ../job?.err)"
    done
    same_files parent/ck job1 || same_files parent/ck job2 || fault "round $round: a mixture"
    expect "round $round: nothing else" only parent ck
done
end

# ---- where to save -----------------------------------------------------------------------------

begin "folders that cannot be a checkpoint are refused before the training"
mkdir foreign
echo mine >foreign/notes.txt
cp two/model.safetensors foreign
refuses 'foreign: .*notes.txt' "${command[@]}" --save foreign
refuses 'foreign: .*(notes.txt|model.safetensors)' "${command[@]}" --dump foreign
expect "what was in it is untouched" test "$(cat foreign/notes.txt)" = mine
expect "and so is its checkpoint" cmp foreign/model.safetensors two/model.safetensors
expect "nothing was added" only foreign notes.txt model.safetensors
mkdir -p nested/config.json
refuses 'nested: .*config.json' "${command[@]}" --save nested
cp text file
refuses '/file: is a file' "${command[@]}" --save file
refuses '/file: is a file' "${command[@]}" --save file/x
refuses '(current folder|--save)' "${command[@]}" --save .
refuses '(--save)' "${command[@]}" --save ..
refuses '(mount point|--save)' "${command[@]}" --save /
refuses '--save' "${command[@]}" --save /proc/x
refuses '--save' "${command[@]}" --save "$(printf 'n%.0s' {1..300})"
mkdir dangling
ln -s nowhere/at/all dangling/link
run "${command[@]}" --steps 4 --save dangling/link
((code == 0 || code == 2)) || fault_run "a link to nowhere: expected 0 or 2" "${command[@]}"
end

begin "new folders are made, links followed, slashes ignored"
works "${command[@]}" --save new/deep/dir/x
expect "new/deep/dir/x" same_files new/deep/dir/x four
expect "nothing else" only new/deep/dir x
mkdir links
works "${command[@]}" --save links/real --stop-after 2
ln -s real links/link
works "${command[@]}" --save links/link
expect "the link is still one" test -L links/link
expect "its target is the checkpoint" same_files links/real four
works "${command[@]}" --save links/slash//
expect "a slash at the end" same_files links/slash four
works "${command[@]}" --save "links/a b	c%s"
expect "a name with blanks" same_files "links/a b	c%s" four
mkdir links/empty
works "${command[@]}" --save links/empty
expect "an empty folder" same_files links/empty four
works "${command[@]}" --save links/empty --stop-after 0 --resume two
expect "a checkpoint is replaced" same_files links/empty two
works "${command[@]}" --save "$PWD/links/absolute" --dump links/dump --log links/l/log
expect "an absolute name" same_files links/absolute four
expect "nothing else" only links real link slash "a b	c%s" empty absolute dump l
end

begin "the mode of the folder follows umask"
for mask in 022 077; do
    (umask $mask && exec "${command[@]}" --save mask$mask >/dev/null)
done
expect "022" test "$(stat -c %a mask022 mask022/config.json mask022/model.safetensors |
    tr '\n' ' ')" = "755 644 644 "
expect "077" test "$(stat -c %a mask077 mask077/config.json mask077/model.safetensors |
    tr '\n' ' ')" = "700 600 600 "
end

begin "a folder that is replaced keeps its mode and owner"
for mode in 700 750 777 2775; do
    mkdir -m $mode "mode$mode"
    works "${command[@]}" --save "mode$mode"
    works "${command[@]}" --save "mode$mode"
    expect "$mode" test "$(stat -c %a "mode$mode")" = $mode
done
if ((EUID == 0)); then
    mkdir owned
    chown 65534:65534 owned
    works "${command[@]}" --save owned
    expect "the owner" test "$(stat -c %u:%g owned)" = 65534:65534
fi
end

if have_ordinary; then
    begin "a folder in which no file can be made is found before the training"
    mkdir -m 777 open
    run bash -c 'umask 222; exec "$@"' bash "${ORDINARY[@]}" "${command[@]}" --save open/ck
    refusal '--save: .*/open/ck: no file can be made .*Permission denied' "${command[@]}"
    expect "nothing is left" test -z "$(ls -A open)"
    mkdir -m 555 open/dump
    refuses '--dump: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --dump open/dump
    end

    begin "a folder that may not be written is found before the training"
    mkdir closed
    chmod 555 closed
    refuses '--save: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --save closed/ck
    refuses '--save: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --save closed/deep/ck
    mkdir -m 1777 sticky
    mkdir -m 777 sticky/ck
    mkdir -p -m 777 shared
    mkdir -m 755 shared/ck
    for place in sticky shared; do
        refuses '/ck: Permission denied to replace it: it belongs to another user' \
            "${ORDINARY[@]}" "${command[@]}" --save $place/ck
    done
    refuses '--dump: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --dump closed/dump
    refuses '--log: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --log closed/log
    refuses '--memory: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --memory closed/memory
    refuses '--logits: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --logits closed/logits
    cp -r two closed/old 2>/dev/null || { chmod 755 closed && cp -r two closed/old && chmod 555 closed; }
    refuses '--save: .*Permission denied' "${ORDINARY[@]}" "${command[@]}" --save closed/old
    expect "it is untouched" same_files closed/old two
    end
else
    skip "folders that may not be written: no ordinary user can start the programs"
fi
finish
