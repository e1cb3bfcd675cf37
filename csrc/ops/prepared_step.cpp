// Steps over the same tensors again and again: the plan is made into jobs once, and a step hands
// over parameters and gradients alone, or a table of where they are (core/pair.h): a list of
// tensors costs about 0.1 microseconds for each of them to hand over. Parameters are not referenced
// between steps, since torch swaps only those that nobody in C++ holds (torch.utils.swap_tensors).
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "ops/seen.h"
#include "ops/step.h"

namespace lowbit {
namespace {

struct PreparedStep {
  explicit PreparedStep(Plan made) : plan(std::move(made)) {}
  Plan plan;
  SeenTensors seen;
  RepeatedStep repeated;
  // From step_take to the end of the step. With a table the caller keeps the tensors.
  Tensors params, grads;
  bool taken = false;
  void let_go() { params.clear(), grads.clear(), taken = false; }
};

/// Never destroyed: torch may be gone before static objects are.
struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<PreparedStep>> all;
};
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

std::shared_ptr<PreparedStep> find(int64_t id) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.all.find(id);
  STD_TORCH_CHECK(found != r.all.end(), "lowbit: no step is prepared as number ", id);
  return found->second;
}

/// Makes the jobs of `step`; the step's number.
int64_t step_prepare(int64_t rule, Tensors params, Tensors grads, Tensors state, Tensors steps,
                     Tensors streams, Tensor plan) {
  STD_TORCH_CHECK(!params.empty(), "lowbit::step_prepare: there are no parameters");
  Plan made =
      make_plan({.rule = rule, .params = params, .state = state, .steps = steps, .plan = plan});
  bind_tensors(made, params, grads);
  auto prepared = std::make_shared<PreparedStep>(std::move(made));
  prepared->seen.see(state), prepared->seen.see(steps), prepared->seen.see_numbers(streams);
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.all.emplace(++r.last, std::move(prepared));
  return r.last;
}

void step_discard(int64_t id) {
  std::shared_ptr<PreparedStep> last;  // destroyed without the lock: tensors may call anything
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.all.find(id);
  if (found == r.all.end()) return;
  last = std::move(found->second);
  r.all.erase(found);
}

/// Gives the jobs the parameters and gradients of the step to come, and keeps those. Returns false,
/// keeping nothing, where any tensor has changed: the jobs must then be prepared again.
bool step_take(int64_t id, Tensors params, Tensors grads) {
  const std::shared_ptr<PreparedStep> p = find(id);
  p->let_go();
  if (params.size() != p->plan.jobs.size() || grads.size() != params.size()) return false;
  if (!bind_pairs(p->plan, params, grads) || !p->seen.unchanged()) return false;
  p->params = std::move(params), p->grads = std::move(grads);
  return p->taken = true;
}

/// The same with a table of addresses, in which all else was found as it was when the step was
/// prepared.
bool step_take_table(int64_t id, Tensor table) {
  const std::shared_ptr<PreparedStep> p = find(id);
  p->let_go();
  if (!p->seen.unchanged()) return false;
  return p->taken = bind_table(p->plan, table);
}

void step_prepared(int64_t id, Tensors workspace, std::vector<double> hyper, MaybeTensor lr,
                   MaybeTensor grad_scale, MaybeTensor found_inf, bool maximize, int64_t seed,
                   int64_t phase, bool last) {
  const std::shared_ptr<PreparedStep> p = find(id);
  STD_TORCH_CHECK(p->taken, "lowbit::step_prepared: step ", id,
                  " has no gradients; step_take gives it some");
  struct Release {  // neither outlives the step, even if it fails
    PreparedStep& of;
    bool now;
    ~Release() {
      if (now) of.let_go();
    }
  } release{*p, true};
  p->repeated.run(p->plan, {.workspace = std::move(workspace),
                            .hyper = std::move(hyper),
                            .lr = std::move(lr),
                            .grad_scale = std::move(grad_scale),
                            .found_inf = std::move(found_inf),
                            .maximize = maximize,
                            .seed = seed,
                            .phase = phase});
  release.now = last;
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def(
      "step_prepare(int rule, Tensor[] params, Tensor[] grads, Tensor[] state, Tensor[] steps, "
      "Tensor[] streams, Tensor plan) -> int");
  m.def("step_discard(int id) -> ()");
  m.def("step_take(int id, Tensor[] params, Tensor[] grads) -> bool");
  m.def("step_take_table(int id, Tensor table) -> bool");
  m.def(
      "step_prepared(int id, Tensor[] workspace, float[] hyper, *, Tensor? lr=None, Tensor? "
      "grad_scale=None, Tensor? found_inf=None, bool maximize=False, int seed=0, int phase=0, bool "
      "last=True) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("step_prepare", LOWBIT_OPERATOR(step_prepare));
  m.impl("step_discard", LOWBIT_OPERATOR(step_discard));
  m.impl("step_take", LOWBIT_OPERATOR(step_take));
  m.impl("step_take_table", LOWBIT_OPERATOR(step_take_table));
  m.impl("step_prepared", LOWBIT_OPERATOR(step_prepared));
}
