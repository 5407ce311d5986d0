#!/usr/bin/env bash
#
# Tests of tools/propagate and tools/check_diffs, on a made-up chain of five tiny chapters in a git
# repository of its own (a fresh copy for each test). One line a case; fails when a case fails.
#
# usage: tests/tools/test_chain.sh

set -uo pipefail
export LC_ALL=C
unset CDPATH
# shellcheck disable=SC2046
unset $(git rev-parse --local-env-vars) # a git hook that runs the tests sets them
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@localhost
export GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@localhost

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../tools" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0
failed=0

# verdict NAME TRUTH: counts and prints a case; after a failure also what the tool said last.
verdict() {
    if [[ $2 == yes ]]; then
        passed=$((passed + 1))
        echo "ok   $section: $1"
    else
        failed=$((failed + 1))
        echo "FAIL $section: $1"
        echo "     | ${out//$'\n'/$'\n     | '}"
    fi
}

# run COMMAND...: sets status and out (stdout and stderr).
run() {
    out=$("$@" 2>&1)
    status=$?
}

# says NAME STATUS TEXT...: the last run ended with STATUS and said every TEXT.
says() {
    local name=$1 wanted=$2 text good=yes
    shift 2
    [[ $status -eq $wanted ]] || good="status is $status"
    for text in "$@"; do
        [[ $out == *"$text"* ]] || good="not said: $text"
    done
    [[ $good == yes ]] || out+=$'\n'"($good; expected status $wanted)"
    verdict "$name" "$good"
}

# silent NAME TEXT...: the last run did not say any TEXT.
silent() {
    local name=$1 text good=yes
    shift
    for text in "$@"; do
        [[ $out != *"$text"* ]] || good=no
    done
    verdict "$name" "$good"
}

# holds NAME COMMAND...: the command succeeds.
holds() {
    local name=$1 good=yes
    shift
    "$@" >/dev/null 2>&1 || good=no
    verdict "$name" "$good"
}

propagate() {
    run "$tools/propagate" --root . "$@"
}

check_diffs() {
    run "$tools/check_diffs" --root . "$@"
}

# The made-up chain -----------------------------------------------------------------------------

chapters=(01_a 02_b 03_c 04_d 05_e)

# make_train K: train.c of chapter K, with one more function for each chapter after the first.
make_train() {
    local k
    printf '%s\n' 'int first(void) {' '    int rate = 1;' '    int steps = 10;' \
        '    return rate * steps;' '}' ''
    for ((k = 2; k <= $1; k++)); do
        printf '%s\n' "int technique_$k(void) {" "    return $k;" '}' ''
    done
    printf '%s\n' 'int last(void) {' '    int total = 0;' '    total += first();' \
        '    return total;' '}'
}

make_chain() {
    local k chapter parent=-
    mkdir tools
    echo '# parent child max' >tools/chain.txt
    for k in 1 2 3 4 5; do
        chapter=${chapters[k - 1]}
        mkdir "$chapter"
        make_train "$k" >"$chapter/train.c"
        printf 'int model(void) {\n    return 7;\n}\n' >"$chapter/llama.c"
        printf 'one\ntwo\nthree\nfour\nfive' >"$chapter/no_newline"
        [[ $k -eq 1 ]] || printf 'int part(void);\n' >"$chapter/part_$k.h"
        [[ $k -le 2 ]] || cp "$parent"/part_*.h "$chapter"
        echo "$parent $chapter 8" >>tools/chain.txt
        parent=$chapter
    done
    git init -q .
    git add .
    git commit -qm 'a chain'
}

# fresh: a new copy of the chain to work in.
fresh() {
    cd "$scratch" || exit 1
    rm -rf work
    cp -Rp chain work
    cd work || exit 1
}

# edit FILE SCRIPT: sed in place (keeps the mode).
edit() {
    sed "$2" "$1" >"$scratch/edited" && cat "$scratch/edited" >"$1"
}

edit_all() {
    local chapter
    for chapter in "${chapters[@]}"; do
        edit "$chapter/$1" "$2"
    done
}

