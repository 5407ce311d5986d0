#!/usr/bin/env bash
# ctest: TIMEOUT 600 PROCESSORS 2
# Checkpoints that every rank writes its parts of: what is in them, who can read them, what they
# cost, what happens to broken ones, and to the old one when a rank fails while it writes.
source "$(dirname "$0")/lib.sh"
DDP_LLAMA=$SHARD_BUILD/02_ddp/llama
FSDP_LLAMA=$SHARD_BUILD/03_fsdp/llama
FSDP_MNIST=$SHARD_BUILD/03_fsdp/mnist
if [[ ! -x $FSDP_LLAMA ]]; then
    echo "skipped: no $FSDP_LLAMA (MPI was not found)"
    exit 77
fi

# LeakSanitizer cannot work in a program that is traced; what it would find, others find.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0
make_text text 20000
make_images n101 101

files_of() { # FOLDER FILES: nothing else lies there than config.json and so many ranks' files
    local expected="config.json" k
    for ((k = 0; k < $2; k++)); do
        expected+=$(printf ' rank-%05d-of-%05d.safetensors' "$k" "$2")
    done
    [[ $(ls -A "$1" | sort | paste -sd' ') == "$expected" ]] || { ls -A "$1" && false; }
}

only() { # FOLDER NAME…: nothing else lies there
    [[ $(ls -A "$1" | sort | paste -sd' ') == "$(printf '%s\n' "${@:2}" | sort | paste -sd' ')" ]] ||
        { ls -A "$1" && false; }
}

# ---- what is written ---------------------------------------------------------------------------

# Nothing divides.
odd=(--vocab 257 --dim 66 --heads 3 --kv-heads 3 --hidden 100 --layers 2 --seq 16 --threads 1
    --data text --batch 8 --steps 20 --warmup 5 --eval-every 0)

begin "4 ranks, odd sizes: a file of each, pieces in F32, with the metadata of a whole checkpoint"
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --stop-after 3 --save whole --save-sharded parts
expect "it says what was saved" \
    grep -qx 'saved       parts (go on with --resume parts)' ../out
expect "both times" grep -qx 'saved       whole (go on with --resume whole)' ../out
expect "the files" files_of parts 4
expect "config.json" cmp parts/config.json whole/config.json
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$CLI python3 - 2>../found <<'PYTHON' || fault "$(<../found)"
from compare import read_safetensors
whole, _ = read_safetensors("whole/model.safetensors")
states, facts = read_safetensors("whole/training.safetensors")
whole.update(states)
found = {}
sizes = []
for rank in range(4):
    tensors, metadata = read_safetensors(f"parts/rank-{rank:05}-of-00004.safetensors")
    assert metadata == facts, metadata
    sizes.append(sum(len(raw) for _, _, raw in tensors.values()))
    for piece, (dtype, shape, raw) in tensors.items():
        name, first = piece.rsplit("@", 1)
        assert dtype == "F32" and len(shape) == 1, piece
        found.setdefault(name, []).append((int(first), raw))
assert found.keys() == whole.keys()
for name, pieces in found.items():
    assert b"".join(raw for _, raw in sorted(pieces)) == whole[name][2], name
assert sum(sizes) == sum(len(raw) for _, _, raw in whole.values())
assert max(sizes) < 1.2 * min(sizes), sizes
PYTHON
end

begin "nothing is gathered: no rank sends its values to another, and no device memory is needed"
weights=(--vocab 256 --dim 128 --heads 4 --kv-heads 4 --hidden 352 --layers 4 --seq 16 --threads 1
    --data text --batch 4 --steps 3 --eval-every 0)
value() { compare column "$1" "$2" 2>/dev/null | tail -n 1; }
for level in gradients parameters; do
    works_on 3 "$FSDP_LLAMA" "${weights[@]}" --shard $level --log log.without
    works_on 3 "$FSDP_LLAMA" "${weights[@]}" --shard $level --log log.with --save-sharded memory \
        --save-every 1 --log-comm calls
    for key in peak_bytes highest_params_bytes highest_comm_bytes highest_workspace_bytes; do
        expect "--shard $level, $key" test "$(value log.with $key)" = "$(value log.without $key)"
    done
    expect "--shard $level: no sends" test -z "$(cut -f 2,3 calls.1 | grep -E 'send|recv')"
