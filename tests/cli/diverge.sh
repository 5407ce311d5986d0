#!/usr/bin/env bash
# A training that diverges: one warning, exit code 1, and the checkpoint of before stays. Files with
# numbers that are none are refused.
# ctest: PROCESSORS 2
source "$(dirname "$0")/lib.sh"

make_text text 4000
make_images n101 101
sane=("$LLAMA" "${SMALL[@]}" --data text --batch 6 --clip 0 --warmup 0 --schedule constant)
wild=("${sane[@]}" --optimizer sgd --lr 1000000 --steps 40)

diverged() { # COMMAND…: what must be seen of a run that diverged
    ((code == 1)) || fault_run "expected exit code 1" "$@"
    expect "one warning that names the step and the number" \
        grep -qE '^warning: step [0-9]+: the (loss|gradient norm|validation loss) is (nan|-?inf), ' ../err
    expect "nothing else on stderr ($(head -c 300 ../err))" test "$(wc -l <../err)" = 1
    expect "a line of the step that diverged" grep -qE '^step .* (nan|inf) ' ../out
    expect "no sign of a NaN" eval '! grep -qe -nan ../out'
    expect "a line that it was stopped" grep -qE '^stopped +after step [0-9]+, since it diverged' ../out
    expect "no text, no logits by such weights" eval '! grep -q ^sample ../out && test ! -e logits'
}

begin "llama diverges: the old checkpoint stays, the dump and the log end with the step"
works "${sane[@]}" --steps 2 --save ck
cp -r ck old
run "${wild[@]}" --save ck --dump dump --log log --sample 5 --logits logits
diverged "${wild[@]}"
expect "the old checkpoint is untouched" diff -r ck old
steps=$(wc -l <dump/steps.txt)
expect "it ended at the step that diverged, not at the last" test "$steps" -lt 40
expect "the step that diverged is in the dump ($(tail -n 1 dump/steps.txt))" \
    eval 'tail -n 1 dump/steps.txt | grep -qwE "nan|inf"'
expect "and no other is" test "$(grep -cwE 'nan|inf' dump/steps.txt)" = 1
expect "no sign of a NaN in the dump" eval '! grep -qe -nan dump/steps.txt'
expect "the log has null there" eval "grep -q '\"step\": $steps, .*null' log"
end

begin "with --save-every there is a checkpoint of before, and it can be resumed"
rm -rf ck
run "${wild[@]}" --save ck --save-every 1
((code == 1)) || fault_run "expected exit code 1" "${wild[@]}"
run "${wild[@]}" --resume ck --dump again
((code == 1)) || fault_run "expected exit code 1" "${wild[@]}" --resume ck
expect "the same end" cmp <(tail -n 1 again/steps.txt) <(tail -n 1 dump/steps.txt)
end

begin "mnist diverges"
mnist=("$MNIST" --threads 1 --data n101 --batch 16 --eval-every 0)
run "${mnist[@]}" --steps 40 --optimizer sgd --lr 1000000 --save new
diverged "${mnist[@]}"
expect "nothing is saved" test ! -e new
end

edit() { # FROM TO FILE TENSOR ELEMENT VALUE: a checkpoint with another number
    rm -rf "$2"
    cp -r "$1" "$2"
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$CLI python3 - "${@:2}" <<'END'
import struct, sys
from compare import read_safetensors, write_safetensors
folder, file, name, element, value = sys.argv[1:]
path = f"{folder}/{file}.safetensors"
tensors, metadata = read_safetensors(path)
dtype, shape, raw = tensors[name]
at = 4 * int(element)
tensors[name] = (dtype, shape, raw[:at] + struct.pack("<f", float(value)) + raw[at + 4 :])
write_safetensors(path, tensors, metadata)
END
}

# The byte 1 does not occur, so its row of the embedding (32 wide) changes no loss; but decay makes
# it too large.
begin "weights that become infinite in the last step are not saved either"
edit old hot model model.embed_tokens.weight 35 3e38
run "${sane[@]}" --load hot --optimizer sgd --lr 1 --weight-decay 2.5 --steps 1 --save old
((code == 1)) || fault_run "expected exit code 1" "${sane[@]}"
expect "it says which ($(head -c 300 ../err))" grep -qE \
    '^warning: no checkpoint saved after step 1: element 35 of model.embed_tokens.weight is infinite$' ../err
