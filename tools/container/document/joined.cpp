#include "container/document/joined.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

class Joined : public Source {
 public:
  Joined(std::vector<Run> runs, int width)
      : runs_(std::move(runs)), width_(static_cast<uint64_t>(width)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    auto* to = static_cast<char*>(out);
    uint64_t begin = 0;
    for (const Run& run : runs_) {
      const uint64_t end = begin + run.count;
      if (count > 0 && first < end) {
        const uint64_t n = std::min(count, end - first);
        RETURN_IF_ERROR(run.source->read(run.first + first - begin, n, to));
        first += n, count -= n, to += n * width_;
      }
      begin = end;
    }
    return count == 0 ? fine() : Status(failed("more was asked for than there is"));
  }

 private:
  const std::vector<Run> runs_;
  const uint64_t width_;
};

}  // namespace

std::shared_ptr<Source> joined(std::vector<Run> runs, int width) {
  if (runs.size() == 1 && runs[0].first == 0) return runs[0].source;
  return std::make_shared<Joined>(std::move(runs), width);
}

}  // namespace lowbit::ckpt