done
works_on 3 "$FSDP_LLAMA" "${weights[@]}" --save gathered --log-comm calls
expect "with --save there are sends" grep -qw send calls.1
expect "--save-every without --save" files_of memory 3
rm -r memory gathered calls.* log.*
end

# ---- who reads it ------------------------------------------------------------------------------

# as_whole WHAT FOLDER RANKS PROGRAM FLAGS…: gathered from the parts, the checkpoint is FOLDER.
as_whole() {
    rm -rf gathered
    if (($3 == 0)); then
        works "${@:4}" --resume parts --stop-after 0 --save gathered
    else
        works_on "${@:3}" --resume parts --stop-after 0 --save gathered
    fi
    expect "$1" diff -r gathered "$2"
}

test_round() { # RANKS FILES, flags
    local n=$1 files=$2 optimizer=adamw
    shift 2
    [[ $* != *sgd ]] || optimizer=sgd
    begin "$n ranks $*: gathered on 3 ranks and in chapter 01 it is what --save writes"
    rm -rf whole parts
    works_on "$n" "$FSDP_LLAMA" "${odd[@]}" --stop-after 3 --save whole --save-sharded parts "$@"
    expect "files" files_of parts "$files"
    as_whole "in chapter 01" whole 0 "$LLAMA" "${odd[@]}" --optimizer $optimizer
    as_whole "on 3 ranks" whole 3 "$FSDP_LLAMA" "${odd[@]}" --optimizer $optimizer
    end
}

test_round 4 4
test_round 3 3 --wrap-params 40000
test_round 4 4 --shard optimizer
test_round 4 4 --shard gradients
test_round 4 2 --replicas 2
test_round 4 2 --replicas 2 --shard gradients
test_round 2 1 --shard none
test_round 2 2 --optimizer sgd

begin "a run goes on from parts on another number of ranks, bit by bit"
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --dump at_once
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --stop-after 10 --dump first --save-sharded parts
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --resume parts --dump rest --shard optimizer
expect "the steps" cmp <(cat {first,rest}/steps.txt) at_once/steps.txt
expect "the weights" cmp {rest,at_once}/final.safetensors
works "$LLAMA" "${odd[@]}" --resume parts --dump rest --micro-batches 4
expect "chapter 01" cmp {rest,at_once}/final.safetensors
works_on 2 "$DDP_LLAMA" "${odd[@]}" --resume parts --dump rest --micro-batches 2
expect "chapter 02" compare steps rest/steps.txt <(tail -n 10 at_once/steps.txt) 1e-5
works_on 3 "$FSDP_LLAMA" "${odd[@]}" --load parts --stop-after 0 --dump loaded
expect "--load" cmp {loaded,first}/final.safetensors
expect "--load: nothing of the optimizer" eval '! grep -q ^resumed ../out'
works "$LLAMA" "${odd[@]}" --optimizer adadelta --load parts --stop-after 0 --dump loaded
expect "--load for another optimizer" cmp {loaded,first}/final.safetensors
end

begin "in place, with other numbers of ranks: the files of the old one are gone"
cp -r parts before
for n in 2 3 1 4; do
    works_on $n "$FSDP_LLAMA" "${odd[@]}" --resume parts --stop-after 0 --save-sharded parts
    expect "$n files" files_of parts $n
done
expect "the same bytes as in the beginning" diff -r parts before
works_on 3 "$DDP_LLAMA" "${odd[@]}" --resume parts --stop-after 0 --save-sharded ddp
expect "chapter 02: one rank has all of it" files_of ddp 1
works_on 4 "$FSDP_LLAMA" "${odd[@]}" --resume ddp --stop-after 0 --save-sharded back
expect "and back" diff -r back before
rm -rf before ddp back
end

