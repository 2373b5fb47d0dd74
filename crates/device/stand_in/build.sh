#!/bin/bash
# Builds the stand-in for a GPU into FOLDER: crates/device/stand_in/build.sh [--test] FOLDER
# --test: builds and runs only the tests of the stand-in itself.
set -euo pipefail
test=
if [[ $1 == --test ]]; then
    test=1
    shift
fi
folder=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
crates=$(cd "$here/../.." && pwd)
cxx=${CXX:-g++}
flags=(-std=c++17 -O2 -fPIC -fno-semantic-interposition -pthread -Wall -Wextra -Werror -I "$here" -I "$crates/device/src/cuda" -ffp-contract=off)
# What this processor has: a multiply-add in one instruction instead of a call. Numbers do not change, as nothing is contracted.
if [[ $("$cxx" -dumpmachine) == x86_64* ]] && grep -qsw avx2 /proc/cpuinfo && grep -qsw fma /proc/cpuinfo; then
    flags+=(-mavx2 -mfma)
fi
read -ra more <<<"${TUNESMITH_STAND_IN_FLAGS:-}"
flags+=("${more[@]}")
if [[ $test ]]; then
    sources=("$here"/{self_test,emulation,cuda,cublaslt}.cpp)
    "$cxx" "${flags[@]}" -Wno-unused-function -o "$folder/self_test" "${sources[@]}"
    exec "$folder/self_test"
fi
mkdir -p "$folder/objects"
objects=()
jobs=()
compile() {
    local object=$folder/objects/$1.o
    shift
    objects+=("$object")
    "$cxx" "${flags[@]}" "$@" -c -o "$object" &
    jobs+=($!)
    if ((${#jobs[@]} >= 2)); then
        wait "${jobs[0]}"
        jobs=("${jobs[@]:1}")
    fi
}
# ThreadSanitizer watches kernels and streams, not what runs the kernels' threads.
watched=()
[[ " ${more[*]} " == *" -fsanitize=thread "* ]] && watched=(-fno-sanitize=thread -D TUNESMITH_WATCHED)
compile emulation "${watched[@]}" "$here/emulation.cpp"
compile cuda "$here/cuda.cpp"
# A kernel's source is compiled with lines that make its kernels known by name. Kernels for each type of activations are
# compiled for all three.
bounds='(__launch_bounds__\([^)]*\)[[:space:]]+)?'
while IFS= read -r source; do
    name=$(basename "$source" .cu)
    if grep -q '^KERNEL.*TYPED(' "$source"; then
        echo '#include "dev.cuh"'
        for type in float f16 bf16; do
            printf '#define act %s\n#define TYPED(name) name##_%s\nnamespace typed_%s {\n' $type $type $type
            echo "#include \"$source\""
            sed -nE "s/^KERNEL[[:space:]]+${bounds}TYPED\(([A-Za-z0-9_]+)\).*/TUNESMITH_REGISTER(\2_$type)/p" "$source"
            printf '}\n#undef act\n#undef TYPED\n'
        done
    else
        echo "#include \"$source\""
        sed -nE "s/^KERNEL[[:space:]]+${bounds}([A-Za-z0-9_]+)[[:space:]]*\(.*/TUNESMITH_REGISTER(\2)/p" "$source"
    fi >"$folder/objects/$name.cpp"
    compile "kernels_$name" -include emulation.h -D "TUNESMITH_SHARED=shared_$name" -Wno-unknown-pragmas -Wno-unused-function "$folder/objects/$name.cpp"
done < <(find "$crates" -name '*.cu' | sort)
for job in "${jobs[@]}"; do
    wait "$job"
done
"$cxx" -shared -pthread -Wl,-Bsymbolic -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so.1" "${objects[@]}"
"$cxx" "${flags[@]}" -shared -Wl,-soname,libnvrtc.so.13 -o "$folder/libnvrtc.so.13" "$here/nvrtc.cpp"
"$cxx" "${flags[@]}" -O3 -shared -Wl,-soname,libcublasLt.so.13 -Wl,-rpath,'$ORIGIN' -o "$folder/libcublasLt.so.13" \
    "$here/cublaslt.cpp" "$folder/libcuda.so.1"
"$cxx" "${flags[@]}" -shared -Wl,-soname,libnccl.so.2 -Wl,-rpath,'$ORIGIN' -o "$folder/libnccl.so.2" "$here/nccl.cpp" "$folder/libcuda.so.1"
rm -r "$folder/objects"
