// Every coded state format against a brute-force search over its values: entries, middles and their
// neighbors, random and exponent-spread values. Also its scale on ordinary and hostile blocks, its
// loops over many values against the scalar definition, and its values against the tables of other
// libraries.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "core/log2.h"
#include "core/registry.h"
#include "usable_main.h"

namespace {

using namespace lowbit;

std::mt19937 random_engine(20240229);
uint32_t draw32() { return static_cast<uint32_t>(random_engine()); }
float uniform() { return static_cast<float>(draw32() >> 8) * 0x1p-24f; }
float normal() { return std::normal_distribution<float>()(random_engine); }

template <class F>
concept Coded = requires {
  F::kDomain;
  F::neighbour(0u, true);
};

/// The loop of walks for formats without a loop of their own.
template <class F, class Codes>
void quantize_block(F, const float* x, const typename F::Scale& scale, Codes* codes, int n) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<Codes>(F::quantize(scale.to_z(x[i])));
}
template <class F, class Codes>
void dequantize_block(F, const Codes* codes, const typename F::Scale& scale, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = scale.from_z(F::dequantize(codes[i]));
}

/// The operations of a format that the tests need, without its type, so the tests are compiled once
/// for all formats.
struct Format {
  const char *name, *domain;
  int bits;
  bool is_signed, tie_up, half_scale;
  uint32_t zero_code;
  size_t bytes;  // bytes per code
  float (*dequantize)(uint32_t code);
  uint32_t (*quantize)(float z);
  uint32_t (*neighbour)(uint32_t code, bool up);
  /// Writes the codes of a block by the loops of walks, and its scale in its stored form. Returns
  /// whether the block is coded.
  bool (*store)(const float* x, int n, uint32_t* scale, uint8_t* codes);
  void (*load)(const uint8_t* codes, const uint32_t* scale, float* out, int n);
  /// z and codes of a coded block, one value at a time.
  void (*define)(const float* x, int n, float* z, uint32_t* codes);
  float (*value)(const uint32_t* scale, uint32_t code);
};

template <class F>
typename F::Scale scale_of(const float* x, int n) {
  uint32_t absmax = 0, absmin = 0xffffffffu;
  for (int i = 0; i < n; ++i) {
    const uint32_t m = magnitude_bits(x[i]);
    absmax = m > absmax ? m : absmax;
    if (m != 0 && m < absmin) absmin = m;
  }
  return F::Scale::of(absmax, F::Scale::kNeedsMin ? absmin : 0xffffffffu);
}
template <class F>
typename F::Scale scale_in(const uint32_t* memory) {
  typename F::Scale::Stored stored[F::Scale::kStored];
  std::memcpy(stored, memory, sizeof stored);
  return F::Scale::read(stored);
}

template <class F>
constexpr bool tie_up() {
  if constexpr (requires { F::kTieUp; }) {
    return F::kTieUp;
  } else {
    return true;
  }
}

template <class F>
constexpr Format format() {
  using Storage = typename F::Storage;
  return {
      .name = F::kName,
      .domain = F::kDomain,
      .bits = F::kBits,
      .is_signed = F::kSigned,
      .tie_up = tie_up<F>(),
      .half_scale = sizeof(typename F::Scale::Stored) == 2,
      .zero_code = F::kZeroCode,
      .bytes = sizeof(Storage),
      .dequantize = [](uint32_t code) { return F::dequantize(code); },
      .quantize = [](float z) { return static_cast<uint32_t>(F::quantize(z)); },
      .neighbour = [](uint32_t code, bool up) { return F::neighbour(code, up); },
      .store =
          [](const float* x, int n, uint32_t* memory, uint8_t* codes) {
            const auto scale = scale_of<F>(x, n);
            typename F::Scale::Stored stored[F::Scale::kStored];
            scale.write(stored);
            std::memcpy(memory, stored, sizeof stored);
            auto* out = reinterpret_cast<Storage*>(codes);
            if (scale.coded) {
              quantize_block(F{}, x, scale, out, n);
            } else {
              for (int i = 0; i < n; ++i) out[i] = static_cast<Storage>(F::kZeroCode);
            }
            return scale.coded;
          },
      .load =
          [](const uint8_t* codes, const uint32_t* memory, float* out, int n) {
            const auto scale = scale_in<F>(memory);
            dequantize_block(F{}, reinterpret_cast<const Storage*>(codes), scale, out, n);
          },
      .define =
          [](const float* x, int n, float* z, uint32_t* codes) {
            const auto scale = scale_of<F>(x, n);
            for (int i = 0; i < n; ++i) z[i] = scale.to_z(x[i]), codes[i] = F::quantize(z[i]);
          },
      .value = [](const uint32_t* memory,
                  uint32_t code) { return scale_in<F>(memory).from_z(F::dequantize(code)); },
  };
}

