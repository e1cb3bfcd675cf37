// The CUDA library, launcher and kernels as they are, on the CPU (cuda_emulator.h): parameters,
// codes, scales and steps against the CPU walk, byte for byte. Then the same with mistakes planted,
// which must show.
#include "cuda_emulator.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "catalog.h"
#include "core/registry.h"
#include "cpu/step.h"

namespace lowbit {
// Where the kernels draw random bits, and the tables that they read, a test can plant a mistake.
inline int random_fault = 0;
inline Random8 faulty_random8(const RandomKey& key, uint64_t group) {
  Random8 r = random8(key, random_fault == 1   ? group + 1
                           : random_fault == 2 ? group & 0xffffffffu
                                               : group);
  if (random_fault == 3) {
    for (uint32_t& word : r.word) word = word << 16 | word >> 16;
  }
  return r;
}
}  // namespace lowbit
#define random8 faulty_random8
#undef LB_TABLE
#define LB_TABLE inline
#include "cuda/step.cu"
#undef random8

namespace lowbit {
namespace {

int passed = 0, failed = 0;

void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED %s\n", what.c_str());
}

/// 16-byte aligned memory.
struct alignas(16) Piece {
  unsigned char byte[16];
  bool operator==(const Piece&) const = default;
};
using Bytes = std::vector<Piece>;

/// What a parameter looks like and where it lies in the whole.
struct Spec {
  int rule = 0, param = 2, grad = 1;
  int state[3] = {2, 3, 3}, block[3] = {256, 256, 256};
  int64_t rows = 1, cols = 1, global_cols = 0, first = 0;  // global_cols 0: cols
  int misaligned = 0;  // elements by which the parameter's memory is off
  std::string name() const {
    char text[256];
    int at = std::snprintf(text, sizeof text, "%s %s %s", rule_info(rule).name,
                           param_info(param).name, grad_dtype(grad));
    for (int k = 0; k < rule_info(rule).slots; ++k) {
      at += std::snprintf(text + at, sizeof text - static_cast<size_t>(at), " %s/%d",
                          state_info(state[k]).name, block[k]);
    }
    std::snprintf(text + at, sizeof text - static_cast<size_t>(at),
                  " [%lld, %lld] of %lld from %lld", static_cast<long long>(rows),
                  static_cast<long long>(cols), static_cast<long long>(global_cols),
                  static_cast<long long>(first));
    return text;
  }
};

int dtype_bytes(const char* dtype) {
  return std::strcmp(dtype, "float32") == 0 ? 4 : std::strcmp(dtype, "uint8") == 0 ? 1 : 2;
}

/// The memory of one parameter, with margins that must stay as they are.
struct Memory {
  static constexpr size_t kMargin = 4;
  std::vector<Bytes> param, values, scales;  // param: one entry
  Bytes grad;
  float step = 0;

