#include "container/document/joined.h"

#include <algorithm>

namespace lowbit::ckpt {

std::shared_ptr<Source> joined(std::vector<Run> runs, int width) {
  if (runs.size() == 1 && runs[0].first == 0) return runs[0].source;
  return source_by(
      [runs = std::move(runs), width](uint64_t first, uint64_t count, void* out) -> Status {
        auto* to = static_cast<char*>(out);
        uint64_t begin = 0;
        for (const Run& run : runs) {
          const uint64_t end = begin + run.count;
          if (count > 0 && first < end) {
            const uint64_t n = std::min(count, end - first);
            RETURN_IF_ERROR(run.source->read(run.first + first - begin, n, to));
            first += n, count -= n, to += n * static_cast<uint64_t>(width);
          }
          begin = end;
        }
        return count == 0 ? fine() : Status(failed("more was asked for than there is"));
      });
}

}  // namespace lowbit::ckpt