struct Tester {
  const Format& f;
  /// Formats that compute their code in float32 from a companded z may differ on the middle itself.
  const bool bent = !std::strcmp(f.domain, "softsign") || !std::strcmp(f.domain, "sqrt");
  /// The parity of the code that wins a tie to even.
  const uint32_t parity = !std::strcmp(f.name, "log8") || !std::strcmp(f.name, "log16");
  /// z = 0 is the smallest value of the format, not zero.
  const bool no_zero = !std::strcmp(f.name, "log8_fixed");

  std::vector<uint32_t> codes = {};  // in value order
  std::vector<double> middles = {};  // in the domain
  bool has_zero = false;

  std::string name(const std::string& what) const { return std::string(f.name) + ": " + what; }
  double bend(double z) const {
    return !std::strcmp(f.domain, "softsign") ? 2.0 * z / (1.0 + std::fabs(z)) : z;
  }
  double value(size_t i) const { return f.dequantize(codes[i]); }
  bool is_zero(size_t i) const { return !no_zero && value(i) == 0.0; }

  void order() {
    uint32_t code = f.is_signed ? f.quantize(-1e30f) : 0;
    codes = {code};
    for (uint32_t next; (next = f.neighbour(code, true)) != code && codes.size() < 70000;
         code = next) {
      codes.push_back(next);
    }
    bool rising = true, back = true, same = true;
    for (size_t i = 0; i < codes.size(); ++i) {
      has_zero = has_zero || is_zero(i);
      same = same && f.quantize(static_cast<float>(value(i))) == codes[i];
      if (i == 0) {
        back = back && f.neighbour(codes[0], false) == codes[0];
        continue;
      }
      rising = rising && value(i) > value(i - 1);
      const bool at_step = !f.is_signed && is_zero(i - 1);  // unsigned: never down to zero
      back = back && f.neighbour(codes[i], false) == codes[at_step ? i : i - 1];
      middles.push_back((bend(value(i)) + bend(value(i - 1))) / 2.0);
    }
    check(rising, name("values rise"));
    check(back, name("neighbours below"));
    check(same, name("quantize(dequantize)"));
    check(codes.back() == f.quantize(1e30f), name("the largest value"));
    size_t expected = 1u << f.bits;
    const std::string n = f.name;
    if (n.starts_with("linear") && f.is_signed) --expected;
    if (n == "companded8" || n == "log8_signed") expected = 255;
    if (n == "float8_e4m3") expected = 253;
    if (n == "float8_e4m3_unsigned") expected = 127;
    if (n == "float8_e5m2") expected = 247;
    if (n == "float8_e5m2_unsigned") expected = 124;
    check(codes.size() == expected, name(std::to_string(codes.size()) + " values"));
    check(f.quantize(0.0f) == f.zero_code && f.quantize(-0.0f) == f.zero_code,
          name("code of zero"));
    for (uint32_t c = 0; c < 1u << f.bits;
         ++c) {  // every code that a file may contain has a value in the map
      const float z = f.dequantize(c);
      if (!(std::fabs(z) <= 1e6f)) {
        check(n.starts_with("float8"), name("dequantize"));
      }
    }
  }

