// Small parameters with gradients and state, in all layouts and cuts, as jobs over their memory.
// Include after cuda_emulator.h and cuda/step/step.cu.
#pragma once

#include <random>
#include <string>

#include "catalog/catalog.h"
#include "check.h"
#include "core/exact_sum.h"
#include "cuda_sample.h"

namespace lowbit {
namespace {

/// 16-byte aligned memory.
struct alignas(16) Piece {
  unsigned char byte[16];
  bool operator==(const Piece&) const = default;
};
using Bytes = std::vector<Piece>;

/// How the state of one slot is stored.
struct Keep {
  int format = 0, block = 256, kind = kBlock;
  bool stochastic = false;
};

/// The properties of a parameter and its position in the whole.
struct Spec {
  int rule = 0, param = 2, grad = 1;
  Keep state[kMaxSlots] = {{2}, {3}, {3}, {3}};
  int64_t rows = 1, cols = 1, global_cols = 0, first = 0;  // global_cols 0: cols
  std::vector<int64_t> inside{};  // the dimensions whose product is cols; empty: one
  int misaligned = 0;             // misalignment of the parameter's memory, in elements
  int64_t more_rows = 0;          // further rows of the whole parameter
  int cut = kNoCut;               // a Cut
  int64_t front = 0, back = 0;    // elements of the first and the last row on other ranks

  /// The number of local elements.
  int64_t numel() const { return rows * cols - front - back; }

  std::vector<int64_t> dims() const {
    std::vector<int64_t> all{rows};
    all.insert(all.end(), inside.begin(), inside.end());
    if (inside.empty()) all.push_back(cols);
    return all;
  }
  std::string name() const {
    std::string text =
        std::string(rule_info(rule).name) + " " + param_info(param).name + " " + grad_dtype(grad);
    for (int k = 0; k < rule_info(rule).slots; ++k) {
      const Keep& keep = state[k];
      text += std::string(" ") + state_info(keep.format).name + "/" +
              std::to_string(keep.kind == kBlock ? keep.block : -keep.kind) +
              (keep.stochastic ? "~" : "");
    }
    for (const int64_t d : dims()) text += " " + std::to_string(d);
    text += " of " + std::to_string(global_cols) + " from " + std::to_string(first);
    if (cut != kNoCut || front + back > 0)
      text += " cut " + std::to_string(cut) + " without " + std::to_string(front) + " and " +
              std::to_string(back);
    return text;
  }
};

int dtype_bytes(const char* dtype) {
  return std::strcmp(dtype, "float32") == 0 ? 4 : std::strcmp(dtype, "uint8") == 0 ? 1 : 2;
}

/// The memory of one parameter, with margins that must not change.
struct Memory {
  static constexpr size_t kMargin = 4;
  std::vector<Bytes> param, state;  // param: the parameter and its compensation
  Bytes grad;
  float step = 0;

  static Bytes buffer(int64_t bytes) {
    return Bytes(static_cast<size_t>(ceil_div(bytes, 16)) + 2 * kMargin);
  }
  static unsigned char* at(Bytes& bytes) { return bytes[kMargin].byte; }
};

/// A value of any magnitude, some exact in few bits, some zero.
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
    const uint16_t half =
        std::strcmp(dtype, "float16") == 0 ? half_nearest(x) : bfloat16_nearest(x);
    std::memcpy(at + 2 * i, &half, 2);
  }
}

/// The workspace of a step with several phases, for all jobs, in the layout of
/// csrc/ops/workspace.cpp.
struct Scratch {
  std::vector<int64_t> totals, rows, cols;
  std::vector<uint32_t> row_absmax, col_absmax, blocks;
  std::vector<float> floats;
};

/// The cross-tile scales of one slot, as csrc/ops/plan.h stores them with a job.
struct Measured {
  size_t job;
  int slot;
  std::vector<float*> absmax;
  std::vector<int64_t> dims;
  bool combined() const { return dims.size() > 2; }
};