# The chapters CHAPTER... are as they were committed.
untouched() {
    git diff --quiet HEAD -- "$@" && [[ -z $(git status --porcelain -- "$@") ]]
}

# Every chapter is what `edit_all train.c "$1"` makes of the committed one.
all_edited() {
    local chapter
    for chapter in "${chapters[@]}"; do
        git show "HEAD:$chapter/train.c" | sed "$1" | cmp - "$chapter/train.c" || return 1
    done
}

# The command that a stopped propagate printed, as arguments.
next_command() {
    sed -n 's|.*run tools/propagate ||p' <<<"$out"
}

# tools/propagate -------------------------------------------------------------------------------

test_carries() {
    fresh
    edit 01_a/train.c 's/rate = 1;/rate = 2;/'
    edit 01_a/llama.c 's/7/8/'
    propagate 01_a --dry-run
    says "dry run says what would happen" 0 "04_d -> 05_e" "train.c: merged" "nothing was written"
    holds "dry run writes nothing" untouched "${chapters[@]:1}"
    propagate 01_a
    says "an edit is carried" 0 "01_a -> 02_b" "04_d -> 05_e" "llama.c: copied" "8 changes"
    holds "the edit is in every chapter and nothing else is" all_edited 's/rate = 1;/rate = 2;/'
    holds "an unchanged copy stays one" cmp 01_a/llama.c 05_e/llama.c
    holds "the index is left alone" git diff --cached --quiet
    check_diffs
    says "check_diffs is content after it" 0 "0 failures"
    propagate 01_a
    says "again: nothing to do" 0 "has the edit already" "nothing changed in 02_b"
}

test_middle() {
    fresh
    edit 03_c/train.c 's/return 3;/return 33;/'
    propagate 03_c/
    says "from the middle" 0 "03_c -> 04_d" "2 changes"
    holds "earlier chapters are left alone" untouched 01_a 02_b
    holds "later ones have the edit" grep -q 'return 33;' 05_e/train.c
    propagate 05_e
    says "from the last chapter" 0 "last chapter: nothing to carry"
}

test_base() {
    fresh
    edit 01_a/train.c 's/rate = 1;/rate = 2;/'
    git commit -qam 'an edit'
    propagate 01_a
    says "a committed edit needs --base" 0 "as it was at HEAD" "--base"
    propagate 01_a --base HEAD~
    says "--base finds a committed edit" 0 "4 changes"
    holds "and carries it" grep -q 'rate = 2;' 05_e/train.c
}

test_uncommitted() {
    fresh
    edit 01_a/train.c 's/rate = 1;/rate = 2;/'
    edit 03_c/train.c 's/total = 0;/total = 100;/'
    propagate 01_a
    says "uncommitted changes in a child" 0 "4 changes"
    holds "they survive" grep -q 'total = 100;' 03_c/train.c
    holds "beside the edit" grep -q 'rate = 2;' 03_c/train.c
    holds "and are not carried along" grep -q 'total = 0;' 04_d/train.c
    fresh
    edit_all train.c 's/rate = 1;/rate = 2;/'
    propagate 01_a
    says "a child that has the edit already" 0 "train.c: has the edit already"
    holds "stays as it is" all_edited 's/rate = 1;/rate = 2;/'
}

# 03_c edits the line itself, so that the edit of 01_a conflicts there.
make_conflict() {
    local chapter
    fresh
    for chapter in 03_c 04_d 05_e; do
        edit "$chapter/train.c" 's/rate = 1;/rate = 3;/'
    done
    git commit -qam 'a line that 03_c changes'
    edit 03_c/train.c 's/total = 0;/total = 100;/' # not committed, not to be carried
    edit 01_a/train.c 's/rate = 1;/rate = 2;/'
    edit 01_a/llama.c 's/7/8/'
    propagate 01_a "$@"
}

