// Writing Muon's state for other libraries.
#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/muon/muon.h"
#include "dialect/numbers/floats.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Value real(double x) { return Value::floating(x); }

class Writer {
 public:
  Writer(MuonKind kind, const Model& model, const Wanted& wanted, DialectReport& report)
      : kind_(kind), names_(names_of(kind)), model_(model), wanted_(wanted), report_(report) {}

  Result<Document> write() {
    if ((!wanted_.state_format.empty() && wanted_.state_format != "float32") || wanted_.block != 0)
      return usage(std::string(names_.whose) +
                   " keeps state in float32 without blocks; leave --state-format "
                   "and --block out");
    if (model_.algorithm != "muon") return no_optimizer(model_, names_.whose);
    Document out = begun(model_);
    out.leaves = model_.rest;
    const std::vector<const Group*> groups = groups_by_param(model_);
    for (size_t i = 0; i < model_.params.size(); ++i)
      RETURN_IF_ERROR(param(model_.params[i], *groups[i], out.leaves));
    Model grouped = model_;
    if (kind_ == MuonKind::kMoonlight) RETURN_IF_ERROR(join(grouped));
    const auto settings = [&](const Group& group) -> Result<Settings> {
      return settings_of_group(group);
    };
    RETURN_IF_ERROR(add_groups(grouped, settings, out.leaves));
    return out;
  }

 private:
  static bool is_muon(const Group& group) {
    const Value* said = setting(group, "use_muon");
    return said == nullptr || said->is_on();
  }

  Status param(const Param& p, const Group& group, std::vector<Leaf>& leaves) {
    const bool muon = is_muon(group);
    const auto at = [&](const std::string& name) { return state_path(model_, p, name); };
    if (kind_ == MuonKind::kMoonlight)
      leaves.push_back(value_leaf(at("use_muon"), Value::boolean(muon)));
    const Value* step = number_in(p, "step");
    if (step != nullptr && !muon && kind_ != MuonKind::kDion) {
      ASSIGN_OR_RETURN(count, whole_of(*step, shown(p) + ": step"));
      leaves.push_back(value_leaf(at("step"), Value::number(count)));
    }
    for (const State& s : p.states) {
      const char* name = s.name == "momentum_buffer" ? names_.momentum
                         : s.name == "exp_avg"       ? names_.first
                         : s.name == "exp_avg_sq"    ? names_.second
                                                     : nullptr;
      if (name == nullptr || (s.name == "momentum_buffer") != muon) {
        RETURN_IF_ERROR(leave_out(p, s, names_.whose, wanted_, report_));
        continue;
      }
      if (s.values == nullptr) return lost_values(p, s);
      if (!p.known_shape) return no_shape(p);
      if (muon && names_.sum) {
        ASSIGN_OR_RETURN(mu, momentum_of(group));
        leaves.push_back(tensor_leaf(at(name), find_dtype("float32"), s.shape,
                                     float32_source(scaled_floats(s.values, 1.0 / (1.0 - mu)))));
        report_of(report_, p, s, "float32, a sum of gradients", true);
      } else {
        leaves.push_back(float32_leaf(at(name), s, s.shape));
        report_of(report_, p, s, "float32", true);
      }
    }
    return fine();
  }

  Result<double> momentum_of(const Group& group) const {
    const double mu = real_setting(group, "momentum").value_or(0.95);
    if (!(mu >= 0.0 && mu < 1.0))
      return bad("a group's momentum is not in [0, 1), so no sum of gradients can be made of it");
    return mu;
  }

