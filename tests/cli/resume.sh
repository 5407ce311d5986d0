#!/usr/bin/env bash
# A training that was interrupted goes on as if nothing had happened, bit by bit; a checkpoint that
# does not belong to the run, or is broken, is refused.
# ctest: TIMEOUT 600
source "$(dirname "$0")/lib.sh"

make_images n101 101
make_text text 4000
make_text other 4000
sed -i 's/waters/winds/' other
FILES="config.json model.safetensors training.safetensors"

# The command of a model, with warm-up and a clip that is tight enough to matter.
command_of() {
    local model=$1 optimizer=$2
    if [[ $model == llama ]]; then
        command=("$LLAMA" "${SMALL[@]}" --data text --batch 4 --dropout 0.1 --micro-batches 2)
    else
        command=("$MNIST" --threads 1 --data n101 --batch 8 --eval-every 100)
    fi
    command+=(--optimizer "$optimizer" --warmup 15 --clip 0.05 --seed 5)
    case $optimizer in
    sgd) command+=(--lr 0.1) ;;
    adamw) command+=(--lr 3e-3 --weight-decay 0.1) ;;
    adadelta) command+=(--lr 1) ;;
    esac
}

same_files() {
    local file
    for file in $FILES; do
        cmp "$1/$file" "$2/$file" || return 1
    done
}

# ---- 24 steps at once, and as 10 + 14 ----------------------------------------------------------

