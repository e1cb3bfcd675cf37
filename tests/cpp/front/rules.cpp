// For tests/repo/test_cpp_front.py: steps a rule of the C++ front end with recorded gradients, and
// uses torch::save and torch::load halfway.
//
//   rules RULE SAVED ARCHIVE RECORD
//
// writes the state with lowbit::save to SAVED and with torch::save to ARCHIVE, and weights and
// gradients to RECORD.
//
//   rules load|lion|frozen FROM TO
//   rules given|added|"added with options" SAVED
//
// writes what an AdamW, a Lion or an AdamW of frozen parameters loaded from a file; or an AdamW of
// two groups, the first of which has options, or to which a group was added.
//
//   rules misuse dtype|shape|grad|backward|lr|betas|torch|nesterov
//
// steps a parameter of another dtype or shape than it had, or with another shape's gradient; or
// between a forward and its backward pass; or makes an optimizer of such options, or adds a group.
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstdio>
#include <string>

#include "lowbit/optim.h"

namespace {

using Named = torch::OrderedDict<std::string, torch::Tensor>;

torch::IValue copies(const Named& params, const bool grads) {
  auto all = lowbit::detail::new_dict();
  for (const auto& p : params)
    all.insert(p.key(), (grads ? p.value().grad() : p.value().detach()).clone());
  return all;
}

Named made() {
  torch::manual_seed(0);
  Named params;
  const auto add = [&](const char* name, const std::vector<int64_t>& shape, at::ScalarType type) {
    params.insert(name, torch::randn(shape).to(type).requires_grad_());
  };
  add("matrix", {70, 300}, at::kBFloat16);
  add("wide", {64, 77}, at::kFloat);
  add("cube", {9, 40, 20}, at::kHalf);
  add("vector", {300}, at::kBFloat16);
  return params;
}

template <class Optimizer>
int load(const char* from, const char* to, bool trained = true) {
  Named params = made();
  for (auto& p : params) p.value().requires_grad_(trained);
  Optimizer opt(params);
  lowbit::load(opt, from);
  lowbit::save(opt, to);
  return 0;
}

int groups(const std::string& way, const char* saved) {
  using Group = torch::optim::OptimizerParamGroup;
  const auto options = [](double lr) {
    return std::make_unique<lowbit::AdamWOptions>(lowbit::AdamWOptions(lr).weight_decay(0.0));
  };
  const std::vector<torch::Tensor> more = {torch::randn({80, 64}).requires_grad_(),
                                           torch::randn({5}).requires_grad_()};
  if (way == "given") {
    const std::vector<Group> all = {Group(made().values(), options(0.5)), Group(more)};
    const lowbit::AdamW opt(all, lowbit::AdamWOptions(0.25));
    lowbit::save(opt, saved);
  } else {
    lowbit::AdamW opt(made(), lowbit::AdamWOptions(0.25));
    opt.add_param_group(way == "added" ? Group(more) : Group(more, options(0.5)));
    lowbit::save(opt, saved);
  }
  return 0;
}

int misuse(const std::string& kind) {
  Named params = made();
  if (kind == "lr") lowbit::AdamW(params, lowbit::AdamWOptions(-1.0));
  if (kind == "betas") lowbit::Lion(params, lowbit::LionOptions(1e-4).betas({0.9, 1.0}));
  lowbit::SGD opt(params, lowbit::SGDOptions(1e-2));
  if (kind == "torch")
    opt.add_param_group(
        {{torch::randn({5}).requires_grad_()}, std::make_unique<torch::optim::SGDOptions>(1e-2)});
  if (kind == "nesterov")
    opt.add_param_group(
        {{torch::randn({5}).requires_grad_()},
         std::make_unique<lowbit::SGDOptions>(lowbit::SGDOptions(1e-2).nesterov(true))});
  torch::Tensor& p = params["wide"];
  if (kind == "dtype") p.set_data(p.detach().to(at::kBFloat16));
  if (kind == "shape") p.set_data(torch::zeros({64, 7}));
  const torch::Tensor loss = p.mul(p).sum();
  p.mutable_grad() = kind == "grad" ? torch::ones({7}) : torch::ones_like(p);
  opt.step();
  loss.backward();
  return 0;
}

template <class Optimizer, class Options>
int run(const Options& options, char** paths) {
  Named params = made();
  auto record = lowbit::detail::new_dict();
  auto grads = lowbit::detail::new_list();
  record.insert("before", copies(params, false));
  auto opt = std::make_unique<Optimizer>(params, options);
  for (int step = 0; step < 8; ++step) {
    if (step == 4) {
      torch::save(*opt, paths[1]);
      opt = std::make_unique<Optimizer>(params, Options(123.0));  // settings are loaded too
      torch::load(*opt, paths[1]);
    }
    for (auto& p : params)
      p.value().mutable_grad() = torch::randn_like(p.value()).mul_(step == 2 ? 100 : 1);
    grads.push_back(copies(params, true));
    opt->step();
  }
  torch::save(*opt, paths[1]);
  lowbit::save(*opt, paths[0]);
  record.insert("grads", grads);
  record.insert("after", copies(params, false));
  const auto bytes = lowbit::detail::to_bytes(record);
  lowbit::write_whole(paths[2], bytes.data(), bytes.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 4 ? argv[1] : "";
  if (what == "load") return load<lowbit::AdamW>(argv[2], argv[3]);
  if (what == "lion") return load<lowbit::Lion>(argv[2], argv[3]);
  if (what == "frozen") return load<lowbit::AdamW>(argv[2], argv[3], false);
  if (argc == 3 && std::string(argv[1]) == "misuse") return misuse(argv[2]);
  if (argc == 3) return groups(argv[1], argv[2]);
  if (argc != 5) return std::fprintf(stderr, "rules RULE SAVED ARCHIVE RECORD\n"), 2;
  const std::string rule = argv[1];
  using lowbit::AdamWOptions, lowbit::LionOptions, lowbit::SGDOptions;
  char** paths = argv + 2;
  if (rule == "AdamW")
    return run<lowbit::AdamW>(AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true).seed(7), paths);
  if (rule == "Adam")
    return run<lowbit::AdamW>(
        AdamWOptions(1e-2).weight_decay(0.1).decoupled_weight_decay(false).seed(7), paths);
  if (rule == "SGD, decoupled")
    return run<lowbit::SGD>(
        SGDOptions(1e-2).momentum(0.9).weight_decay(0.1).decoupled(true).seed(7), paths);
  if (rule == "SGD, dampened first")
    return run<lowbit::SGD>(
        SGDOptions(1e-2).momentum(0.9).dampening(0.5).dampen_first(true).seed(7), paths);
  if (rule == "SGD")
    return run<lowbit::SGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true).weight_decay(0.1).seed(7),
                            paths);
  if (rule == "SGD, plain") return run<lowbit::SGD>(SGDOptions(1e-2).seed(7), paths);
  if (rule == "Lion")
    return run<lowbit::Lion>(LionOptions(1e-3).weight_decay(0.1).maximize(true).seed(7), paths);
  return std::fprintf(stderr, "no rule %s\n", argv[1]), 2;
}
