#!/usr/bin/env bash
# mypy --strict of everything that touches TensorRT, against the tensorrt-stubs of PyPI (TensorRT 10.13).
#
#   scripts/trt_types.sh [FOLDER]    the stubs are kept in FOLDER; default ${XDG_CACHE_HOME:-~/.cache}/calib8/trt-stubs
#
# The stubs' wheel asks for the 4 GB of TensorRT itself and holds a few lines that are no Python (a parameter called
# `in`, one without a default after one with, trt.bool where Python's is meant): so it is unpacked without dependencies and those lines are mended.
set -euo pipefail

version=10.13.0.35.1
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/calib8/trt-stubs}/$version

if [ ! -d "$folder" ]; then
  mkdir -p "$(dirname "$folder")"
  unfinished=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$unfinished"' EXIT
  if ! python -m pip download -q --disable-pip-version-check --no-deps -d "$unfinished" "tensorrt-stubs==$version" >&2; then
    echo "trt_types: tensorrt-stubs could not be fetched (network?)" >&2
    exit 3
  fi
  (cd "$unfinished" && python -m zipfile -e ./*.whl . && rm -r ./*.whl)
  sed -i -e 's/\bin: list/in_: list/' -e 's/power: Weights = None, channel_axis: int)/power: Weights = None, channel_axis: int = 0)/' \
    -e 's/^from __future__.*/&\nimport builtins/' -e 's/\(-> \|: \)bool\b/\1builtins.bool/g' \
    "$unfinished/tensorrt_bindings/tensorrt.pyi"
  mv "$unfinished" "$folder"
  trap - EXIT
fi

settings=$(mktemp)
trap 'rm -f "$settings"' EXIT
cat setup.cfg - > "$settings" <<'CFG'

[mypy-tensorrt_bindings.*]
ignore_errors = True

[mypy-tensorrt_libs.*]
ignore_missing_imports = True
CFG
sed -i 's/^\[mypy-tensorrt\.\*\]/&\nignore_errors = True/' "$settings"
files=$(grep -lE '^ *(import|from) tensorrt\b' -r calibrators deploy --include='*.py')
# shellcheck disable=SC2086
MYPYPATH=$folder python -m mypy --strict --config-file "$settings" $files
