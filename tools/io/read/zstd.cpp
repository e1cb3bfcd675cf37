#include "io/read/zstd.h"

#include <zstd.h>

#include <algorithm>
#include <functional>

namespace lowbit::ckpt {
namespace {

constexpr int kMaxWindow = 23;  // bits; what RFC 8878 asks of every decoder, and levels up to 19

using Context = std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)>;
/// Takes a piece of content. Returns false when it needs no more.
using TakeBlock = std::function<Result<bool>(const char*, size_t)>;

Status unpack(const File& file, uint64_t offset, uint64_t length, const std::string& what,
              const TakeBlock& take) {
  const Context context(ZSTD_createDCtx(), ZSTD_freeDCtx);
  if (context == nullptr) return failed("not enough memory");
  ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, kMaxWindow);
  std::string packed, content(ZSTD_DStreamOutSize(), '\0');
  uint64_t at = 0;
  size_t left = 1;  // 0: the frame is over
  ZSTD_inBuffer in{nullptr, 0, 0};
  while (left != 0) {
    if (in.pos == in.size && at < length) {
      packed.resize(std::min<uint64_t>(1u << 18, length - at));
      RETURN_IF_ERROR(file.read(offset + at, packed.data(), packed.size()));
      at += packed.size();
      in = {packed.data(), packed.size(), 0};
    }
    const size_t before = in.pos;
    ZSTD_outBuffer out{content.data(), content.size(), 0};
    left = ZSTD_decompressStream(context.get(), &out, &in);
    if (ZSTD_isError(left) != 0)
      return damaged(what + ": is not a sound zstd frame: " + ZSTD_getErrorName(left));
    if (left != 0 && out.pos == 0 && in.pos == before && at == length)
      return damaged(what + ": its zstd frame is cut off");
    ASSIGN_OR_RETURN(more, take(content.data(), out.pos));
    if (!more) return fine();
  }
  if (at - (in.size - in.pos) != length) return bad(what + ": something follows its zstd frame");
  return fine();
}

}  // namespace

Result<std::shared_ptr<File>> zstd_content(const File& file, uint64_t offset, uint64_t length,
                                           uint64_t limit, const std::string& what) {
  char head[18] = {};  // the longest header of a frame
  const uint64_t n = std::min<uint64_t>(length, sizeof head);
  RETURN_IF_ERROR(file.read(offset, head, n));
  const unsigned long long said = ZSTD_getFrameContentSize(head, n);
  if (said == ZSTD_CONTENTSIZE_ERROR) return bad(what + ": is not a zstd frame");
  const Error large = bad(what + ": its zstd frame unpacks to more than the " +
                          std::to_string(limit) + " bytes that it can need");
  if (said != ZSTD_CONTENTSIZE_UNKNOWN && said > limit) return large;
  ASSIGN_OR_RETURN(scratch, Scratch::create());
  uint64_t size = 0;
  RETURN_IF_ERROR(
      unpack(file, offset, length, what, [&](const char* data, size_t bytes) -> Result<bool> {
        size += bytes;
        if (size > limit) return large;
        RETURN_IF_ERROR(scratch.append(data, bytes));
        return true;
      }));
  return scratch.finish(file.name());
}

Result<std::string> zstd_beginning(const File& file, uint64_t offset, uint64_t length,
                                   uint64_t limit) {
  std::string out;
  RETURN_IF_ERROR(unpack(file, offset, length, file.name(),
                         [&](const char* data, size_t bytes) -> Result<bool> {
                           out.append(data, std::min<size_t>(bytes, limit - out.size()));
                           return out.size() < limit;
                         }));
  return out;
}

}  // namespace lowbit::ckpt
