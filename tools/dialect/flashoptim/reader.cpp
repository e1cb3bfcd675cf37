// FlashOptim's state dicts, of both generations.
//
// Moments are 8-bit codes with a float16 scale for 32 values of the flattened tensor:
// NAME::quantized and NAME::scales. Up to 0.1.3 scales are float16 tensors; 0.1.4 writes their bits
// in the parameter's type, so that torch's cast on loading leaves them alone: for a bfloat16
// parameter a bfloat16 tensor whose bits are float16 numbers. Neither version can read the other's
// for bfloat16 parameters, and neither notices. Moments without compression are plain tensors under
// NAME: float32 from 0.1.4, bfloat16 before.
//
// Under FSDP2 each rank has blocks from the beginning of its shard on. Where shards do not end with
// blocks, scales are those of the shards' blocks.
//
// error_bits is what a split weight keeps beside it: 8 bits as numbers of the weight's type, 16
// bits as bits of it. The group's master_bytewidth (3 or 4) tells which.
#include "dialect/flashoptim/flashoptim.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "dialect/common/other_libraries.h"
#include "dialect/numbers/adapters.h"
#include "dialect/requantize/nearest.h"
#include "io/scratch_buffer.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<int> recognize_flashoptim(const Document& /*document*/, const OptimizerTree& tree) {
  for (const Group& g : tree.groups) {
    if (has_setting(g, "master_bytewidth") && has_setting(g, "quantize")) return 3;
  }
  for (const Entry& e : tree.params) {
    for (const auto& [name, leaf] : e.leaves) {
      if (name.ends_with("::quantized") || name.ends_with("::scales")) return 3;
    }
  }
  return 0;
}

/// Where the shards of a tensor begin in the flattened one, and its end; {0, end} where blocks end
/// with shards, or shards are not rows.
std::vector<uint64_t> ends_of_shards(const Leaf& codes) {
  const uint64_t all = volume(codes.shape);
  std::vector<uint64_t> ends = {0, all};
  if (codes.stored == nullptr || codes.shape.empty() || all == 0) return ends;
  const uint64_t row = all / static_cast<uint64_t>(codes.shape[0]);
  for (const Chunk& chunk : codes.stored->chunks) {
    if (volume(chunk.shape) == 0) continue;
    if (!std::equal(chunk.shape.begin() + 1, chunk.shape.end(), codes.shape.begin() + 1))
      return {0, all};
    ends.push_back(static_cast<uint64_t>(chunk.offset[0]) * row);
  }
  std::ranges::sort(ends);
  const auto twice = std::ranges::unique(ends);
  ends.erase(twice.begin(), twice.end());
  const bool whole =
      std::ranges::all_of(ends, [&](uint64_t end) { return end == all || end % kFlashBlock == 0; });
  return whole ? std::vector<uint64_t>{0, all} : ends;
}

/// The values of shards that have blocks of their own.
std::shared_ptr<Floats> floats_of_shards(const Leaf& codes, const Leaf& scales, bool is_signed) {
  std::vector<uint64_t> ends = ends_of_shards(codes);
  std::vector<std::shared_ptr<Floats>> shards;
  uint64_t block = 0;
  for (size_t i = 0; i + 1 < ends.size(); ++i) {
    const uint64_t count = ends[i + 1] - ends[i];
    shards.push_back(block_floats(flash_rule(is_signed), flash_layout(count, is_signed),
                                  part_of_source(codes.source, ends[i]),
                                  {float16_bits(part_of_source(scales.source, block))}));
    block += blocks_in(count);
  }
  return floats_by([ends = std::move(ends), shards = std::move(shards)](
                       uint64_t first, uint64_t count, float* out) -> Status {
    for (size_t i = 0; i < shards.size() && count > 0; ++i) {
      if (first >= ends[i + 1]) continue;
      const uint64_t n = std::min(count, ends[i + 1] - first);
      RETURN_IF_ERROR(shards[i]->read(first - ends[i], n, out));
      first += n, count -= n, out += n;
    }
    return fine();
  });
}

struct FlashOptimReader {
  const Entry& entry;
  Param& param;
  const Group& group;
  const Manifest& manifest;
  std::string what(const std::string& key) const { return shown(param) + ", " + key; }

  Status moment(const std::string& name) {
    const Leaf* plain = entry.find(name);
    const Leaf* codes = tensor_in(entry, name + "::quantized");
    const Leaf* scales = tensor_in(entry, name + "::scales");
    if (plain == nullptr && codes == nullptr && scales == nullptr) return fine();
    if (plain != nullptr && (codes != nullptr || scales != nullptr))
      return bad(what(name) + ": is there both plain and compressed");
    State state;
    if (plain != nullptr) {
      if (plain->kind != Leaf::Kind::kTensor) return bad(what(name) + ": is not a tensor");
      state = plain_state(name, *plain);
    } else {
      state.name = name;
      state.is_signed = is_signed_state(name);
      if (codes == nullptr || scales == nullptr)
        return bad(what(name) + ": has " +
                   (codes == nullptr ? "scales without codes" : "codes without scales"));
      RETURN_IF_ERROR(compressed(state, *codes, *scales));
    }
    param.learn(state.shape);
    param.states.push_back(std::move(state));
    return fine();
  }