test_conflict() {
    local command
    make_conflict --dry-run
    says "dry run finds a conflict" 1 "03_c/train.c" "would stop here"
    holds "and writes nothing" untouched 02_b 04_d 05_e
    make_conflict
    says "a conflict stops" 1 "conflict: 03_c/train.c" "stopped before 03_c -> 04_d" \
        "run tools/propagate 03_c --base "
    holds "with diff3's markers" grep -A 6 -x '<<<<<<< 03_c' 03_c/train.c
    holds "that name the versions" grep -x '||||||| 02_b before' 03_c/train.c
    holds "all three" grep -x '>>>>>>> 02_b now' 03_c/train.c
    holds "the other files of that edge are done" cmp 01_a/llama.c 03_c/llama.c
    holds "the edge before is done" grep -q 'rate = 2;' 02_b/train.c
    holds "the edge after is not" untouched 04_d 05_e
    command=$(next_command)
    # shellcheck disable=SC2086
    propagate $command
    says "markers are not carried on" 2 "03_c/train.c has conflict markers"
    edit 03_c/train.c '/^<<<<<<</d; /^|||||||/,/^>>>>>>>/d; s/rate = 3;/rate = 6;/'
    git commit -qam 'resolved, and committed too early'
    # shellcheck disable=SC2086
    propagate $command
    says "resolved, it goes on" 0 "03_c -> 04_d" "04_d -> 05_e"
    holds "with the resolved line" grep -q 'rate = 6;' 05_e/train.c
    holds "with the other files" cmp 01_a/llama.c 05_e/llama.c
    holds "without what was uncommitted before" grep -q 'total = 0;' 05_e/train.c
}

test_conflict_at_end() {
    fresh
    edit 05_e/train.c 's/rate = 1;/rate = 5;/'
    edit 04_d/train.c 's/rate = 1;/rate = 2;/'
    propagate 04_d
    says "a conflict in the last chapter" 1 "05_e/train.c" "nothing remains"
    fresh
    edit 04_d/train.c 's/rate = 1;/rate = 2;/'
    edit 05_e/train.c 's/rate = 1;/rate = 5;/'
    git add -A
    git commit -qm 'both'
    edit 04_d/train.c 's/rate = 2;/rate = 4;/'
    propagate 04_d
    edit 05_e/train.c '/^<<<<<<</d; /^|||||||/,/^>>>>>>>/d'
    propagate 04_d --base HEAD
    says "the same edit again after resolving otherwise conflicts again" 1 "05_e/train.c"
}

test_new_file() {
    fresh
    printf 'new\n' >01_a/new.c
    mkdir 01_a/sub
    printf '#!/bin/sh\n' >01_a/sub/tool
    chmod +x 01_a/sub/tool
    printf 'rest\n' >01_a/train.c.orig
    propagate 01_a
    says "new files are carried" 0 "new.c: added" "sub/tool: added" "8 changes"
    holds "to the last chapter" cmp 01_a/new.c 05_e/new.c
    holds "with their mode" test -x 05_e/sub/tool
    holds "what a merge left is not" test ! -e 02_b/train.c.orig
    fresh
    printf 'new\n' >01_a/part_3.h
    propagate 01_a
    says "a new file whose name a later chapter uses" 1 "conflict: 03_c/part_3.h: new in 02_b" \
        "stopped before 03_c -> 04_d"
    holds "is left as it was there" untouched 03_c
    holds "and added before" cmp 01_a/part_3.h 02_b/part_3.h
}

test_deleted_file() {
    fresh
    rm 01_a/llama.c
    printf 'int more;\n' >>04_d/llama.c
    propagate 01_a
    says "a deleted file" 0 "llama.c: deleted" "KEPT, though 03_c deleted it" "2 changes"
    holds "is deleted where it was a copy" test ! -e 03_c/llama.c
    holds "and kept where it was not" grep -q more 04_d/llama.c
    holds "and after that" test -e 05_e/llama.c
}