  static Bytes buffer(int64_t bytes) {
    return Bytes(static_cast<size_t>(ceil_div(bytes, 16)) + 2 * kMargin);
  }
  static unsigned char* at(Bytes& bytes) { return bytes[kMargin].byte; }
};

/// Values of every magnitude, some exact in few bits, some zero.
float draw(std::mt19937& random, float size) {
  std::normal_distribution<float> normal;
  const unsigned kind = random() % 16;
  const float x = normal(random) * size;
  if (kind == 0) return 0.0f;
  if (kind == 1) return x * 1e-6f;
  if (kind == 2) return std::round(x * 8.0f / size) / 8.0f * size;
  return x;
}

void put(unsigned char* at, const char* dtype, int64_t i, float x) {
  if (dtype_bytes(dtype) == 4) {
    std::memcpy(at + 4 * i, &x, 4);
  } else {
    uint16_t half = bfloat16_nearest(x);
    if (std::strcmp(dtype, "float16") == 0) {  // a float16 of about this size, any mantissa
      const int exponent = std::clamp(static_cast<int>(float_bits(x) >> 23 & 255) - 112, 0, 31);
      half = static_cast<uint16_t>((float_bits(x) >> 16 & 0x8000u) |
                                   static_cast<uint32_t>(exponent) << 10 |
                                   (float_bits(x) >> 13 & 0x3ffu));
    }
    std::memcpy(at + 2 * i, &half, 2);
  }
}

Memory make_memory(const Spec& spec, std::mt19937& random) {
  Memory m;
  const int64_t n = spec.rows * spec.cols;
  m.param.push_back(Memory::buffer(4 * (n + spec.misaligned)));
  m.grad = Memory::buffer(4 * n);
  for (int64_t i = 0; i < n + spec.misaligned; ++i)
    put(Memory::at(m.param[0]), param_info(spec.param).dtype, i, draw(random, 1.0f));
  for (int k = 0; k < rule_info(spec.rule).slots; ++k) {
    const StateInfo info = state_info(spec.state[k]);
    m.values.push_back(Memory::buffer(info.scaled ? spec.rows * code_bytes(spec.cols, info.bits)
                                                  : n * info.bits / 8));
    m.scales.push_back(
        Memory::buffer(info.scaled ? 4 * spec.rows * ceil_div(spec.cols, spec.block[k]) : 0));
  }
  return m;
}

Job make_job(const Spec& spec, Memory& m) {
  Job job{};
  job.rule = spec.rule, job.param_format = spec.param, job.grad_format = spec.grad;
  job.rows = spec.rows, job.cols = spec.cols,
  job.global_cols = spec.global_cols ? spec.global_cols : spec.cols, job.first = spec.first;
  job.random = {0x12345678u, 7u, 0, static_cast<uint32_t>(spec.rows * 31 + spec.cols)};
  job.param = Memory::at(m.param[0]) + spec.misaligned * dtype_bytes(param_info(spec.param).dtype);
  job.grad = Memory::at(m.grad);
  for (size_t k = 0; k < m.values.size(); ++k) {
    const bool scaled = state_info(spec.state[k]).scaled;
    job.state[k] = {Memory::at(m.values[k]),
                    scaled ? reinterpret_cast<float*>(Memory::at(m.scales[k])) : nullptr,
                    spec.state[k], scaled ? spec.block[k] : 0};
  }
  return job;
}

struct Options {
  double hyper[5] = {1e-2, 0.9, 0.99, 1e-8, 1e-2};
  const float *lr = nullptr, *grad_scale = nullptr, *found_inf = nullptr;
  bool maximize = false;
  float grad_size = 1e-2f;
  bool odd_grads = false;  // NaN, infinities, huge and tiny ones
};

/// As ops.cpp does on the CPU.
void step_cpu(std::vector<Job> jobs, const std::vector<float*>& steps, const Options& o) {
  if (o.found_inf && *o.found_inf != 0.0f) return;
  double hyper[5];
  std::copy(o.hyper, o.hyper + 5, hyper);
  if (o.lr) hyper[0] = *o.lr;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int64_t t = std::llrint(*steps[i] += 1.0f);
    lowbit::prepare(jobs[i], hyper, t,
                    (o.maximize ? -1.0 : 1.0) / (o.grad_scale ? *o.grad_scale : 1.0));
    jobs[i].random.step = static_cast<uint32_t>(t);
    jobs[i].write_param = hyper[0] != 0.0;
    cpu::step(jobs[i], 0, jobs[i].tiles(), cpu::leaves());
  }
}

void step_cuda(const std::vector<Job>& jobs, const std::vector<float*>& steps, const Options& o) {
  Bytes workspace(
      static_cast<size_t>(lowbit_cuda_workspace(static_cast<int64_t>(jobs.size()))) / 16 + 1);
  std::memset(workspace.data(), 0xff, workspace.size() * sizeof(Piece));
  CudaStep call{};
  call.jobs = jobs.data(), call.count = static_cast<int64_t>(jobs.size());
  call.steps = steps.data();
  call.hyper = o.hyper, call.hypers = 5;
  call.lr = o.lr, call.grad_scale = o.grad_scale, call.found_inf = o.found_inf,
  call.maximize = o.maximize;
  call.workspace = workspace.data();
  const char* error = lowbit_cuda_step(&call);
  check(error == nullptr, std::string("lowbit_cuda_step: ") + (error ? error : ""));
}