  /// Whether `code` is the code nearest to z.
  bool nearest(float z, uint32_t code) const {
    const double at = bend(z);
    size_t i = static_cast<size_t>(std::upper_bound(middles.begin(), middles.end(), at) -
                                   middles.begin());  // a tie goes up
    const bool tie = i > 0 && middles[i - 1] == at;
    if (tie && !f.tie_up && (codes[i] & 1u) != parity) --i;
    const auto legal = [&](size_t k) {
      if (!f.is_signed && z > 0.0f && is_zero(k)) ++k;
      return code == codes[k];
    };
    if (legal(i)) return true;
    if (!bent) return false;
    const double slack = 3e-7;
    return (i > 0 && at - middles[i - 1] < slack && legal(i - 1)) ||
           (i < middles.size() && middles[i] - at < slack && legal(i + 1));
  }

  void brute_force() {
    int wrong = 0, count = 0;
    float example = 0.0f;
    const auto ask = [&](float z) {
      if (!f.is_signed && z < 0.0f) z = -z;
      ++count;
      if (!nearest(z, f.quantize(z))) ++wrong, example = z;
    };
    const auto around = [&](double exact) {
      const float f = static_cast<float>(exact);
      ask(f);
      float up = f, down = f;
      for (int i = 0; i < 3; ++i) {
        ask(up = std::nextafterf(up, INFINITY));
        ask(down = std::nextafterf(down, -INFINITY));
      }
    };
    for (size_t i = 0; i < codes.size(); ++i) around(value(i));
    for (size_t i = 1; i < codes.size(); ++i) around((value(i) + value(i - 1)) / 2.0);
    if (bent) {
      for (const double t : middles) around(t / (2.0 - std::fabs(t)));
    }
    around(0.0);
    const double top = value(codes.size() - 1);
    for (int i = 0; i < 4000; ++i) {
      ask(static_cast<float>(top * 1.01 * uniform()) * (draw32() & 1 ? -1.0f : 1.0f));
      ask(std::ldexp(1.0f + uniform(), static_cast<int>(draw32() % 150) - 149) *
          (draw32() & 1 ? -1.0f : 1.0f));
    }
    check(wrong == 0, name(std::to_string(wrong) + " of " + std::to_string(count) +
                           " are not the nearest, such as " + std::to_string(example)));
    if (f.is_signed) return;
    check(f.quantize(-1.0f) == f.zero_code, name("below zero"));
    if (has_zero) check(f.dequantize(f.quantize(1e-45f)) > 0.0f, name("positive becomes zero"));
  }

  struct Block {
    bool coded;
    uint32_t scale[2] = {};
    std::vector<uint8_t> bytes;  // codes, and 64 that must not change
    std::vector<float> values;   // read back
    const Format* format;
    uint32_t code(size_t i) const {
      if (format->bytes == 1) return bytes[i];
      return bytes[2 * i] | static_cast<uint32_t>(bytes[2 * i + 1]) << 8;
    }
  };
  Block stored(const std::vector<float>& x) const {
    const int n = static_cast<int>(x.size());
    Block b;
    b.format = &f;
    b.bytes.assign(x.size() * f.bytes + 64, 0xa5);
    b.values.resize(x.size());
    b.coded = f.store(x.data(), n, b.scale, b.bytes.data());
    f.load(b.bytes.data(), b.scale, b.values.data(), n);
    return b;
  }

