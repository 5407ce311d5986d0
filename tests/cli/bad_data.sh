#!/usr/bin/env bash
# Data sets that are broken, and some that only look so. Each broken one is refused before training
# with one message: which file, what was found, what was expected.
source "$(dirname "$0")/lib.sh"

make_images
make_text text 1000
mkdir more
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$SHARD_ROOT/tests/data python3 - <<'END'
# What mkidx.py has not: faults in the other files, and in the other part.
import gzip
import os
import shutil
from mkidx import write_idx, write_set

def labels(name, part, count, at, value):
    write_set(name)
    body = bytearray(i % 10 for i in range(count))
    body[at] = value
    write_idx(f"{name}/{part}-labels-idx1-ubyte.gz", bytes(body), (count,))

def copy(name, file, change):
    write_set(name)
    with open(f"{name}/{file}", "rb") as old:
        raw = old.read()
    with open(f"{name}/{file}", "wb") as new:
        new.write(change(raw))

os.chdir("more")
labels("badlabel_test", "t10k", 20, 7, 10)
labels("label255_test", "t10k", 20, 19, 255)
write_set("size32"); write_idx("size32/train-images-idx3-ubyte.gz", bytes(32 * 32 * 100), (100, 32, 32))
write_set("size32_test"); write_idx("size32_test/t10k-images-idx3-ubyte.gz", bytes(32 * 32 * 20), (20, 32, 32))
write_set("flat"); write_idx("flat/train-images-idx3-ubyte.gz", bytes(784 * 100), (100, 784))
write_set("none"); write_idx("none/train-images-idx3-ubyte.gz", b"", (0, 28, 28)); write_idx("none/train-labels-idx1-ubyte.gz", b"", (0,))
write_set("none_test"); write_idx("none_test/t10k-images-idx3-ubyte.gz", b"", (0, 28, 28)); write_idx("none_test/t10k-labels-idx1-ubyte.gz", b"", (0,))
write_set("long"); write_idx("long/train-images-idx3-ubyte.gz", bytes(784 * 100 + 1), (100, 28, 28))
write_set("huge_plain", suffix=""); write_idx("huge_plain/train-images-idx3-ubyte", bytes(784), (4294967295, 28, 28))
write_set("huge_labels"); write_idx("huge_labels/train-labels-idx1-ubyte.gz", bytes(100), (4294967295,))
copy("header", "train-images-idx3-ubyte.gz", lambda raw: gzip.compress(gzip.decompress(raw)[:10]))
copy("two_bytes", "train-labels-idx1-ubyte.gz", lambda raw: raw[:2])
copy("checksum", "train-images-idx3-ubyte.gz", lambda raw: raw[:-8] + b"\0\0\0\0" + raw[-4:])
copy("tail", "train-labels-idx1-ubyte.gz", lambda raw: raw + b"<html>")
copy("twice", "train-labels-idx1-ubyte.gz", lambda raw: gzip.compress(raw))
copy("html_labels", "t10k-labels-idx1-ubyte.gz", lambda raw: b"<!DOCTYPE html><title>404</title>" * 20)
copy("members", "train-images-idx3-ubyte.gz", lambda raw: gzip.compress(gzip.decompress(raw)[:5000]) + gzip.compress(gzip.decompress(raw)[5000:]))
write_set("dots"); [os.rename(f"dots/{file}", f"dots/{file.replace('-idx', '.idx')}") for file in os.listdir("dots")]
write_set("no_labels"); os.remove("no_labels/train-labels-idx1-ubyte.gz")
write_set("no_test"); os.remove("no_test/t10k-images-idx3-ubyte.gz")
write_set("folder"); os.remove("folder/train-images-idx3-ubyte.gz"); os.mkdir("folder/train-images-idx3-ubyte.gz")
write_set("pipe"); os.remove("pipe/train-images-idx3-ubyte.gz"); os.mkfifo("pipe/train-images-idx3-ubyte.gz")
write_set("dangling"); os.remove("dangling/train-images-idx3-ubyte.gz"); os.symlink("nowhere", "dangling/train-images-idx3-ubyte.gz")
os.mkdir("nothing")
END