/// Where the two differ, or an empty string.
std::string difference(const Memory& a, const Memory& b) {
  if (a.param != b.param) return "parameter";
  for (size_t k = 0; k < a.values.size(); ++k) {
    if (a.values[k] != b.values[k]) return "state " + std::to_string(k);
    if (a.scales[k] != b.scales[k]) return "scales " + std::to_string(k);
  }
  return float_bits(a.step) != float_bits(b.step) ? "step" : "";
}

/// How often each kernel served a job.
int served[cuda::kFastCount + 1];

/// Steps all specs `steps` times on both, each step one call; the number of specs that differ.
int compare(const std::vector<Spec>& specs, const Options& options, int steps, bool report = true) {
  std::mt19937 random(5);
  std::vector<Memory> memory[2];
  for (const Spec& spec : specs) memory[0].push_back(make_memory(spec, random));
  memory[1] = memory[0];
  std::vector<Job> jobs[2];
  std::vector<float*> counters[2];
  for (size_t i = 0; i < specs.size(); ++i) {
    for (int on : {0, 1}) {
      jobs[on].push_back(make_job(specs[i], memory[on][i]));
      counters[on].push_back(&memory[on][i].step);
    }
    ++served[cuda::kernel_of(jobs[1][i])];
  }
  std::vector<std::string> where(specs.size());
  for (int s = 0; s < steps; ++s) {
    for (size_t i = 0; i < specs.size(); ++i) {
      for (int64_t e = 0; e < specs[i].rows * specs[i].cols; ++e) {
        float g = draw(random, options.grad_size);
        if (options.odd_grads && e % 701 == 5 * s) {
          const float odd[] = {
              NAN, INFINITY, -INFINITY, 3e38f, 1e-42f, -1e-30f, bits_float(0xffc12345u)};
          g = odd[random() % 7];
        }
        for (int on : {0, 1}) put(Memory::at(memory[on][i].grad), grad_dtype(specs[i].grad), e, g);
      }
    }
    step_cpu(jobs[0], counters[0], options);
    step_cuda(jobs[1], counters[1], options);
    for (size_t i = 0; i < specs.size(); ++i) {
      if (!where[i].empty()) continue;
      where[i] = difference(memory[0][i], memory[1][i]);
      if (!where[i].empty()) where[i] += " after step " + std::to_string(s + 1);
    }
  }
  int differ = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    differ += !where[i].empty();
    if (report) check(where[i].empty(), specs[i].name() + ": " + where[i]);
  }
  return differ;
}

/// Every rule, parameter, gradient and state format that fits the slot's sign.
void test_every_combination() {
  for (int rule = 0; rule < rule_count(); ++rule) {
    std::vector<Spec> specs;
    for (int param = 0; param < param_count(); ++param) {
      for (int grad = 0; grad < grad_count(); ++grad) {
        for (int s0 = 0; s0 < state_count(); ++s0) {
          if (!state_info(s0).is_signed) continue;
          for (int s1 = 0; s1 < state_count(); ++s1) {
            Spec spec{rule, param, grad};
            spec.state[0] = s0, spec.state[1] = s1, spec.state[2] = (s1 + 1) % state_count();
            spec.rows = 2, spec.cols = 264;
            specs.push_back(spec);
            spec.rows = 3, spec.cols = 77, spec.global_cols = 100, spec.first = 1003;
            specs.push_back(spec);
          }
        }
      }
    }
    compare(specs, {}, 2);
  }
}