test_modes() {
    fresh
    chmod +x 01_a/llama.c 03_c/train.c
    edit 01_a/train.c 's/rate = 1;/rate = 2;/'
    propagate 01_a
    says "a mode is carried" 0 "llama.c: made executable"
    holds "to the last chapter" test -x 05_e/llama.c
    holds "a merge leaves the child's mode" test -x 03_c/train.c -a ! -x 04_d/train.c
    git commit -qam 'a mode'
    chmod -x 01_a/llama.c
    propagate 01_a
    says "and taken back" 0 "made not executable" "4 changes"
    holds "in the last chapter" test ! -x 05_e/llama.c
}

test_last_line() {
    fresh
    edit 03_c/no_newline 's/five/FIVE/'
    printf %s "$(cat 03_c/no_newline)" >03_c/no_newline
    git commit -qam 'a line of 03_c'
    printf 'ONE\ntwo\nthree\nfour\nfive' >01_a/no_newline
    propagate 01_a
    says "a file without a newline at its end" 0 "no_newline: merged" "no_newline: copied"
    holds "is merged without adding one" cmp 03_c/no_newline <(printf 'ONE\ntwo\nthree\nfour\nFIVE')
}

test_binary() {
    fresh
    printf 'a\0b' >01_a/image
    printf 'a\0c' >02_b/image
    git add -A
    git commit -qm 'a binary file'
    printf 'a\0d' >01_a/image
    propagate 01_a
    says "a binary file that differs" 1 "02_b/image cannot be merged"
    holds "is left alone" untouched 02_b
}

test_propagate_usage() {
    fresh
    propagate --help
    says "propagate --help" 0 "usage: tools/propagate CHAPTER"
    propagate
    says "no chapter" 2 "which chapter"
    propagate 07_x
    says "an unknown chapter" 2 "'07_x' is not a chapter" "01_a 02_b"
    propagate 01_a 02_b
    says "two chapters" 2 "one chapter at a time"
    propagate 01_a --fast
    says "an unknown option" 2 "unknown option '--fast'"
    propagate 01_a --base nowhere
    says "an unknown revision" 2 "no revision 'nowhere'"
    propagate 01_a --base "$(git rev-parse HEAD:02_b)"
    says "a revision without the chapter" 2 "has no 01_a: name a revision that has it"
    run "$tools/propagate" 01_a --root /nowhere
    says "a root that is not there" 2 "--root needs a folder"
    rm -rf .git
    propagate 01_a
    says "no git repository" 2 "not in a git repository"
}

# tools/check_diffs -----------------------------------------------------------------------------

test_report() {
    fresh
    check_diffs
    says "a good chain passes" 0 "01_a: the first chapter: llama.c no_newline train.c" \
        "03_c -> 04_d: 4 changed (max 8): llama.c same, no_newline same, part_2.h same,\
 part_3.h same, train.c 4; new: part_4.h" "total: 5 chapters, 16 lines changed, 0 failures"
    touch 01_a/.hidden 01_a/train.c~ 01_a/train.c.orig 01_a/train.c.rej
    chmod +x 03_c/llama.c
    check_diffs
    says "hidden and left-over files and modes do not count" 0 "0 failures"
    echo '- 01_a 0' >tools/chain.txt
    check_diffs
    says "one chapter is a chain" 0 "total: 1 chapters, 0 lines changed, 0 failures"
    git checkout -q tools/chain.txt
    cp "$tools"/check_diffs "$tools"/propagate tools
    cd 02_b || exit 1
    run ../tools/check_diffs
    says "the root is found from the tool's place" 0 "total: 5 chapters"
    echo 'int new;' >new.c
    run ../tools/propagate 02_b
    says "by both tools" 0 "new.c: added" "3 changes"
}

test_bound() {
    local chapter
    fresh
    for chapter in 04_d 05_e; do
        edit "$chapter/train.c" 's/return 4;/return 4 +\n        44;/; s/rate = 1/rate = 9/'
        echo 'int more;' >>"$chapter/llama.c"
    done
    check_diffs
    says "as many lines as the bound allows" 0 "03_c -> 04_d: 8 changed (max 8): llama.c 1," \
        "train.c 7;" " 0 failures"
    echo 'int more;' >>04_d/part_3.h
    cp 04_d/part_3.h 05_e
    check_diffs
    says "a line more than the bound" 1 "03_c -> 04_d: 9 lines changed, at most 8 allowed" \
        "1 failures"
    rm 05_e/llama.c
    check_diffs
    says "a file of the parent is missing" 1 "05_e/llama.c is missing" "2 failures"
}