mnist=("$MNIST" --steps 2 --batch 8 --threads 1 --data)
llama=("$LLAMA" "${SMALL[@]}" --steps 2 --batch 4)
before=$(find . | sort)
LIMIT=20

good() {
    begin "mnist: $1"
    works "${mnist[@]}" "$2"
    expect "it trained" grep -qE '^step +2 ' ../out
    expect "all numbers are finite" eval '! grep -qiwE "nan|inf" ../out'
    end
}

# good or broken: what it is, the folder, the file, and what the message says of it
bad() {
    begin "mnist: $1"
    refuses "$2.*$3" "${mnist[@]}" "$2"
    if [[ -n ${4-} ]]; then
        refuses "$4" "${mnist[@]}" "$2"
    fi
    end
}

images=train-images-idx3-ubyte
labels=train-labels-idx1-ubyte
good "gzip" good
good "plain" plain
good "10 images" n10
good "101 images" n101
good "gzip in two members" more/members
good "names with a dot" more/dots
begin "mnist: plain and gzip are the same data"
works "${mnist[@]}" good --dump ../a
works "${mnist[@]}" plain --dump ../b
expect "the same dump" diff -r ../a ../b
end

bad "a web page" html "$images.gz" '(web page|<!DOCTYPE)'
bad "a web page for labels" more/html_labels t10k-labels '<!DOCTYPE'
bad "an empty file" empty "$images.gz" 'empty'
bad "gzip that is cut" cut "$images.gz" "expected 78416 bytes, found [0-9]+"
bad "gzip with a flipped bit" flip "$images.gz" 'download'
bad "a wrong checksum" more/checksum "$images.gz" 'download'
bad "a plain file that is cut" short "$images" 'expected 78416 bytes, found 70574'
bad "bytes after the images" more/long "$images.gz" 'expected 78416 bytes, found .*78417'
bad "bytes after gzip" more/tail "$labels.gz" 'not gzip'
bad "gzip in gzip" more/twice "$labels.gz" '1f 8b'
bad "a header that is cut" more/header "$images.gz" 'found 10 bytes, expected 16'
bad "two bytes" more/two_bytes "$labels.gz"
bad "little-endian" little "$images.gz" 'little-endian'
bad "images and labels swapped" swapped "$images.gz" '1 dimension.*expected 3|swapped'
bad "floats" float "$images.gz" '0x0d.*expected unsigned byte'
bad "99 labels of 100 images" fewer "$images.gz has 100 images" 'has 99 labels'
bad "a label 10" badlabel "$labels.gz: label 37 has the value 10; expected 0 to 9"
bad "a label 255" label255 "$labels.gz: label 37 has the value 255; expected 0 to 9"
bad "a label 10 in the test part" more/badlabel_test "t10k-labels.*: label 7 has the value 10"
bad "a label 255 in the test part" more/label255_test "t10k-labels.*: label 19 has the value 255"
bad "32x32 images" more/size32 "$images.gz" '32 x 32; expected 28 x 28'
bad "32x32 images in the test part" more/size32_test t10k-images '32 x 32; expected 28 x 28'
bad "flat images" more/flat "$images.gz" '2 dimensions; expected 3'
bad "no images" more/none "$images.gz" 'no images'
bad "no images in the test part" more/none_test t10k-images 'no images'
bad "a folder without files" more/nothing "no file $images"
bad "a missing file" more/no_labels "no file $labels"
bad "a missing file of the test part" more/no_test 'no file t10k-images-idx3-ubyte'
bad "a folder for a file" more/folder "$images.gz" 'folder'
bad "a pipe for a file" more/pipe "$images.gz"
bad "a link to nowhere" more/dangling "$images.gz" '[Nn]o such file'
bad "no such folder" nowhere 'No such file' 'run ./run setup, which installs dataset-fashion-mnist'
bad "a folder without files" more/nothing 'no file' 'run ./run setup, which installs dataset'
bad "a file for a folder" text 'not a folder'
begin "mnist: a name with control characters"
refuses 'no\?\[2Jwhere: No such file' "${mnist[@]}" $'no\e[2Jwhere'
end