  std::vector<float> values(int kind, int n) const {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
      switch (kind) {
        case 0:
          v = normal() * 1e-3f;
          break;
        case 1:
          v = normal(), v = v * v * 1e-7f;
          break;
        case 2:
          v = bits_float(draw32() & 0xbfffffffu);
          break;  // below 2
        case 3:
          v = draw32() % 3 ? normal() : (draw32() & 1 ? 0.0f : -0.0f);
          break;
        case 4:
          v = bits_float(draw32() & 0x80ffffffu);
          break;  // subnormal and a little above
        case 5:
          v = normal() * 3e37f;
          break;
        case 6:
          v = std::ldexp(normal(), static_cast<int>(draw32() % 30) - 20);
          break;
        default:
          v = 1.0f + uniform() * 1e-6f;  // nearly constant
      }
      if (!f.is_signed) v = std::fabs(v);
      if (!std::isfinite(v)) v = 1.0f;
    }
    return x;
  }

  void blocks() {
    int outside = 0, loops = 0, unstored = 0, vanished = 0;
    for (int n = 1; n <= 300; ++n) {
      for (int kind = 0; kind < 8; ++kind) {
        const auto x = values(kind, n);
        const Block b = stored(x);
        if (!b.coded) continue;
        std::vector<float> z(x.size());
        std::vector<uint32_t> defined(x.size());
        f.define(x.data(), n, z.data(), defined.data());
        bool same = true;
        for (size_t i = x.size() * f.bytes; i < b.bytes.size(); ++i) same &= b.bytes[i] == 0xa5;
        for (size_t i = 0; i < x.size(); ++i) {
          const uint32_t code = defined[i];
          const float back = f.value(b.scale, code);
          same = same && b.code(i) == code && float_bits(back) == float_bits(b.values[i]);
          unstored += !std::isfinite(back);
          vanished +=
              !f.is_signed && has_zero && back == 0.0f && z[i] > 0.0f && x[i] > 1e-37f && kind != 2;
          // x lies between the values of the neighboring codes, or beyond the last one.
          const uint32_t above = f.neighbour(code, true), below = f.neighbour(code, false);
          double slack = std::fabs(x[i]) * 2e-5 + 1e-37;
          if (f.half_scale) {  // half a unit in the last place, also if subnormal
            const double u = f.is_signed ? 1.0 : 2.0 * std::sqrt(x[i]) + 4e-8;
            slack = std::fabs(x[i]) * 1e-3 + 4e-8 * u;
          }
          if (above != code && x[i] > f.value(b.scale, above) + slack) ++outside;
          if (below != code && x[i] < f.value(b.scale, below) - slack) ++outside;
        }
        loops += !same;
      }
    }
    check(loops == 0, name(std::to_string(loops) + " blocks whose loop is not the definition"));
    check(outside == 0, name(std::to_string(outside) + " values outside their neighbours"));
    check(unstored == 0, name(std::to_string(unstored) + " finite values became infinite"));
    check(vanished == 0, name(std::to_string(vanished) + " positive values vanished"));
  }

  /// Loops at the ends of the intervals of lookup tables, over runs of floats that share at most
  /// the first 8 bits of the mantissa, and around all boundaries between codes.
  void edges() {
    std::vector<float> at;
    const auto around = [&](float v) {
      for (const uint32_t bits : {float_bits(v) - 1, float_bits(v), float_bits(v) + 1}) {
        at.push_back(bits_float(bits));
        if (f.is_signed) at.push_back(-bits_float(bits));
      }
    };
    for (uint32_t bits = 97u << 23; bits < 128u << 23; bits += 1u << 15) around(bits_float(bits));
    for (const double m : middles) {
      const double z = bent ? m / (2.0 - std::fabs(m)) : m;
      if (std::fabs(z) > 1e-30) around(static_cast<float>(std::fabs(z)));
    }
    for (const float v : {0.0f, -0.0f, bits_float(1)}) at.push_back(v);
    const double top = std::max(std::fabs(value(0)), std::fabs(value(codes.size() - 1)));
    int wrong = 0;
    for (size_t i = 0; i < at.size(); i += 255) {
      std::vector<float> x(1, static_cast<float>(top));  // so that the scale is 1
      x.insert(x.end(), at.begin() + static_cast<ptrdiff_t>(i),
               at.begin() + static_cast<ptrdiff_t>(std::min(i + 255, at.size())));
      for (float& v : x) v = std::fabs(v) > top ? static_cast<float>(top) : v;
      const Block b = stored(x);
      std::vector<float> z(x.size());
      std::vector<uint32_t> defined(x.size());
      f.define(x.data(), static_cast<int>(x.size()), z.data(), defined.data());
      for (size_t k = 0; k < x.size(); ++k) wrong += b.coded && b.code(k) != defined[k];
    }
    check(wrong == 0, name(std::to_string(wrong) + " of " + std::to_string(at.size()) +
                           " at edges are not the definition"));
  }

  /// The digest of codes and values of fixed blocks: the same for every compiler and processor.
  uint32_t digest() const {
    uint32_t sum = 0;
    std::mt19937 engine(7);
    for (int n = 1; n <= 256; n += 5) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& v : x) {
        const uint32_t low = 0x30000000u + 0x100000u * static_cast<uint32_t>(n);
        v = bits_float(low + engine() % 0x8000000u);
        if (f.is_signed && engine() % 2 == 0) v = -v;
      }
      const Block b = stored(x);
      for (const float v : b.values) sum = sum * 16777619u ^ float_bits(v);
      for (size_t i = 0; i < x.size(); ++i) sum = sum * 16777619u ^ b.code(i);
    }
    return sum;
  }

  void hostile() {
    const Block zeros = stored(std::vector<float>(40, 0.0f));
    for (const float v : zeros.values) check(v == 0.0f, name("a block of zeros"));
    check(zeros.code(0) == f.zero_code, name("codes of a block of zeros"));
    for (const uint32_t bad : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u}) {
      std::vector<float> x(40, 0.5f);
      x[7] = bits_float(bad);
      bool all = true;
      for (const float v : stored(x).values) all = all && std::isnan(v);
      check(all, name("a block with " + std::to_string(bits_float(bad))));
    }
    for (const float tiny : {1e-45f, 3e-42f, 1.1e-38f, 2e-38f, 1e-35f, 1e-9f}) {
      std::vector<float> x(40, tiny);
      x[3] = 0.0f;
      const Block b = stored(x);
      for (size_t i = 0; i < x.size(); ++i) {
        const float v = b.values[i];
        check(std::isfinite(v) && (f.is_signed || i == 3 || !has_zero || v > 0.0f),
              name("a block of " + std::to_string(tiny)));
      }
    }
    std::vector<float> x(40, 3.4028234e38f);
    for (size_t i = 0; i < x.size(); i += 2) x[i] = f.is_signed ? -x[i] : 1e-30f;
    for (const float v : stored(x).values) check(std::isfinite(v), name("a block of huge values"));
  }

  void golden(const std::string& text) const {
    const size_t at = text.find(std::string("\"").append(f.name).append("\": {\"crc32\": \""));
    if (at == std::string::npos) return;
    const uint32_t expected =
        static_cast<uint32_t>(std::stoul(text.substr(text.find("crc32", at) + 9, 8), nullptr, 16));
    uint32_t crc = ~0u;
    for (const uint32_t code : codes) {
      const uint32_t bits = float_bits(f.dequantize(code));
      for (int byte = 0; byte < 4; ++byte) {
        crc ^= (bits >> (8 * byte)) & 255u;
        for (int b = 0; b < 8; ++b) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
      }
    }
    check(~crc == expected, name("the table of other libraries"));
  }
};

