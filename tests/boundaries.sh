#!/usr/bin/env bash
#
# boundaries: who may know what. Chapters know common/*.h and the C library; the core knows no
# chapter and no library of a device; only the backends look at the elements of a tensor.
#
# Run by ctest. By hand: SHARD_BUILD=build/cpu tests/boundaries.sh

set -uo pipefail
export LC_ALL=C
root=${SHARD_ROOT:-$(cd "$(dirname "$0")/.." && pwd)}
build=$(cd "${SHARD_BUILD:-$root/build/cpu}" && pwd) || exit 1
cc=${CC:-cc} cxx=${CXX:-c++} nm=${NM:-nm}
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
cd "$root" || exit 1
failed=0

# Names that belong to a library of a device or of a transport.
foreign='MPI_|OMPI_|cblas_|openblas_|dnnl_|cuda|cublas|nccl|GOMP_|omp_|__kmpc_'

# report WHAT FINDINGS: prints the outcome of a check; findings are lines, none if all is well.
report() {
    if [ -z "$2" ]; then
        printf 'ok    %s\n' "$1"
    else
        printf 'FAIL  %s\n' "$1"
        sed 's/^/      /' <<<"$2"
        failed=1
    fi
}

# Prints a C file as FILE:LINE:CODE, without comments and with empty strings.
code() {
    awk '{
        out = ""
        for (i = 1; i <= length($0); i++) {
            c = substr($0, i, 1)
            two = substr($0, i, 2)
            if (comment) {
                if (two == "*/") { comment = 0; i++; out = out " " }
            } else if (quote != "") {
                if (c == "\\") { i++ } else if (c == quote) { quote = ""; out = out c }
            } else if (two == "//") {
                break
            } else if (two == "/*") {
                comment = 1; i++
            } else {
                if (c == "\"" || c == "\047") { quote = c }
                out = out c
            }
        }
        quote = ""
        if (out ~ /[^ ]/) { print FILENAME ":" FNR ":" out }
    }' "$@"
}

# ---- what the sources say ----------------------------------------------------------------------

shopt -s nullglob
chapters=([0-9][0-9]_*/)
chapters=("${chapters[@]%/}")
chapter_files=([0-9][0-9]_*/*.[ch])
core_files=(common/*.[ch] common/mpi/*.[ch])
headers=(common/*.h)
if [ ${#chapter_files[@]} -eq 0 ] || [ ${#headers[@]} -eq 0 ]; then
    echo "boundaries: no chapters or no headers found in $root"
    exit 1
fi

standard=' assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal
 stdalign stdarg stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time
 uchar wchar wctype '
includes=$(grep -nE '^[ \t]*#[ \t]*include' "${chapter_files[@]}" /dev/null |
    while IFS=: read -r file line text; do
        name=$(sed -E 's/.*include[ \t]*[<"]([^>"]*)[>"].*/\1/' <<<"$text")
        case $text in
        *\<*) [[ $standard == *[[:space:]]${name%.h}[[:space:]]* ]] && continue ;;
        *\"common/*/*) ;;
        *\"common/*) [ -f "$name" ] && continue ;;
        *\"*) [[ $name != */* && -f ${file%/*}/$name ]] && continue ;;
        esac
        echo "$file:$line: $text"
    done)
report "${#chapter_files[@]} files of ${#chapters[@]} chapter(s) include only the C standard's \
headers, common/*.h and their own folder's" "$includes"

names=$(code "${chapter_files[@]}" |
    grep -E "^[^:]*:[0-9]*:.*(\<($foreign)|#[ \t]*pragma[ \t]+omp)")
report "chapters name no MPI, CUDA, NCCL, BLAS, oneDNN or OpenMP" "$names"

# A transport may use the library that it is made for, and no other.
names=$(code "${core_files[@]}" |
    grep -E "^[^:]*:[0-9]*:.*(\<($foreign)|#[ \t]*pragma[ \t]+omp)" |
    while IFS= read -r found; do
        case $found in
        common/mpi/*) rest=$(sed -E 's/\<O?MPI_\w*//g' <<<"${found#*:*:}") ;;
        common/nccl/*) rest=$(sed -E 's/\<(MPI_|cuda|nccl)\w*//g' <<<"${found#*:*:}") ;;
        *) rest=${found#*:*:} ;;
        esac
        grep -qE "\<($foreign)|#[ \t]*pragma[ \t]+omp" <<<"$rest" && echo "$found"
    done)
