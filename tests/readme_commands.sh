#!/usr/bin/env bash
#
# readme_commands: every command that README.md and docs/*.md show works as it stands.
#
# Runs each line of each block that starts with ```sh, in a copy of the tree with the build folder of
# this test run in it, so nothing that a command writes lands in the tree. A line that ends in a
# backslash goes on in the next one; `cd` and variables last until the end of the block. A block
# after
#
#     <!-- not run: reason -->
#
# is skipped and counted. So are downloads and the like, which need that line.
#
# ctest: TIMEOUT 900 RUN_SERIAL ON

set -uo pipefail
root=${SHARD_ROOT:-$(cd "$(dirname "$0")/.." && pwd)}
build=$(cd "${SHARD_BUILD:-$root/build/cpu}" && pwd) || exit 1
limit=120 # seconds a command

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$root" && tar -cf - --exclude=./build --exclude=./.git .) | tar -C "$copy" -xpf - || exit 1
touch -d 2000-01-01 "$copy/CMakePresets.json" # the build folder is not the copy's to configure
mkdir "$copy/build" && ln -s "$build" "$copy/build/cpu" || exit 1
if [ -d "$root/build/data" ]; then
    ln -s "$root/build/data" "$copy/build/data"
fi

run=0 failed=0 skipped=0

# Prints the blocks of a Markdown file: "run LINE" or "skip LINE reason", then its commands, then an
# empty line.
blocks() {
    awk '
        /^```sh *$/ {
            print (reason == "" ? "run " FNR : "skip " FNR " " reason)
            inside = 1
            next
        }
        inside && /^```/ { print ""; inside = 0; reason = ""; next }
        inside {
            line = line $0
            if (sub(/\\$/, "", line)) { next }
            if (line ~ /[^ ]/ && line !~ /^ *#/) { print line }
            line = ""
            next
        }
        /^<!-- not run: .* -->$/ {
            reason = $0
            sub(/^<!-- not run: /, "", reason)
            sub(/ -->$/, "", reason)
            next
        }
        /[^ ]/ { reason = "" }' "$1"
}

# Runs the commands of one block, each with a time limit, in one shell.
run_block() {
    local where=$1 line output rc start
    shift
    local before='true'
    for line in "$@"; do
        start=$SECONDS
        output=$(cd "$copy" && timeout -k 5 $limit bash -c "$before && $line" </dev/null 2>&1)
        rc=$?
        run=$((run + 1))
        if [ $rc -eq 0 ]; then
            printf 'ok    %s: %s (%d s)\n' "$where" "$line" $((SECONDS - start))
        else
            failed=$((failed + 1))
            printf 'FAIL  %s: %s (exit code %d)\n' "$where" "$line" $rc
            tail -n 15 <<<"$output" | sed 's/^/      /'
        fi
        # Only what changes the shell itself is repeated for the next line.
        if [[ $line =~ ^(cd\ |export\ |[A-Za-z_]+=[^\ ]*$) ]]; then
            before+=" && $line"
        fi
    done
}

cd "$root" || exit 1
for file in README.md docs/*.md; do
    [ -f "$file" ] || continue
    commands=() kind=
    while IFS= read -r text; do
        if [ -z "$kind" ]; then
            read -r kind number reason <<<"$text"
        elif [ -n "$text" ]; then
            commands+=("$text")
        else
            if [ "$kind" = run ]; then
                run_block "$file:$number" "${commands[@]}"
            else
                skipped=$((skipped + ${#commands[@]}))
                printf 'skip  %s: %d command(s): %s\n' "$file:$number" ${#commands[@]} "$reason"
            fi
            commands=() kind=
        fi
    done < <(blocks "$file")
done

echo "$run commands run, $failed of them failed; $skipped skipped"
if [ $run -eq 0 ]; then
    echo "FAIL: expected at least one command that can be run"
    exit 1
fi
[ $failed -eq 0 ]