/// The integers of `"key": [...]`, starting at `at`.
std::vector<uint32_t> integers(const std::string& text, size_t at, const char* key) {
  std::vector<uint32_t> all;
  const std::string mark = std::string(key).append("\": [");
  size_t i = text.find(mark, at) + mark.size();
  while (text[i] != ']') {
    size_t used = 0;
    all.push_back(static_cast<uint32_t>(std::stoul(text.substr(i, 16), &used)));
    i += used + (text[i + used] == ',');
  }
  return all;
}

/// FlashOptim's blocks get FlashOptim's codes, scales and values, except that positive values it
/// stores as zero become the smallest step.
template <class F>
void flashoptim(const std::string& text) {
  int blocks = 0;
  const std::string mark = std::string("\"format\": \"").append(F::kName).append("\"");
  for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos; ++at, ++blocks) {
    std::vector<float> x;
    for (const uint32_t b : integers(text, at, "x")) x.push_back(bits_float(b));
    const auto codes = integers(text, at, "codes"), values = integers(text, at, "values");
    const auto scale =
        F::Scale::of(magnitude_bits(*std::max_element(
                         x.begin(), x.end(),
                         [](float a, float b) { return magnitude_bits(a) < magnitude_bits(b); })),
                     0xffffffffu);
    uint16_t memory;
    scale.write(&memory);
    bool same = memory == integers(text, at, "scale")[0] && codes.size() == x.size();
    for (size_t i = 0; i < x.size(); ++i) {
      const uint32_t code = F::quantize(scale.to_z(x[i]));
      const float back = F::Scale::read(&memory).from_z(F::dequantize(code));
      const bool raised = !F::kSigned && x[i] > 0.0f && codes[i] == 0;
      same = same && (raised ? code == 1 : code == codes[i] && float_bits(back) == values[i]);
    }
    check(same, std::string(F::kName) + ": FlashOptim's block " + std::to_string(blocks));
  }
  check(blocks == 3, std::string(F::kName) + ": FlashOptim's blocks");
}