report "${#core_files[@]} files of common/ leave them to cpu/, cuda/ and the transports" "$names"

names=$(grep -rnE '\<0[1-9]_[a-z]\w+' common)
for chapter in "${chapters[@]}"; do
    names+=$(grep -rnF "$chapter" common)
done
report "common/ names no chapter" "$names"

# A pointer of incomplete type cannot be followed; so nobody may make another type of it either.
peeks=$(code "${chapter_files[@]}" "${core_files[@]}" | grep -E \
    '\([a-z_0-9 ]+\*+ *\) *&?[A-Za-z_][][A-Za-z_0-9.>-]*(\.|->)data\>|void *\*+ *\w+ *= *[^;]*(\.|->)data\>|\<(mem(cpy|move|set|cmp)|fread|fwrite|write|read) *\([^;]*(\.|->)data\>' |
    grep -vE '^common/tensor\.[ch]:')
report "no cast of a tensor's data in chapters and common/*.c" "$peeks"

guards=$(for header in "${headers[@]}"; do
    name=${header##*/}
    guard=SHARD_$(tr 'a-z' 'A-Z' <<<"${name%.h}")_H
    grep -qx "#ifndef $guard" "$header" && grep -qx "#define $guard" "$header" ||
        echo "$header: expected the include guard $guard"
    grep -qx 'extern "C" {' "$header" && grep -qx '#ifdef __cplusplus' "$header" ||
        echo "$header: expected extern \"C\" under #ifdef __cplusplus"
done)
report "${#headers[@]} headers have an include guard and extern \"C\"" "$guards"

# ---- what the compilers say --------------------------------------------------------------------

# compiles C|C++ CODE: its messages; fails if it does not compile.
compiles() {
    local compiler=("$cc" -std=gnu11 -x c)
    [ "$1" = C ] || compiler=("$cxx" -x c++)
    "${compiler[@]}" -D_GNU_SOURCE -Wall -Wextra -Werror -fsyntax-only -I"$root" - <<<"$2" 2>&1
}

languages=(C)
if command -v "$cxx" >/dev/null; then
    languages+=(C++)
fi
alone=$(for header in "${headers[@]}"; do
    for language in "${languages[@]}"; do
        message=$(compiles "$language" "#include \"$header\"") ||
            printf '%s, alone, as %s:\n%s\n' "$header" "$language" "$(head -n 4 <<<"$message")"
    done
done)
report "each of them compiles alone (${languages[*]})" "$alone"

# Each line would read an element of a tensor, but for the first, which shows that the rest fails for
# that reason alone.
snippet() {
    printf '#include "common/tensor.h"\nint test(struct tensor t);\nint test(struct tensor t) {\n%s\n}\n' "$1"
}
message=$(compiles C "$(snippet 'return t.data == NULL;')") && message=
report "a chapter may ask whether a tensor has data" "$message"
for line in 'return (int)t.data[0];' 'return (int)*t.data;' 'float *x = t.data; return x != NULL;' \
    'return (int)(t.data + 1 == t.data);' 'return (int)sizeof *t.data;'; do
    message=$(compiles C "$(snippet "$line")") && message="it compiles" || message=
    report "does not compile in a chapter:  $line" "$message"
done

# ---- what the objects say ----------------------------------------------------------------------

objects=()
for chapter in "${chapters[@]}"; do
    found=("$build"/CMakeFiles/"$chapter"_*.dir/"$chapter"/*.o)
    objects+=("${found[@]}")
    [ ${#found[@]} -gt 0 ] || report "objects of $chapter" "none in $build: build it first"
done
if "$nm" -u "${objects[@]}" | grep -qE '__(asan|tsan)_'; then
    echo "skip  symbols of chapter objects: a sanitizer's build has its own"
else
    symbols=$("$nm" -Au "${objects[@]}" | grep -E " U ($foreign)" | sed "s|^$build/||")
    report "${#objects[@]} chapter objects need no symbol of MPI, CUDA, NCCL, BLAS, oneDNN or OpenMP" \
        "$symbols"
    # Writable sections; .data.rel.ro holds constants with addresses in them.
    state=$("$nm" -A -f sysv "${objects[@]}" | sed "s|^$build/||" |
        grep -E '\|(\.(data|bss|tdata|tbss)[^|]*|\*COM\*) *$' | grep -vE '\|\.data\.rel\.ro')
    report "chapter objects have no variables outside of functions" "$state"
fi

[ $failed -eq 0 ] && echo "PASS" || echo "FAIL: see above"
exit $failed
