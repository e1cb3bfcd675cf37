#include "dialect/model/formats.h"

#include "catalog/catalog.h"
#include "cpu/step.h"

namespace lowbit::ckpt {
namespace {

std::vector<FormatInfo> all_formats() {
  std::vector<FormatInfo> all;
  for (int i = 0; i < state_count(); ++i) {
    const StateInfo s = state_info(i);
    all.push_back({s.name, s.bits, s.block, s.scaled, s.is_signed, find_dtype(s.dtype),
                   s.scaled ? find_dtype(s.scale_dtype) : nullptr, s.scale_numbers, s.cross_tile});
  }
  return all;
}

}  // namespace

const FormatInfo* find_format(const std::string& name) {
  static const std::vector<FormatInfo> all = all_formats();
  for (const FormatInfo& f : all) {
    if (f.name == name) return &f;
  }
  return nullptr;
}

std::vector<float> codebook_of(const std::string& format) {
  const FormatInfo* info = find_format(format);
  const int count = 1 << info->bits;
  // All codes in one block, with a scale of 1.
  std::vector<uint8_t> bytes(256);
  for (int k = 0; k < count; ++k) {
    const int bit = k * info->bits;
    for (int b = 0; b < info->bits; ++b)
      bytes[static_cast<size_t>((bit + b) / 8)] |=
          static_cast<uint8_t>((k >> b & 1) << ((bit + b) % 8));
  }
  std::vector<float> values(static_cast<size_t>(count), 0.0f), scales(64, 1.0f);
  cpu::kernels().dequantize[find_state(format)](bytes.data(), scales.data(), 256, values.data(),
                                                count);
  return values;
}

}  // namespace lowbit::ckpt
