// FlashOptim's state dicts, of both generations.
//
// Moments are 8-bit codes with a float16 scale for 32 values of the flattened tensor:
// NAME::quantized and NAME::scales. Up to 0.1.3 scales are float16 tensors; 0.1.4 writes their bits
// in the parameter's type, so that torch's cast on loading leaves them alone: for a bfloat16
// parameter a bfloat16 tensor whose bits are float16 numbers. Neither version can read the other's
// for bfloat16 parameters, and neither notices. Moments without compression are plain tensors under
// NAME: float32 from 0.1.4, bfloat16 before.
//
// error_bits is what a split weight keeps beside it: 8 bits as numbers of the weight's type, 16 bits
// as bits of it. The group's master_bytewidth (3 or 4) tells which.
#include <array>
#include <cmath>
#include <cstring>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "core/state/companded8.h"
#include "dialect/adapters.h"
#include "dialect/peer.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kBlock = 32;
constexpr const char* kMoments[] = {"exp_avg", "exp_avg_sq", "momentum_buffer"};

bool is_signed(const std::string& moment) { return moment != "exp_avg_sq"; }

/// Which of the two wrote the scales.
enum class Generation : uint8_t { kOld, kNew };
constexpr const char* kVersions[] = {"0.1.3 or before", "0.1.4"};

/// Codes count from 0 here, from -127 in FlashOptim's int8.
class CompandedRule : public BlockRule {
 public:
  explicit CompandedRule(bool is_signed) : signed_(is_signed) {}
  void decode(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override {
    for (int64_t i = 0; i < n; ++i) {
      if (signed_) {
        out[i] = Companded8::decode(codes[i]) * scale[0];
      } else {
        const float u = Companded8Unsigned::decode(codes[i]) * scale[0];
        out[i] = u * u;
      }
    }
  }
  Scale encode(const float* x, int64_t n, uint16_t* codes) const override {
    float most = 1e-12f;
    const auto bent = [&](float v) { return signed_ ? v : std::sqrt(v > 0 ? v : 0.0f); };
    for (int64_t i = 0; i < n; ++i) {
      const float a = std::fabs(bent(x[i]));
      most = a > most ? a : most;
    }
    const float top = signed_ ? 127.0f : 255.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float z = bent(x[i]) / most, t = signed_ ? 2.0f * z / (1.0f + std::fabs(z)) : z;
      const float code = std::floor(t * top + 0.5f);
      // A NaN becomes zero in FlashOptim; here it becomes what shows: the block's scale is NaN.
      const int k = code >= -top && code <= top ? static_cast<int>(code) : 0;
      codes[i] = static_cast<uint16_t>(signed_ ? k + 127 : k);
    }
    bool finite = true;
    for (int64_t i = 0; i < n; ++i) finite = finite && std::isfinite(x[i]);
    return {finite ? half_to_float(half_nearest(most)) : std::nanf(""), 0};
  }

 private:
  const bool signed_;
};

std::shared_ptr<const BlockRule> rule_of(bool is_signed) {
  return std::make_shared<CompandedRule>(is_signed);
}

BlockLayout layout_of(uint64_t count, bool is_signed) {
  return {.count = count,
          .block = kBlock,
          .coded = count,
          .stored = count,
          .bias = is_signed ? -127 : 0};
}

std::array<uint8_t, 256> moved_by(int by) {
  std::array<uint8_t, 256> table{};
  for (int b = 0; b < 256; ++b) table[static_cast<size_t>(b)] = static_cast<uint8_t>(b + by);
  return table;
}

Result<int> recognize(const Document& document) {
  if (!has_skeleton(document)) return 0;
  LB_TRY(skeleton, skeleton_of(document));
  for (const Group& g : skeleton.groups) {
    if (has_setting(g, "master_bytewidth") && has_setting(g, "quantize")) return 3;
  }
  for (const Entry& e : skeleton.params) {
    for (const auto& [name, leaf] : e.leaves) {
      if (name.ends_with("::quantized") || name.ends_with("::scales")) return 3;
    }
  }
  return 0;
}

// Reading

struct Reader {
  const Entry& entry;
  Param& param;
  const Group& group;
  std::string what(const std::string& key) const { return shown(param) + ", " + key; }