test_split() {
    local model=$1 optimizer=$2 moments=$3
    begin "$model, $optimizer: 24 steps at once are 10 steps and 14"
    command_of "$model" "$optimizer"
    command+=(--steps 24)
    works "${command[@]}" --dump whole --log whole.log --save whole.save
    works "${command[@]}" --dump one --log one.log --stop-after 10 --save half
    works "${command[@]}" --dump two --log two.log --resume half --save end.save
    expect "the same losses and norms" cmp <(cat one/steps.txt two/steps.txt) whole/steps.txt
    expect "24 steps" test "$(wc -l <whole/steps.txt)" = 24
    expect "the same weights" cmp two/final.safetensors whole/final.safetensors
    expect "the same checkpoint" same_files end.save whole.save
    expect "the same learning rates" \
        cmp <(compare column one.log lr && compare column two.log lr) <(compare column whole.log lr)
    expect "steps 11 to 24 in the second log" \
        test "$(compare column two.log step | sort -nu | head -n 1)" = 11
    expect "the clip was tighter than the norms" \
        awk '{ if ($3 ~ /p-[5-9]|p-[1-9][0-9]/) bad = 1 } END { exit bad }' whole/steps.txt
    expect "weights in F32" compare dtypes half/model.safetensors F32
    if ((moments > 0)); then
        expect "moments in F32" compare dtypes half/training.safetensors F32
    fi
    expect "$moments moments of each parameter" test "$(count_tensors half training)" = \
        $((moments * $(count_tensors half model)))

    works "${command[@]}" --resume half --stop-after 0 --save again
    expect "resumed and saved again without a step: the same bytes" same_files half again
    works "${command[@]}" --resume again --stop-after 0 --save again
    expect "the same in place" same_files half again
    works "${command[@]}" --resume half --stop-after 5 --save fifteen --dump three
    works "${command[@]}" --resume fifteen --dump four
    expect "in three parts" cmp <(cat one/steps.txt three/steps.txt four/steps.txt) whole/steps.txt
    works "${command[@]}" --load half --stop-after 0 --dump loaded
    expect "--load takes the weights" \
        compare tensors loaded/final.safetensors half/model.safetensors 0
    expect "nothing but three files in a checkpoint" test "$(ls half | tr '\n' ' ')" = "$FILES "
    end
    [[ $model-$optimizer == *-adamw ]] || rm -r half
    [[ $model-$optimizer != *-adamw ]] || mv half "$model.save"
    rm -rf whole one two three four loaded again fifteen ./*.log whole.save end.save
}

count_tensors() {
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$CLI python3 -c '
import compare, sys
print(len(compare.read_safetensors(sys.argv[1])[0]))' "$1/$2.safetensors"
}

for model in llama mnist; do
    test_split $model sgd 0
    test_split $model adamw 2
    test_split $model adadelta 2
done

begin "mnist: a training by epochs, stopped within one and at the end of one"
command=("$MNIST" --threads 1 --data n101 --batch 30 --epochs 3)
works "${command[@]}" --dump whole
for stop in 4 6; do
    works "${command[@]}" --dump one --stop-after $stop --save ck
    works "${command[@]}" --dump two --resume ck
    expect "$stop: the same losses and norms" cmp <(cat one/steps.txt two/steps.txt) whole/steps.txt
    expect "$stop: the same weights" cmp two/final.safetensors whole/final.safetensors
done
expect "12 steps" test "$(wc -l <whole/steps.txt)" = 12
rm -r whole one two ck
end

# ---- what may change, and what may not ---------------------------------------------------------

command_of llama adamw
adamw=("${command[@]}")
begin "a resumed run may have other threads and other files, a longer training, micro-batches"
works "${adamw[@]}" --steps 24 --resume llama.save --dump one
works "${adamw[@]}" --steps 24 --resume llama.save --dump two --save ck --log log --eval-every 3
expect "the same steps" cmp one/steps.txt two/steps.txt
vary --threads 2 "${adamw[@]}"
works "${line[@]}" --steps 24 --resume llama.save --dump three
expect "the same steps with 2 threads" cmp one/steps.txt three/steps.txt
works "${adamw[@]}" --steps 30 --resume llama.save --dump four
expect "up to step 30" test "$(tail -n 1 four/steps.txt | cut -d ' ' -f 1)" = 30
vary --micro-batches 1 "${adamw[@]}"
works "${line[@]}" --steps 24 --resume llama.save --dump five
expect "one micro-batch for two" compare steps five/steps.txt one/steps.txt 1e-5
works "${adamw[@]}" --steps 10 --resume llama.save --save ten
expect "no step beyond --steps" eval 'cmp llama.save/model.safetensors ten/model.safetensors &&
    compare tensors llama.save/training.safetensors ten/training.safetensors 0'
expect "it says so" grep -qE '^note +finished already: this training has 10 steps' ../out
works "${adamw[@]}" --steps 24 --load llama.save --dump six
expect "--load starts at step 1" test "$(head -n 1 six/steps.txt | cut -d ' ' -f 1)" = 1
rm -r one two three four five six ten ck log
end

begin "a resumed run says what it changes of the training"
works "${adamw[@]}" --steps 24 --resume llama.save --stop-after 0
expect "nothing, here" eval '! grep -q ^note ../out'
expect "and where it goes on" grep -qE '^resumed +after step 10$' ../out
vary --warmup 20 "${adamw[@]}"
vary --lr 0.01 "${line[@]}"
works "${line[@]}" --steps 48 --schedule constant --resume llama.save --stop-after 0
expect "one line ($(grep ^note ../out))" test "$(grep -c ^note ../out)" = 1
expect "with each of them" grep -qxE "note +changed on the way: --steps 48, was 24; --lr 0.01, was \
0.003; --min-lr 0.001, was 0.0003; --warmup 20, was 15; --schedule constant, was cosine" ../out
end

# The command of llama with another value of a flag must be refused.
changed() {
    local pattern=$1 flag=$2 value=$3
    shift 3
    vary "$flag" "$value" "${adamw[@]}"
    refuses "$pattern" "${line[@]}" --steps 24 "$@"
}

begin "--resume with another seed, batch, data, optimizer"
changed 'seed 5, this run has 6' --seed 6 --resume llama.save
changed 'batch 4, this run has 8' --batch 8 --resume llama.save
changed 'optimizer adamw, this run has sgd' --optimizer sgd --resume llama.save
changed 'optimizer adamw, this run has adadelta' --optimizer adadelta --resume llama.save
changed '--data' --data other --resume llama.save
end

begin "--resume with other sizes"
changed 'has the shape .*expected' --hidden 64 --resume llama.save
changed 'has the shape .*expected' --vocab 300 --resume llama.save
changed '(has the shape|heads)' --kv-heads 2 --resume llama.save
changed 'has no tensor' --layers 2 --resume llama.save
changed 'has the shape .*expected' --dim 64 --resume llama.save
changed '(seq|window)' --seq 8 --resume llama.save
end

begin "--load with other sizes"
changed 'has the shape .*expected' --hidden 64 --load llama.save
changed 'has no tensor' --layers 2 --load llama.save
works "${adamw[@]}" --steps 12 --load llama.save --dump a --sample 4
end

# Two key heads of width 8 have the shapes of one of width 16, but they are another model.
begin "sizes that give the same shapes but another model (config.json has them)"
for how in --load --resume; do
    vary --heads 4 "${adamw[@]}"
    vary --kv-heads 2 "${line[@]}"
    refuses 'heads' "${line[@]}" --steps 24 $how llama.save
done
changed '(norm-eps|rms_norm_eps)' --norm-eps 1e-3 --resume llama.save
changed '(rope-theta|rope_theta)' --rope-theta 500 --resume llama.save
end

begin "a checkpoint of more layers, of the other model, a folder of something else"
vary --layers 2 "${adamw[@]}"
works "${line[@]}" --steps 1 --save two.save
refuses 'has the tensor .*layers.1' "${adamw[@]}" --steps 24 --load two.save
refuses 'has the tensor .*layers.1' "${adamw[@]}" --steps 24 --resume two.save
refuses 'mnist.save/config.json: is of the model "mnist", and this program is "llama"; name' \
    "${adamw[@]}" --steps 24 --load mnist.save
command_of mnist adamw
refuses 'llama.save/config.json: is of the model "llama", and this program is "mnist"; name' \
    "${command[@]}" --steps 24 --load llama.save
refuses 'llama.save' "${command[@]}" --steps 24 --resume llama.save
mkdir hollow
refuses 'hollow' "${adamw[@]}" --steps 24 --resume hollow
refuses 'hollow' "${adamw[@]}" --steps 24 --load hollow
refuses 'nowhere' "${adamw[@]}" --steps 24 --resume nowhere
refuses 'nowhere' "${adamw[@]}" --steps 24 --load nowhere/deep
refuses 'text' "${adamw[@]}" --steps 24 --load text
mkdir swapped
cp llama.save/* swapped
cp two.save/model.safetensors swapped
refuses 'swapped/model.safetensors' "${adamw[@]}" --steps 24 --resume swapped
cp llama.save/model.safetensors swapped
cp two.save/training.safetensors swapped
refuses 'swapped/training.safetensors' "${adamw[@]}" --steps 24 --resume swapped
expect "no folder was made" test ! -e nowhere -a -z "$(ls -A hollow)"
end

# ---- broken checkpoints ------------------------------------------------------------------------

mkdir broken
works "${adamw[@]}" --steps 24 --load llama.save --stop-after 0 --dump good
PYTHONDONTWRITEBYTECODE=1 python3 "$CLI/tamper.py" llama.save broken >cases
begin "broken checkpoints: $(wc -l <cases) kinds, refused or read as they were"
LIMIT=20
while read -r broken what; do
    run "${adamw[@]}" --steps 24 --resume "broken/$broken" --stop-after 0 --dump dump
    if [[ $what == refused || $code != 0 ]]; then
        refusal "broken/$broken" resume "$broken"
    else
        cmp -s dump/final.safetensors good/final.safetensors || fault "$broken: other weights"
    fi
    rm -rf dump
    if [[ $broken == training_* ]]; then # the weights alone are whole
        if [[ $broken == training_cut_0 || $broken == training_no_file ]]; then
            works "${adamw[@]}" --steps 24 --load "broken/$broken" --stop-after 0
        fi
    elif [[ $what == refused ]]; then
        refuses "broken/$broken" "${adamw[@]}" --steps 24 --load "broken/$broken" --stop-after 0
    fi
done <cases
expect "there were many" test "$(wc -l <cases)" -gt 90
end

begin "what a config.json that is refused says"
config_says() { # CASE PATTERN
    refuses "broken/config_$1/config.json: $2" "${adamw[@]}" --steps 24 --load "broken/config_$1"
}
config_says heads 'num_attention_heads is 4 there and 2 in this run; give --heads 4'
config_says eps 'rms_norm_eps is 1e-06 there and 1e-05 in this run; give --norm-eps 1e-06'
config_says act 'hidden_act is "gelu" there; this program has only "silu"'
config_says llama3 'rope_scaling is .*llama3.* there; this program has no scaled positions'
config_says theta_inside 'rope_theta is 500000.0 there and 10000 in this run; give --rope-theta'
config_says html 'is not a JSON object'
config_says is_folder 'is a folder; expected a file'
run "${adamw[@]}" --steps 24 --load broken/config_no_file --stop-after 0
((code == 0)) || fault_run "without config.json: expected exit code 0" "${adamw[@]}"
expect "one warning without config.json ($(cat ../err))" \
    test "$(grep -c '^warning: broken/config_no_file/config.json: there is no such file' ../err)" = 1
expect "and no more" test "$(wc -l <../err)" = 1
works "${adamw[@]}" --steps 24 --load broken/config_unknown --stop-after 0
end
finish
