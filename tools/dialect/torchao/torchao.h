// torchao's dialect: its reader and its writer.
#pragma once

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

Result<Model> read_torchao(std::shared_ptr<const Document> document, const OptimizerTree& tree);
Result<Document> write_torchao(const Model& model, const Wanted& wanted, DialectReport& report);

}  // namespace lowbit::ckpt