/// Jobs over memory, with their workspace.
struct Batched {
  std::vector<Job> jobs;
  std::vector<float*> steps;
  std::vector<Measured> measured;
  bool cuts = false;  // whether blocks are cut, so that their maxima are measured
  Scratch scratch;
};

/// Adds a job over the memory of one parameter, and allocates the memory if there is none.
/// Workspace pointers are offsets until `resolve`.
void add_job(Batched& all, const Spec& spec, Memory& m) {
  const bool fresh = m.param.empty();
  const RuleInfo rule = rule_info(spec.rule);
  const ParamInfo param = param_info(spec.param);
  const int64_t n = spec.rows * spec.cols;
  size_t next = 0;
  const auto take = [&](int64_t bytes) -> unsigned char* {
    if (fresh) m.state.push_back(Memory::buffer(bytes));
    return Memory::at(m.state[next++]);
  };
  if (fresh) {
    m.param.push_back(Memory::buffer(param.bytes * (spec.numel() + spec.misaligned)));
    m.param.push_back(Memory::buffer(param.compensation_bytes * n));
    m.grad = Memory::buffer(4 * (spec.numel() + spec.misaligned));
  }
  Job job{};
  job.rule = spec.rule, job.param_format = spec.param, job.grad_format = spec.grad;
  job.rows = spec.rows, job.cols = spec.cols;
  job.global_cols = spec.global_cols ? spec.global_cols : spec.cols, job.first = spec.first;
  job.numel = n + spec.more_rows * spec.cols;
  job.cut = spec.cut, job.front = spec.front, job.back = spec.back;
  const std::vector<int64_t> dims = spec.dims();
  job.inner_cols = dims.back(), job.inner_rows = dims[dims.size() - 2];
  job.batches = 1;
  for (size_t d = 0; d + 2 < dims.size(); ++d) job.batches *= dims[d];
  job.global_inner_cols = job.inner_cols;
  job.global_inner_rows = job.inner_rows + (dims.size() == 2 ? spec.more_rows : 0);
  job.random = {0x12345678u, 7u, 0, static_cast<uint32_t>(spec.rows * 31 + spec.cols)};
  job.param = Memory::at(m.param[0]) + spec.misaligned * param.bytes;
  job.compensation = param.compensation_bytes > 0 ? Memory::at(m.param[1]) : nullptr;
  job.grad = Memory::at(m.grad) + spec.misaligned * grad_bytes(spec.grad);
  job.tile = kTile;
  Scratch& s = all.scratch;
  const auto room = [](auto& list, int64_t count) {
    const size_t at = list.size();
    list.resize(at + static_cast<size_t>(count));
    // An offset until all lists have their final length.
    return reinterpret_cast<decltype(list.data())>(at * sizeof(list[0]));
  };
  for (int k = 0; k < rule.slots; ++k) {
    const Keep& keep = spec.state[k];
    const StateInfo info = state_info(keep.format);
    StateSlot& slot = job.state[k];
    slot.format = keep.format, slot.kind = info.scaled ? keep.kind : kNoScale;
    slot.block = slot.kind == kBlock ? keep.block : 0;
    slot.stochastic = keep.stochastic;
    slot.values =
        take(info.scaled ? spec.rows * code_bytes(spec.cols, info.bits) : n * info.bits / 8);
    if (slot.kind == kBlock) {
      if (slot.block > job.tile) job.tile = slot.block;
      slot.scales = take(info.scale_bytes * spec.rows * job.blocks(slot.block));
      if (spec.cut != kNoCut) {
        all.cuts = true;
        slot.block_next = room(s.blocks, 2 * job.cut_rows() * job.blocks(slot.block));
      }
    }
    if (!is_cross_tile(slot.kind)) continue;
    Measured measured{all.jobs.size(), k, {}, {}};
    const auto absmax = [&](int64_t length) {
      measured.absmax.push_back(reinterpret_cast<float*>(take(4 * length)));
      return reinterpret_cast<const uint32_t*>(measured.absmax.back());
    };
    slot.row_stride = slot.kind == kTensor ? 0 : 1;
    const int64_t rows = slot.kind == kTensor ? 1 : spec.rows;
    if (slot.kind != kColumn)
      slot.row_absmax = absmax(rows), slot.row_next = room(s.row_absmax, rows);
    if (slot.kind == kColumn) slot.col_absmax = absmax(spec.cols);
    if (slot.kind == kRank1) {
      measured.dims = dims;
      for (size_t d = 1; d < dims.size(); ++d) slot.col_absmax = absmax(dims[d]);
      if (measured.combined())
        slot.col_absmax = reinterpret_cast<uint32_t*>(room(s.floats, spec.cols));
    }
    if (slot.kind == kColumn || slot.kind == kRank1) slot.col_next = room(s.col_absmax, spec.cols);
    all.measured.push_back(measured);
  }
  int64_t *row_sums = nullptr, *col_sums = nullptr;
  if (rule.factors > 0) {
    row_sums = room(s.rows, job.batches * job.inner_rows * ExactSum::kWords);
    col_sums = room(s.cols, job.batches * (job.inner_cols + 1) * ExactSum::kWords);
  }
  for (int k = 0; k < rule.factors; ++k) {
    Factor& factor = job.factor[k];
    factor.row = reinterpret_cast<float*>(take(4 * job.batches * job.inner_rows));
    factor.col = reinterpret_cast<float*>(take(4 * job.batches * job.inner_cols));
    factor.scaled = room(s.floats, job.batches * job.inner_rows);
    factor.row_sums = row_sums, factor.col_sums = col_sums;
  }
  if (rule.numbers > 0) job.numbers = reinterpret_cast<float*>(take(4 * rule.numbers));
  job.totals = room(s.totals, rule.rounds * kMaxTotals * ExactSum::kWords);
  all.jobs.push_back(job);
  all.steps.push_back(&m.step);
}

