// adafactor-8bit's state dict: the two halves of its dialect.
#pragma once

#include <string>

#include "dialect/dialect.h"
#include "dialect/peer.h"

namespace lowbit::ckpt {

/// A parameter that is read.
struct AdafactorEntry {
  const Entry& entry;
  Param& param;
  const Group& group;
  bool seed_counter;  // the file has _apollo_seed_counter: 0.2.6 or later

  std::string what(const std::string& key) const { return shown(param) + ", " + key; }
  /// A tensor that must have come through loading as it was, of one of two dtypes.
  Result<const Leaf*> intact(const std::string& name, const char* dtype,
                             const char* other = "") const;
};
/// Reads momentum, of any version, as the state `name`.
Status read_momentum(const AdafactorEntry& from, const std::string& name);

Result<Model> read_adafactor8bit(std::shared_ptr<const Document> document);
Result<Document> write_adafactor8bit(const Model& model, const Wanted& wanted,
                                     DialectReport& report);

}  // namespace lowbit::ckpt
