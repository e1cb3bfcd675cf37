#include "container/dcp/verified_reader.h"

#include <algorithm>
#include <cstring>

#include "container/dcp/digests.h"
#include "container/manifest/record_reader.h"
#include "container/manifest/strided.h"
#include "container/manifest/tensor_reader.h"
#include "io/stream_copy.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr size_t kMaxHeaders = 1u << 14;    // headers in the cache: some MB
constexpr uint64_t kHashed = 1u << 18;      // that stays in a core's cache until it is hashed
constexpr uint64_t kFirstCache = 1u << 15;  // bytes of rows that stay in it until they are written
constexpr uint64_t kMinRowRead = 512;       // bytes of a row that is worth a read of its own
constexpr uint64_t kPage = 4096;            // closer rows leave no page unread between them
constexpr uint64_t kMinMapped = 1u << 15;   // bytes of rows, with what lies between, worth mapping

void copy_rows(char* to, uint64_t row, const char* from, uint64_t pitch, uint64_t rows) {
  for (uint64_t r = 0; r < rows; ++r) std::memcpy(to + r * row, from + r * pitch, row);
}

}  // namespace

/// What a box has in common with one chunk.
struct VerifiedReader::Part {
  const Tensor& tensor;
  const Chunk& chunk;
  const Box& box;     // that was asked for
  const Box& common;  // of it, in the tensor
  Box inner;          // the same in the chunk
  char* out;          // of `box`
  uint64_t width;

  /// Where a box of the tensor begins in `out`.
  char* place(const Box& of) const {
    const Shape stride = row_major(box.shape);
    return out + (position(of.offset, stride) - position(box.offset, stride)) * width;
  }
  std::string what() const { return printable(tensor.name) + " at " + shape_text(chunk.offset); }
};

/// Copies a box of the tensor, whose elements lie at `from` with these strides, to its place.
void VerifiedReader::put(const Part& part, const Box& box, const Shape& stride, const char* from) {
  const Shape to = row_major(part.box.shape);
  std::vector<Step> steps;
  for (size_t d = 0; d < box.shape.size(); ++d)
    steps.push_back({static_cast<uint64_t>(box.shape[d]), static_cast<uint64_t>(stride[d]),
                     static_cast<uint64_t>(to[d])});
  copy_strided(from, part.place(box), joined(steps), part.width);
}

Status VerifiedReader::read(const Tensor& tensor, const Box& box, char* out) {
  uint64_t left = volume(box.shape);
  for (const Chunk& chunk : tensor.chunks) {
    if (left == 0) break;
    const Box common = common_box(box, {chunk.offset, chunk.shape});
    const uint64_t n = volume(common.shape);
    if (n == 0) continue;
    left -= n;
    Part part{tensor, chunk, box, common, common, out, static_cast<uint64_t>(tensor.dtype->bytes)};
    for (size_t d = 0; d < part.inner.offset.size(); ++d) part.inner.offset[d] -= chunk.offset[d];
    RETURN_IF_ERROR(read_part(part));
  }
  return left == 0 ? fine() : Status(bad(printable(tensor.name) + ": a part is missing"));
}

Result<Payload> PayloadCache::find(const Manifest& manifest, const Tensor& tensor,
                                   const Chunk& chunk) {
  {
    const std::lock_guard held(lock_);
    const auto known = known_.find(&chunk);
    if (known != known_.end()) return known->second;
  }
  const auto place = [&](const Error& error) {
    return error.at(printable(tensor.name), manifest.container->files().name(chunk.extent.file));
  };
  auto read = manifest.container->stored(tensor, chunk);
  if (!read.ok()) return place(read.error());
  if (!read.value().cls.empty())
    return place(bad(printable(tensor.name) + " at " + shape_text(chunk.offset) + ": is a " +
                     printable(read.value().cls) +
                     ", a tensor subclass, which is not loaded here: convert it first (lowbit-ckpt "
                     "convert), or load it with torch's FileSystemReader"));
  const std::lock_guard held(lock_);
  if (known_.size() >= kMaxHeaders) known_.clear();
  return known_.emplace(&chunk, std::move(read.value().parts[0].second)).first->second;
}