  Status compressed(State& state, const Leaf& codes, const Leaf& scales) {
    const std::string dtype = codes.dtype->name, wanted = state.is_signed ? "int8" : "uint8";
    if (dtype != wanted)
      return bad(what(state.name) + ": the codes are " + dtype + ", not " + wanted +
                 ": a program has cast them; save them again with FlashOptim");
    const uint64_t n = volume(codes.shape), blocks = blocks_in(n);
    const bool by_shard = is_by_shard(codes, scales, manifest);
    const bool fits = scales.shape == Shape{static_cast<int64_t>(blocks)};
    if (!fits && !by_shard)
      return bad(what(state.name) + ": " + std::to_string(n) + " codes go with " +
                 std::to_string(blocks) + " scales, but the shape of the scales is " +
                 shape_text(scales.shape));
    ASSIGN_OR_RETURN(generation, generation_of(scales));
    state.shape = codes.shape;
    state.bytes = codes.bytes() + scales.bytes();
    state.leaves = {&codes, &scales};
    state.stored_as = std::string("FlashOptim companded 8-bit, blocks of 32, scales as in ") +
                      versions_of(generation);
    if (by_shard) {
      state.stored_as += ", of each shard";
      state.values = floats_of_shards(codes, scales, state.is_signed);
      return fine();
    }
    state.values = block_floats(flash_rule(state.is_signed), flash_layout(n, state.is_signed),
                                codes.source, {float16_bits(scales.source)});
    state.codes = codes_of_rows(
        codes.shape, state.is_signed ? "companded8" : "companded8_unsigned", 8, kFlashBlock,
        state.is_signed ? mapped_bytes(codes.source, moved_bytes(127)) : codes.source,
        scales.source);
    return fine();
  }

  /// By the dtype of the scales, held against what else the file tells of its writer.
  Result<FlashFiles> generation_of(const Leaf& scales) {
    const std::string_view dtype = scales.dtype->name;
    const Leaf* step = tensor_in(entry, "step");
    const Leaf* error = tensor_in(entry, "error_bits");
    const bool new_step = step != nullptr && std::string_view(step->dtype->name) == "int64";
    const bool bfloat16 = error != nullptr && std::string_view(error->dtype->name) == "bfloat16";
    if (dtype == "float16") {
      if (new_step && bfloat16)
        return bad(what("scales") +
                   ": are float16 as FlashOptim 0.1.3 writes them, but the step is int64 as 0.1.4 "
                   "writes it: which of the two wrote them cannot be told, and they mean different "
                   "numbers; save again with compress_state_dict=False");
      return new_step ? FlashFiles::kNew : FlashFiles::kOld;
    }
    if (dtype != "bfloat16")
      return bad(what("scales") + ": are " + std::string(dtype) + ", where float16 numbers belong");
    // 0.1.4 takes bfloat16 numbers, which 0.1.3's scales become when torch loads them, for float16
    // bits, and keeps 0.1.3's float32 step. The smallest such scale reads as 0.234.
    if (new_step || step == nullptr) return FlashFiles::kNew;
    const uint64_t n = std::min<uint64_t>(volume(scales.shape), 4096);
    std::vector<uint16_t> bits(n);
    RETURN_IF_ERROR(scales.source->read(0, n, bits.data()));
    uint64_t large = 0, small = 0;
    for (const uint16_t b : bits) {
      if (b != 0) ++(b >= 0x3380 ? large : small);
    }
    if (large > 0 && small == 0)
      return bad(what("scales") +
                 ": are bfloat16 beside a float32 step, and all as large as FlashOptim 0.1.4 makes "
                 "those of a file of 0.1.3: it has probably taken them for other numbers, and what "
                 "they were cannot be told; convert the file that 0.1.3 wrote");
    return FlashFiles::kNew;
  }

  /// What is kept beside the weight.
  Status error_bits() {
    const Leaf* leaf = tensor_in(entry, "error_bits");
    if (leaf == nullptr) return fine();
    const std::string dtype = leaf->dtype->name;
    const auto width = real_setting(group, "master_bytewidth");
    if (dtype != "bfloat16" && dtype != "float16")
      return bad(what("error_bits") + ": are " + dtype + ", which belongs to no 16-bit weight");
    if (!width || (*width != 3 && *width != 4))
      return bad(
          what("error_bits") + ": may be of 8 or of 16 bits: the group's master_bytewidth is " +
          (width ? std::to_string(static_cast<int64_t>(*width)) : "missing") + ", not 3 or 4");
    const bool wide = *width == 4;
    Leaf out;
    out.path = {Key("param_" + dtype + (wide ? "_split16" : "_split8"))};
    out.shape = leaf->shape;
    out.dtype = find_dtype(wide ? "uint8" : "int8");
    if (wide) out.shape.push_back(2);
    out.source = wide ? bytes_of_words(leaf->source)
                      : numbers_of(leaf->source, dtype == "bfloat16", what("error_bits"));
    State s;
    s.name = out.path[0].text();
    s.shape = leaf->shape;
    s.stored_as = "FlashOptim error_bits in " + dtype;
    s.bytes = leaf->bytes();
    s.raw = std::move(out);
    s.leaves = {leaf};
    param.states.push_back(std::move(s));
    param.learn(leaf->shape);
    return fine();
  }

