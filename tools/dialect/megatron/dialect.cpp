// The dialect of Megatron-Core's distributed checkpoint: read as torch's, from its view.
#include <algorithm>

#include "dialect/common/dialect.h"
#include "dialect/megatron_view/megatron.h"
#include "dialect/requantize/master.h"
#include "dialect/tree/algorithm.h"

namespace lowbit::ckpt {
namespace {

Result<int> recognize_megatron(const Document& document, const OptimizerTree& /*tree*/) {
  return is_megatron(document) ? 3 : 0;
}

Result<Model> read_megatron(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  if (!is_megatron(*document))
    return bad("is not a distributed checkpoint of Megatron-Core, a directory with a common state");
  ASSIGN_OR_RETURN(model, find_dialect("torch")->read(std::move(document), tree));
  model.dialect = "megatron";
  // The float32 weights are weights, no state: `convert` puts them there.
  for (Param& p : model.params)
    std::erase_if(p.states, [](const State& s) { return is_master(s.name); });
  model.algorithm = algorithm_of(model);
  return model;
}

}  // namespace

extern const Dialect kMegatron = {
    "megatron", "Megatron-Core's distributed checkpoint (torch_dist), by parameters; read only",
    recognize_megatron, read_megatron, nullptr};

}  // namespace lowbit::ckpt
