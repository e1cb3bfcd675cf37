// Steps over the same tensors again and again: what does not change between them is handed over
// once, so that a step hands over parameters and gradients alone. A list of tensors costs about 0.1
// microseconds for each of them to hand over. Parameters are not held between steps, since torch
// swaps only those that nobody in C++ holds (torch.utils.swap_tensors).
#include <memory>
#include <mutex>
#include <unordered_map>

#include "ops.h"

namespace lowbit {
namespace {

struct Prepared {
  std::string rule;
  Tensors state, steps;
  Tensor plan;
  std::vector<int64_t> numel;
  std::vector<torch::headeronly::ScalarType> dtypes;
  Tensors params, grads;  // from step_take to the end of the step
  void let_go() { params.clear(), grads.clear(); }
};

/// Never destroyed: torch may be gone before static objects are.
struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<Prepared>> all;
};
Registry& registry() {
  static auto* kept = new Registry;
  return *kept;
}

std::shared_ptr<Prepared> find(int64_t id) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.all.find(id);
  STD_TORCH_CHECK(found != r.all.end(), "lowbit: no step is prepared as number ", id);
  return found->second;
}

/// Of `step`'s lists those that stay; the step's number.
int64_t step_prepare(std::string rule, Tensors params, Tensors state, Tensors steps, Tensor plan) {
  auto made = std::make_shared<Prepared>();
  for (const Tensor& p : params) {
    made->numel.push_back(p.numel());
    made->dtypes.push_back(p.scalar_type());
  }
  made->rule = std::move(rule), made->state = std::move(state);
  made->steps = std::move(steps), made->plan = std::move(plan);
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.all.emplace(++r.last, std::move(made));
  return r.last;
}

void step_discard(int64_t id) {
  std::shared_ptr<Prepared> last;  // destroyed without the lock: tensors may call anything
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.all.find(id);
  if (found == r.all.end()) return;
  last = std::move(found->second);
  r.all.erase(found);
}

/// Keeps the parameters and gradients of the step to come. False where they are not as they were, and
/// somebody must look again; then nothing is kept.
bool step_take(int64_t id, Tensors params, Tensors grads) {
  const std::shared_ptr<Prepared> p = find(id);
  p->let_go();
  if (params.size() != p->numel.size() || grads.size() != p->numel.size()) return false;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!params[i].is_contiguous() || !grads[i].is_contiguous() ||
        params[i].scalar_type() != p->dtypes[i] || params[i].numel() != p->numel[i] ||
        grads[i].numel() != p->numel[i])
      return false;
  }
  p->params = std::move(params), p->grads = std::move(grads);
  return true;
}

void step_prepared(int64_t id, Tensors scratch, std::vector<double> hyper, MaybeTensor lr,
                   MaybeTensor grad_scale, MaybeTensor found_inf, bool maximize, int64_t seed,
                   int64_t phase, bool last) {
  const std::shared_ptr<Prepared> p = find(id);
  struct Release {  // neither is kept longer than the step, whatever becomes of it
    Prepared& of;
    bool now;
    ~Release() {
      if (now) of.let_go();
    }
  } release{*p, true};
  step({p->rule, p->params, p->grads, p->state, p->steps, scratch, p->plan, std::move(hyper),
        std::move(lr), std::move(grad_scale), std::move(found_inf), maximize, seed, phase});
  release.now = last;
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def(
      "step_prepare(str rule, Tensor[] params, Tensor[] state, Tensor[] steps, Tensor plan) -> "
      "int");
  m.def("step_discard(int id) -> ()");
  m.def("step_take(int id, Tensor[] params, Tensor[] grads) -> bool");
  m.def(
      "step_prepared(int id, Tensor[] scratch, float[] hyper, *, Tensor? lr=None, Tensor? "
      "grad_scale=None, Tensor? found_inf=None, bool maximize=False, int seed=0, int phase=0, bool "
      "last=True) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("step_prepare", TORCH_BOX(&lowbit::step_prepare));
  m.impl("step_discard", TORCH_BOX(&lowbit::step_discard));
  m.impl("step_take", TORCH_BOX(&lowbit::step_take));
  m.impl("step_prepared", TORCH_BOX(&lowbit::step_prepared));
}
