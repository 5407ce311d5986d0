#!/usr/bin/env bash
# Batches that do not divide, are too large, or are cut into micro-batches: nothing is a mean of
# means, every sample is used once an epoch, and nothing divides by zero.
source "$(dirname "$0")/lib.sh"

make_images n10 10 n101 101
make_text text 2000
mnist=("$MNIST" --threads 1)
llama=("$LLAMA" "${SMALL[@]}" --data text)

# Every number that was printed or logged is one.
finite() {
    local log=$1
    shift
    expect "no NaN, no infinity on stdout" eval '! grep -qiE "(^|[^a-z])(nan|inf)([^a-z]|$)" ../out'
    expect "no null, NaN or infinity in the log" eval "! grep -qiE 'null|nan|inf' '$log'"
    expect "the log has all keys" compare json "$log" "$@"
}

logged=(step loss grad_norm lr ms samples)

# ---- fewer samples than a batch ----------------------------------------------------------------

begin "mnist: 10 images in a batch of 64 are one batch of 10"
works "${mnist[@]}" --data n10 --batch 64 --epochs 2 --dump a --log log
expect "two steps" test "$(wc -l <a/steps.txt)" = 2
expect "10 samples each" test "$(compare column log samples | tr '\n' ' ')" = "10 10 "
finite log "${logged[@]}" images_per_s
works "${mnist[@]}" --data n10 --batch 10 --epochs 2 --dump b
expect "the same as --batch 10" diff -r a b
works "${mnist[@]}" --data n10 --batch 16777216 --epochs 2 --dump c
expect "the same as the largest --batch" diff -r a c
end

begin "llama: a batch larger than the epoch"
works "${llama[@]}" --batch 1000 --epochs 2 --dump d --log log
samples=$(((2000 - 200 - 1) / 16))
expect "two steps" test "$(wc -l <d/steps.txt)" = 2
expect "$samples samples each" test "$(compare column log samples | tr '\n' ' ')" = "$samples $samples "
finite log "${logged[@]}" tokens_per_s
works "${llama[@]}" --batch "$samples" --epochs 2 --dump e
expect "the same as a batch of all samples" diff -r d e
end

begin "more micro-batches than samples"
works "${mnist[@]}" --data n10 --batch 64 --epochs 2 --micro-batches 16 --dump f --log log \
    --optimizer sgd --lr 0.01
finite log "${logged[@]}" images_per_s
works "${mnist[@]}" --data n10 --batch 64 --epochs 2 --micro-batches 1 --dump g \
    --optimizer sgd --lr 0.01
works "${mnist[@]}" --data n10 --batch 64 --epochs 2 --micro-batches 10 --dump h \
    --optimizer sgd --lr 0.01
expect "mnist: losses and norms of 16 parts and of 1" compare steps f/steps.txt g/steps.txt 1e-6
expect "mnist: gradients" compare tensors f/grads.safetensors g/grads.safetensors 1e-5
expect "mnist: empty parts change no bit" diff -r f h
works "${llama[@]}" --batch 2 --steps 4 --micro-batches 5 --dump i --optimizer sgd --lr 0.1
works "${llama[@]}" --batch 2 --steps 4 --micro-batches 2 --dump j --optimizer sgd --lr 0.1
expect "llama: empty parts change no bit" diff -r i j
end

# ---- micro-batches -----------------------------------------------------------------------------

begin "mnist: 101 images, --batch 10 in 3 parts, against 1 part, two epochs"
sgd=(--data n101 --batch 10 --epochs 2 --optimizer sgd --lr 0.02)
works "${mnist[@]}" "${sgd[@]}" --micro-batches 1 --dump m1 --log log1
works "${mnist[@]}" "${sgd[@]}" --micro-batches 3 --dump m3 --log log3
expect "losses and norms" compare steps m3/steps.txt m1/steps.txt 1e-6
expect "first gradients" compare tensors m3/grads.safetensors m1/grads.safetensors 1e-5
expect "final weights" compare tensors m3/final.safetensors m1/final.safetensors 1e-5
for log in log1 log3; do
    finite "$log" "${logged[@]}" images_per_s
    expect "$log: 101 samples in epoch 1" test "$(compare sum "$log" 1 11)" = 101
    expect "$log: 101 samples in epoch 2" test "$(compare sum "$log" 12 22)" = 101
    expect "$log: the last step of an epoch has 1" \
        test "$(compare sum "$log" 11 11) $(compare sum "$log" 22 22)" = "1 1"
done
expect "22 steps" test "$(wc -l <m1/steps.txt)" = 22
expect "validation once an epoch" test "$(grep -c val_loss log1)" = 2
end

begin "llama: --batch 5 in 2, 3 and 5 parts, against 1 part, sgd and adamw"
for optimizer in "sgd --lr 0.1" "adamw --lr 1e-3"; do
    # shellcheck disable=SC2086
    set -- --batch 5 --steps 6 --optimizer $optimizer --clip 0 --warmup 0
    works "${llama[@]}" "$@" --micro-batches 1 --dump l1
    for parts in 2 3 5; do
        works "${llama[@]}" "$@" --micro-batches $parts --dump l$parts
        expect "$1 $parts: losses and norms" compare steps l$parts/steps.txt l1/steps.txt 1e-6
        expect "$1 $parts: gradients" \
            compare tensors l$parts/grads.safetensors l1/grads.safetensors 1e-5
    done
    rm -r l?
