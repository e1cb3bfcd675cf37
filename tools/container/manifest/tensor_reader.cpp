#include "container/manifest/tensor_reader.h"

#include <algorithm>

#include "container/manifest/record_reader.h"
#include "container/manifest/strided.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMaxSpan = 4u << 20;  // bytes of a file that are held to pick elements from

}  // namespace

struct TensorReader::Transfer {
  const Record* record;
  const std::string* what;
  uint64_t width, from, to;  // element at the start of both sides
  std::vector<Step> steps;
};

Result<const Payload*> TensorReader::payload(const Tensor& tensor, const Chunk& chunk) {
  const auto known = payloads_.find(&chunk);
  if (known != payloads_.end()) return &known->second;
  auto read = manifest_.container->stored(tensor, chunk);
  if (!read.ok()) return read.error().at(printable(tensor.name), file_name(chunk.extent.file));
  Stored& stored = read.value();
  if (!stored.cls.empty())
    return bad(printable(tensor.name) + ": is a " + printable(stored.cls) +
               ", which only its own dialect reads")
        .at(printable(tensor.name), file_name(chunk.extent.file));
  constexpr size_t kMaxKnown = 1024;  // chunks that one row of the tensor meets, as a rule
  if (payloads_.size() >= kMaxKnown) payloads_.clear();
  return &payloads_.emplace(&chunk, std::move(stored.parts[0].second)).first->second;
}

std::string TensorReader::file_name(uint32_t file) const {
  return manifest_.container->files().name(file);
}

void TensorReader::forget() {
  payloads_.clear();
  span_ = {};
}

Status TensorReader::read(const Tensor& tensor, const Box& box, char* out) {
  // Chunks are sorted by offset, so those that start behind the box are all at the end.
  auto last = tensor.chunks.end();
  if (!box.shape.empty()) {
    const int64_t end = box.offset[0] + box.shape[0];
    last = std::ranges::partition_point(tensor.chunks,
                                        [end](const Chunk& c) { return c.offset[0] < end; });
  }
  uint64_t left = volume(box.shape);
  for (auto chunk = last; chunk != tensor.chunks.begin() && left > 0;) {
    --chunk;
    const Box common = common_box(box, {chunk->offset, chunk->shape});
    if (volume(common.shape) == 0) continue;
    left -= volume(common.shape);
    ASSIGN_OR_RETURN(payload, this->payload(tensor, *chunk));
    Box inner = common;
    for (size_t d = 0; d < inner.offset.size(); ++d) inner.offset[d] -= chunk->offset[d];
    const Shape to = row_major(box.shape);
    const uint64_t first = position(common.offset, to) - position(box.offset, to);
    const Record& record = payload->record;
    if (const Status done =
            take(*payload, inner, to, out + first * static_cast<uint64_t>(tensor.dtype->bytes),
                 printable(tensor.name) + " at " + shape_text(chunk->offset));
        !done.ok())
      return done.error().at(printable(tensor.name), file_name(record.file),
                             printable(record.name));
  }
  // A manifest's chunks tile their tensors, so nothing is left.
  return left == 0 ? fine() : Status(bad(printable(tensor.name) + ": a part is missing"));
}

Status TensorReader::read(const Payload& payload, const Box& box, char* out,
                          const std::string& what) {
  return volume(box.shape) == 0 ? fine() : take(payload, box, row_major(box.shape), out, what);
}

Status TensorReader::take(const Payload& payload, const Box& box, const Shape& to, char* out,
                          const std::string& what) {
  Transfer t{&payload.record, &what, static_cast<uint64_t>(payload.dtype->bytes),
             payload.first,   0,     {}};
  for (size_t d = 0; d < box.shape.size(); ++d) {
    const auto from = static_cast<uint64_t>(payload.stride[d]);
    t.from += static_cast<uint64_t>(box.offset[d]) * from;
    t.steps.push_back({static_cast<uint64_t>(box.shape[d]), from, static_cast<uint64_t>(to[d])});
  }
  t.steps = joined(t.steps);
  return run(t, out);
}

Status TensorReader::run(const Transfer& t, char* out) {
  const bool plain =
      t.steps.empty() || (t.steps.size() == 1 && t.steps[0].from == 1 && t.steps[0].to == 1);
  const uint64_t count = t.steps.empty() ? 1 : t.steps[0].count;
  if (plain)
    return records_->read(*t.record, t.from * t.width, out + t.to * t.width, count * t.width,
                          *t.what);

  uint64_t span = 1, wanted = 1;
  size_t widest = 0;
  for (size_t d = 0; d < t.steps.size(); ++d) {
    const Step &s = t.steps[d], &w = t.steps[widest];
    span += (s.count - 1) * s.from;
    wanted *= s.count;
    if (s.count * s.from > w.count * w.from) widest = d;
  }
  const uint64_t bytes = span * t.width;
  if (bytes <= kMaxSpan && (span / 4 <= wanted || bytes <= 4096)) {
    span_.resize(bytes);
    RETURN_IF_ERROR(records_->read(*t.record, t.from * t.width, span_.data(), bytes, *t.what));
    copy_strided(span_.data(), out + t.to * t.width, t.steps, t.width);
    return fine();
  }
  // Too long, or too thinly spread: halves of the dimension that spreads it.
  Transfer first = t, second = t;
  const Step s = t.steps[widest];
  first.steps[widest].count = s.count / 2;
  second.steps[widest].count = s.count - s.count / 2;
  second.from += s.count / 2 * s.from;
  second.to += s.count / 2 * s.to;
  for (Transfer* half : {&first, &second}) {
    half->steps = joined(half->steps);
    RETURN_IF_ERROR(run(*half, out));
  }
  return fine();
}

}  // namespace lowbit::ckpt
