// What of an optimizer's state a conversion would leave out without a word.
#pragma once

#include <string>
#include <vector>

#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

/// An error if there are tensors in the state and the dialect read none of them: it is another
/// one's.
Status check_any_read(const OptimizerTree& tree, const Model& model);
/// A warning for each number in the parameters' state, and for each tensor of a parameter's shape,
/// that the dialect did not read and that is not in what was written: the user's own.
std::vector<std::string> state_left_out(const OptimizerTree& tree, const Model& model,
                                        const Document& written);

}  // namespace lowbit::ckpt
