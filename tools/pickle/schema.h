// What arguments an allowed global takes. One letter for each argument:
//   i integer   s string   b bool   n tuple of integers   p persistent id   g a global
//   o OrderedDict()   d an empty dict   w any dict   l any list   u any tuple   x anything
//   t a call that gives a tensor
//   m a memory format's class   f the name of a memory format
//   * after a letter: any number of it      ? what follows may be left out
#pragma once

#include "pickle/value.h"

namespace lowbit::ckpt {

bool arguments_match(const Pickle& pickle, NodeId arguments, const char* pattern);

}  // namespace lowbit::ckpt
