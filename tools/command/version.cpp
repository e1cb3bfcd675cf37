#include "command/version.h"

#include <fmt/format.h>
#include <libdeflate.h>
#include <xxhash.h>
#include <zstd.h>

#include <CLI/Version.hpp>
#include <nlohmann/json.hpp>

#define LOWBIT_TEXT(x) #x
#define LOWBIT_VERSION_TEXT(major, minor, patch) \
  LOWBIT_TEXT(major) "." LOWBIT_TEXT(minor) "." LOWBIT_TEXT(patch)

namespace lowbit::ckpt {

std::string version_text() {
  constexpr const char* kJson = LOWBIT_VERSION_TEXT(
      NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH);
  constexpr const char* kXxhash =
      LOWBIT_VERSION_TEXT(XXH_VERSION_MAJOR, XXH_VERSION_MINOR, XXH_VERSION_RELEASE);
  struct Library {
    std::string name, license;
  };
  const Library libraries[] = {
      {"CLI11 " CLI11_VERSION, "BSD-3-Clause"},
      {fmt::format("nlohmann-json {}", kJson), "MIT"},
      {fmt::format("fmt {}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100),
       "MIT"},
      {"libdeflate " LIBDEFLATE_VERSION_STRING, "MIT"},
      {fmt::format("xxHash {}", kXxhash), "BSD-2-Clause"},
      {"Zstandard " ZSTD_VERSION_STRING, "BSD-3-Clause"},
  };
  std::string text = "lowbit-ckpt " LOWBIT_VERSION
                     "\nCopyright the lowbit authors. License: Apache-2.0\nBuilt with:";
  for (const auto& [name, license] : libraries) text += fmt::format("\n  {} ({})", name, license);
  return text;
}

}  // namespace lowbit::ckpt