  /// Whole numbers from -127 to 127 out of 16-bit floats.
  static std::shared_ptr<Source> numbers_of(std::shared_ptr<Source> source, bool bfloat16,
                                            std::string what) {
    return source_by([source = std::move(source), bfloat16, what = std::move(what),
                      words = std::vector<uint16_t>()](uint64_t first, uint64_t count,
                                                       void* out) mutable -> Status {
      const ScratchBuffer memory(words);
      words.resize(count);
      RETURN_IF_ERROR(source->read(first, count, words.data()));
      for (uint64_t i = 0; i < count; ++i) {
        const float x = bfloat16 ? bfloat16_to_float(words[i]) : half_to_float(words[i]);
        const auto k = x >= -128 && x <= 127 ? static_cast<int8_t>(x) : int8_t{0};
        if (static_cast<float>(k) != x)
          return bad(what + ": element " + std::to_string(first + i) +
                     " is not a whole number of 8 bits, as master_bytewidth 3 says it is");
        static_cast<int8_t*>(out)[i] = k;
      }
      return fine();
    });
  }
};

}  // namespace

bool is_by_shard(const Leaf& codes, const Leaf& scales, const Manifest& manifest) {
  const std::vector<uint64_t> ends = ends_of_shards(codes);
  if (ends.size() <= 2) return false;
  uint64_t of_shards = 0;
  for (size_t i = 0; i + 1 < ends.size(); ++i) of_shards += blocks_in(ends[i + 1] - ends[i]);
  if (scales.shape != Shape{static_cast<int64_t>(of_shards)}) return false;
  return !manifest.of_tool || of_shards != blocks_in(ends.back());
}

Status check_blocks_kept(const Document& document) {
  constexpr std::string_view kCodes = "::quantized", kScales = "::scales";
  std::unordered_map<std::string, const Leaf*> scales_of;
  for (const Leaf& leaf : document.leaves) {
    const std::string name = leaf.name();
    if (leaf.kind == Leaf::Kind::kTensor && name.ends_with(kScales))
      scales_of.emplace(name.substr(0, name.size() - kScales.size()), &leaf);
  }
  for (const Leaf& leaf : document.leaves) {
    const std::string name = leaf.name();
    if (scales_of.empty() || leaf.kind != Leaf::Kind::kTensor || !name.ends_with(kCodes)) continue;
    const auto scales = scales_of.find(name.substr(0, name.size() - kCodes.size()));
    if (scales == scales_of.end()) continue;
    if (is_by_shard(leaf, *scales->second, *document.manifest))
      return bad(printable(name) +
                 ": FlashOptim's blocks begin anew in each rank's shard here, and where shards "
                 "began would be lost; convert it --to lowbit or --to flashoptim");
  }
  return fine();
}

Result<Model> read_flashoptim(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  Model model = model_of(tree, "flashoptim", document);
  const std::vector<const Group*> group_of = groups_by_param(model);
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Entry& entry = tree.params[i];
    FlashOptimReader reader{entry, model.params[i], *group_of[i], *model.document->manifest};
    for (const char* name : kFlashMoments) RETURN_IF_ERROR(reader.moment(name));
    RETURN_IF_ERROR(reader.error_bits());
    for (const auto& [name, leaf] : entry.leaves) {
      if (name == "step") {
        RETURN_IF_ERROR(read_step(entry, model.params[i]));
        continue;
      }
      const std::string base = name.substr(0, name.find("::"));
      bool known = base == "error_bits";
      for (const char* m : kFlashMoments) known = known || base == m;
      if (!known) return bad(reader.what(printable(name)) + ": is nothing that FlashOptim keeps");
    }
    for (const State& s : model.params[i].states) {
      if (s.shape != model.params[i].shape)
        return bad(reader.what(s.name) + ": has the shape " + shape_text(s.shape) +
                   ", its parameter " + shape_text(model.params[i].shape));
    }
  }
  model.algorithm = algorithm_of(model);
  return model;
}

constexpr KeptSetting kKeptByFlashOptim[] = {{"sgd", "dampening"}};

extern const Dialect kFlashOptim;
const Dialect kFlashOptim = {
    "flashoptim",
    "FlashOptim: 8-bit moments, split weights; files of 0.1.3 and of 0.1.4",
    recognize_flashoptim,
    read_flashoptim,
    write_flashoptim,
    kKeptByFlashOptim,
    {.coupled = "continue with FlashAdam, not FlashAdamW"}};

}  // namespace lowbit::ckpt
