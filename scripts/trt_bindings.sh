#!/usr/bin/env bash
# Make (once) the folders from which tests/test_trt_real.py imports the real Python bindings of TensorRT 10 and 11.
#
#   scripts/trt_bindings.sh [FOLDER]   default $CALIB8_TRT_BINDINGS, then ${XDG_CACHE_HOME:-~/.cache}/calib8/trt-bindings
#   FOLDER/<version>/                  the package `tensorrt`, for LD_LIBRARY_PATH and PYTHONPATH alike
#   FOLDER/rtx-<version>/              TensorRT for RTX: it compiles strongly typed models without a GPU (90 MB)
#
# Of the first, only the wheels of the bindings are fetched (1.3 MB each). The library that they are linked to has
# gigabytes and needs a GPU: one whose functions return nothing stands in for it, so classes can be derived from and
# called, and a builder says that there is none. Needs cc; the Python on the PATH is the one that can import them. Exit
# code 3, with one sentence, where they cannot be had.
set -euo pipefail

folder=${1:-${CALIB8_TRT_BINDINGS:-${XDG_CACHE_HOME:-$HOME/.cache}/calib8/trt-bindings}}

give_up() {
  echo "trt_bindings: no bindings of TensorRT: $1" >&2
  exit 3
}

works() { LD_LIBRARY_PATH=$1 PYTHONPATH=$1 python -c 'import tensorrt' 2> /dev/null; }

# have WHEEL VERSION
have() {
  local place=$folder/$2 major=${2%%.*} library
  works "$place" && return
  rm -rf "$place"
  mkdir -p "$folder"
  unfinished=$(mktemp -d "$folder/.XXXXXX")
  trap 'rm -rf "$unfinished"' EXIT
  python -m pip install -q --disable-pip-version-check --no-deps --target "$unfinished" "$1==$2" >&2 \
    || give_up "$1 $2 could not be fetched (network?)"
  for name in createInferBuilder_INTERNAL createInferRefitter_INTERNAL createInferRuntime_INTERNAL \
    createNvOnnxParser_INTERNAL createNvOnnxParserRefitter_INTERNAL getBuilderPluginRegistry getNvOnnxParserVersion \
    getPluginRegistry initLibNvInferPlugins; do
    echo "void *$name(void) { return 0; }"
  done | cc -shared -fPIC -w -x c - -o "$unfinished/libnvinfer.so.$major" || give_up "cc failed"
  for library in nvinfer_plugin nvonnxparser; do ln -s "libnvinfer.so.$major" "$unfinished/lib$library.so.$major"; done
  mkdir "$unfinished/tensorrt"
  echo 'import sys, tensorrt_bindings; sys.modules[__name__] = tensorrt_bindings' > "$unfinished/tensorrt/__init__.py"
  works "$unfinished" || give_up "$2 cannot be imported"
  mv "$unfinished" "$place"
  trap - EXIT
}

# compiler VERSION: whole, since the library compiles without a GPU
compiler() {
  local place=$folder/rtx-$1
  [ -d "$place" ] && return
  unfinished=$(mktemp -d "$folder/.XXXXXX")
  trap 'rm -rf "$unfinished"' EXIT
  python -m pip install -q --disable-pip-version-check --no-deps --target "$unfinished" \
    "tensorrt_rtx_cu12_libs==$1" "tensorrt_rtx_cu12_bindings==$1" >&2 || return
  PYTHONPATH=$unfinished python -c 'import tensorrt_rtx_libs, tensorrt_rtx_bindings' || return
  mv "$unfinished" "$place"
  trap - EXIT
}

command -v cc > /dev/null || give_up "cc is missing"
have tensorrt_cu12_bindings 10.16.1.11
have tensorrt_cu13_bindings 11.4.0.106
compiler 1.7.1.116 || echo "trt_bindings: TensorRT for RTX could not be fetched: its tests are skipped" >&2
echo "$folder"