# white NAME SCRIPT: `sed SCRIPT` of 05_e/train.c is found to differ in white space.
white() {
    fresh
    edit 05_e/train.c "$2"
    check_diffs
    says "$1" 1 "05_e/train.c:" "but for white space" "1 failures"
}

test_white_space() {
    white "indentation" 's/^    int rate/  int rate/'
    white "tabs" 's/^    int rate/\tint rate/'
    white "at the end of a line" 's/steps = 10;/& /'
    white "carriage return" 's/steps = 10;/&\r/'
    white "a line broken in two" 's/return rate \* steps/return rate *\n        steps/'
    white "a blank line more" 's/int steps/\n&/'
    white "beside another change" \
        's/rate = 1;/rate = 8;/; s/^    int steps/        int steps/'
    fresh
    printf '\n' >>05_e/no_newline
    check_diffs
    says "a newline at the end of the file" 1 "05_e/no_newline:5" "1 failures"
    fresh
    sed -i 's/ 8$/ 99/' tools/chain.txt
    edit 05_e/train.c 's/total += first();/for (;;) {\n        break;\n    }/
        s/return total;/return total > 1;/'
    check_diffs
    says "other text is no white space" 0 "0 failures"
    # a rewritten block: its `}` and `break;` stand elsewhere, `<` is not `>`
    printf '%s\n' 'while (a < b) {' '    break;' '}' >04_d/block.c
    printf '%s\n' 'while (a > b) {' '    if (a) {' '        break;' '    }' '}' >05_e/block.c
    check_diffs
    says "nor are lines such as } at another depth" 0 "block.c 6" "0 failures"
}

# versions TEXT...: checks a fresh chain with one file more, whose middle is TEXT, one a chapter.
versions() {
    local k=0 text
    fresh
    sed -i 's/ 8$/ 99/' tools/chain.txt
    for text in "$@"; do
        printf 'top\n%s\nbottom\n' "$text" >"${chapters[k]}/block.c"
        k=$((k + 1))
    done
    check_diffs
}

test_back_again() {
    local a=$'call(x);' b=$'call(x, y);' c=$'call(z);'
    versions "$a" "$a" "$b" "$a" "$a"
    says "A B A" 1 "block.c: \"$a\" is in 02_b, not in 03_c, and back in 04_d" "1 failures"
    versions "$a" "$b" "$b" "$b" "$a"
    says "A B B B A" 1 "is in 01_a, not in 02_b, and back in 05_e" "1 failures"
    versions "$a" "$b" "$c" "$a" "$a"
    says "A B C A" 1 "is in 01_a, not in 02_b, and back in 04_d"
    versions "$a" "n = 4;" "$b" "n = 4;" "n = 4;"
    says "A B A, a short line" 1 "\"n = 4;\" is in 02_b"
    versions $'p();\n'"$a"$'\nq();' $'p();\nq();' $'p();\n'"$a"$'\nq();' "p();" "p();"
    says "deleted and back" 1 "\"$a\" is in 01_a, not in 02_b, and back in 03_c"
    versions "$a" "$b" $'one();\ntwo();\n'"$b" $'one();\ntwo();\n'"$b"$'\nmore();' \
        $'zero();\none();\ntwo();\n'"$a"$'\nmore();'
    says "back after lines above it came" 1 "\"$a\" is in 01_a, not in 02_b, and back in 05_e"
    versions "$a" "$b" "$b"$'\nmore();\n'"$c" "$a"$'\nmore();\n'"$c" "$a"$'\nmore();\n'"$c"
    says "back beside new lines" 1 "\"$a\" is in 01_a, not in 02_b, and back in 04_d"
    versions "$a" "$b" "$c" "$c$b" "$c$a"
    says "A B C D E" 0 "0 failures"
    versions "p();" "$a"$'\np();' "p();" "p();" "p();"
    says "a line that comes and goes is none" 0 "0 failures"
    versions $'for (a) {\n    one();\n}' "two();" $'for (b) {\n    three();\n}' "four();" "five();"
    says "nor is a } that comes back" 0 "0 failures"
    versions "$a"$'\np();\nq();\nr();' $'p();\nq();\nr();\n'"$b" \
        $'p();\nq();\nr();\n'"$a" $'p();\nq();\nr();\n'"$a" $'p();\nq();\nr();\n'"$a"
    says "nor a like line at another place" 0 "0 failures"
}

