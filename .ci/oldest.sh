#!/usr/bin/env bash
# The oldest torch that pyproject.toml allows, in an environment that stays between runs:
#   .ci/oldest.sh version    says which
#   .ci/oldest.sh install    downloads it, 2.5 GB the first time
#   .ci/oldest.sh test       builds the operators and lowbit._tensors with it, with the kernels of one instruction set,
#                            and runs the fast tests that need no lowbit-ckpt
set -euo pipefail
cd "$(dirname "$0")/.."
# The requirement of a package, as pyproject.toml has it.
requirement() { sed -n "s/.*\"\($1>=[^\"]*\)\".*/\1/p" pyproject.toml | head -n 1; }
oldest=$(requirement torch)
oldest=${oldest#torch>=}
home=${LOWBIT_OLDEST:-${XDG_CACHE_HOME:-$HOME/.cache}/lowbit/torch-$oldest}
python=$home/bin/python
pip="$python -m pip install --quiet --disable-pip-version-check"

case "${1:-}" in
version)
  echo "$oldest"
  ;;
install)
  [ -x "$python" ] || python3 -m venv "$home"
  needs=("torch==$oldest.0" cmake ninja)
  for package in numpy pyyaml tqdm pytest pytest-xdist hypothesis expecttest scikit-build-core; do
    needs+=("$(requirement $package)")
  done
  $pip "${needs[@]}"
  ;;
test)
  # A folder without the sources of lowbit, which have no operators and would be imported first.
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  PATH="$home/bin:$PATH" $pip --no-build-isolation --no-deps --force-reinstall -C build-dir=build/oldest \
    -C cmake.define.LOWBIT_TOOLS=OFF -C cmake.define.LOWBIT_CUDA=OFF -C cmake.define.LOWBIT_ISAS=baseline .
  cp -r tests recipes docs bench pyproject.toml "$copy"
  cd "$copy"
  "$python" -c "import lowbit, torch; print('torch', torch.__version__, 'lowbit', lowbit.__version__)"
  env -u LOWBIT_REQUIRE OMP_NUM_THREADS=1 "$python" -m pytest -p no:cacheprovider --numprocesses=2 --dist=loadfile \
    -m "not slow" tests/optim tests/state tests/gradients tests/sharding tests/planning
  ;;
*)
  sed -n '2,6s/^# *//p' "$0"
  exit 2
  ;;
esac