/// z of the logarithmic formats equals the definition's, to float32 accuracy.
void test_log_scale(const Format& f, double levels, double start) {
  const Tester tester{f};
  for (int turn = 0; turn < 200; ++turn) {
    const auto x = tester.values(turn % 2 ? 6 : 1, 256);
    const auto b = tester.stored(x);
    float zs[256];
    uint32_t codes[256];
    f.define(x.data(), 256, zs, codes);
    const double range = bits_float(b.scale[0]);
    const double lowest = start == 0.0 ? -126.0 : bits_float(b.scale[1]);
    double wrong = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double a = std::fabs(x[i]);
      if (a < std::ldexp(1.0, -126)) continue;
      double z = (std::log2(a) - lowest) * levels / range + start;
      const bool zero = f.is_signed && std::log2(a) < lowest - 1.0;
      z = zero ? 0.0 : std::fmax(z, start) * (x[i] < 0 ? -1 : 1);
      const double allowed = 2e-7 * (levels / range + std::fabs(z) + 1.0);
      wrong = std::fmax(wrong, std::fabs(zs[i] - std::fmin(z, levels + start)) / allowed);
    }
    check(wrong < 1.0, std::string(f.name) + ": z of a logarithm " + std::to_string(wrong));
  }
}

/// For formats whose codes and values involve more operations than a search can verify.
void check_digest(const char* name, uint32_t sum) {
  constexpr struct {
    std::string_view name;
    uint32_t sum;
  } kKnown[] = {{"log8_fixed", 0xe253c52u},   {"log8", 0xaad9b94cu},
                {"log16", 0x2fecbe92u},       {"log8_signed", 0x652fa5u},
                {"companded8", 0xb8647883u},  {"companded8_unsigned", 0x32ea07cdu},
                {"float8_e4m3", 0x4331a45cu}, {"float8_e5m2", 0x1275c231u}};
  for (const auto& known : kKnown) {
    if (known.name != name) continue;
    std::ostringstream hex;
    hex << std::hex << "0x" << sum;
    check(known.sum == sum, std::string(name) + ": digest " + hex.str());
  }
}

void test(const Format& f, const std::string& golden) {
  Tester t{f};
  t.order();
  t.brute_force();
  t.blocks();
  t.edges();
  t.hostile();
  t.golden(golden);
  check_digest(f.name, t.digest());
}