Status VerifiedReader::read_part(const Part& part) {
  const Recorded::Entry* entry = nullptr;
  if (recorded_ != nullptr && verify_) {
    const auto known = recorded_->tensors.find(part.tensor.name);
    if (known != recorded_->tensors.end()) entry = &known->second;
  }
  ASSIGN_OR_RETURN(payload, cache_.find(manifest_, part.tensor, part.chunk));
  const std::string file = manifest_.container->files().name(part.chunk.extent.file);
  TileGrid grid = tile_grid(part.chunk.shape, part.width);
  if (!is_row_major(payload) || (verify_ && entry == nullptr)) return read_record(part, payload);
  if (!verify_) return read_tiles(part, payload, grid, nullptr);
  if (entry->dtype != part.tensor.dtype->name || entry->shape != part.tensor.shape)
    return bad(part.what() + ": lowbit.json describes " + printable(entry->dtype) + " " +
               shape_text(entry->shape) + ", the metadata " + part.tensor.dtype->name + " " +
               shape_text(part.tensor.shape) + ": they are of different checkpoints")
        .at(printable(part.tensor.name), file);
  const std::string key = chunk_key(part.chunk.offset);
  const auto tiles = entry->tiles.find(key);
  if (tiles != entry->tiles.end()) {
    grid.down = tiles->second.down;
    grid.across = tiles->second.across;
    return read_tiles(part, payload, grid, &tiles->second.digits);
  }
  const auto whole = entry->chunks.find(key);
  if (whole == entry->chunks.end())
    return bad(part.what() +
               ": lowbit.json has no digest of it; remove that file to load by the "
               "checksums of " +
               file)
        .at(printable(part.tensor.name), file);
  grid.down = grid.across = 1;
  return read_tiles(part, payload, grid, &whole->second);
}

/// By the checksum of its record, once all of it was read.
Status VerifiedReader::read_record(const Part& part, const Payload& payload) {
  TensorReader reader(manifest_);
  const uint64_t n = volume(part.common.shape) * part.width;
  bytes_ += n;
  const bool whole = part.common.shape == part.box.shape;
  std::string values(whole ? 0 : n, '\0');
  if (const Status done =
          reader.read(payload, part.inner, whole ? part.out : values.data(), part.what());
      !done.ok())
    return done.error().at(printable(part.tensor.name),
                           manifest_.container->files().name(payload.record.file),
                           printable(payload.record.name));
  if (!whole) put(part, part.common, row_major(part.common.shape), values.data());
  return fine();
}

/// Rows of mapped pages. They are gathered where a digest reads them fast, and written from there
/// past the caches, which a plain copy would fill with what it overwrites.
void VerifiedReader::gather(const char* from, uint64_t pitch, uint64_t row, uint64_t rows,
                            const Target& to) {
  if (!to.is_last || row > kFirstCache) {
    copy_rows(to.out, row, from, pitch, rows);
    if (to.cells != nullptr) to.cells->add(to.out, rows);
    return;
  }
  alignas(64) char some[kFirstCache];
  const uint64_t at_once = kFirstCache / std::max<uint64_t>(1, row);
  for (uint64_t r = 0; r < rows; r += at_once) {
    const uint64_t n = std::min(at_once, rows - r);
    copy_rows(some, row, from + r * pitch, pitch, n);
    if (to.cells != nullptr) to.cells->add(some, n);
    stream_copy({to.out + r * row, some, n * row});
  }
}

Status VerifiedReader::fetch(const Payload& payload, const TileGrid& grid, const TileRange& range,
                             MappedFile& mapped, uint64_t end_row, const Target& to) {
  const auto width = static_cast<uint64_t>(payload.dtype->bytes);
  ASSIGN_OR_RETURN(file, manifest_.container->files().open(payload.record.file));
  const uint64_t start = payload.record.offset +
                         (payload.first + range.first_row * grid.cols + range.first_col) * width;
  const uint64_t row = range.cols * width, pitch = grid.cols * width;
  const uint64_t left = (end_row - range.first_row - 1) * pitch + row;
  const uint64_t span = (range.rows - 1) * pitch + row;
  const bool apart = row != pitch && range.rows > 1;
  bytes_ += range.rows * row;
  // A read of 2 KiB takes twice as long as its bytes. Where every page is needed, rows are copied
  // from the pages themselves.
  if (apart && pitch - row <= kPage && (mapped.covers(start, span) || left >= kMinMapped)) {
    if (const char* from = mapped.at(start, span, start + left)) {
      mapped_ += range.rows * row;
      gather(from, pitch, row, range.rows, to);
      return fine();
    }
  }
  if (!apart) {
    RETURN_IF_ERROR(file->read(start, to.out, range.rows * row));
  } else if (row >= kMinRowRead) {
    for (uint64_t r = 0; r < range.rows; ++r)
      RETURN_IF_ERROR(file->read(start + r * pitch, to.out + r * row, row));
  } else {
    // Short rows: some of them with what lies between.
    const uint64_t at_once = std::max<uint64_t>(1, (1u << 20) / pitch);
    std::string some;
    for (uint64_t r = 0; r < range.rows; r += at_once) {
      const uint64_t n = std::min(at_once, range.rows - r);
      some.resize((n - 1) * pitch + row);
      RETURN_IF_ERROR(file->read(start + r * pitch, some.data(), some.size()));
      bytes_ += some.size() - n * row;
      copy_rows(to.out + r * row, row, some.data(), pitch, n);
    }
  }
  if (to.cells != nullptr) to.cells->add(to.out, range.rows);
  return fine();
}