begin "mnist: parts of 3 ranks, gone on with by 2 and by chapter 01"
images=(--threads 1 --data n101 --batch 10 --eval-every 100 --steps 4)
works_on 3 "$FSDP_MNIST" "${images[@]}" --stop-after 2 --save whole_m --save-sharded parts_m
works "$MNIST" "${images[@]}" --resume parts_m --stop-after 0 --save gathered_m
expect "gathered" diff -r gathered_m whole_m
works_on 2 "$FSDP_MNIST" "${images[@]}" --resume parts_m --dump m2
works "$MNIST" "${images[@]}" --resume whole_m --dump m1 --micro-batches 2
expect "two more steps" diff -r m2 m1
end

# ---- mistakes ----------------------------------------------------------------------------------

broken() { # NAME PATTERN: refused by chapter 01 and on 2 ranks
    refuses "$2" "$LLAMA" "${odd[@]}" --resume "$1"
    refuses_on 2 "$2" "$FSDP_LLAMA" "${odd[@]}" --resume "$1"
}

# Copies the parts to a folder, and changes the tensors of a file with some lines of Python.
tamper() { # NAME RANK PYTHON
    rm -rf "$1"
    cp -r parts "$1"
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$CLI python3 -c '
import struct, sys
from compare import read_safetensors, write_safetensors
path, code = sys.argv[1:]
tensors, metadata = read_safetensors(path)
exec(code)
write_safetensors(path, tensors, metadata)' "$1/rank-0000$2-of-00004.safetensors" "$3"
}

begin "files that do not belong together"
cp -r parts absent && rm absent/rank-00002-of-00004.safetensors
broken absent 'absent/rank-00002-of-00004.safetensors: there is no such file; the checkpoint has files of 4 ranks; expected a whole folder, as --save and --save-sharded write it'
mkdir huge && cp parts/rank-00000-of-00004.safetensors huge/rank-00000-of-999999999.safetensors
broken huge 'huge/rank-00001-of-999999999.safetensors: there is no such file'
cp -r parts both && cp whole/model.safetensors both
broken both 'both: has both model.safetensors and files of 4 ranks, which are two checkpoints'
cp -r parts more && cp parts/rank-00001-of-00004.safetensors more/rank-00001-of-00003.safetensors
broken more 'more: has files of two checkpoints, .*one was written by [34] ranks, the other by [34]'
cp -r parts cut && truncate -s -100 cut/rank-00003-of-00004.safetensors
broken cut 'cut/rank-00003-of-00004.safetensors: the file is cut short'
tamper other 2 'metadata["step"] = "11"'
broken other 'other/rank-00002-of-00004.*is of another save than .*rank-00000.*its step is 11, not 10'
tamper less 2 'del metadata["gamma"]'
broken less 'less/rank-00002-of-00004.safetensors: is of another save'
tamper foreign 1 'tensors["model.norm.bias@0"] = ("F32", [1], bytes(4))'
broken foreign 'foreign: has the tensor model.norm.bias, which this model has not'
end