template <class F>
void test_coded(const std::string& golden, int* formats) {
  if constexpr (Coded<F>) {
    test(format<F>(), golden);
    ++*formats;
  }
}

template <class... F>
int test_all(const std::string& golden, Types<F...>) {
  int formats = 0;
  (test_coded<F>(golden, &formats), ...);
  return formats;
}

void test_half() {
  bool same = true;
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    const float f = half_to_float(static_cast<uint16_t>(h));
    const uint16_t back = half_nearest(f);
    same = same && (std::isnan(f) ? back == 0x7e00u : back == h);
    if (h >= 0x7bffu) continue;  // the middle to the next value, and its neighbors
    const float middle = (f + half_to_float(static_cast<uint16_t>(h + 1))) / 2.0f;
    same = same && half_nearest(middle) == h + (h & 1) &&
           half_nearest(std::nextafterf(middle, 0.0f)) == h &&
           half_nearest(-std::nextafterf(middle, INFINITY)) == (0x8000u | (h + 1));
  }
  check(same, "float16");
  check(half_nearest(65519.996f) == 0x7bff && half_nearest(65520.0f) == 0x7c00, "float16 overflow");
}

void test_log2() {
  double log_error = 0.0, part_error = 0.0, exp_error = 0.0;
  for (uint32_t b = 1; b < 0x7f800000u; b += 1009) {
    const float x = bits_float(b);
    const double exact = std::log2(static_cast<double>(x));
    const Log2 l = log2_parts(x);
    part_error = std::fmax(part_error, std::fabs((l.whole + static_cast<double>(l.part)) - exact));
    log_error =
        std::fmax(log_error, std::fabs(binary_log(x) - exact) / std::fmax(1.0, std::fabs(exact)));
  }
  for (int i = 0; i < 1000000; ++i) {
    const float y = (uniform() - 0.5f) * 240.0f;
    const double exact = std::exp2(static_cast<double>(y));
    exp_error = std::fmax(exp_error, std::fabs(binary_exp(y, 0.0f) - exact) / exact);
    const double shifted = std::exp2(y / 240.0 + 17.0);
    exp_error = std::fmax(exp_error, std::fabs(binary_exp(y / 240.0f, 17.0f) - shifted) / shifted);
  }
  check(part_error < 1e-7, "log2 parts: " + std::to_string(part_error * 1e7) + "e-7");
  check(log_error < 1e-7, "log2: " + std::to_string(log_error * 1e7) + "e-7");
  check(exp_error < 2e-7, "exp2: " + std::to_string(exp_error * 1e7) + "e-7");
  bool exact = true;
  for (int e = -149; e < 128; ++e) {
    const float x = std::ldexp(1.0f, e), w = static_cast<float>(e);
    exact = exact && binary_log(x) == w && binary_exp(w, 0.0f) == x && binary_exp(0.0f, w) == x;
  }
  check(exact, "log2 and exp2 of powers of two");
  check(std::isnan(binary_exp(NAN, 0.0f)), "exp2 of NaN");
}

std::string contents(const char* name) {
  std::ifstream file(LOWBIT_GOLDEN "/" + std::string(name));
  std::stringstream all;
  all << file.rdbuf();
  check(all.str().size() > 1000, name);
  return all.str();
}

}  // namespace

int run_tests() {
  const std::string golden = contents("codebooks.json"), blocks = contents("flashoptim8.json");
  test_half();
  test_log2();
  const int formats = test_all(golden, StateFormats{});
  flashoptim<Companded8>(blocks);
  flashoptim<Companded8Unsigned>(blocks);
  test_log_scale(format<Log8Fixed>(), 255, 0);
  test_log_scale(format<Log8>(), 254, 1);
  test_log_scale(format<Log16>(), 65534, 1);
  test_log_scale(format<Log8Signed>(), 126, 1);
  std::printf("%d formats, ", formats);
  return finish();
}
