// torchao's tensor subclasses: one kind for each precision.
#pragma once

#include <cstdint>
#include <string>

namespace lowbit::ckpt {

/// One of torchao's tensor subclasses.
struct TorchaoKind {
  const char *cls, *name;           // "OptimState8bit", "8-bit"
  const char* module;               // where version 0.10 and later have it
  const char *with_sign, *without;  // the formats of lowbit with the same values
  int bits;
  int64_t block;  // its optimizers' default
};
inline constexpr TorchaoKind kTorchaoKinds[] = {
    {"OptimState8bit", "8-bit", "torchao.optim.subclass_8bit", "dynamic8", "dynamic8_unsigned", 8,
     256},
    {"OptimState4bit", "4-bit", "torchao.optim.subclass_4bit", "dynamic4", "power1_4_unsigned", 4,
     128},
    {"OptimStateFp8", "fp8", "torchao.optim.subclass_fp8", "float8_e4m3", "float8_e4m3_unsigned", 8,
     256},
};
/// The kind of a class by its full path, of any version; null if the class is not torchao's.
const TorchaoKind* torchao_kind(const std::string& cls);
/// torchao quantizes no state of fewer elements.
inline constexpr uint64_t kTorchaoMin = 4096;

}  // namespace lowbit::ckpt
