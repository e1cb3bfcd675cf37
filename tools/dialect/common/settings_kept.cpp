#include "dialect/common/settings_kept.h"

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

/// Those of them that a dialect has, by algorithm.
const std::map<std::string, std::map<std::string, Keys>>& other_dialects() {
  static const std::map<std::string, std::map<std::string, Keys>> all = {
      {"torchao", {{"adam", {"amsgrad"}}}},
      {"flashoptim", {{"sgd", {"dampening"}}}},
      {"lpmm", {{"sgd", {"dampening", "nesterov"}}}},
      {"adafactor8bit",
       {{"adam", {"maximize"}},
        {"came", {"maximize"}},
        {"adafactor",
         {"maximize", "beta1", "beta2", "relative_step", "scale_parameter", "decay_by", "factored",
          "fira_margin", "scale_weight_decay"}}}}};
  return all;
}

Keys keys_of(const Settings& settings) {
  Keys out;
  for (const auto& [key, value] : settings) out.insert(key);
  return out;
}

Keys kept_by(const std::string& dialect, const std::string& algorithm) {
  if (dialect == "torch") return keys_of(torch_settings(algorithm));
  if (dialect == "lowbit") {
    Keys out = keys_of(lowbit_settings(algorithm));
    out.insert("scale_weight_decay");  // as decay_by
    return out;
  }
  const auto of = other_dialects().find(dialect);
  if (of == other_dialects().end()) return {};
  const auto keys = of->second.find(algorithm);
  return keys == of->second.end() ? Keys() : keys->second;
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
    return std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), same);
  return a == b;
}

/// Weight decay of Adam in a dialect.
struct Decay {
  const char* dialect;
  const char* coupled;    // what to know where it was part of the gradient; null: it is kept
  bool always_decoupled;  // decoupled whatever a class or an argument says
};
constexpr Decay kDecays[] = {
    {"lowbit", nullptr, true},
    {"torchao", "continue with torchao's Adam, not its AdamW", false},
    {"fusedadam", "continue with FusedAdam(adam_w_mode=False)", false},
    {"flashoptim", "continue with FlashAdam, not FlashAdamW", false},
    {"bitsandbytes", "bitsandbytes decouples it in Adam as in AdamW", true},
    {"lpmm", "lpmm's AdamW decouples it", true},
    {"adafactor8bit", "adafactor-8bit decouples it", true},
};

/// Dialects of a Muon whose other parameters Adam steps: each decouples its decay.
constexpr std::string_view kMuons[] = {"lowbit", "muon", "moonlight", "dion"};

/// Adds a warning, once.
void warn(DialectReport& report, std::string text) {
  auto& all = report.warnings;
  if (std::find(all.begin(), all.end(), text) == all.end()) all.push_back(std::move(text));
}

bool is_coupled(const Model& model, const Group& group) {
  return is_on(group, "weight_decay") && decouples(model, group) == false;
}

/// Warns of the Adam beside a Muon, also where a library's files are written anew.
void check_decay_beside_muon(const Model& model, std::string_view to, DialectReport& report) {
  if (model.algorithm == "muon" && std::count(std::begin(kMuons), std::end(kMuons), to) != 0 &&
      std::any_of(model.groups.begin(), model.groups.end(),
                  [&](const Group& group) { return is_coupled(model, group); }))
    warn(report, "weight decay is part of the gradient in groups that Adam steps: " +
                     std::string(to) + " decouples it there, as AdamW does");
}

void check_decay(const Model& model, std::string_view to, DialectReport& report) {
  const auto* const decay = std::find_if(std::begin(kDecays), std::end(kDecays),
                                         [&](const Decay& d) { return d.dialect == to; });
  if (decay == std::end(kDecays) || model.algorithm != "adam") return;
  const auto& told = model.document->manifest->warnings;
  const bool container_warned = std::find(told.begin(), told.end(), kDecayNotSaved) != told.end();
  for (const Group& group : model.groups) {
    if (!is_on(group, "weight_decay")) continue;
    const auto said = decouples(model, group);
    if (!said && decay->always_decoupled && !container_warned)
      warn(report,
           "the file does not say whether weight decay was decoupled; AdamW is assumed. If it was "
           "Adam, set decoupled_weight_decay=False in the source's groups and convert again");
    if (is_coupled(model, group) && decay->coupled != nullptr)
      warn(report, std::string("weight decay is part of the gradient here: ") + decay->coupled);
  }
}

/// An error if settings are those of an optimizer whose step none of the target takes. torch's
/// files of it stay what they are.
Status check_rule(const Model& model, const Dialect& to) {
  if (model.dialect == "torch" && model.dialect == to.name) return fine();
  const std::string refusal = refusal_of_rule(model, to.name);
  return refusal.empty() ? fine() : Status(bad(refusal));
}

}  // namespace

Status check_settings(const Model& model, const Dialect& to, DialectReport& report) {
  RETURN_IF_ERROR(check_rule(model, to));
  check_decay_beside_muon(model, to.name, report);
  // A torch that has no such optimizer gets the settings as they are.
  const bool as_they_are = to.name == std::string_view("torch") && torch_lacks_optimizer(model);
  if (model.dialect == to.name || model.algorithm.empty() || as_they_are) return fine();
  const Keys kept = kept_by(to.name, model.algorithm);
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
      if (std::find(dropped.begin(), dropped.end(), what) == dropped.end()) dropped.push_back(what);
    }
  }
  std::string all;
  for (const std::string& what : dropped) all += (all.empty() ? "" : ", ") + what;
  if (!all.empty())
    warn(report, std::string("files of ") + to.name + " do not keep " + all +
                     ": the next steps differ, unless its optimizer has that and is built with it");
  check_decay(model, to.name, report);
  return fine();
}

}  // namespace lowbit::ckpt