/// Turns offsets into pointers.
void resolve(Batched& all) {
  Scratch& s = all.scratch;
  const auto move = [](auto*& at, auto& list) {
    at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(
        reinterpret_cast<char*>(list.data()) + reinterpret_cast<size_t>(at));
  };
  for (Job& job : all.jobs) {
    const RuleInfo rule = rule_info(job.rule);
    move(job.totals, s.totals);
    for (int k = 0; k < rule.factors; ++k) {
      move(job.factor[k].row_sums, s.rows), move(job.factor[k].col_sums, s.cols);
      move(job.factor[k].scaled, s.floats);
    }
  }
  for (Job& job : all.jobs) {
    for (StateSlot& slot : job.state) {
      if (slot.kind == kBlock && job.cut != kNoCut) move(slot.block_next, s.blocks);
    }
  }
  for (const Measured& m : all.measured) {
    StateSlot& slot = all.jobs[m.job].state[m.slot];
    if (slot.kind != kColumn) move(slot.row_next, s.row_absmax);
    if (slot.kind == kColumn || slot.kind == kRank1) move(slot.col_next, s.col_absmax);
    if (m.combined()) move(slot.col_absmax, s.floats);
  }
}

void forget(Scratch& s) {
  for (auto* list : {&s.totals, &s.rows, &s.cols}) std::fill(list->begin(), list->end(), 0);
  for (auto* list : {&s.row_absmax, &s.col_absmax, &s.blocks})
    std::fill(list->begin(), list->end(), 0u);
}

/// One shape of two to four dimensions, even or uneven; every third turn gives the next one.
Spec shaped(Spec spec, int turn) {
  switch (turn % 4) {
    case 0:
      spec.rows = 2, spec.cols = 264;
      break;
    case 1:
      spec.rows = 3, spec.cols = 77, spec.more_rows = 2, spec.global_cols = 100, spec.first = 1003;
      break;
    case 2:
      spec.rows = 4, spec.cols = 90, spec.inside = {6, 5, 3};
      break;
    default:
      spec.rows = 3, spec.cols = 330, spec.inside = {6, 55};
  }
  return spec;
}