  Status moment(const std::string& name) {
    const Leaf* plain = entry.find(name);
    const Leaf* codes = tensor_in(entry, name + "::quantized");
    const Leaf* scales = tensor_in(entry, name + "::scales");
    if (plain == nullptr && codes == nullptr && scales == nullptr) return fine();
    if (plain != nullptr && (codes != nullptr || scales != nullptr))
      return bad(what(name) + ": is there both plain and compressed");
    State state;
    state.name = name;
    state.is_signed = is_signed(name);
    if (plain != nullptr) {
      if (plain->kind != Leaf::Kind::kTensor) return bad(what(name) + ": is no tensor");
      state.shape = plain->shape;
      state.stored_as = plain->dtype->name;
      state.bytes = plain->bytes();
      state.values = floats_of(*plain);
      state.leaves = {plain};
    } else {
      if (codes == nullptr || scales == nullptr)
        return bad(what(name) + ": has " +
                   (codes == nullptr ? "scales without codes" : "codes without scales"));
      LB_CHECK(compressed(state, *codes, *scales));
    }
    param.shape = state.shape;
    param.known_shape = true;
    param.states.push_back(std::move(state));
    return fine();
  }

  Status compressed(State& state, const Leaf& codes, const Leaf& scales) {
    const std::string dtype = codes.dtype->name, wanted = state.is_signed ? "int8" : "uint8";
    if (dtype != wanted)
      return bad(what(state.name) + ": the codes are " + dtype + ", not " + wanted +
                 ": a program has cast them; save them again with FlashOptim");
    const uint64_t n = volume(codes.shape), blocks = (n + kBlock - 1) / kBlock;
    if (scales.shape != Shape{static_cast<int64_t>(blocks)})
      return bad(what(state.name) + ": " + std::to_string(n) + " codes go with " +
                 std::to_string(blocks) + " scales, but the shape of the scales is " +
                 shape_text(scales.shape));
    LB_TRY(generation, generation_of(scales));
    state.shape = codes.shape;
    state.bytes = codes.bytes() + scales.bytes();
    state.leaves = {&codes, &scales};
    state.stored_as = std::string("FlashOptim companded 8-bit, blocks of 32, scales as in ") +
                      kVersions[static_cast<int>(generation)];
    state.values = block_floats(rule_of(state.is_signed), layout_of(n, state.is_signed),
                                codes.source, {float16_bits(scales.source)});
    const MatrixShape m = matrix_of(codes.shape);
    if (m.cols % kBlock == 0 || m.rows == 1) {
      state.codes =
          Codes{.format = state.is_signed ? "companded8" : "companded8_unsigned",
                .bits = 8,
                .rows = m.rows,
                .cols = m.cols,
                .block = kBlock,
                .codes = state.is_signed ? mapped_bytes(codes.source, moved_by(127)) : codes.source,
                .scales = scales.source};
    }
    return fine();
  }

  /// By the dtype of the scales, held against what else the file tells of its writer.
  Result<Generation> generation_of(const Leaf& scales) {
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
      return new_step ? Generation::kNew : Generation::kOld;
    }
    if (dtype != "bfloat16")
      return bad(what("scales") + ": are " + std::string(dtype) + ", where float16 numbers belong");
    // 0.1.4 takes bfloat16 numbers, which 0.1.3's scales become when torch loads them, for float16
    // bits, and keeps 0.1.3's float32 step. The smallest such scale reads as 0.234.
    if (new_step || step == nullptr) return Generation::kNew;
    const uint64_t n = std::min<uint64_t>(volume(scales.shape), 4096);
    std::vector<uint16_t> bits(n);
    LB_CHECK(scales.source->read(0, n, bits.data()));
    uint64_t large = 0, small = 0;
    for (const uint16_t b : bits) {
      if (b != 0) ++(b >= 0x3380 ? large : small);
    }
    if (large > 0 && small == 0)
      return bad(what("scales") +
                 ": are bfloat16 beside a float32 step, and all as large as FlashOptim 0.1.4 makes "
                 "those of a file of 0.1.3: it has probably taken them for other numbers, and what "
                 "they were cannot be told; convert the file that 0.1.3 wrote");
    return Generation::kNew;
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
    param.shape = leaf->shape;
    param.known_shape = true;
    return fine();
  }

  /// Whole numbers from -127 to 127 out of 16-bit floats.
  static std::shared_ptr<Source> numbers_of(std::shared_ptr<Source> source, bool bfloat16,
                                            std::string what) {
    class Numbers : public Source {
     public:
      Numbers(std::shared_ptr<Source> s, bool b, std::string w)
          : source_(std::move(s)), bfloat16_(b), what_(std::move(w)) {}
      Status read(uint64_t first, uint64_t count, void* out) override {
        words_.resize(count);
        LB_CHECK(source_->read(first, count, words_.data()));
        for (uint64_t i = 0; i < count; ++i) {
          const float x = bfloat16_ ? bfloat16_to_float(words_[i]) : half_to_float(words_[i]);
          const auto k = x >= -128 && x <= 127 ? static_cast<int8_t>(x) : int8_t{0};
          if (static_cast<float>(k) != x)
            return bad(what_ + ": element " + std::to_string(first + i) +
                       " is no whole number of 8 bits, as master_bytewidth 3 says it is");
          static_cast<int8_t*>(out)[i] = k;
        }
        return fine();
      }

     private:
      const std::shared_ptr<Source> source_;
      const bool bfloat16_;
      const std::string what_;
      std::vector<uint16_t> words_;
    };
    return std::make_shared<Numbers>(std::move(source), bfloat16, std::move(what));
  }
};

