// Names for parameters that a checkpoint only numbers, from the order of a model's weights.
#pragma once

#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

/// Names the parameters of `tree` after the weights of document.model, if there is one and no
/// parameter has a name. Those weights must be a module's state dict in a torch.save file, which
/// keeps the order of `model.parameters()`, and as many as the one group has parameters. Anything
/// else is an error; so are keys sorted by name, as converted files have them, if weights have one
/// size and the dict is not as state_dict() made it.
Status name_by_model(const Document& document, OptimizerTree& tree);

/// An error if a parameter that was named so has another shape than its weight.
Status check_order(const Model& model);

}  // namespace lowbit::ckpt
