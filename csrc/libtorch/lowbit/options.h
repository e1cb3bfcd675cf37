// The options of the optimizers of lowbit/optim.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "lowbit/param_state.h"

namespace lowbit {

using Betas = std::tuple<double, double>;

namespace detail {

/// In torch's words.
inline void check_least(const char* what, double x) {
  TORCH_CHECK(x >= 0, "Invalid ", what, ": ", x);
}
inline void check_betas(const Betas& b) {
  const double betas[] = {std::get<0>(b), std::get<1>(b)};
  for (int i = 0; i < 2; ++i)
    TORCH_CHECK(betas[i] >= 0 && betas[i] < 1, "Invalid beta parameter at index ", i, ": ",
                betas[i]);
}

}  // namespace detail

// What every optimizer's options have; see lowbit::StateOptions.
#define LOWBIT_OPTIONS(Name)                          \
 public:                                              \
  Name(double lr) : lr_(lr) {}                        \
  double get_lr() const override { return lr_; }      \
  void set_lr(const double lr) override { lr_ = lr; } \
  TORCH_ARG(bool, maximize) = false;                  \
  TORCH_ARG(std::string, state_format) = "8bit";      \
  TORCH_ARG(std::string, param_format) = "auto";      \
  TORCH_ARG(bool, full_precision) = false;            \
  TORCH_ARG(int64_t, seed) = 0;                       \
                                                      \
 public:                                              \
  StateOptions keep() const { return {state_format_, param_format_, full_precision_}; }

struct AdamWOptions : torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, decoupled_weight_decay) = true;  // false: Adam
  LOWBIT_OPTIONS(AdamWOptions)
  AdamWOptions() = default;

  std::string rule() const {
    return std::string(decoupled_weight_decay_ ? "adamw" : "adam") + (amsgrad_ ? "_amsgrad" : "");
  }
  std::vector<double> hyper() const {
    return {lr_, std::get<0>(betas_), std::get<1>(betas_), eps_, weight_decay_};
  }
  void check() const {
    detail::check_least("learning rate", lr_), detail::check_betas(betas_);
    detail::check_least("epsilon value", eps_);
    detail::check_least("weight_decay value", weight_decay_);
  }
  template <class Fn>
  void each(const Fn& fn) {
    fn("lr", lr_), fn("betas", betas_), fn("eps", eps_), fn("weight_decay", weight_decay_);
    fn("amsgrad", amsgrad_), fn("decoupled_weight_decay", decoupled_weight_decay_);
    fn("maximize", maximize_), fn("seed", seed_);
  }
};

struct SGDOptions : torch::optim::OptimizerCloneableOptions<SGDOptions> {
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(double, dampening) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, decoupled) = false;     // weight decay of the weights: SGDW
  TORCH_ARG(bool, dampen_first) = false;  // dampening in the first step too
  LOWBIT_OPTIONS(SGDOptions)
  SGDOptions() = default;

  std::string rule() const { return momentum_ != 0 ? "sgd_momentum" : "sgd"; }
  std::vector<double> hyper() const {
    return {lr_,
            momentum_,
            dampening_,
            nesterov_ ? 1.0 : 0.0,
            weight_decay_,
            decoupled_ ? 1.0 : 0.0,
            dampen_first_ ? 1.0 : 0.0};
  }
  void check() const {
    detail::check_least("learning rate", lr_), detail::check_least("momentum value", momentum_);
    detail::check_least("weight_decay value", weight_decay_);
    TORCH_CHECK(!nesterov_ || (momentum_ > 0 && dampening_ == 0),
                "Nesterov momentum requires a momentum and zero dampening");
  }
  template <class Fn>
  void each(const Fn& fn) {
    fn("lr", lr_), fn("momentum", momentum_), fn("dampening", dampening_);
    fn("weight_decay", weight_decay_), fn("nesterov", nesterov_);
    fn("decoupled", decoupled_), fn("dampen_first", dampen_first_);
    fn("maximize", maximize_), fn("seed", seed_);
  }
};

struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  TORCH_ARG(double, lr) = 1e-4;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.99);
  TORCH_ARG(double, weight_decay) = 0;
  LOWBIT_OPTIONS(LionOptions)
  LionOptions() = default;

  std::string rule() const { return "lion"; }
  std::vector<double> hyper() const {
    return {lr_, std::get<0>(betas_), std::get<1>(betas_), weight_decay_};
  }
  void check() const {
    detail::check_least("learning rate", lr_), detail::check_betas(betas_);
    detail::check_least("weight_decay value", weight_decay_);
  }
  template <class Fn>
  void each(const Fn& fn) {
    fn("lr", lr_), fn("betas", betas_), fn("weight_decay", weight_decay_);
    fn("maximize", maximize_), fn("seed", seed_);
  }
};
#undef LOWBIT_OPTIONS

}  // namespace lowbit
