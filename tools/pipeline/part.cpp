#include "pipeline/part.h"

namespace lowbit::ckpt {

Status check_part(const WriteOptions& options) {
  constexpr uint64_t kMax = 65536;
  const Part& part = *options.part;
  if (part.count < 1 || part.count > kMax || part.number >= part.count)
    return usage("a part is I/N, with I from 0 to N - 1 and N from 1 to 65536, not " +
                 std::to_string(part.number) + "/" + std::to_string(part.count));
  if (options.replace)
    return usage(
        "parts replace nothing, since none of them knows when the others begin: remove "
        "the target first, and leave out --force");
  return fine();
}

void say_part(const WriteReport& report, const WriteOptions& options, bool dry_run, Json& out) {
  out["part"] = std::to_string(options.part->number) + "/" + std::to_string(options.part->count);
  out["counted"] = "the whole target";  // by every part alike
  out["published"] = report.published && !dry_run;
  out["missing"] = report.missing;
}

}  // namespace lowbit::ckpt
