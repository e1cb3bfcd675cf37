// lowbit's optimizers for training programs in C++ on LibTorch: torch::optim::Optimizers whose
// state, weights and files are those of lowbit in Python, bit for bit.
//
//   lowbit::AdamW opt(model->named_parameters(), lowbit::AdamWOptions(1e-3).state_format("8bit"));
//   ...
//   lowbit::save(opt, "opt.pt");  // lowbit-ckpt reads it, and torch.load and load_state_dict do
//
// State is plain CPU tensors, made at construction. Parameters with names have the random bits that
// they have in Python; without names these follow the order of parameters.
#pragma once

#include <ATen/Parallel.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>
#include <torch/serialize.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lowbit/options.h"
#include "lowbit/param_state.h"

namespace lowbit {

namespace detail {

using torch::IValue;
using torch::Tensor;
using Dict = c10::impl::GenericDict;

inline Dict new_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }
inline c10::impl::GenericList new_list() { return c10::impl::GenericList(c10::AnyType::get()); }

inline IValue to_value(const Betas& b) {
  return c10::ivalue::Tuple::create({IValue(std::get<0>(b)), IValue(std::get<1>(b))});
}
template <class T>
IValue to_value(const T& x) {
  return IValue(x);
}

inline double to_double(const IValue& v) {
  if (v.isTensor()) return v.toTensor().item<double>();
  return v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble();
}
inline void read_value(const IValue& v, double& x) { x = to_double(v); }
inline void read_value(const IValue& v, bool& x) { x = v.toBool(); }
inline void read_value(const IValue& v, int64_t& x) { x = v.toInt(); }
inline void read_value(const IValue& v, Betas& x) {
  const std::vector<IValue> pair =
      v.isTuple() ? v.toTuple()->elements().vec() : v.toListRef().vec();
  TORCH_CHECK(pair.size() == 2, "lowbit: betas in the state dict are not two numbers");
  x = {to_double(pair[0]), to_double(pair[1])};
}

inline at::ScalarType dtype_of(const std::string& name) {
  if (name == "uint8") return at::kByte;
  if (name == "int16") return at::kShort;
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  TORCH_CHECK(false, "lowbit: state of dtype ", name, " is not supported in C++");
}
inline std::string name_of(at::ScalarType type) {
  if (type == at::kFloat) return "float32";
  if (type == at::kBFloat16) return "bfloat16";
  if (type == at::kHalf) return "float16";
  return c10::toString(type);
}

/// What torch.save writes: a zip file that holds a pickle and the bytes of its tensors. Not
/// torch::pickle_save, which puts names of TorchScript's types in that only TorchScript knows.
inline std::vector<char> to_bytes(const IValue& value) {
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { pickle.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  std::vector<char> bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    const auto* from = static_cast<const char*>(data);
    bytes.insert(bytes.end(), from, from + size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("byteorder", "little", 6);
  size_t number = 0;
  for (const Tensor& t : pickler.tensorData()) {
    writer.writeRecord("data/" + std::to_string(number++), t.const_data_ptr(),
                       t.storage().nbytes());
  }
  writer.writeEndOfFile();
  return bytes;
}

/// Where in a saved group each of these parameters is: by name where both have names, else as they
/// are. Throws c10::Error where a name is missing or there twice.
inline std::vector<size_t> places(const Dict& group, size_t count,
                                  const std::vector<std::string>& names) {
  std::vector<size_t> all(count);
  std::iota(all.begin(), all.end(), size_t{0});
  if (!group.contains("param_names") || names.size() != count) return all;
  const auto saved = group.at("param_names").toList();
  TORCH_CHECK(saved.size() == count, "lowbit: a group of the state dict has ", saved.size(),
              " param_names for ", count, " parameters");
  std::unordered_map<std::string, size_t> place;
  for (size_t i = 0; i < count; ++i) {
    const std::string name = clean_name(IValue(saved.get(i)).toStringRef());
    TORCH_CHECK(place.emplace(name, i).second, "lowbit: the state dict has two parameters named ",
                name);
  }
  for (size_t i = 0; i < count; ++i) {
    const auto found = place.find(clean_name(names[i]));
    TORCH_CHECK(found != place.end(), "lowbit: the state dict has no parameter named ", names[i],
                "; to load by position, build the optimizer of a list without names");
    all[i] = found->second;
  }
  return all;
}

struct State : torch::optim::OptimizerCloneableParamState<State> {
  State(std::string r, ParamState p, const Tensor& param, uint32_t s)
      : rule(std::move(r)),
        param_state(std::move(p)),
        dtype(param.scalar_type()),
        shape(param.sizes().vec()),
        stream(s) {}
  std::string rule;
  ParamState param_state;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  uint32_t stream;
  int64_t step = 0;
  std::vector<Tensor> tensors;

  std::vector<void*> pointers() const {
    std::vector<void*> all;
    for (const Tensor& t : tensors) all.push_back(t.data_ptr());
    return all;
  }
};

}  // namespace detail

template <class O>
class Optimizer : public torch::optim::Optimizer {
 public:
  using Tensor = torch::Tensor;
  using Group = torch::optim::OptimizerParamGroup;

  /// A group's options are taken as they are; nothing is merged into them from `defaults`.
  explicit Optimizer(const std::vector<Group>& groups, O defaults = {})
      : torch::optim::Optimizer(groups, std::make_unique<O>(defaults)) {
    for (size_t i = 0; i < groups.size(); ++i) {
      if (auto options = options_of(groups[i])) param_groups()[i].set_options(std::move(options));
    }
    init_state();
  }
  explicit Optimizer(std::vector<Tensor> params, O defaults = {})
      : Optimizer(std::vector<Group>{Group(std::move(params))}, std::move(defaults)) {}
  /// `module->named_parameters()`.
  explicit Optimizer(const torch::OrderedDict<std::string, Tensor>& named, O defaults = {})
      : torch::optim::Optimizer(named.values(), std::make_unique<O>(defaults)),
        names_(named.keys()) {
    init_state();
  }

  /// torch's, which gives a group `defaults` in the place of options that torch does not know.
  void add_param_group(const Group& group) {
    auto options = options_of(group);
    torch::optim::Optimizer::add_param_group(group);
    if (options != nullptr) param_groups().back().set_options(std::move(options));
  }

  Tensor step(LossClosure closure = nullptr) override {
    Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode on(true);
      loss = closure();
    }
    const torch::NoGradGuard no_grad;
    init_state();
    each_param([&](O& options, Tensor& p, int64_t) {
      if (!p.grad().defined()) return;
      TORCH_CHECK(p.device().is_cpu(),
                  "lowbit: in C++ parameters are stepped on the CPU, and one is on ", p.device());
      TORCH_CHECK(p.grad().layout() == at::kStrided, "lowbit: gradients must be dense");
      detail::State& s = state_of(p);
      TORCH_CHECK(p.scalar_type() == s.dtype && p.sizes() == s.shape, "lowbit: a parameter was ",
                  s.dtype, " ", at::IntArrayRef(s.shape), " and is now ", p.scalar_type(), " ",
                  p.sizes(), "; make a new optimizer");
      TORCH_CHECK(p.grad().sizes() == p.sizes() && p.grad().device().is_cpu(),
                  "lowbit: a gradient is ", p.grad().sizes(), " on ", p.grad().device(),
                  ", its parameter ", p.sizes(), " on the CPU");
      TORCH_CHECK(s.rule == options.rule(), "lowbit: the options' rule was ", s.rule,
                  " and is now ", options.rule(), ", which has other state; make a new optimizer");
      const Tensor value = p.contiguous(), grad = p.grad().contiguous();
      s.param_state.step(
          {value.data_ptr(), grad.const_data_ptr(), detail::name_of(grad.scalar_type()),
           s.pointers(), options.hyper(), ++s.step, s.stream, options.seed(), options.maximize()},
          [](int64_t n, const std::function<void(int64_t, int64_t)>& part) {
            at::parallel_for(0, n, /*grain=*/64, part);
          });
      if (value.is_same(p))
        p.unsafeGetTensorImpl()->bump_version();  // for a backward pass that saved the old value
      else
        p.copy_(value);
    });
    return loss;
  }

  /// What `state_dict()` gives in Python: {"state": {0: {...}}, "param_groups": [...]}.
  torch::IValue state_dict() const {
    auto& self = const_cast<Optimizer&>(*this);
    self.init_state();  // of groups that were added since
    detail::Dict state = detail::new_dict();
    self.each_param([&](O&, Tensor& p, int64_t index) {
      if (!self.has_state(p)) return;
      const detail::State& s = self.state_of(p);
      detail::Dict entry = detail::new_dict();
      entry.insert("step", torch::tensor(static_cast<float>(s.step)));
      entry.insert("stream", torch::tensor(static_cast<int64_t>(s.stream)));
      if (s.param_state.coded()) entry.insert("shape", torch::tensor(p.sizes(), torch::kInt64));
      for (size_t i = 0; i < s.tensors.size(); ++i)
        entry.insert(s.param_state.tensors()[i].key, s.tensors[i]);
      state.insert(index, entry);
    });
    auto groups = detail::new_list();
    int64_t index = 0;
    for (const Group& group : param_groups()) {
      detail::Dict made = detail::new_dict();
      O options = static_cast<const O&>(group.options());
      options.each(
          [&](const char* name, auto& value) { made.insert(name, detail::to_value(value)); });
      auto params = detail::new_list(), names = detail::new_list();
      for (size_t i = 0; i < group.params().size(); ++i, ++index) {
        params.push_back(index);
        if (static_cast<size_t>(index) < names_.size())
          names.push_back(names_[static_cast<size_t>(index)]);
      }
      made.insert("lowbit_version", int64_t{1});
      made.insert("params", params);
      if (!names.empty() && names.size() == params.size()) made.insert("param_names", names);
      groups.push_back(made);
    }
    detail::Dict all = detail::new_dict();
    all.insert("state", state);
    all.insert("param_groups", groups);
    return all;
  }

  /// Takes what `state_dict()` gave, here or in Python, in the same formats, by names where both
  /// have names; settings are the loaded ones, and the rule follows them. Throws c10::Error with
  /// what does not fit, and has then changed nothing.
  void load_state_dict(const torch::IValue& value) {
    const torch::NoGradGuard no_grad;
    init_state();
    const detail::Dict all = value.toGenericDict();
    const detail::Dict saved = all.at("state").toGenericDict();
    const auto groups = all.at("param_groups").toList();
    TORCH_CHECK(groups.size() == param_groups().size(), "lowbit: the state dict has ",
                groups.size(), " parameter groups, this optimizer ", param_groups().size());
    std::vector<O> settings;
    std::vector<std::pair<Tensor, Tensor>> copies;
    std::vector<std::pair<void*, std::unique_ptr<detail::State>>> made;
    std::vector<std::tuple<detail::State*, int64_t, uint32_t>> counts;
    int64_t index = -1;
    for (size_t g = 0; g < groups.size(); ++g) {
      const detail::Dict group = torch::IValue(groups.get(g)).toGenericDict();
      const auto ids = group.at("params").toList();
      const std::vector<Tensor>& params = param_groups()[g].params();
      TORCH_CHECK(ids.size() == params.size(), "lowbit: group ", g, " of the state dict has ",
                  ids.size(), " parameters, here ", params.size());
      const torch::IValue cautious =
          group.contains("cautious") ? group.at("cautious") : torch::IValue(false);
      TORCH_CHECK(cautious.isNone() || (cautious.isBool() && !cautious.toBool()), "lowbit: group ",
                  g, " of the state dict has cautious=", cautious, ", which C++ does not step");
      settings.push_back(static_cast<const O&>(param_groups()[g].options()));
      settings.back().each([&](const char* name, auto& x) {
        if (group.contains(name)) detail::read_value(group.at(name), x);
      });
      const std::vector<size_t> places =
          detail::places(group, ids.size(), names_of(index + 1, ids.size()));
      for (size_t i = 0; i < ids.size(); ++i) {
        const Tensor& p = params[i];
        ++index;
        const int64_t id = torch::IValue(ids.get(places[i])).toInt();
        if (!p.requires_grad() && !saved.contains(id)) continue;
        TORCH_CHECK(saved.contains(id), "lowbit: the state dict has no state of parameter ", index);
        const detail::Dict entry = saved.at(id).toGenericDict();
        detail::State* s = has_state(p) ? &state_of(p) : nullptr;
        // Of a frozen parameter, or of another rule: a momentum has state of its own.
        if (s == nullptr || s->rule != settings.back().rule()) {
          made.emplace_back(p.unsafeGetTensorImpl(), new_state(settings.back(), p, index));
          s = made.back().second.get();
        }
        const auto found = [&](const std::string& key) {
          TORCH_CHECK(
              entry.contains(key), "lowbit: state of parameter ", index, " has no '", key,
              "': it is of another format; convert it by lowbit-ckpt, or load it in Python");
          return entry.at(key).toTensor();
        };
        for (size_t k = 0; k < s->tensors.size(); ++k) {
          const std::string& key = s->param_state.tensors()[k].key;
          const Tensor t = found(key);
          TORCH_CHECK(
              t.scalar_type() == s->tensors[k].scalar_type() && t.sizes() == s->tensors[k].sizes(),
              "lowbit: '", key, "' of parameter ", index, " is ", t.scalar_type(), " ", t.sizes(),
              ", expected ", s->tensors[k].scalar_type(), " ", s->tensors[k].sizes());
          copies.emplace_back(s->tensors[k], t);
        }
        for (const auto& each : entry) {  // the weight is right with its compensation alone
          const std::string key = each.key().toStringRef();
          const std::string moment = s->param_state.foreign_moment(key);
          TORCH_CHECK(moment.empty(), "lowbit: state of parameter ", index, " keeps ", moment,
                      ", which the rule here, ", s->rule,
                      ", does not: build the optimizer that it was saved with");
          bool kept = key.rfind("param_", 0) != 0;
          for (const StateTensor& t : s->param_state.tensors()) kept = kept || t.key == key;
          TORCH_CHECK(kept, "lowbit: state of parameter ", index, " has '", key,
                      "', which this param_format does not keep; build the optimizer with the one "
                      "of the file");
        }
        counts.emplace_back(s, static_cast<int64_t>(found("step").template item<double>()),
                            static_cast<uint32_t>(found("stream").template item<int64_t>()));
      }
    }
    for (auto& [to, from] : copies) to.copy_(from);
    for (auto& [s, step, stream] : counts) s->step = step, s->stream = stream;
    for (auto& [key, s] : made) state_[key] = std::move(s);
    for (size_t g = 0; g < groups.size(); ++g)
      static_cast<O&>(param_groups()[g].options()) = settings[g];
  }

  /// For torch::save and torch::load: the same bytes as lowbit::save, as one tensor of the archive.
  void save(torch::serialize::OutputArchive& archive) const override {
    std::vector<char> bytes = detail::to_bytes(state_dict());
    const auto size = static_cast<int64_t>(bytes.size());
    archive.write("lowbit", torch::from_blob(bytes.data(), {size}, torch::kByte).clone());
  }
  void load(torch::serialize::InputArchive& archive) override {
    Tensor t;
    archive.read("lowbit", t);
    const auto* bytes = reinterpret_cast<const char*>(t.const_data_ptr());
    load_state_dict(torch::pickle_load(std::vector<char>(bytes, bytes + t.numel())));
  }

 private:
  /// A copy of a group's options; null where it has none.
  static std::unique_ptr<O> options_of(const Group& group) {
    if (!group.has_options()) return nullptr;
    const auto* const options = dynamic_cast<const O*>(&group.options());
    TORCH_CHECK(options != nullptr,
                "lowbit: a parameter group has options of another optimizer, such as torch's "
                "AdamWOptions; lowbit's have the same names in the namespace lowbit");
    options->check();
    return std::make_unique<O>(*options);
  }
  /// fn(options, parameter, its number), over all groups.
  template <class Fn>
  void each_param(const Fn& fn) {
    int64_t index = 0;
    for (Group& group : param_groups()) {
      for (Tensor& p : group.params()) fn(static_cast<O&>(group.options()), p, index++);
    }
  }
  /// The names of `count` parameters from number `first` on; empty where they have none.
  std::vector<std::string> names_of(int64_t first, size_t count) const {
    const auto begin = static_cast<size_t>(first);
    if (begin + count > names_.size()) return {};
    const auto at = names_.begin() + static_cast<std::ptrdiff_t>(begin);
    return {at, at + static_cast<std::ptrdiff_t>(count)};
  }
  bool has_state(const Tensor& p) const {
    return state_.find(p.unsafeGetTensorImpl()) != state_.end();
  }
  detail::State& state_of(const Tensor& p) {
    return static_cast<detail::State&>(*state_.at(p.unsafeGetTensorImpl()));
  }
  std::unique_ptr<detail::State> new_state(const O& options, const Tensor& p, int64_t index) const {
    const auto number = static_cast<size_t>(index);
    const std::string rule = options.rule();
    auto s = std::make_unique<detail::State>(
        rule, ParamState(rule, p.sizes().vec(), detail::name_of(p.scalar_type()), options.keep()),
        p, number < names_.size() ? stream_of(names_[number]) : static_cast<uint32_t>(index));
    for (const StateTensor& t : s->param_state.tensors())
      s->tensors.push_back(torch::zeros(t.shape, detail::dtype_of(t.dtype)));
    s->param_state.fresh(s->pointers());
    return s;
  }
  void init_state() {
    each_param([&](O& options, Tensor& p, int64_t index) {
      void* key = p.unsafeGetTensorImpl();
      if (has_state(p) || !(p.requires_grad() || p.grad().defined())) return;
      options.check();
      state_[key] = new_state(options, p, index);
    });
  }

  std::vector<std::string> names_;
};

using AdamW = Optimizer<AdamWOptions>;
using SGD = Optimizer<SGDOptions>;
using Lion = Optimizer<LionOptions>;

/// Writes the optimizer's state dict as torch.save does in Python; the file appears whole or not at
/// all.
template <class O>
void save(const Optimizer<O>& opt, const std::string& path) {
  const std::vector<char> bytes = detail::to_bytes(opt.state_dict());
  write_whole(path, bytes.data(), bytes.size());
}

/// Loads what lowbit::save wrote, or torch.save of an optimizer's state dict in Python.
template <class O>
void load(Optimizer<O>& opt, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "lowbit: cannot read ", path);
  opt.load_state_dict(torch::pickle_load(
      std::vector<char>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>())));
}

}  // namespace lowbit
