#!/usr/bin/env bash
#
# format: clang-format leaves every C file as it is.
#
# Other versions of clang-format see some lines differently, so only version 14 (Debian 12's) counts.
# To mend what it finds: clang-format-14 -i FILE

set -uo pipefail
root=${SHARD_ROOT:-$(cd "$(dirname "$0")/.." && pwd)}
cd "$root" || exit 1

for tool in clang-format-14 clang-format ''; do
    if [ -z "$tool" ]; then
        echo "skipped: clang-format 14 not found (./run setup installs it on Debian 12)"
        exit 77
    fi
    [[ $("$tool" --version 2>/dev/null) == *'version 14.'* ]] && break
done

mapfile -d '' files < <(find . \( -path ./build -o -path ./.git \) -prune -o \
    -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' \) -print0)
if [ ${#files[@]} -eq 0 ]; then
    echo "format: no C files found in $root"
    exit 1
fi
if "$tool" --dry-run -Werror "${files[@]}"; then
    echo "PASS: ${#files[@]} files are as $tool writes them"
else
    echo "FAIL: run $tool -i on the files named above"
    exit 1
fi
