"""A format that somebody adds: one header and its name in the registry."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.codes import ONLY
from tests.support.paths import ROOT, TESTS, for_build

pytestmark = pytest.mark.slow

TOY = """// Three bits, evenly spaced in the square root: what the test of one added file adds.
#pragma once

#include "core/scale/block.h"

namespace lowbit {

struct Toy3 {
  static constexpr const char* kName = "toy3";
  static constexpr const char* kDtype = "uint8";
  static constexpr const char* kDomain = "linear";
  static constexpr int kBits = 3, kBlock = 64, kCodes = 8;
  static constexpr bool kScaled = true, kSigned = true;
  static constexpr uint32_t kZeroCode = 3;
  using Storage = uint8_t;
  using Scale = BlockScale;

  LB_HD static float dequantize(uint32_t code) {
    const float q = static_cast<float>(static_cast<int32_t>(code) - 3) * 0.25f;
    return q < 0.0f ? -(q * q) : q * q;
  }
  LB_HD static uint32_t quantize(float z) {
    uint32_t code = 0;
    for (uint32_t k = 1; k < 8; ++k) code += z >= (dequantize(k - 1) + dequantize(k)) * 0.5f;
    return code;
  }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code < 7 ? code + 1 : code;
    return code > 0 ? code - 1 : code;
  }
};

}  // namespace lowbit
"""


@pytest.mark.long
@pytest.mark.skipif(bool(ONLY), reason="this is the build that it makes")
def test_a_format_of_one_file(tmp_path):
    """A header and its name in the registry are all that a new format needs: built beside, and held
    by the tests of the other formats.
    """
    root = ROOT
    if not (root / "csrc").is_dir() or not shutil.which("cmake", path=tool_path()):
        pytest.skip("no sources or no cmake here")
    for part in ("csrc", "lowbit"):
        shutil.copytree(
            root / part, tmp_path / part, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for part in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(root / part, tmp_path)
    (tmp_path / "csrc/core/state/toy3.h").write_text(TOY)
    registry = tmp_path / "csrc/core/state/registry.h"
    text = registry.read_text().replace(
        '#include "core/state/power.h"',
        '#include "core/state/power.h"\n#include "core/state/toy3.h"',
    )
    start = text.index("using StateFormats")
    end = text.index(">;", start)
    registry.write_text(text[:end] + ", Toy3" + text[end:])

    def run(*command, **environment):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=for_build(tmp_path) | {"PATH": tool_path()} | environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    generator = ["-G", "Ninja"] if shutil.which("ninja", path=tool_path()) else []
    run(
        "cmake",
        "-S",
        ".",
        "-B",
        "build",
        *generator,
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DLOWBIT_TOOLS=OFF",
        "-DLOWBIT_CUDA=OFF",
        "-DLOWBIT_ISAS=baseline",
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
    )
    run("cmake", "--build", "build", "--target", "_ops", "--parallel")
    shutil.copy(tmp_path / "build/csrc/_ops.so", tmp_path / "lowbit")
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-s",
        *(str(TESTS / "state" / name) for name in ("test_state.py", "test_cross_tile_scales.py")),
    ]
    # An editable installation puts a finder before everything on the path.
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in "
        "type(f).__module__.lower()]; import lowbit, pytest; assert "
        f"lowbit.__file__.startswith({str(tmp_path)!r}), lowbit.__file__; "
        f"sys.exit(pytest.main({arguments!r}))"
    )
    said = run(
        sys.executable,
        "-c",
        program,
        PYTHONPATH=f"{tmp_path}",
        LOWBIT_TEST_FORMAT="toy3",
        PYTHONSAFEPATH="1",
    )
    assert "toy3" in said, said
    print(said)


def tool_path():
    """PATH, and where this Python's own tools are."""
    return os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
