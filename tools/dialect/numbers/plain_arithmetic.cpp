#include "dialect/numbers/plain_arithmetic.h"

#include "cpu/float_environment.h"

namespace lowbit::ckpt {

Status with_plain_arithmetic(const std::function<Status()>& work) {
  const cpu::FloatEnvironment environment;
  return work();
}

}  // namespace lowbit::ckpt