Status VerifiedReader::read_tiles(const Part& part, const Payload& payload, const TileGrid& grid,
                                  const std::string* digits) {
  const uint64_t width = part.width;
  const TileRange range = tile_range(grid, part.chunk.shape, part.inner);
  const TileRange all = digits == nullptr ? range : whole_tiles(grid, range);
  // What lies in `out` as it lies in the file, and is verified whole, is read to its place.
  const bool same_rows =
      std::equal(part.common.shape.begin() + !part.common.shape.empty(), part.common.shape.end(),
                 part.box.shape.begin() + !part.box.shape.empty());
  const bool in_place = same_rows && all.rows == range.rows && all.cols == range.cols &&
                        volume(part.common.shape) == all.rows * all.cols;
  // A row of cells at a time.
  const Shape from = row_major(part.chunk.shape);
  std::string values;
  ASSIGN_OR_RETURN(file, manifest_.container->files().open(payload.record.file));
  std::unique_ptr<MappedFile> mapped = mapped_files_.take(std::move(file));
  const uint64_t end_row = all.first_row + all.rows;
  for (uint64_t row = all.first_row; row < end_row;) {
    const uint64_t end = std::min(end_row, (row / grid.cell_rows() + 1) * grid.cell_rows());
    const TileRange band{row, end - row, all.first_col, all.cols};
    const uint64_t pitch = band.cols * width;
    if (!in_place) values.resize(band.rows * pitch);
    char* to = in_place ? part.place(part.common) + (row - all.first_row) * pitch : values.data();
    // Digests are taken of what is still in the core's cache.
    CellHashes cells(grid, band, width);
    const uint64_t at_once = std::max<uint64_t>(1, kHashed / std::max<uint64_t>(1, pitch));
    for (uint64_t r = 0; r < band.rows; r += at_once) {
      const TileRange rows{row + r, std::min(at_once, band.rows - r), band.first_col, band.cols};
      RETURN_IF_ERROR(fetch(payload, grid, rows, *mapped, end_row,
                            {to + r * pitch, in_place, digits == nullptr ? nullptr : &cells}));
    }
    if (digits != nullptr && !cells.hold(*digits)) return not_as_recorded(part);
    row = end;
    if (in_place) continue;
    // The part of the box in this band.
    Box take = part.common;
    Shape stride = from;
    uint64_t first = 0;
    if (!take.shape.empty()) {
      const int64_t above = part.chunk.offset[0];
      const auto low = std::max(take.offset[0], above + static_cast<int64_t>(band.first_row));
      const auto high = std::min(take.offset[0] + take.shape[0], above + static_cast<int64_t>(end));
      take.offset[0] = low;
      take.shape[0] = high - low;
      stride[0] = static_cast<int64_t>(band.cols);
      first = position(take.offset, stride) - position(part.chunk.offset, stride) -
              (band.first_row * band.cols + band.first_col);
    }
    put(part, take, stride, values.data() + first * width);
  }
  mapped_files_.give_back(std::move(mapped));
  return fine();
}

Error VerifiedReader::not_as_recorded(const Part& part) const {
  const std::string file = manifest_.container->files().name(part.chunk.extent.file);
  return damaged(manifest_.container->files().shown(part.chunk.extent.file) + ": " + part.what() +
                 ": its digest is not the one in lowbit.json: the file, or its digest there, is "
                 "damaged")
      .at(printable(part.tensor.name), file);
}

Status VerifiedReader::finish() {
  return verify_ ? manifest_.container->reader().finish()
                 : manifest_.container->files().check_unchanged();
}

}  // namespace lowbit::ckpt
