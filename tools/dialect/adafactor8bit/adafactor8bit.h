// adafactor-8bit's dialect: its reader and its writer.
#pragma once

#include <string>

#include "dialect/common/dialect.h"
#include "dialect/common/other_libraries.h"

namespace lowbit::ckpt {

/// A parameter being read: its entry in the file, its group, and what it becomes.
struct AdafactorEntry {
  const Entry& entry;
  Param& param;
  const Group& group;
  bool seed_counter;  // the file has _apollo_seed_counter: 0.2.6 or later

  std::string what(const std::string& key) const { return shown(param) + ", " + key; }
  /// A tensor of one of two dtypes. Any other dtype is an error: loading has cast its values.
  Result<const Leaf*> intact(const std::string& name, const char* dtype,
                             const char* other = "") const;
};
/// Reads the momentum of any version, as the state `name`.
Status read_momentum(const AdafactorEntry& from, const std::string& name);

/// Whether an entry was stepped in a subspace.
bool is_low_rank(const Entry& entry);
/// Reads it, the `number`-th such entry of the file, as far as lowbit steps it likewise.
Status read_low_rank(const AdafactorEntry& from, int64_t number);

Result<Model> read_adafactor8bit(std::shared_ptr<const Document> document,
                                 const OptimizerTree& tree);
Result<Document> write_adafactor8bit(const Model& model, const Wanted& wanted,
                                     DialectReport& report);

}  // namespace lowbit::ckpt