std::vector<Spec> shapes(int param, int grad, int s0, int s1) {
  std::vector<Spec> specs;
  const auto add = [&](int64_t rows, int64_t cols, int64_t global_cols, int64_t first,
                       int block0 = 256, int block1 = 256, int misaligned = 0) {
    Spec spec{0, param, grad};
    spec.state[0] = s0, spec.state[1] = s1;
    spec.rows = rows, spec.cols = cols, spec.global_cols = global_cols, spec.first = first;
    spec.block[0] = block0, spec.block[1] = block1, spec.misaligned = misaligned;
    specs.push_back(spec);
  };
  add(20, 896, 0, 0);
  add(4, 1408, 0, 896 * 512);         // a later shard
  add(3, 4096, 0, int64_t{1} << 36);  // indices beyond 32 bits
  add(2, 8, 0, 0), add(5, 16, 0, 80), add(3, 248, 0, 0);
  add(40, 77, 0, 0), add(5, 77, 0, 3 * 77), add(40, 1, 0, 0), add(1, 1, 0, 0);
  add(0, 512, 0, 0), add(5, 0, 0, 0);  // empty shards
  add(6, 257, 0, 257 * 2), add(4, 255, 0, 0);
  add(3, 512, 1024, 512), add(3, 300, 900, 300);                  // cut along the columns
  add(2, 512, 1021, 5), add(3, 264, 1021, 8), add(3, 264, 0, 4);  // Philox groups that no lane owns
  add(4, 512, 0, 0, 256, 256, 1);                                 // unaligned memory
  for (int block = 1; block <= 256; block *= 2) {
    add(2, 616, 0, 0, block, 256), add(2, 616, 0, 0, 256, block),
        add(1, 333, 0, 0, block, 512 / block > 256 ? 256 : 512 / block);
  }
  return specs;
}

/// What a user has: 8-bit state on bfloat16 and float32 parameters; the fixed kernels and, where
/// rows are uneven, the general one.
void test_shapes() {
  const int d8 = find_state("dynamic8"), d8u = find_state("dynamic8_unsigned"),
            wide = find_state("float32");
  Options odd;
  odd.odd_grads = true;
  for (const cuda::Fast& f : cuda::kFast) {
    check(f.rule >= 0 && f.param >= 0 && f.grad >= 0 && f.state[0] >= 0 && f.state[1] >= 0,
          "a fixed kernel's formats are registered");
    std::vector<Spec> specs = shapes(f.param, f.grad, f.state[0], f.state[1]);
    if (&f != cuda::kFast && f.state[0] == d8)
      specs.erase(
          std::remove_if(specs.begin(), specs.end(), [](const Spec& s) { return s.cols % 8 != 0; }),
          specs.end());
    compare(specs, odd, 3);
  }
  for (int i = 0; i <= cuda::kFastCount; ++i)
    check(served[i] >= 5, "kernel " + std::to_string(i) + " was tested");

  std::vector<Spec> mixed;  // more than one prepare, every kernel in one call, empty ones between
  for (int i = 0; i < 1100; ++i) {
    Spec spec{0, i % 3, i % 2};
    spec.state[0] = i % 5 == 0 ? wide : d8, spec.state[1] = i % 5 == 0 ? wide : d8u;
    spec.rows = i % 7 == 0 ? 0 : 1 + i % 2, spec.cols = 8 + 24 * (i % 13) + i % 5 / 4;
    mixed.push_back(spec);
  }
  compare(mixed, {}, 2);
}

