// The keys of an optimizer's state in a tree that does not tell numbers from text.
#pragma once

#include <cstdint>

#include "container/document/document.h"

namespace lowbit::ckpt {

/// A DCP directory keeps every key as text, and torch's optimizers look for numbers where their
/// groups have numbers: under "0" they find no state, and say nothing. Turns such keys of `state`
/// into the numbers that `params` of the groups name. Returns how many parameters had text.
uint64_t restore_number_keys(Document& document);

}  // namespace lowbit::ckpt