expect "the old one is whole" test "$(ls old | wc -l)" = 3
works "${sane[@]}" --resume old --steps 3
end

begin "--load and --resume refuse NaN, infinity and negative squares, by name and element"
for value in nan inf -inf; do
    edit old bad model model.layers.0.mlp.up_proj.weight 7 "$value"
    for how in --load --resume; do
        refuses "^llama: bad/model.safetensors: element 7 of the tensor model.layers.0.mlp.up_proj.weight is $value; expected a finite" \
            "${sane[@]}" $how bad
    done
done
edit old bad training exp_avg.model.norm.weight 5 nan
refuses 'bad/training.safetensors: element 5 of the tensor exp_avg.model.norm.weight is nan' \
    "${sane[@]}" --resume bad
edit old bad training exp_avg.model.norm.weight 5 -0.5
works "${sane[@]}" --resume bad --steps 3
edit old bad training exp_avg_sq.model.norm.weight 31 -1e-3
refuses 'element 31 of the tensor exp_avg_sq.model.norm.weight is -0.001; expected .* not negative' \
    "${sane[@]}" --resume bad
works "${sane[@]}" --load bad --steps 1
works "${mnist[@]}" --steps 1 --save mold
edit mold bad training acc_delta.fc2.bias 9 -1
refuses 'element 9 of the tensor acc_delta.fc2.bias is -1' \
    "${mnist[@]}" --steps 2 --resume bad
end

begin "a validation loss that is none ends the training, too"
edit old hot model lm_head.weight 1 3e38
run "${sane[@]}" --load hot --optimizer sgd --lr 0.1 --steps 0 --save new
((code == 1)) || fault_run "expected exit code 1" "${sane[@]}"
expect "it says so ($(head -c 300 ../err))" grep -q '^warning: step 0: the validation loss is ' ../err
expect "nothing is saved" test ! -e new
end

if [[ -x $SHARD_BUILD/02_ddp/llama ]]; then
    begin "on 3 ranks: the same steps as with 3 micro-batches, one warning, exit code 1"
    run "${wild[@]}" --micro-batches 3 --dump one
    ((code == 1)) || fault_run "expected exit code 1" "${wild[@]}"
    on_ranks=("${mpi[@]}" -n 3 "$SHARD_BUILD/02_ddp/${wild[0]##*/}" "${wild[@]:1}")
    run "${on_ranks[@]}" --save three --sample 5 --logits logits --dump ranks
    diverged "${on_ranks[@]}"
    expect "the same steps" cmp one/steps.txt ranks/steps.txt
    expect "nothing is saved" test ! -e three
    end

    begin "on 2 ranks: what rank 0 alone cannot write ends with exit code 1, and nobody waits"
    LIMIT=30
    on_ranks=("${mpi[@]}" -n 2 "$SHARD_BUILD/02_ddp/llama" "${sane[@]:1}" --steps 6)
    run "${on_ranks[@]}" --log /dev/full
    ((code == 1)) || fault_run "--log: expected exit code 1" "${on_ranks[@]}"
    run "${on_ranks[@]}" --logits /dev/full
    ((code == 1)) || fault_run "--logits: expected exit code 1" "${on_ranks[@]}"
    expect "one warning" test "$(grep -c '^warning: --logits /dev/full was not written' ../err)" = 1
    disk=$WORK/disk
    mkdir "$disk"
    if mount -t tmpfs -o size=60k tmpfs "$disk" 2>/dev/null; then
        run "${on_ranks[@]}" --dump "$disk/dump" --save "$disk/ck" --save-every 3 --log log
        ((code == 1)) || fault_run "a full disk: expected exit code 1" "${on_ranks[@]}"
        expect "one warning on the dump ($(head -c 500 ../err))" \
            test "$(grep -c '^warning: the dump is not complete: .*No space' ../err)" = 1
        expect "one on each checkpoint" \
            test "$(grep -cE '^warning: no checkpoint saved after step [36]: .*No space' ../err)" = 2
        expect "it went on to its end" grep -q '"step": 6,' log
        umount "$disk"
    fi
    end
fi
finish
