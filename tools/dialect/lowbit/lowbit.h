// lowbit's own dialect: its reader and its writer.
#pragma once

#include <map>
#include <string>

#include "dialect/common/dialect.h"
#include "dialect/model/presets.h"
#include "policy/presets.h"

namespace lowbit::ckpt {

Result<Model> read_lowbit(std::shared_ptr<const Document> document, const OptimizerTree& tree);
Result<Document> write_lowbit(const Model& model, const Wanted& wanted, DialectReport& report);
/// The settings of a group. `used` has the format of the states of each name.
Result<Settings> lowbit_group(const Model& model, const Wanted& wanted, const Group& group,
                              const std::map<std::string, StateSpec>& used);
/// Splits a key that names a format: "exp_avg_dynamic8" is exp_avg in dynamic8. False for other
/// keys.
bool split_key(const std::string& key, std::string& state, std::string& format);

}  // namespace lowbit::ckpt