begin "pieces that do not make up the tensors"
embedding='next(n for n in tensors if n.startswith("model.embed_tokens.weight@"))'
tamper gap 1 "del tensors[$embedding]"
broken gap 'gap: the elements 4256 to 8511 of the tensor model.embed_tokens.weight are in none of'
tamper gone 3 "del tensors[$embedding]"
broken gone 'gone: tensor model.embed_tokens.weight has 12768 elements, expected 16962'
tamper twice 1 "tensors['model.embed_tokens.weight@4255'] = tensors.pop($embedding)"
broken twice 'twice/rank-00001.*: has elements of the tensor model.embed_tokens.weight from 4255 on'
tamper again 0 "tensors['exp_avg.model.embed_tokens.weight@4256'] = tensors[$embedding]"
broken again 'has elements of the tensor exp_avg.model.embed_tokens.weight from 4256 on'
tamper shape 2 '
name = next(iter(tensors))
tensors[name] = ("F32", [1, len(tensors[name][2]) // 4], tensors[name][2])'
broken shape 'shape/rank-00002.*NAME@FIRST'
tamper form 2 'tensors["lm_head.weight@-1"] = tensors.pop(next(iter(tensors)))'
broken form 'form/rank-00002.*lm_head.weight@-1 .*NAME@FIRST'
tamper nan 2 '
name = next(iter(tensors))
tensors[name] = ("F32", tensors[name][1], struct.pack("<f", float("nan")) + tensors[name][2][4:])'
broken nan 'nan/rank-00002.*element 0 of .* is nan; expected a finite number'
tamper type 2 '
name = next(iter(tensors))
tensors[name] = ("I32", *tensors[name][1:])'
broken type 'type/rank-00002.*has the type I32'
rm -rf huge both gap gone twice again shape form nan type absent more cut other less foreign
end

begin "other sizes, another optimizer, another model"
for flag in --hidden --vocab; do
    vary $flag 300 "${odd[@]}"
    refuses '(has|is) [0-9]+.*expected [0-9]+; give the sizes' "$LLAMA" "${line[@]}" --load parts
done
vary --layers 1 "${odd[@]}"
refuses 'parts: has the tensor (exp_avg.)?model.layers.1' "$LLAMA" "${line[@]}" --load parts
vary --layers 3 "${odd[@]}"
refuses 'parts: has no tensor model.layers.2' "$LLAMA" "${line[@]}" --load parts
refuses 'optimizer adamw, this run has sgd' "$LLAMA" "${odd[@]}" --resume parts --optimizer sgd
refuses 'is of the model "llama"' "$MNIST" "${images[@]}" --load parts
end

begin "places: refused before the training"
mkdir -p kept && echo mine >kept/notes.txt
cp text file
refuses_on 2 'kept: the folder also holds notes.txt' "$FSDP_LLAMA" "${odd[@]}" --save-sharded kept
refuses_on 2 'whole: the folder also holds (model|training).safetensors' \
    "$FSDP_LLAMA" "${odd[@]}" --save-sharded whole
refuses_on 2 'parts: the folder also holds rank-0000' "$FSDP_LLAMA" "${odd[@]}" --save parts
refuses_on 2 '--save-sharded x lies in the same place as --save x' "$FSDP_LLAMA" "${odd[@]}" \
    --save x --save-sharded x
refuses_on 2 '--save-sharded x/y lies inside of --save x' "$FSDP_LLAMA" "${odd[@]}" \
    --save x --save-sharded x/y
refuses_on 2 '--save-sharded parts lies in the same place as --load' "$FSDP_LLAMA" "${odd[@]}" \
    --load parts --save-sharded parts
refuses_on 2 'file: is a file' "$FSDP_LLAMA" "${odd[@]}" --save-sharded file
refuses 'unknown flag --save-sharded' "$LLAMA" "${odd[@]}" --save-sharded x
expect "nothing was made" test ! -e x
rm -r kept file
end

# ---- failures while it is written --------------------------------------------------------------

small=("${SMALL[@]}" --data text --batch 4 --steps 4 --warmup 0 --eval-every 0)
rm -rf whole parts gathered
begin "parts after 2 steps and after 4"
works_on 2 "$FSDP_LLAMA" "${small[@]}" --stop-after 2 --save-sharded two
works_on 2 "$FSDP_LLAMA" "${small[@]}" --save-sharded four
end
((failed == 0)) || finish

# Runs 2 ranks that save after 2 steps and after 4, one of them under strace.
traced() { # RANK INJECT…
    local rank=$1 first=(-n 1) second=(-n 1) what
    shift
    local -a trace=(strace -f -o ../trace -e "trace=${1%%:*}")
    for what in "$@"; do
        trace+=(-e "inject=$what")
    done
    ((rank == 1)) || first+=("${trace[@]}")
    ((rank == 0)) || second+=("${trace[@]}")
    run "${mpi[@]}" "${first[@]}" "$FSDP_LLAMA" "${small[@]}" --save-sharded parent/ck \
        --save-every 2 : "${second[@]}" "$FSDP_LLAMA" "${small[@]}" --save-sharded parent/ck \
        --save-every 2
}

# Waits until the processes that had begun to write are gone, which a container may be slow to see.
wait_for_owners() { # FOLDER
    local left tries
    for left in "$1"/*.tmp-*; do
        left=${left%-*}
        for ((tries = 0; tries < 100; tries++)); do
            kill -0 "${left##*-}" 2>/dev/null || break
            sleep 0.1
        done
    done
}

survivor() { # HOW: the old one or the new one, and the next save tidies up, on any number of ranks
    diff -r parent/ck two >/dev/null || diff -r parent/ck four >/dev/null ||
        fault "$1: a mixture: $(ls -A parent parent/ck 2>&1 | paste -sd' ')"
    wait_for_owners parent
    works_on 3 "$FSDP_LLAMA" "${small[@]}" --resume parent/ck --stop-after 0 --save-sharded parent/ck
    expect "$1: the next save removes what was left" only parent ck
    expect "$1: and is whole" files_of parent/ck 3
}

if have_strace && ! have_sanitizer; then
    for rank in 1 0; do
        begin "rank $rank is killed while it saves"
        calls=(fsync)
        ((rank == 1)) || calls+=(renameat2)
        for call in "${calls[@]}"; do
            for when in 1 2; do
                rm -rf parent
                mkdir parent
                cp -r two parent/ck
                traced $rank "$call:signal=KILL:when=$when"
                ((code != 0)) || fault "$call $when: the job did not fail"
                survivor "$call $when"
            done
        done
        end
    done

    for rank in 1 0; do
        begin "the disk of rank $rank is full: a warning for each save, exit code 1, the old one"
        rm -rf parent
        mkdir parent
        cp -r two parent/ck
        traced $rank "fsync:error=ENOSPC:when=1+"
        ((code == 1)) || fault_run "expected exit code 1" "rank $rank"
        for step in 2 4; do
            expect "a warning after step $step ($(<../err))" test \
                "$(grep -c "^warning: no checkpoint saved after step $step: .*No space left" ../err)" = 1
        done
        expect "no more" test "$(wc -l <../err)" = 2
        expect "not said to be saved" eval '! grep -q ^saved ../out'
        expect "the old one is whole" diff -r parent/ck two
        expect "nothing is left" only parent ck
        end
    done
else
    skip "ranks that are killed or fail while they write: strace cannot trace here"
fi

begin "killed at any moment"
vary --steps 400 "${small[@]}"
works_on 2 "$FSDP_LLAMA" "${line[@]}" --stop-after 2 --save-sharded any/ck
for delay in 0.5 0.7 0.9; do
    "${mpi[@]}" -n 2 "$FSDP_LLAMA" "${line[@]}" --save-sharded any/ck --save-every 1 \
        >../any.out 2>&1 </dev/null &
    pid=$!
    sleep $delay
    mapfile -t ranks < <(pgrep -P $pid -x llama)
    kill -9 "${ranks[@]}" 2>/dev/null
    wait $pid 2>/dev/null
    expect "two files after $delay s" files_of any/ck 2
    wait_for_owners any
    works_on 2 "$FSDP_LLAMA" "${line[@]}" --resume any/ck --stop-after 0 --save-sharded any/ck
    expect "tidy after $delay s" only any ck
done
end

begin "a number that is none, on one rank: not saved, one warning, exit code 1"
vary --steps 3 "${small[@]}"
run "${mpi[@]}" -n 2 "$FSDP_LLAMA" "${line[@]}" --optimizer sgd --schedule constant --clip 0 \
    --lr 1e6 --save-sharded diverged --save-every 1
((code == 1)) || fault_run "expected exit code 1" "--lr 1e6"
expect "the training ended with a warning" grep -q '^warning: ' ../err
end

if unshare -m true 2>/dev/null; then
    begin "a rank on whose machine the folder is another one: it says so"
    mkdir -p shared
    cat >../elsewhere <<'SCRIPT'
mount -t tmpfs tmpfs shared && exec "$@"
SCRIPT
    run "${mpi[@]}" -n 1 "$FSDP_LLAMA" "${small[@]}" --save-sharded shared/ck : \
        -n 1 unshare -m bash ../elsewhere "$FSDP_LLAMA" "${small[@]}" --save-sharded shared/ck
    ((code == 1)) || fault_run "expected exit code 1" "two machines"
    expect "one warning ($(<../err))" test "$(grep -c . ../err)" = 1
    expect "which rank, and what to do" grep -qE \
        'rank 1 on .* does not find the folder .*--save-sharded needs a folder that all machines' ../err
    expect "nothing is left" test -z "$(ls -A shared)"
    end
else
    skip "a folder that one rank does not see: no permission to mount one"
fi

finish