Result<Model> read(std::shared_ptr<const Document> document) {
  LB_TRY(skeleton, skeleton_of(*document));
  Model model = model_of(skeleton, "flashoptim", document);
  std::vector<const Group*> group_of(model.params.size());
  for (const Group& g : model.groups) {
    for (const size_t p : g.params) group_of[p] = &g;
  }
  static const Group kNone;
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Entry& entry = skeleton.params[i];
    Reader reader{entry, model.params[i], group_of[i] == nullptr ? kNone : *group_of[i]};
    for (const char* name : kMoments) LB_CHECK(reader.moment(name));
    LB_CHECK(reader.error_bits());
    for (const auto& [name, leaf] : entry.leaves) {
      if (name == "step") {
        LB_TRY(step, number_of(*leaf));
        model.params[i].numbers.emplace_back("step", std::move(step));
        continue;
      }
      const std::string base = name.substr(0, name.find("::"));
      bool known = base == "error_bits";
      for (const char* m : kMoments) known = known || base == m;
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

// Writing

/// What was asked for by --state-format.
struct Form {
  bool compressed = true;
  Generation generation = Generation::kNew;
};
Result<Form> form_of(const Wanted& wanted) {
  const std::string& f = wanted.state_format;
  if (wanted.block != 0 && wanted.block != kBlock)
    return bad("FlashOptim's blocks have 32 values, not " + std::to_string(wanted.block));
  if (f.empty() || f == "8bit" || f == "companded8" || f == "0.1.4") return Form{};
  if (f == "0.1.3") return Form{true, Generation::kOld};
  if (f == "float32") return Form{false, Generation::kNew};
  if (f == "bfloat16") return Form{false, Generation::kOld};
  return Error{Exit::kUsage,
               "FlashOptim keeps no state as " + printable(f) +
                   "; it has 0.1.4 (or 8bit) and 0.1.3, which are its compressed states of either "
                   "generation, and float32 and bfloat16 without compression"};
}

/// The weight's dtype, where anything tells it: what is beside it, how a file of 0.1.4 keeps its
/// scales, or the weight itself.
const Dtype* dtype_of(const Model& model, const Param& param) {
  if (const State* beside = beside_of(param))
    return find_dtype(beside->name.starts_with("param_bfloat16") ? "bfloat16" : "float16");
  if (const Leaf* weight = weight_of(model, param)) return weight->dtype;
  for (const State& s : param.states) {
    for (const Leaf* leaf : s.leaves) {
      if (model.dialect == "flashoptim" && leaf->name().ends_with("::scales") &&
          std::string_view(leaf->dtype->name) == "bfloat16")
        return leaf->dtype;
    }
  }
  return nullptr;
}

struct Writer {
  const Model& model;
  const Param& param;
  const Form& form;
  const Wanted& wanted;
  DialectReport& report;
  std::vector<Leaf>& leaves;

  Path at(const std::string& key) const { return state_path(model, param, key); }

  Status state(const State& s) {
    bool known = false;
    for (const char* m : kMoments) known = known || s.name == m;
    if (!known)
      return bad(shown(param) + ": FlashOptim keeps no " + printable(s.name) +
                 "; it has exp_avg, exp_avg_sq and momentum_buffer");
    if (!form.compressed || stays_wide(param, wanted)) return plain(s);
    const uint64_t n = volume(s.shape);
    const bool own =
        s.codes && s.codes->block == kBlock &&
        s.codes->format == (is_signed(s.name) ? "companded8" : "companded8_unsigned") &&
        (s.codes->cols % kBlock == 0 || s.codes->rows == 1);
    const Dtype* dtype = dtype_of(model, param);
    if (form.generation == Generation::kNew && dtype == nullptr && !from_flat_scales(s))
      return bad(
          shown(param) +
          ": FlashOptim 0.1.4 keeps scales in the weight's type, which this checkpoint does not "
          "tell; convert one that has the weights too, or take --state-format float32, which "
          "every version loads");
    const bool bits = form.generation == Generation::kNew && dtype != nullptr &&
                      std::string_view(dtype->name) == "bfloat16";
    const Dtype* scale_dtype = find_dtype(bits ? "bfloat16" : "float16");
    const Shape blocks = {static_cast<int64_t>((n + kBlock - 1) / kBlock)};
    const Dtype* code_dtype = find_dtype(is_signed(s.name) ? "int8" : "uint8");
    // Codes of its own file that ours cannot express, because a block goes over rows.
    const bool relabelled = own || (model.dialect == "flashoptim" && s.leaves.size() == 2);
    if (wanted.keep && !relabelled)
      return bad(shown(param) + ", " + s.name + ": " + s.stored_as +
                 " cannot become FlashOptim's codes without rounding");
    StateReport* entry = report_of(report, param, s,
                                   std::string("FlashOptim companded 8-bit, scales as in ") +
                                       kVersions[static_cast<int>(form.generation)],
                                   relabelled);
    std::shared_ptr<Source> codes, scales;
    if (own) {
      codes = is_signed(s.name) ? mapped_bytes(s.codes->codes, moved_by(-127)) : s.codes->codes;
      scales = s.codes->scales;
    } else if (relabelled) {
      codes = s.leaves[0]->source;
      scales = s.leaves[1]->source;
    } else {
      const auto values = locked(s.values);
      const auto layout = layout_of(n, is_signed(s.name));
      codes = block_codes(rule_of(is_signed(s.name)), layout, values, entry);
      scales = float16_source(block_scales(rule_of(is_signed(s.name)), layout, values, 0));
    }
    leaves.push_back(
        tensor_leaf(at(s.name + "::quantized"), code_dtype, s.shape, std::move(codes)));
    leaves.push_back(tensor_leaf(at(s.name + "::scales"), scale_dtype, blocks, std::move(scales)));
    return fine();
  }

  /// float16 scales of a file of 0.1.4: its weight is float16 or float32, and they stay as they are.
  bool from_flat_scales(const State& s) const {
    if (model.dialect != "flashoptim" || s.leaves.size() != 2) return false;
    return s.stored_as.ends_with(kVersions[static_cast<int>(Generation::kNew)]);
  }

  Status plain(const State& s) {
    const bool narrow = form.generation == Generation::kOld && !form.compressed;
    StateReport* entry = report_of(report, param, s, narrow ? "bfloat16" : "float32", true);
    leaves.push_back(
        tensor_leaf(at(s.name), find_dtype(narrow ? "bfloat16" : "float32"), s.shape,
                    narrow ? bfloat16_source(s.values, entry) : float32_source(s.values)));
    return fine();
  }

  /// What is kept beside the weight; its width in bytes, or 0.
  Result<int> error_bits() {
    const State* beside = beside_of(param);
    if (beside == nullptr) return 0;
    const Leaf& from = raw_of(*beside);
    const std::string& key = beside->name;
    const bool wide = key.ends_with("_split16");
    if (!wide && !key.ends_with("_split8"))
      return bad(shown(param) + ": FlashOptim keeps nothing like " + printable(key) +
                 " beside a weight; it has split weights of 8 and 16 bits");
    const bool bfloat16 = key.starts_with("param_bfloat16");
    Shape shape = from.shape;
    if (wide) shape.pop_back();
    leaves.push_back(
        tensor_leaf(at("error_bits"), find_dtype(bfloat16 ? "bfloat16" : "float16"), shape,
                    wide ? words_of_bytes(from.source) : floats_from(from.source, bfloat16)));
    return wide ? 4 : 3;
  }

  static std::shared_ptr<Source> floats_from(std::shared_ptr<Source> source, bool bfloat16) {
    class FromNumbers : public Source {
     public:
      FromNumbers(std::shared_ptr<Source> s, bool b) : source_(std::move(s)), bfloat16_(b) {}
      Status read(uint64_t first, uint64_t count, void* out) override {
        numbers_.resize(count);
        LB_CHECK(source_->read(first, count, numbers_.data()));
        for (uint64_t i = 0; i < count; ++i) {
          const auto x = static_cast<float>(numbers_[i]);
          const uint16_t word = bfloat16_ ? bfloat16_nearest(x) : half_nearest(x);
          std::memcpy(static_cast<char*>(out) + 2 * i, &word, 2);
        }
        return fine();
      }

     private:
      const std::shared_ptr<Source> source_;
      const bool bfloat16_;
      std::vector<int8_t> numbers_;
    };
    return std::make_shared<FromNumbers>(std::move(source), bfloat16);
  }
};

Result<Document> write(const Model& model, const Wanted& wanted, DialectReport& report) {
  LB_TRY(form, form_of(wanted));
  if (model.flattened && form.compressed)
    return bad(
        "FlashOptim loads no compressed states from a flattened checkpoint; take "
        "--state-format float32");
  Document out;
  if (model.document != nullptr) out.manifest = model.document->manifest;
  std::vector<int> widths(model.params.size(), -1);
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Param& param = model.params[i];
    if (!param.known_shape && !param.states.empty())
      return bad(shown(param) +
                 ": its shape is nowhere in the checkpoint; give the weights with --model");
    Writer writer{model, param, form, wanted, report, out.leaves};
    bool adam = false;
    for (const State& s : param.states) adam |= s.name == "exp_avg_sq";
    for (const auto& [name, value] : param.numbers) {
      // Only its Adam counts steps.
      if (name != "step" || !adam) continue;
      const bool whole = form.generation == Generation::kNew;
      LB_TRY(step, whole_of(value, shown(param) + ", step"));
      out.leaves.push_back(whole ? scalar_leaf(writer.at("step"), step)
                                 : scalar_leaf(writer.at("step"), static_cast<float>(step)));
    }
    for (const State& s : param.states) {
      if (&s != beside_of(param)) LB_CHECK(writer.state(s));
    }
    LB_TRY(width, writer.error_bits());
    if (!param.states.empty()) widths[i] = width;
  }
  std::vector<Settings> settings;
  for (const Group& group : model.groups) {
    Settings s = group.settings;
    int width = -1;
    for (const size_t p : group.params) {
      const Dtype* dtype = dtype_of(model, model.params[p]);
      // A float32 weight has nothing beside it whatever the group says.
      if (widths[p] < 0 || (dtype != nullptr && dtype->bytes == 4)) continue;
      if (width >= 0 && width != widths[p])
        return bad("FlashOptim keeps 8 or 16 bits beside all weights of a group, and here " +
                   shown(model.params[p]) + " has others than those before it");
      width = widths[p];
    }
    if (!has_setting(group, "initial_lr") && has_setting(group, "lr"))
      set_in(s, "initial_lr", *setting(group, "lr"));
    if (!has_setting(group, "master_bytewidth") || width > 0)
      set_in(s, "master_bytewidth", Value::number(std::max(0, width)));
    if (!has_setting(group, "quantize")) set_in(s, "quantize", Value::boolean(true));
    settings.push_back(std::move(s));
  }
  add_groups(model, settings, out.leaves);
  out.leaves.insert(out.leaves.end(), model.rest.begin(), model.rest.end());
  return out;
}

}  // namespace

extern const Dialect kFlashOptim;
const Dialect kFlashOptim = {
    "flashoptim", "FlashOptim: 8-bit moments, split weights; files of 0.1.3 and of 0.1.4",
    recognize, read, write};

}  // namespace lowbit::ckpt