done
end

begin "with dropout a mask belongs to a sample, not to its place in a part"
works "${llama[@]}" --batch 5 --steps 3 --dropout 0.3 --optimizer sgd --dump l1
works "${llama[@]}" --batch 5 --steps 3 --dropout 0.3 --optimizer sgd --dump l3 --micro-batches 3
expect "losses and norms" compare steps l3/steps.txt l1/steps.txt 1e-6
works "${llama[@]}" --batch 5 --steps 3 --dropout 0 --optimizer sgd --dump l0
expect "dropout does something" eval '! cmp -s l0/steps.txt l1/steps.txt'
end

# ---- weights of samples ------------------------------------------------------------------------

# With a learning rate of 0 the weights stay, so the samples' losses do too: however an epoch is cut
# into steps, the mean weighted by samples is the loss of the whole epoch as one batch.
begin "the loss of a step is weighted by its samples"
still=(--lr 0 --dropout 0 --optimizer sgd)
works "${mnist[@]}" "${still[@]}" --data n101 --batch 101 --epochs 1 --log whole
for batch in 10 50; do
    works "${mnist[@]}" "${still[@]}" --data n101 --batch "$batch" --epochs 2 --log log
    steps=$(((101 + batch - 1) / batch))
    one=$(compare mean log 1 $steps)
    two=$(compare mean log $((steps + 1)) $((2 * steps)))
    expect "mnist, --batch $batch, epoch 1" compare near "$(compare mean whole 1 1)" "$one" 1e-6
    expect "mnist, --batch $batch, epoch 2" compare near "$(compare mean whole 1 1)" "$two" 1e-6
    [[ $(compare column log loss | head -n 1) != $(compare column log loss | sed -n $((steps + 1))p) ]] ||
        fault "the second epoch has the order of the first"
done
works "${llama[@]}" "${still[@]}" --batch 112 --epochs 1 --log whole
works "${llama[@]}" "${still[@]}" --batch 9 --epochs 1 --log log
expect "llama, --batch 9" \
    compare near "$(compare mean whole 1 1)" "$(compare mean log 1 13)" 1e-6
end

begin "validation does not depend on the size of its batches"
for size in 1 3 7 64 10000; do
    works "${mnist[@]}" --data n101 --steps 1 --eval-batch $size --log log
    compare column log val_loss >>mnist.losses
    compare column log accuracy >>mnist.accuracies
    works "${llama[@]}" --steps 1 --eval-batch $size --log log
    compare column log val_loss >>llama.losses
    compare column log accuracy >>llama.accuracies
done
for model in mnist llama; do
    expect "$model: five evaluations" test "$(wc -l <$model.losses)" = 5
    expect "$model: one accuracy" test "$(sort -u $model.accuracies | wc -l)" = 1
    while read -r loss; do
        expect "$model: one loss" compare near "$loss" "$(head -n 1 $model.losses)" 1e-6
    done <$model.losses
done
end

# ---- runs of no steps --------------------------------------------------------------------------

begin "--steps 0, --epochs 0 and --stop-after 0 evaluate and save, without a step"
for flags in "--steps 0" "--epochs 0" "--stop-after 0"; do
    # shellcheck disable=SC2086
    for model in mnist llama; do
        data=n10
        command=("${mnist[@]}" --data n10)
        [[ $model == llama ]] && command=("${llama[@]}")
        rm -rf zero zero.save log
        works "${command[@]}" $flags --log log --dump zero --save zero.save
        expect "$model $flags: no NaN on stdout" \
            eval '! grep -qiE "(^|[^a-z])(nan|inf)([^a-z]|$)" ../out'
        expect "$model $flags: the log is JSON" compare json log
        expect "$model $flags: an evaluation in the log" \
            grep -qE '"val_loss": [0-9.e+-]+, "accuracy": [0-9.e+-]+' log
        expect "$model $flags: no null in the log" eval '! grep -qiE "null|nan|inf" log'
        expect "$model $flags: no step in the log" eval '! grep -q grad_norm log'
        expect "$model $flags: no step dumped" eval '[[ ! -s zero/steps.txt ]]'
        expect "$model $flags: saved weights are those dumped" \
            compare tensors zero/final.safetensors zero.save/model.safetensors 0
    done
done
end

begin "--eval-every and --print-every larger than the run"
works "${mnist[@]}" --data n10 --steps 3 --eval-every 1000 --print-every 1000 --log log
finite log "${logged[@]}" images_per_s
expect "one evaluation, at the end" test "$(compare column log val_loss | wc -l)" = 1
expect "it belongs to step 3" grep -q '"step": 3, .*"val_loss"' log
works "${llama[@]}" --steps 3 --eval-every 1000 --print-every 1000 --log log
finite log "${logged[@]}" tokens_per_s
expect "one evaluation, at the end" test "$(compare column log val_loss | wc -l)" = 1
works "${llama[@]}" --steps 6 --eval-every 2 --log log
expect "--eval-every 2 of 6 steps" test "$(compare column log val_loss | wc -l)" = 3
end

begin "the learning rate does not depend on micro-batches"
for parts in 1 3; do
    works "${llama[@]}" --steps 12 --warmup 5 --micro-batches $parts --log log$parts
done
expect "the same column" diff <(compare column log1 lr) <(compare column log3 lr)
expect "it rises, then falls" test "$(compare column log1 lr | sort -gu | wc -l)" -gt 8
end
finish
