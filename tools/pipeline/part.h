// One part of a directory that several processes write: what reshard and convert have in common.
#pragma once

#include "pipeline/commands.h"

namespace lowbit::ckpt {

/// An error where `options.part` is not a part, or other options contradict it.
Status check_part(const WriteOptions& options);
/// Adds what a part did to its report: {"part", "counted", "published", "missing"}.
void say_part(const WriteReport& report, const WriteOptions& options, bool dry_run, Json& out);

}  // namespace lowbit::ckpt
