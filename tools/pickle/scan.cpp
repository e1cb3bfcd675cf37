#include "pickle/scan.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

/// How many bytes follow an opcode: a number; a length of -n bytes and then the text of that
/// length; kLines + n: n lines; kUnknown.
constexpr int kLines = 100, kUnknown = 1000;

int argument_of(uint8_t op) {
  switch (op) {
    case 0x80:  // PROTO
    case 'K':
    case 'q':
    case 'h':
      return 1;
    case 'M':
      return 2;
    case 'J':
    case 'r':
    case 'j':
      return 4;
    case 'G':
    case 0x95:  // FRAME
      return 8;
    case 0x8a:  // LONG1
    case 0x8c:
    case 'C':
    case 'U':
      return -1;
    case 'X':
    case 'B':
    case 'T':
      return -4;
    case 0x8d:
    case 0x96:
      return -8;
    case 'c':
      return kLines + 2;
    case '(':
    case '.':
    case 'N':
    case '}':
    case ']':
    case ')':
    case 't':
    case 'a':
    case 'e':
    case 's':
    case 'u':
    case 'R':
    case 'b':
    case 'Q':
    case 0x81:
    case 0x85:
    case 0x86:
    case 0x87:
    case 0x88:
    case 0x89:
    case 0x8f:
    case 0x90:
    case 0x91:
    case 0x92:
    case 0x93:
    case 0x94:
      return 0;
    default:
      return kUnknown;
  }
}

}  // namespace

Result<std::string> pickle_at(const File& file, uint64_t offset, uint64_t limit,
                              const std::string& what) {
  std::string bytes;  // grows as it is needed: what follows may be gigabytes
  const Error cut = bad(what + ": a pickle ends before its STOP");
  const auto hold = [&](uint64_t n) -> Status {
    if (n <= bytes.size()) return fine();
    if (n > limit)
      return bad(what + ": has a pickle of more than " + std::to_string(limit) + " bytes");
    const uint64_t left = file.size() - std::min(offset, file.size());
    if (n > left) return cut;
    const uint64_t have = bytes.size();
    const uint64_t want = std::min({left, limit, std::max<uint64_t>({n, 2 * have, 4096})});
    bytes.resize(want);
    return file.read(offset + have, bytes.data() + have, want - have);
  };
  for (uint64_t at = 0;;) {
    RETURN_IF_ERROR(hold(at + 1));
    const auto op = static_cast<uint8_t>(bytes[at++]);
    const int argument = argument_of(op);
    if (op == '.') {
      bytes.resize(at);
      return bytes;
    }
    if (argument == kUnknown)
      return bad(what + ": the pickle has the opcode " + std::to_string(op) +
                 ", which is outside the allowlist");
    if (argument > kLines) {
      for (int lines = argument - kLines; lines > 0; ++at) {
        RETURN_IF_ERROR(hold(at + 1));
        lines -= bytes[at] == '\n';
      }
    } else if (argument >= 0) {
      at += static_cast<uint64_t>(argument);
    } else {
      const auto width = static_cast<uint64_t>(-argument);
      RETURN_IF_ERROR(hold(at + width));
      uint64_t n = 0;
      for (uint64_t i = 0; i < width; ++i)
        n |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
      if (n > limit) return cut;
      at += width + n;
    }
  }
}

}  // namespace lowbit::ckpt
