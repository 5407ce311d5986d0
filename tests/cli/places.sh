#!/usr/bin/env bash
# Where a run reads and writes: nothing that it writes may take the place of what it reads or of
# another output, whatever the paths are called; and paths that no file can have are refused.
source "$(dirname "$0")/lib.sh"

make_text text 4000
make_images n10 10
gunzip n10/*.gz
llama=("$LLAMA" "${SMALL[@]}" --data text --batch 4 --steps 2)
mnist=("$MNIST" --threads 1 --data n10 --batch 4 --steps 2)
begin "a checkpoint"
works "${llama[@]}" --save ck
end
cp -r . ../before

untouched() {
    expect "nothing was touched" diff -r . ../before
}

# ---- inputs ------------------------------------------------------------------------------------

begin "no output in the place of --data, by whatever name"
ln -s run/text ../link
ln text ../hard
ln -s run ../folder
for flag in --log --memory --logits --trace; do
    for path in text ./text ../run//text "$PWD/text" ../link ../hard ../folder/text; do
        refuses "$flag $path lies in the same place as --data text; give $flag a place" \
            "${llama[@]}" $flag "$path"
    done
done
refuses '--save text' "${llama[@]}" --save text
refuses '--dump text' "${llama[@]}" --dump text
refuses '--log text lies in the same place as --data ../link' "${llama[@]/#text/../link}" --log text
untouched
end

begin "no output in a folder of --data"
for path in n10/train-labels-idx1-ubyte n10/new n10 ../folder/n10/t10k-images-idx3-ubyte; do
    refuses "--logits $path lies in.* --data n10" "${mnist[@]}" --logits $path
    refuses "--log $path lies in.* --data n10" "${mnist[@]}" --log $path
done
refuses '--save n10/new lies inside of --data n10' "${mnist[@]}" --save n10/new
untouched
end

begin "no output in a folder of --load or --resume; --save in the place of --resume"
for how in --load --resume; do
    for path in ck/model.safetensors ck/log ck ../folder/ck/config.json; do
        refuses "--log $path lies in.* $how ck" "${llama[@]}" $how ck --log $path
    done
    refuses "--dump ck lies in the same place as $how ck" "${llama[@]}" $how ck --dump ck
    refuses "--save ck/in lies inside of $how ck" "${llama[@]}" $how ck --save ck/in
done
refuses '--save ck lies in the same place as --load ck' "${llama[@]}" --load ck --save ck
refuses '--data ck/config.json lies inside of --save ck; give --save' \
    "${llama[@]/#text/ck/config.json}" --save ck
works "${llama[@]}" --resume ck --save ../folder/ck
untouched
end

begin "two outputs in one place that is not there yet"
ln -s run/new ../dangling
refuses '--memory new lies in the same place as --log' "${llama[@]}" --log new --memory new
refuses '--memory \./new' "${llama[@]}" --log new --memory ./new
refuses '--memory ../dangling' "${llama[@]}" --log new --memory ../dangling
refuses '--memory new/x/../y' "${llama[@]}" --log new/y --memory new/x/../y
refuses '--trace new/log lies inside of --save new' "${llama[@]}" --save new --trace new/log
refuses '--trace new lies in the same place as --logits' "${llama[@]}" --logits new --trace new
untouched
works "${llama[@]}" --log /dev/null --memory /dev/null
works "${llama[@]}" --log ../newer --memory ../newest --save ../news
end

# ---- paths -------------------------------------------------------------------------------------

repeat() { # COUNT TEXT
    local line
    printf -v line '%*s' "$1" ''
    printf '%s' "${line// /"$2"}"
}

begin "paths that are too long, or nearly"
for flag in --data --load --resume --save --dump --log --memory --logits --trace; do
    vary $flag "$(repeat 5000 a)" "${llama[@]}"
    refuses 'too long' "${line[@]}"
    for length in 1990 2015 2030 2040 2045 2047; do
        vary $flag "$(repeat $length a/)x" "${llama[@]}"
        run "${line[@]}"
        ((code == 0)) || refusal '(too long|[Nn]o such file)' "$flag" $length
        rm -rf a
    done
done
untouched
end

begin "deep folders"
works "${llama[@]}" --log "$(repeat 1500 d/)log"
expect "it is there" test -s "$(repeat 1500 d/)log"
rm -rf d
untouched
end

begin "a current folder that was removed"
mkdir ../gone
for flag in --log --memory --save --dump --logits --trace; do
    run bash -c 'cd ../gone && rmdir ../gone && exec "$@"' bash \
        "${llama[@]/#text/$PWD/text}" $flag x
    refusal "$flag: x: the current folder is not there any more" "${llama[@]}" $flag x
    mkdir -p ../gone
done
run bash -c 'cd ../gone && rmdir ../gone && exec "$@"' bash "${llama[@]/#text/$PWD/text}" \
    --log "$WORK/log" --memory /dev/null
((code == 0)) || fault_run "absolute paths work" "${llama[@]}"
end

begin "a name with a newline stays one line in messages"
refuses 'no\?file' "${llama[@]/#text/no$'\n'file}"
expect "one line" test "$(wc -l <../err)" = 1
refuses 'not\?here' "${llama[@]}" --log $'text/not\nhere'
expect "one line" test "$(wc -l <../err)" = 1
end
finish
