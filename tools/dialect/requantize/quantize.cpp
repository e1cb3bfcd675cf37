#include "dialect/requantize/quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "catalog/catalog.h"
#include "core/bits.h"
#include "cpu/step.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/floats.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kQuantizePiece = 1 << 16;           // values at a time
std::atomic<int64_t> scales_room{int64_t{16} << 20};  // bytes for scales that wait to be read

/// Quantizes the ranges that a writer asks for. The sources of codes and of scales share one, and
/// may be read from two threads.
class Quantizer {
 public:
  Quantizer(std::shared_ptr<Floats> values, const Shape& shape, int format, int64_t block,
            StateReport* report)
      : values_(std::move(values)),
        info_(state_info(format)),
        format_(format),
        rows_(matrix_of(shape).rows),
        cols_(matrix_of(shape).cols),
        block_(block),
        row_bytes_(code_bytes(cols_, info_.bits)),
        block_bytes_(code_bytes(block, info_.bits)),
        blocks_(ceil_div(cols_, block)),
        errors_(report) {}
  ~Quantizer() {
    for (const auto& [first, scales] : kept_) scales_room += static_cast<int64_t>(scales.size());
  }

  Status read_codes(int64_t first, int64_t count, char* out) {
    if (count == 0) return fine();
    const std::lock_guard lock(mutex_);
    const ScratchBuffer memory(x_, after_, codes_, scales_);
    const auto block_at = [&](int64_t byte) {
      return byte / row_bytes_ * blocks_ + byte % row_bytes_ / block_bytes_;
    };
    const int64_t end = first + count, last = block_at(end - 1) + 1;
    for (int64_t b = block_at(first); b < last;) {
      const int64_t next = piece_end(b, last), from = code_at(b), to = code_at(next);
      RETURN_IF_ERROR(quantize(b, next, from < first ? 1 : 0, true));
      const int64_t begin = std::max(from, first), stop = std::min(to, end);
      std::memcpy(out + (begin - first), codes_.data() + (begin - from),
                  static_cast<size_t>(stop - begin));
      keep(b);
      b = next;
    }
    return fine();
  }

  Status read_scales(int64_t first, int64_t count, char* out) {
    if (count == 0) return fine();
    const std::lock_guard lock(mutex_);
    const ScratchBuffer memory(x_, after_, codes_, scales_);
    const int64_t numbers = info_.scale_numbers, number = info_.scale_bytes / numbers;
    const int64_t begin = first / numbers, end = ceil_div(first + count, numbers);
    for (int64_t b = begin; b < end;) {
      int64_t next, from = b;  // blocks that `scales` holds
      const char* scales;
      auto kept = kept_.upper_bound(b);
      if (kept != kept_.begin() && covers(*std::prev(kept), b)) {
        --kept;
        from = kept->first;
        scales = kept->second.data();
        next = std::min(end, from + length(kept->second));
      } else {
        next = piece_end(b, kept == kept_.end() ? end : std::min(end, kept->first));
        RETURN_IF_ERROR(quantize(b, next, 0, false));
        scales = scales_.data();
      }
      const int64_t left = std::max(first, b * numbers),
                    right = std::min(first + count, next * numbers);
      std::memcpy(out + (left - first) * number, scales + (left - from * numbers) * number,
                  static_cast<size_t>((right - left) * number));
      b = next;
    }
    for (auto kept = kept_.begin(); kept != kept_.end() && kept->first < end;) {
      if (kept->first + length(kept->second) > end) break;
      scales_room += static_cast<int64_t>(kept->second.size());
      kept = kept_.erase(kept);
    }
    return fine();
  }

