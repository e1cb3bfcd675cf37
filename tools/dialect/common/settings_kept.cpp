#include "dialect/common/settings_kept.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "container/deepspeed/model_states.h"
#include "dialect/common/other_libraries.h"

namespace lowbit::ckpt {
namespace {

/// A setting that some dialects lack, with its neutral value. Left out: settings that every dialect
/// has, that change no update, or that a schedule sets (lr).
struct OptionalSetting {
  const char* key;
  Value neutral;
  const char* algorithm = "";  // that has it; "": any
  bool of_decay = false;       // does nothing without weight decay either
  const char* alias = "";      // a name of the neutral value
};

const std::vector<OptionalSetting>& optional_settings() {
  const Value no = Value::boolean(false), yes = Value::boolean(true), none = Value::none(),
              zero = Value::number(0);
  const auto real = [](double x) { return Value::floating(x); };
  static const std::vector<OptionalSetting> all = {
      {"maximize", no},
      {"cautious", no},
      {"amsgrad", no},
      {"dampening", zero},
      {"nesterov", no, "sgd"},
      {"nesterov", no, "lars"},
      {"decoupled", no, "sgd", true},
      {"dampen_first", no, "sgd"},
      {"lr_decay", zero},
      {"centered", no},
      {"momentum", zero, "rmsprop"},
      {"beta1", none, "adafactor"},
      {"beta2", none, "adafactor"},
      {"relative_step", yes, "adafactor"},
      {"scale_parameter", yes, "adafactor"},
      {"decay_by", Value::words("lr"), "adafactor", true},
      {"scale_weight_decay", no, "adafactor", true},
      {"scale_weight_decay", no, "adam", true},
      {"d", zero, "adam"},  // adafactor-8bit's, of the root mean square of updates
      {"fira_margin", none, "adafactor"},
      {"factored", yes, "adafactor"},
      {"add_eps", no, "adafactor"},
      {"ns_coefficients", Value::tuple({real(3.4445), real(-4.7750), real(2.0315)}), "", false,
       "quintic"},
      {"split", none},
      {"normuon_beta2", none},
      {"cautious_weight_decay", no, "", true},
      // timm's
      {"caution", no},
      {"corrected_weight_decay", no, "", true},
  };
  return all;
}

using Keys = std::set<std::string>;

Keys keys_of(const Settings& settings) {
  Keys out;
  for (const auto& [key, value] : settings) out.insert(key);
  return out;
}

/// Those of them that a dialect keeps.
Keys kept_by(const Dialect& dialect, const std::string& algorithm) {
  const std::string_view name = dialect.name;
  if (name == "torch") return keys_of(torch_settings(algorithm));
  Keys out;
  if (name == "lowbit") out = keys_of(lowbit_settings(algorithm));
  for (const KeptSetting& kept : dialect.settings) {
    if (kept.algorithm == algorithm || kept.algorithm == std::string_view("")) out.insert(kept.key);
  }
  return out;
}

/// Numbers are equal whatever their types.
bool same(const Value& a, const Value& b) {
  const auto is_number = [](const Value& v) {
    return v.is(Value::Kind::kBool) || v.is(Value::Kind::kInt) || v.is(Value::Kind::kFloat);
  };
  const auto real = [](const Value& v) {
    return v.is(Value::Kind::kFloat) ? v.real : static_cast<double>(v.integer);
  };
  if (is_number(a) && is_number(b)) return real(a) == real(b);
  if (!a.items.empty() || !b.items.empty())  // tuples and lists
    return std::ranges::equal(a.items, b.items, same);
  return a == b;
}

bool is_coupled(const Model& model, const Group& group) {
  return is_on(group, "weight_decay") && decouples(model, group) == false;
}

/// Warns of the Adam beside a Muon, also where a library's files are written anew.
void check_decay_beside_muon(const Model& model, const Dialect& to, DialectReport& report) {
  if (model.algorithm == "muon" && to.decay.decoupled_beside_muon &&
      std::ranges::any_of(model.groups,
                          [&](const Group& group) { return is_coupled(model, group); }))
    report.warn("weight decay is part of the gradient in groups that Adam steps: " +
                std::string(to.name) + " decouples it there, as AdamW does");
}

void check_decay(const Model& model, const AdamDecay& decay, DialectReport& report) {
  if (model.algorithm != "adam") return;
  const auto& told = model.document->manifest->warnings;
  const bool container_warned = std::ranges::find(told, kDecayNotSaved) != told.end();
  for (const Group& group : model.groups) {
    if (!is_on(group, "weight_decay")) continue;
    const auto said = decouples(model, group);
    if (!said && decay.always_decoupled && !container_warned)
      report.warn(
          "the file does not say whether weight decay was decoupled; AdamW is assumed. If it was "
          "Adam, set decoupled_weight_decay=False in the source's groups and convert again");
    if (is_coupled(model, group) && decay.coupled != nullptr)
      report.warn(std::string("weight decay is part of the gradient here: ") + decay.coupled);
  }
}

/// Warns of what FlashOptim's SGD does and does not save.
void check_sgd(const Model& model, DialectReport& report) {
  if (model.dialect != "flashoptim" || model.algorithm != "sgd") return;
  bool nesterov = false, decoupled = false;
  for (const Group& group : model.groups) {
    nesterov |= is_on(group, "momentum") && !has_setting(group, "nesterov");
    decoupled |= is_on(group, "weight_decay") && !has_setting(group, "decoupled");
  }
  if (nesterov)
    report.warn(
        "the file does not say whether momentum was Nesterov's, and it is taken for plain. If it "
        "was, set nesterov=True in the source's groups and convert again");
  if (decoupled)
    report.warn(
        "the file does not say whether weight decay was decoupled; FlashSGD is assumed. If it was "
        "FlashSGDW, set decoupled=True in the source's groups and convert again");
}

/// An error if settings are those of an optimizer whose step none of the target takes. torch's
/// files of it stay what they are.
Status check_rule(const Model& model, const Dialect& to) {
  if (model.dialect == "torch" && model.dialect == to.name) return fine();
  const std::string refusal = refusal_of_rule(model, to.name);
  return refusal.empty() ? fine() : Status(bad(refusal));
}

}  // namespace

std::optional<bool> decouples(const Model& model, const Group& group) {
  const Value* said = setting(group, "decoupled_weight_decay");
  if (said != nullptr && (said->is(Value::Kind::kBool) || said->is(Value::Kind::kInt)))
    return said->integer != 0;
  const Dialect* from = find_dialect(model.dialect);
  if (from != nullptr && from->decay.always_decoupled) return true;
  // AdamW of transformers and of timm.
  for (const char* key : {"correct_bias", "corrected_weight_decay"}) {
    if (setting(group, key) != nullptr) return true;
  }
  return std::nullopt;
}

Status check_settings(const Model& model, const Dialect& to, DialectReport& report) {
  RETURN_IF_ERROR(check_rule(model, to));
  check_decay_beside_muon(model, to, report);
  // A torch that has no such optimizer gets the settings as they are.
  const bool as_they_are = to.name == std::string_view("torch") && torch_lacks_optimizer(model);
  if (model.dialect == to.name || model.algorithm.empty() || as_they_are) return fine();
  const Keys kept = kept_by(to, model.algorithm);
  std::vector<std::string> dropped;
  for (const Group& group : model.groups) {
    for (const OptionalSetting& own : optional_settings()) {
      const Value* said = setting(group, own.key);
      const bool other = *own.algorithm != 0 && own.algorithm != model.algorithm;
      if (said == nullptr || other || kept.contains(own.key)) continue;
      const bool neutral = same(*said, own.neutral) || (*own.alias != 0 && said->text == own.alias);
      if (neutral || (own.of_decay && !is_on(group, "weight_decay"))) continue;
      const std::string what = std::string(own.key) + "=" + value_text(*said);
      if (own.key == std::string_view("maximize"))
        return bad("a group has " + what + ", which " + to.name +
                   " does not have: its next step would go the other way");
      if (std::ranges::find(dropped, what) == dropped.end()) dropped.push_back(what);
    }
  }
  if (!dropped.empty())
    report.warn(
        fmt::format("files of {} do not keep {}: the next steps differ, unless its "
                    "optimizer has that and is built with it",
                    to.name, fmt::join(dropped, ", ")));
  check_decay(model, to.decay, report);
  check_sgd(model, report);
  return fine();
}

}  // namespace lowbit::ckpt
