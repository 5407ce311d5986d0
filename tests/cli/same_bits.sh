#!/usr/bin/env bash
# The same command gives the same numbers: any number of threads, every time, whatever else the
# program writes or evaluates on the way.
source "$(dirname "$0")/lib.sh"

make_images n101 101
make_text text 20000
# More rows than one piece of work has, and a last piece that is not full.
llama=("$LLAMA" --dim 64 --layers 2 --heads 4 --kv-heads 2 --hidden 96 --seq 48 --batch 11
    --vocab 259 --data text --steps 4 --warmup 0 --dropout 0.1)
mnist=("$MNIST" --data n101 --batch 60 --steps 4)

same() {
    expect "$1" diff -r "$2" "$3"
}

for model in llama mnist; do
    command=("${llama[@]}")
    [[ $model == llama ]] || command=("${mnist[@]}")
    works "${command[@]}" --threads 1 --dump "$model.1"

    begin "$model: 1, 2, 3 and 5 threads, and all cores"
    for threads in 2 3 5 0; do
        works "${command[@]}" --threads $threads --dump dump --save save
        same "$threads threads" dump "$model.1"
        rm -r dump
    done
    end

    begin "$model: five runs, with and without random addresses"
    for ((i = 0; i < 5; i++)); do
        works "${command[@]}" --threads 2 --dump dump
        same "run $i" dump "$model.1"
        rm -r dump
    done
    if setarch -R true 2>/dev/null; then
        works setarch -R "${command[@]}" --threads 2 --dump dump
        same "fixed addresses" dump "$model.1"
        rm -r dump
    fi
    works env MALLOC_PERTURB_=85 OMP_DYNAMIC=true OMP_NUM_THREADS=7 "${command[@]}" --dump dump
    same "other contents of fresh memory" dump "$model.1"
    rm -r dump
    end

    begin "$model: evaluating, logging, saving, sampling change nothing"
    works "${command[@]}" --threads 1 --dump dump --eval-every 1 --eval-batch 3
    same "--eval-every 1" dump "$model.1"
    works "${command[@]}" --threads 1 --dump dump --log log --memory memory --print-every 1
    same "--log, --memory" dump "$model.1"
    works "${command[@]}" --threads 1 --dump dump --save save --save-every 1
    same "--save-every 1" dump "$model.1"
    if [[ $model == llama ]]; then
        works "${command[@]}" --threads 1 --dump dump --sample 20
        same "--sample" dump "$model.1"
    fi
    expect "the timeline of the memory was written" test -s memory
    rm -rf dump save log memory
    end

    begin "$model: another seed gives other numbers"
    works "${command[@]}" --threads 1 --dump dump --seed 2
    expect "other losses" eval "! cmp -s dump/steps.txt $model.1/steps.txt"
    expect "other weights" eval "! cmp -s dump/final.safetensors $model.1/final.safetensors"
    rm -r dump
    end
done

begin "the same start and the same samples at other lengths of the training"
vary --steps 9 "${mnist[@]}"
works "${line[@]}" --threads 1 --dump nine --optimizer sgd --schedule constant
works "${mnist[@]}" --threads 1 --dump four --optimizer sgd --schedule constant
expect "the first four steps" cmp <(head -n 4 nine/steps.txt) four/steps.txt
expect "first gradients" cmp nine/grads.safetensors four/grads.safetensors
rm -r nine four
end

begin "llama: --sample writes the same text every time"
works "${llama[@]}" --sample 60 --threads 1
grep -A 99 '^sample' ../out >one
works "${llama[@]}" --sample 60 --threads 2
grep -A 99 '^sample' ../out >two
expect "the same text" cmp <(sed '/^time /,$d' one) <(sed '/^time /,$d' two)
expect "60 bytes and more" test "$(sed '/^time /,$d' one | wc -c)" -ge 60
works "${llama[@]}" --sample 60 --seed 2
expect "another text with another seed" \
    eval '! cmp -s <(sed "/^time /,\$d" one) <(grep -A 99 "^sample" ../out | sed "/^time /,\$d")'
end
finish