  Result<Settings> settings_of_group(const Group& group) {
    const bool muon = is_muon(group);
    const auto said = [&](const char* name, Value otherwise) {
      const Value* value = setting(group, name);
      return value == nullptr ? std::move(otherwise) : *value;
    };
    const Value decay = said("weight_decay", real(muon ? 0.1 : 0.01)), lr = said("lr", real(1e-3));
    const Value betas = said("betas", Value::tuple({real(0.9), real(0.95)}));
    const Value momentum = said("momentum", real(0.95)),
                nesterov = said("nesterov", Value::boolean(true));
    const Value steps = said("ns_steps", Value::number(5));
    Settings out = {{"lr", lr}};
    if (kind_ == MuonKind::kKeller) {
      if (muon) {
        out.insert(out.end(), {{"momentum", momentum}});
        if (nesterov.integer == 0 || (steps.integer != 5) || rms(group))
          warn(
              "it always steps with Nesterov's momentum, five Newton-Schulz steps and the factor "
              "sqrt(max(1, rows / columns)): other settings are left out");
      } else {
        out.insert(out.end(), {{"betas", betas}, {"eps", said("eps", real(1e-10))}});
      }
      out.insert(out.end(), {{"weight_decay", decay}, {"use_muon", Value::boolean(muon)}});
    } else if (kind_ == MuonKind::kMoonlight) {
      out.insert(out.end(), {{"wd", decay},
                             {"momentum", momentum},
                             {"nesterov", nesterov},
                             {"ns_steps", steps},
                             {"adamw_betas", betas},
                             {"adamw_eps", said("adamw_eps", real(1e-8))}});
      if (!rms(group))
        warn("it always has the factor 0.2 sqrt(max(rows, columns)): adjust lr where that differs");
    } else {
      ASSIGN_OR_RETURN(step, steps_of(group));
      if (muon && !rms(group))
        warn(
            "adjust_lr becomes 'spectral_norm', sqrt(rows / columns) also below 1: adjust lr where "
            "that differs");
      if (muon && steps.integer != 5)
        warn("it always takes five Newton-Schulz steps: ns_steps is left out");
      out.insert(out.end(),
                 {{"mu", momentum},
                  {"beta1", betas.items.empty() ? real(0.9) : betas.items[0]},
                  {"beta2", betas.items.size() < 2 ? real(0.95) : betas.items[1]},
                  {"weight_decay", decay},
                  {"algorithm", Value::words(muon ? "muon" : "adamw")},
                  {"step", Value::number(step)},
                  {"epsilon", muon ? real(1e-8) : said("eps", real(1e-8))},
                  {"nesterov", muon ? nesterov : Value::boolean(false)},
                  {"flatten", said("flatten", Value::boolean(false))},
                  {"adjust_lr", Value::words(rms(group) ? "rms_norm" : "spectral_norm")}});
      // Older ones have none.
      const Value* cautious = setting(group, "cautious_weight_decay");
      if (cautious != nullptr && (cautious->is_on() || model_.dialect == names_.dialect))
        out.emplace_back("cautious_wd", *cautious);
    }
    for (const char* name : {"initial_lr", "param_names"}) {
      if (const Value* value = setting(group, name)) set_in(out, name, *value);
    }
    for (const auto& [name, value] : group.settings) {  // the user's own
      if (!is_setting(name) && !is_of_muon(name)) set_in(out, name, value);
    }
    return out;
  }

  static bool rms(const Group& group) {
    const Value* said = setting(group, "adjust_lr_fn");
    return said != nullptr && said->is(Value::Kind::kText) && said->text == "match_rms_adamw";
  }

  /// The steps of a group for Dion. Muon does not step by them, and matrices without a gradient
  /// count fewer: the most that one of them has.
  Result<int64_t> steps_of(const Group& group) const {
    if (!is_muon(group)) {
      ASSIGN_OR_RETURN(step, step_of_group(model_, group, names_.whose));
      return step.value_or(0);
    }
    int64_t most = 0;
    for (const size_t i : group.params) {
      const Value* step = number_in(model_.params[i], "step");
      const auto count = step == nullptr ? Result<int64_t>(0) : whole_of(*step, "step");
      if (count.ok()) most = std::max(most, count.value());
    }
    return most;
  }

  /// Moonlight's Muon has one group: matrices first, then what AdamW steps.
  Status join(Model& model) {
    Group all;
    const Group* first[] = {nullptr, nullptr};  // of those that AdamW steps, that Muon steps
    Value names = Value::list({});
    const Value *betas = nullptr, *eps = nullptr;
    const std::vector<const char*> kinds[] = {{"betas", "eps", "adamw_eps"},
                                              {"momentum", "nesterov", "ns_steps"}};
    const auto differ = [&](const char* name) {
      return bad(std::string(names_.whose) + " has one group, and those here differ in " + name +
                 "; --to muon keeps them apart");
    };
    for (const bool muon : {true, false}) {
      for (const Group& group : model_.groups) {
        if (is_muon(group) != muon) continue;
        for (const char* name : {"lr", "weight_decay"}) {
          const Value *own = setting(group, name), *of_all = setting(all, name);
          if (!all.params.empty() && own != nullptr && of_all != nullptr && *own != *of_all)
            return differ(name);
        }
        const Group& of_kind = *(first[muon] = first[muon] == nullptr ? &group : first[muon]);
        for (const char* name : kinds[muon]) {
          const Value *own = setting(group, name), *other = setting(of_kind, name);
          if ((own == nullptr) != (other == nullptr) || (own != nullptr && *own != *other))
            return differ(name);
        }
        if (muon && rms(group) != rms(of_kind)) return differ("adjust_lr_fn");
        if (all.params.empty()) all.settings = group.settings;
        if (!muon && betas == nullptr) betas = setting(group, "betas"), eps = setting(group, "eps");
        all.params.insert(all.params.end(), group.params.begin(), group.params.end());
        if (const Value* some = setting(group, "param_names"))
          names.items.insert(names.items.end(), some->items.begin(), some->items.end());
      }
    }
    if (betas != nullptr) set_in(all.settings, "betas", *betas);
    if (eps != nullptr) set_in(all.settings, "adamw_eps", *eps);
    take_from(all.settings, "param_names");
    if (names.items.size() == all.params.size()) set_in(all.settings, "param_names", names);
    model.groups = {std::move(all)};
    return fine();
  }

  void warn(const std::string& text) { report_.warn(std::string(names_.whose) + ": " + text); }

  const MuonKind kind_;
  const MuonNames& names_;
  const Model& model_;
  const Wanted& wanted_;
  DialectReport& report_;
};

}  // namespace

Result<Document> write_muon(MuonKind kind, const Model& model, const Wanted& wanted,
                            DialectReport& report) {
  return Writer(kind, model, wanted, report).write();
}

}  // namespace lowbit::ckpt