void test_options() {
  std::vector<Spec> specs = shapes(2, 1, find_state("dynamic8"), find_state("dynamic8_unsigned"));
  const size_t count = 20;
  specs.resize(count);
  Options o;
  o.maximize = true;
  const float scale = 1024.0f, lr = 3e-3f, none = 0.0f, found = 1.0f, nan = NAN;
  o.grad_scale = &scale, o.lr = &lr, o.found_inf = &none, o.grad_size = 10.0f;
  o.hyper[4] = 0.0;
  check(compare(specs, o, 3) == 0, "grad_scale, lr on the device, maximize");
  for (const float* f : {&found, &nan}) {
    o.found_inf = f;
    compare(specs, o, 2);
  }
  std::mt19937 random(1);
  Memory before = make_memory(specs[0], random), after = before;
  step_cuda({make_job(specs[0], after)}, {&after.step}, o);
  check(difference(before, after).empty(), "found_inf leaves everything as it is");
  Options still;
  still.hyper[0] = 0.0;
  compare(specs, still, 3);
  after.grad = before.grad;
  put(Memory::at(after.grad), "bfloat16", 3, 1.0f);
  step_cuda({make_job(specs[0], after)}, {&after.step}, still);
  check(before.param == after.param && before.values != after.values && after.step == 1.0f,
        "lr = 0 leaves the parameter and moves its state");
}

/// Codes by the device's arithmetic against core's definition, at and beside every boundary and on
/// floats all over.
template <class F>
int wrong_codes() {
  const auto& tables = []() -> const auto& {
    if constexpr (F::kSigned)
      return cuda::kSignedTables;
    else
      return cuda::kUnsignedTables;
  }();
  int wrong = 0;
  const auto at = [&](float z) { wrong += cuda::Device<F>::encode(z, tables) != F::encode(z); };
  for (uint32_t bits = 0; bits <= 0x3f800001u; bits += 997)
    at(bits_float(bits)), at(-bits_float(bits));
  for (int code = 0; code < 256; ++code) {
    wrong += float_bits(cuda::Device<F>::decode(static_cast<uint8_t>(code), tables)) !=
             float_bits(F::decode(code));
    const float low = F::decode(code), high = code < 255 ? F::decode(code + 1) : 1.0f;
    for (const double center :
         {(static_cast<double>(low) + high) / 2.0, static_cast<double>(low)}) {
      const uint32_t bits = float_bits(static_cast<float>(center));
      for (uint32_t near = bits - 4; near != bits + 5; ++near) {
        if (magnitude_bits(bits_float(near)) <= 0x3f800001u) at(bits_float(near));
      }
    }
  }
  for (const float z : {0.0f, -0.0f, 1.0f, -1.0f, bits_float(1), bits_float(0x80000001u)}) at(z);
  return wrong;
}

