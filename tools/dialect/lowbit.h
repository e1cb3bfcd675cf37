// lowbit's own state dict: the two halves of its dialect.
#pragma once

#include <map>
#include <string>

#include "dialect/dialect.h"
#include "dialect/presets.h"

namespace lowbit::ckpt {

Result<Model> read_lowbit(std::shared_ptr<const Document> document);
Result<Document> write_lowbit(const Model& model, const Wanted& wanted, DialectReport& report);
/// The settings of a group; `used` has what the states of each name have become.
Result<Settings> lowbit_group(const Model& model, const Wanted& wanted, const Group& group,
                              const std::map<std::string, Spec>& used);
/// A state key as the format is part of it: "exp_avg_dynamic8" is exp_avg in dynamic8; false where
/// it is none.
bool split_key(const std::string& key, std::string& state, std::string& format);

}  // namespace lowbit::ckpt
