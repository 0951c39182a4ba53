#!/usr/bin/env bash
# Make (once) the Python 3.10 environment in which the tests drive TensorRT's own classes without a GPU.
#
#   scripts/trt_env.sh [FOLDER]      prints FOLDER/bin/python; default $CALIB8_TRT_ENV, then
#                                    ${XDG_CACHE_HOME:-~/.cache}/calib8/trt-8.5.3.1
#
# It holds tensorrt 8.5.3.1 from PyPI (550 MB, CPython 3.8-3.10), numpy, OpenCV and onnx. `import tensorrt` also loads
# the plugin library, which is linked to cuBLAS 11 and cuDNN 8 (2 GB of wheels) that nothing here calls: empty
# libraries of a few KB stand in for them, and one that is called says so and aborts. So it is for no GPU.
# Needs python3.10 (or $PYTHON310), gcc and nm. Exit code 3, with one sentence, where one of them is missing.
set -euo pipefail

version=8.5.3.1
folder=${1:-${CALIB8_TRT_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/calib8/trt-$version}}

give_up() {
  echo "trt_env: no TensorRT $version environment: $1" >&2
  exit 3
}

find_python() {
  local candidate
  for candidate in "${PYTHON310:-}" python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python3.10; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

# stand_in LIBRARY PLUGIN FOLDER: an empty LIBRARY with every symbol that PLUGIN wants from it.
stand_in() {
  local library=$1 plugin=$2 out=$3 source
  source=$(mktemp -d)
  {
    echo '#include <stdlib.h>'
    echo '#include <unistd.h>'
    echo "const int calib8_stand_in = 1;"
    echo "static void refuse(const char *name, long n) { if (write(2, name, n) < 0) {} abort(); }"
    nm -D --undefined-only "$plugin" | sed -n "s/^ *U \(.*\)@$library\$/\1/p" | while read -r symbol; do
      message="calib8: $symbol was called in an empty stand-in of $library\\n"
      echo "void $symbol(void) { static const char m[] = \"$message\"; refuse(m, sizeof m - 1); }"
    done
  } > "$source/stand_in.c"
  echo "$library { global: *; };" > "$source/versions"
  gcc -shared -fPIC -fno-builtin -w -Wl,-soname,"$library" -Wl,--version-script="$source/versions" \
    -o "$out/$library" "$source/stand_in.c"
  rm -r "$source"
}

works() {
  [ -x "$1/bin/python" ] && "$1/bin/python" -c '
import ctypes, cv2, msgspec, numpy, onnx, tensorrt
assert tensorrt.__version__ == "'$version'", tensorrt.__version__
ctypes.CDLL("libcudnn.so.8").calib8_stand_in' 2>/dev/null
}

if works "$folder"; then
  echo "$folder/bin/python"
  exit 0
fi

python=$(find_python)
[ -n "$python" ] || give_up "Python 3.10 is missing (the wheel is for CPython 3.8-3.10); set PYTHON310"
for tool in gcc nm; do
  command -v "$tool" > /dev/null || give_up "$tool is missing"
done

# Built beside its place and renamed when whole, so that a killed run leaves nothing that looks finished.
mkdir -p "$(dirname "$folder")"
unfinished=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$unfinished"' EXIT
rm -rf "$folder"
"$python" -m venv "$unfinished"
"$unfinished/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
  "tensorrt==$version" "numpy==1.26.4" "opencv-python-headless==4.11.0.86" "onnx==1.17.0" "protobuf==5.29.5" "msgspec==0.21.1" \
  >&2 || give_up "the wheels could not be installed (network?)"
package=$(echo "$unfinished"/lib/python3.10/site-packages/tensorrt)
plugin=$package/libnvinfer_plugin.so.8
for library in libcublas.so.11 libcublasLt.so.11 libcudnn.so.8; do
  stand_in "$library" "$plugin" "$package"
done
# The dynamic linker finds a library by its soname once it is loaded: load the stand-ins at start-up.
cat > "$unfinished/lib/python3.10/site-packages/calib8_stand_ins.py" <<'PY'
"""Load the empty cuBLAS and cuDNN beside tensorrt before tensorrt itself is imported."""

import ctypes
import pathlib

for _library in ("libcublas.so.11", "libcublasLt.so.11", "libcudnn.so.8"):
    ctypes.CDLL(str(pathlib.Path(__file__).parent / "tensorrt" / _library))
PY
echo 'import calib8_stand_ins' > "$unfinished/lib/python3.10/site-packages/calib8_stand_ins.pth"
works "$unfinished" || give_up "$("$unfinished/bin/python" -c 'import tensorrt' 2>&1 | tail -1)"
mv "$unfinished" "$folder"
trap - EXIT
echo "$folder/bin/python"