/// The encode and decode kernels against the CPU's leaves: every code under scales of all kinds,
/// blocks of all lengths, uneven rows.
void test_codes() {
  check(wrong_codes<Dynamic8>() == 0, "dynamic8: codes on the device");
  check(wrong_codes<Dynamic8Unsigned>() == 0, "dynamic8_unsigned: codes on the device");
  const cpu::Leaves& leaves = cpu::leaves();
  std::mt19937 random(3);
  for (int format = 0; format < state_count(); ++format) {
    const StateInfo info = state_info(format);
    if (!info.scaled) continue;
    for (int block = 1; block <= 256; block *= 2) {
      const int64_t rows = 12, cols = block == 256 ? 1280 : 333, blocks = ceil_div(cols, block);
      std::vector<float> x(static_cast<size_t>(rows * cols)), scale[2], back[2];
      std::vector<uint8_t> codes[2];
      for (size_t i = 0; i < x.size(); ++i) x[i] = draw(random, 1e-3f);
      for (int64_t i = cols; i < 2 * cols; ++i) x[i] = 0.0f;
      x[3 * cols] = NAN, x[4 * cols + 1] = INFINITY, x[5 * cols + 2] = -INFINITY;
      for (int64_t i = 6 * cols; i < 7 * cols; ++i) x[i] *= 1e-38f;
      for (int64_t i = 7 * cols; i < 8 * cols; ++i) x[i] *= 1e38f;
      for (int on : {0, 1})
        codes[on].resize(x.size()), scale[on].resize(static_cast<size_t>(rows * blocks)),
            back[on].resize(x.size());
      CudaCode call{0,    nullptr,  format,          block,          rows,
                    cols, x.data(), codes[1].data(), scale[1].data()};
      check(lowbit_cuda_encode(&call) == nullptr, "lowbit_cuda_encode");
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; col += kTile) {
          leaves.encode[format](&x[row * cols + col], &codes[0][row * cols + col],
                                &scale[0][row * blocks + col / block], block,
                                static_cast<int>(std::min<int64_t>(kTile, cols - col)));
        }
      }
      const std::string name = std::string(info.name) + ", blocks of " + std::to_string(block);
      check(codes[0] == codes[1] &&
                std::memcmp(scale[0].data(), scale[1].data(), 4 * scale[0].size()) == 0,
            "encode " + name);
      for (size_t i = 0; i < codes[0].size(); ++i) codes[0][i] = static_cast<uint8_t>(i);
      const float scales[] = {1.0f, 0.0f, NAN, 3.7e-5f, 3e38f, 1.1754944e-38f};
      for (size_t i = 0; i < scale[0].size(); ++i) scale[0][i] = scales[i % 6];
      call.values = back[1].data(), call.codes = codes[0].data(), call.scales = scale[0].data();
      check(lowbit_cuda_decode(&call) == nullptr, "lowbit_cuda_decode");
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; col += kTile) {
          leaves.decode[format](&codes[0][row * cols + col], &scale[0][row * blocks + col / block],
                                block, &back[0][row * cols + col],
                                static_cast<int>(std::min<int64_t>(kTile, cols - col)));
        }
      }
      bool same = true;
      for (size_t i = 0; i < x.size(); ++i)
        same &= float_bits(canonical(back[0][i])) == float_bits(canonical(back[1][i]));
      check(same, "decode " + name);
    }
  }
}

/// A small run that mistakes must disturb; 0 where nothing differs.
int probe() {
  std::vector<Spec> specs = shapes(2, 1, find_state("dynamic8"), find_state("dynamic8_unsigned"));
  specs.resize(9);
  return compare(specs, {}, 2, false) + wrong_codes<Dynamic8>() + wrong_codes<Dynamic8Unsigned>();
}

/// Runs the probe with a mistake in another process, which may crash; whether it showed.
bool shows(const std::function<void()>& mistake) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
    mistake();
    _exit(probe() == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_mistakes_show() {
  emulator::Faults& faults = emulator::machine.faults;
  check(!shows([] {}), "no mistake, no difference");
  check(shows([&] { faults.short_shuffle = true; }), "a shuffle over half the lanes shows");
  check(shows([&] { faults.no_block_barrier = true; }), "a missing block barrier shows");
  check(shows([&] { faults.no_warp_barrier = true; }), "a missing warp barrier shows");
  check(shows([] { random_fault = 1; }), "the next group's random bits show");
  check(shows([] { random_fault = 2; }), "a counter of 32 bits shows");
  check(shows([] { random_fault = 3; }), "swapped halves of random words show");
  check(shows([] {
          cuda::kSignedTables.from[200] = std::nextafter(cuda::kSignedTables.from[200], 2.0f);
        }),
        "a boundary one unit high shows");
  check(shows([] { cuda::kUnsignedTables.from[1] = 2e-7f; }),
        "a positive value rounded to zero shows");
  check(shows([] { cuda::kSignedTables.lines[14].slope *= 1.1f; }), "a wrong slope shows");
  check(shows([] { cuda::kUnsignedTables.value[77] *= 1.0000002f; }), "a value one unit off shows");
}

}  // namespace
}  // namespace lowbit

int main() {
  lowbit::test_codes();
  lowbit::test_every_combination();
  lowbit::test_shapes();
  lowbit::test_options();
  lowbit::test_mistakes_show();
  std::printf("%d passed, %d failed\n", lowbit::passed, lowbit::failed);
  return lowbit::failed ? 1 : 0;
}