 private:
  /// Blocks are counted row by row; so are their elements, and the bytes of their codes.
  int64_t element_at(int64_t b) const { return b / blocks_ * cols_ + b % blocks_ * block_; }
  int64_t code_at(int64_t b) const { return b / blocks_ * row_bytes_ + b % blocks_ * block_bytes_; }
  int64_t length(const std::string& scales) const {
    return static_cast<int64_t>(scales.size()) / info_.scale_bytes;
  }
  bool covers(const std::pair<const int64_t, std::string>& kept, int64_t b) const {
    return b >= kept.first && b < kept.first + length(kept.second);
  }
  /// The block behind a piece that begins at block b.
  int64_t piece_end(int64_t b, int64_t last) const {
    const int64_t e = element_at(b) + kQuantizePiece, rows = e / cols_;
    return std::min(last, std::max(b + 1, rows * blocks_ + e % cols_ / block_));
  }

  /// Quantizes blocks [begin, end) into codes_ and scales_. The first `skip` blocks were counted in
  /// the errors before.
  Status quantize(int64_t begin, int64_t end, int skip, bool count) {
    const int64_t first = element_at(begin), stop = element_at(end);
    x_.resize(static_cast<size_t>(stop - first));
    codes_.resize(static_cast<size_t>(code_at(end) - code_at(begin)));
    scales_.resize(static_cast<size_t>((end - begin) * info_.scale_bytes));
    RETURN_IF_ERROR(values_->read(static_cast<uint64_t>(first), x_.size(), x_.data()));
    count = count && errors_.wanted();
    if (count) after_.resize(x_.size());
    const int64_t limit = std::clamp<int64_t>(kTile / block_, 1, cpu::kMaxBlocks);  // a call
    for (int64_t b = begin; b < end;) {
      const int64_t in_row = b % blocks_, next = std::min({b + limit, end, b + blocks_ - in_row});
      const int64_t at = element_at(b) - first;
      const int64_t n = std::min(cols_ - in_row * block_, (next - b) * block_);
      char* codes = codes_.data() + code_at(b) - code_at(begin);
      char* scales = scales_.data() + (b - begin) * info_.scale_bytes;
      cpu::quantize_run(kernels_, format_, x_.data() + at, codes, scales, static_cast<int>(block_),
                        static_cast<int>(n));
      if (count)
        kernels_.dequantize[format_](codes, scales, static_cast<int>(block_), after_.data() + at,
                                     static_cast<int>(n));
      b = next;
    }
    if (count) {
      const auto from = static_cast<size_t>(element_at(begin + skip) - first);
      if (from < x_.size()) errors_.add(x_.data() + from, after_.data() + from, x_.size() - from);
    }
    return fine();
  }

  void keep(int64_t b) {
    const auto bytes = static_cast<int64_t>(scales_.size());
    if (kept_.contains(b)) return;
    if (scales_room.fetch_sub(bytes) < bytes) {
      scales_room += bytes;
      return;
    }
    kept_.emplace(b, std::string(scales_.data(), scales_.size()));
  }

  const std::shared_ptr<Floats> values_;
  const StateInfo info_;
  const cpu::Kernels& kernels_ = cpu::kernels();
  const int format_;
  const int64_t rows_, cols_, block_, row_bytes_, block_bytes_, blocks_;
  std::mutex mutex_;
  ErrorSum errors_;
  std::vector<float> x_, after_;
  std::vector<char> codes_, scales_;
  std::map<int64_t, std::string> kept_;  // by first block
};

}  // namespace

Codes quantized(std::shared_ptr<Floats> values, const Shape& shape, const std::string& format,
                int64_t block, StateReport* report) {
  const int index = find_state(format);
  const auto quantizer =
      std::make_shared<Quantizer>(std::move(values), shape, index, block, report);
  if (report != nullptr) report->exact = false;
  const auto [rows, cols] = matrix_of(shape);
  const auto source = [&](Status (Quantizer::*read)(int64_t, int64_t, char*)) {
    return source_by([quantizer, read](uint64_t first, uint64_t count, void* out) {
      return ((*quantizer).*read)(static_cast<int64_t>(first), static_cast<int64_t>(count),
                                  static_cast<char*>(out));
    });
  };
  Codes out{format, state_info(index).bits, rows, cols, block, nullptr, nullptr};
  out.codes = source(&Quantizer::read_codes);
  out.scales = source(&Quantizer::read_scales);
  return out;
}

}  // namespace lowbit::ckpt
