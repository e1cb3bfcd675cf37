#include "dialect/muon/muon.h"

#include <set>

namespace lowbit::ckpt {

const MuonNames& names_of(MuonKind kind) {
  static const MuonNames all[] = {
      {"muon", "Keller Jordan's MuonWithAuxAdam", "momentum_buffer", "exp_avg", "exp_avg_sq",
       false},
      {"moonlight", "Moonlight's Muon", "momentum_buffer", "moment1", "moment2", true},
      {"dion", "Dion's Muon", "momentum", "momentum", "variance", true},
  };
  return all[static_cast<int>(kind)];
}

bool is_of_muon(const std::string& name) {
  static const std::set<std::string> all = {"wd",        "adamw_betas", "adamw_eps", "mu",
                                            "algorithm", "step",        "epsilon",   "flatten",
                                            "adjust_lr", "cautious_wd"};
  return all.contains(name);
}

std::shared_ptr<Floats> scaled_floats(std::shared_ptr<Floats> values, double factor) {
  return floats_by(
      [values = std::move(values), factor](uint64_t first, uint64_t count, float* out) -> Status {
        RETURN_IF_ERROR(values->read(first, count, out));
        for (uint64_t i = 0; i < count; ++i)
          out[i] = static_cast<float>(static_cast<double>(out[i]) * factor);
        return fine();
      });
}

namespace {

template <MuonKind kKind>
constexpr Dialect dialect_of(const char* name, const char* about) {
  return {name,
          about,
          [](const Document&, const OptimizerTree& tree) -> Result<int> {
            return recognize_muon(kKind, tree);
          },
          [](std::shared_ptr<const Document> document, const OptimizerTree& tree) {
            return read_muon(kKind, std::move(document), tree);
          },
          [](const Model& model, const Wanted& wanted, DialectReport& report) {
            return write_muon(kKind, model, wanted, report);
          },
          {},
          {.decoupled_beside_muon = true}};
}

}  // namespace

extern const Dialect kMuon = dialect_of<MuonKind::kKeller>(
    "muon", "Keller Jordan's Muon and MuonWithAuxAdam: momentum is an average");
extern const Dialect kMoonlight =
    dialect_of<MuonKind::kMoonlight>("moonlight", "Moonlight's Muon with AdamW: momentum is a sum");
extern const Dialect kDion =
    dialect_of<MuonKind::kDion>("dion", "the Muon of Dion, with AdamW: momentum is a sum");

}  // namespace lowbit::ckpt
