// `lowbit-ckpt inspect`: what is in a checkpoint.
#pragma once

#include <string>

#include "io/status.h"

namespace lowbit::ckpt {

struct InspectOptions {
  std::string path;
  bool json = false, digest = false, quiet = false;
};

Status inspect(const InspectOptions& options);

}  // namespace lowbit::ckpt
