// The arguments of an allowed global, as a pattern with one letter for each argument:
//   i integer   r integer or float   s string   b bool   y bytes, also as text of latin-1
//   n tuple of integers   z the same, or a torch.Size   p persistent id   g a global
//   o OrderedDict()   h the same, or None   d an empty dict   w any dict   l any list
//   u any tuple   x anything
//   t a call that gives a tensor
//   m the class of one of torch's enums   f the name of one of its members
//   c a class outside the allowlist, or an object of one   q that, or a global
//   * after a letter: any number of it      ? the arguments that follow are optional
#pragma once

#include "pickle/value.h"

namespace lowbit::ckpt {

/// Whether the tuple `arguments` fits the pattern.
bool arguments_match(const Pickle& pickle, NodeId arguments, const char* pattern);

}  // namespace lowbit::ckpt