std::vector<Spec> shapes(int param, int grad, int s0, int s1) {
  std::vector<Spec> specs;
  const auto add = [&](int64_t rows, int64_t cols, int64_t global_cols, int64_t first,
                       int block0 = 256, int block1 = 256, int misaligned = 0) {
    Spec spec;
    spec.param = param, spec.grad = grad;
    spec.state[0] = {s0, block0}, spec.state[1] = {s1, block1};
    spec.rows = rows, spec.cols = cols, spec.global_cols = global_cols, spec.first = first;
    spec.misaligned = misaligned;
    specs.push_back(spec);
  };
  add(20, 896, 0, 0);
  add(4, 1408, 0, 896 * 512);         // a later shard
  add(3, 4096, 0, int64_t{1} << 36);  // indices beyond 32 bits
  add(5, 512, 0, 1024, 64, 128);      // whole tiles, one after another
  add(2, 8, 0, 0), add(5, 16, 0, 80), add(3, 248, 0, 0);
  // short rows, several in a tile, the last tile not full
  add(37, 128, 0, 0), add(301, 16, 0, 0), add(9, 64, 0, 640, 32, 64), add(515, 8, 0, 0);
  add(20, 128, 0, 0, 32, 256), add(3, 128, 256, 128), add(70, 32, 0, int64_t{1} << 36, 64, 128);
  add(40, 77, 0, 0), add(5, 77, 0, 3 * 77), add(40, 1, 0, 0), add(1, 1, 0, 0);
  add(0, 512, 0, 0), add(5, 0, 0, 0);  // empty shards
  add(6, 257, 0, 257 * 2), add(4, 255, 0, 0);
  add(3, 512, 1024, 512), add(3, 300, 900, 300);                  // cut along the columns
  add(2, 512, 1021, 5), add(3, 264, 1021, 8), add(3, 264, 0, 4);  // Philox groups that no lane owns
  add(4, 512, 0, 0, 256, 256, 1);                                 // unaligned memory
  for (int block = 32; block <= 256; block *= 2) {
    add(2, 616, 0, 0, block, 256), add(2, 616, 0, 0, 256, block),
        add(1, 333, 0, 0, block, 8192 / block);
  }
  for (int block = 512; block <= 2048; block *= 2) {
    add(2, 4616, 0, 0, block, 256), add(2, 2500, 0, 0, 64, block), add(1, 3333, 0, 0, block, 512);
  }
  return specs;
}

/// A parameter whose rows or blocks are cut: flat shards, which begin and end inside rows, and
/// column shards, which begin inside blocks.
Spec cut(Spec spec, int turn) {
  const auto ends = [&](int64_t rows, int64_t cols, int64_t front, int64_t back) {
    spec.rows = rows, spec.cols = cols, spec.front = front, spec.back = back;
    spec.first = 3 * cols, spec.more_rows = 4, spec.cut = kCutEnds;
  };
  const auto columns = [&](int64_t rows, int64_t cols, int64_t begin, int64_t whole) {
    spec.rows = rows, spec.cols = cols, spec.global_cols = whole, spec.first = 2 * whole + begin;
    spec.cut = kCutAll;
  };
  switch (turn % 9) {
    case 0:
      ends(4, 300, 37, 111);
      break;
    case 1:
      ends(1, 600, 5, 8);
      break;
    case 2:  // whole rows for the fixed kernels
      ends(5, 264, 64, 8);
      break;
    case 3:
      ends(3, 1000, 0, 999);
      break;
    case 4:
      ends(2, 270, 269, 0);
      break;
    case 5:
      columns(3, 190, 136, 700);
      break;
    case 6:
      columns(2, 333, 367, 700);
      spec.first -= 7;
      break;
    case 7:  // blocks and tiles without local elements
      columns(2, 40, 2100 - 20, 5000);
      break;
    default:
      columns(2, 2500, 1000, 5000);
  }
  return spec;
}

}  // namespace
}  // namespace lowbit
