#!/usr/bin/env bash
# The oldest torch that pyproject.toml allows, in an environment that stays between runs:
#   .ci/oldest.sh install    downloads it, 2.5 GB the first time
#   .ci/oldest.sh test       builds the operators and lowbit._tensors with it, and runs the fast tests that need no
#                            lowbit-ckpt
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=$(sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
home=${LOWBIT_OLDEST:-${XDG_CACHE_HOME:-$HOME/.cache}/lowbit/torch-$oldest}
python=$home/bin/python
pip="$python -m pip install --quiet --disable-pip-version-check"

case "${1:-}" in
install)
  [ -x "$python" ] || python3 -m venv "$home"
  $pip "torch==$oldest.0" "numpy>=1.26" "pyyaml>=6" "tqdm>=4.66" "pytest>=8" "pytest-xdist>=3.7" "hypothesis>=6.100" \
    "expecttest>=0.2" "scikit-build-core>=0.11" "cmake>=3.25" "ninja>=1.11"
  ;;
test)
  # A folder without the sources of lowbit, which have no operators and would be imported first.
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  PATH="$home/bin:$PATH" $pip --no-build-isolation --no-deps --force-reinstall -C build-dir=build/oldest \
    -C cmake.define.LOWBIT_TOOLS=OFF -C cmake.define.LOWBIT_CUDA=OFF -C cmake.define.LOWBIT_ISAS=native .
  cp -r tests recipes docs bench pyproject.toml "$copy"
  cd "$copy"
  "$python" -c "import lowbit, torch; print('torch', torch.__version__, 'lowbit', lowbit.__version__)"
  env -u LOWBIT_REQUIRE OMP_NUM_THREADS=1 "$python" -m pytest -p no:cacheprovider --numprocesses=2 --dist=loadfile \
    -m "not slow" tests/optim tests/state tests/gradients tests/sharding tests/planning
  ;;
*)
  sed -n '2,5s/^# *//p' "$0"
  exit 2
  ;;
esac
