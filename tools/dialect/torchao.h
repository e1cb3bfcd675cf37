// torchao's optimizer states: the two halves of its dialect.
#pragma once

#include <string>
#include <vector>

#include "dialect/dialect.h"

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
/// By the class's full path, of any version; null where it is none of torchao's.
const TorchaoKind* torchao_kind(const std::string& cls);
/// Parameters with fewer elements keep states of floats.
inline constexpr uint64_t kTorchaoLeast = 4096;

/// What a leaf means that holds a state, or parts of one.
struct TorchaoState {
  State state;
  const TorchaoKind* kind = nullptr;  // of its parts that are coded; null where none is
  int64_t block = 0;
};
Result<TorchaoState> torchao_state(const Document& document, const Leaf& leaf);
Result<Model> read_torchao(std::shared_ptr<const Document> document);
Result<Document> write_torchao(const Model& model, const Wanted& wanted, DialectReport& report);

}  // namespace lowbit::ckpt
