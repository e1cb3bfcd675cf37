// The operator `step` and the workspace it asks for, on the processor where the parameters are.
#include <string>
#include <utility>
#include <vector>

#include "ops_step.h"

namespace lowbit {

using torch::headeronly::ScalarType;

double number(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1, "lowbit::step: ", what,
                  " must be a CPU tensor of one element here");
  if (t.scalar_type() == ScalarType::Double) return *t.const_data_ptr<double>();
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "lowbit::step: ", what,
                  " must be float32 or float64");
  return *t.const_data_ptr<float>();
}

void step(StepArgs args) {
  if (args.params.empty()) {
    checked_rule(args.rule, args.hyper);
  } else if (args.params[0].is_cuda()) {
    step_cuda(std::move(args));
  } else {
    step_cpu(std::move(args));
  }
}

namespace {

void step_boxed(std::string rule, Tensors params, Tensors grads, Tensors state, Tensors steps,
                Tensors scratch, Tensor plan, std::vector<double> hyper, MaybeTensor lr,
                MaybeTensor grad_scale, MaybeTensor found_inf, bool maximize, int64_t seed,
                int64_t phase) {
  step({rule, params, grads, state, steps, scratch, plan, hyper, lr, grad_scale, found_inf,
        maximize, seed, phase});
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def(
      "step(str rule, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor(c!)[] steps, "
      "Tensor(d!)[] scratch, Tensor plan, float[] hyper, *, "
      "Tensor? lr=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool maximize=False, int "
      "seed=0, int phase=0) -> ()");
  m.def("scratch_sizes(str rule, Tensor plan) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) { m.impl("step", TORCH_BOX(&lowbit::step_boxed)); }

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) { m.impl("step", TORCH_BOX(&lowbit::step_boxed)); }

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("scratch_sizes", TORCH_BOX(&lowbit::scratch_sizes));
}
