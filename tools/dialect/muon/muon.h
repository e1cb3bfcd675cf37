// Muon as others keep it: Keller Jordan's MuonWithAuxAdam, Moonlight's Muon and Dion's Muon. Each
// steps some parameters by Muon and others by AdamW.
//
//   muon       momentum is an average of gradients: m = m + (1 - mu) (g - m), as in torch and
//              lowbit
//   moonlight  a sum: M = mu M + g, which is the average divided by 1 - mu. Parameters of both
//              kinds share groups, and their state says which is which
//   dion       a sum; groups have the algorithm and the step
#pragma once

#include <memory>
#include <string>

#include "dialect/common/dialect.h"
#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

enum class MuonKind { kKeller, kMoonlight, kDion };

/// What a library calls its states.
struct MuonNames {
  const char* dialect;
  const char* whose;  // for messages
  const char *momentum, *first, *second;
  bool sum;  // whether momentum is a sum of gradients
};
const MuonNames& names_of(MuonKind kind);

/// Whether a setting of a group is one of these libraries alone.
bool is_of_muon(const std::string& name);

/// Values times a factor.
std::shared_ptr<Floats> scaled_floats(std::shared_ptr<Floats> values, double factor);

int recognize_muon(MuonKind kind, const OptimizerTree& tree);
Result<Model> read_muon(MuonKind kind, std::shared_ptr<const Document> document,
                        const OptimizerTree& tree);
Result<Document> write_muon(MuonKind kind, const Model& model, const Wanted& wanted,
                            DialectReport& report);

}  // namespace lowbit::ckpt
