#!/bin/bash
# Horovod 0.28.1 for PyTorch on CPUs (gloo), built from its released source into FOLDER: build_wheel.sh PYTHON FOLDER
# PYTHON has torch, setuptools below 80 and wheel; cmake (3.13 or newer, below 4), make and g++ are on PATH.
set -euo pipefail
python=$(realpath -s "$1") folder=$(realpath -m "$2") version=0.28.1
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
mkdir -p "$folder"
"$python" -m pip download --no-deps --no-build-isolation --no-binary :all: --dest "$source" "horovod==$version"
tar -C "$source" -xzf "$source/horovod-$version.tar.gz"
cd "$source/horovod-$version"
# The release asks for C++14; torch's headers need 17.
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO
export MAKEFLAGS=${MAKEFLAGS--j$(nproc)}
"$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$folder" .