# The claim of 3.4 TB must not become an allocation. A sanitizer cannot run with so little memory.
bad_huge() {
    local expected=$((4294967295 * $4 + $5))
    begin "mnist: a header that claims 2^32 - 1 $1"
    if have_sanitizer; then
        run "${mnist[@]}" "$2"
    else
        run bash -c 'ulimit -v 3000000; exec "$@"' bash "${mnist[@]}" "$2"
    fi
    refusal "$3.*expected $expected bytes, found $6" "${mnist[@]}" "$2"
    end
}
bad_huge "images" huge "$images.gz" 784 16 800
bad_huge "images, not compressed" more/huge_plain "$images" 784 16 800
bad_huge "labels" more/huge_labels "$labels.gz" 1 8 108

# ---- text --------------------------------------------------------------------------------------

text() {
    begin "llama: $1"
    refuses "$3" "${llama[@]}" --data "$2"
    end
}

: >nothing.txt
head -c 4000 /dev/urandom >random.bin
mkfifo pipe
text "no such file" nowhere.txt 'nowhere.txt: .*[Nn]o such file.*run ./run setup, .*--data'
text "an empty file" nothing.txt 'nothing.txt: the file is empty'
text "a folder" good 'good: .*folder'
text "a device" /dev/zero '/dev/zero'
text "a pipe" pipe '^llama: pipe'
text "a file for a folder" text/x 'text/x: .*Not a directory'
text "an empty name" "" 'needs an argument'
printf 'x' >one
text "one byte" one 'one: the text has 1 bytes; expected at least'
begin "llama: any bytes"
works "${llama[@]}" --data random.bin
expect "it trained" grep -qE '^step +2 ' ../out
end

# The shortest text that is taken has something to train on and something to validate with.
begin "llama: the shortest text of each length of window"
for seq in 1 2 7 16 64; do
    refuses 'expected at least [0-9]+' "${llama[@]/#16/$seq}" --data one
    least=$(sed -nE 's/.*expected at least ([0-9]+):.*/\1/p' ../err)
    head -c "$least" random.bin >least
    head -c "$((least - 1))" random.bin >less
    works "${llama[@]/#16/$seq}" --data least --log ../log
    expect "--seq $seq: numbers in the log of the shortest text" \
        compare json ../log loss grad_norm lr tokens_per_s samples
    expect "--seq $seq: an evaluation" grep -q '"val_loss": [0-9]' ../log
    refuses 'expected at least' "${llama[@]/#16/$seq}" --data less
    # The last tenth is for validation; the rest must have a window and its target.
    ((least == 20 || least - 1 - (least - 1) / 10 <= seq)) ||
        fault "--seq $seq: asks for $least bytes, more than needed"
done
head -c 26 random.bin >least
works "${llama[@]/#16/22}" --data least
rm -f least less
end

# ---- what an ordinary user may not read --------------------------------------------------------

if have_ordinary; then
    cp -r good secret
    chmod 0 "secret/$images.gz"
    cp -r good locked
    chmod 700 locked
    cp text secret.txt
    chmod 0 secret.txt
    begin "files and folders that may not be read"
    refuses "secret/$images.gz: .*Permission denied" "${ORDINARY[@]}" "${mnist[@]}" secret
    ((EUID != 0)) || refuses 'locked.*Permission denied' "${ORDINARY[@]}" "${mnist[@]}" locked
    refuses 'secret.txt: .*Permission denied' "${ORDINARY[@]}" "${llama[@]}" --data secret.txt
    end
    rm -rf secret locked secret.txt
else
    skip "files that may not be read: no ordinary user can start the programs"
fi

begin "nothing is left behind"
rm -f nothing.txt random.bin pipe one
expect "only the data sets are here" diff <(echo "$before") <(find . | sort)
end
finish