test_show() {
    fresh
    check_diffs --show 04_d 05_e
    says "--show prints a diff without times" 0 "--- 04_d/train.c
+++ 05_e/train.c
@@ -16,6 +16,10 @@ int technique_4(void) {
     return 4;
 }
 
+int technique_5(void) {
+    return 5;
+}
+
 int last(void) {
     int total = 0;
     total += first();"
     silent "--show names no new file and no equal one" part_5.h llama.c
    check_diffs --show 04_d 05_e part_5.h
    says "--show of a new file" 0 "--- /dev/null
+++ 05_e/part_5.h
@@ -0,0 +1 @@
+int part(void);"
    check_diffs --show 04_d 05_e llama.c
    says "--show of an equal file prints nothing" 0
    holds "nothing" test -z "$out"
    check_diffs --show 04_d 05_e none.c
    says "--show of no file" 2 "neither 04_d nor 05_e has a file 'none.c'"
    check_diffs --show 04_d 07_x
    says "--show of no chapter" 2 "'07_x' is not a chapter"
}

# bad_chain NAME TEXT LINE...: chain.txt of these lines is refused with TEXT.
bad_chain() {
    local name=$1 text=$2
    shift 2
    printf '%s\n' "$@" >tools/chain.txt
    check_diffs
    says "$name" 2 "$text"
}

test_chain_file() {
    fresh
    check_diffs --chain
    says "--chain prints the edges" 0 $'- 01_a 8\n01_a 02_b 8\n02_b 03_c 8'
    printf '# text\n\n  - 01_a 0 # the root\n01_a 02_b 8' >tools/chain.txt
    check_diffs
    says "comments, blanks, no newline at the end" 0 "total: 2 chapters, 4 lines changed"
    bad_chain "a bound that is no number" "chain.txt:2: expected 'parent child max" \
        '- 01_a 0' '01_a 02_b many'
    bad_chain "too many words" "chain.txt:1: expected" '- 01_a 0 0'
    bad_chain "a gap" "chain.txt:2: the parent is '02_b', expected '01_a'" '- 01_a 0' '02_b 03_c 8'
    bad_chain "no root line" "expected '-'" '01_a 02_b 8'
    bad_chain "no such chapter" "no folder '09_x'" '- 01_a 0' '01_a 09_x 8'
    bad_chain "a circle" "'01_a' is in the chain twice" '- 01_a 0' '01_a 02_b 8' '02_b 01_a 8'
    bad_chain "empty" "no chapter" '# nothing'
    propagate 01_a
    says "propagate refuses it too" 2 "no chapter"
    rm tools/chain.txt
    check_diffs
    says "no chain.txt" 2 "no tools/chain.txt"
    check_diffs --help
    says "check_diffs --help" 0 "usage: tools/check_diffs"
    check_diffs --quick
    says "check_diffs: an unknown option" 2 "unknown option '--quick'"
    run "$tools/check_diffs" --root
    says "check_diffs: --root without a folder" 2 "--root needs a folder"
}

# -----------------------------------------------------------------------------------------------

status=0
out=""
mkdir "$scratch/chain"
cd "$scratch/chain" || exit 1
make_chain
for one_test in $(declare -F | sed -n 's/^declare -f \(test_.*\)/\1/p'); do
    section=${one_test#test_}
    "$one_test"
done
echo "$passed passed, $failed failed"
[[ $failed -eq 0 && $passed -gt 0 ]]
