// adafactor-8bit's state dicts, of all five generations.
//
// <x>_q are codes of the flattened tensor filled up with zeros to whole blocks, <x>_scale a float32
// for each, <x>_shape what they were, <x>_pad how many zeros there are; x is row_var and col_var of a
// factored second moment, variance of one that is not. Which version wrote them the file does not
// say; it follows from keys and settings:
//
//   <x>_min_log                                0.4.0 and later
//   a step that is a float                     0.1.0 to 0.1.2
//   a setting m_block_size in the groups       0.2.1 to 0.3.1
//   none of these                              0.1.3 to 0.2.0, which divided by 255 twice: its CUDA
//                                              kernels' codes can be read, its fallback's are all 255
//
// Momentum (m_q, m_scale) has changed more often; see AdafactorMomentum.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "dialect/adafactor8bit_rules.h"
#include "dialect/adapters.h"
#include "dialect/peer.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kBlock = 2048, kMomentumBlock = 256;
constexpr int64_t kLeastQuantized = 4096;

Result<int> recognize(const Document& document) {
  if (!has_skeleton(document)) return 0;
  LB_TRY(skeleton, skeleton_of(document));
  for (const Entry& e : skeleton.params) {
    for (const char* mark : {"row_var_q", "variance_q", "v_low_q", "m_q", "is_quantized"}) {
      if (e.find(mark) != nullptr) return 3;
    }
  }
  for (const Group& g : skeleton.groups) {
    if (has_setting(g, "min_8bit_size") && has_setting(g, "scale_parameter")) return 3;
  }
  return 0;
}

// Reading

struct Reader {
  const Model& model;
  const Entry& entry;
  Param& param;
  const Group& group;
  bool seed_counter;  // the file has _apollo_seed_counter: 0.2.6 or later
  std::string what(const std::string& key) const { return shown(param) + ", " + key; }

  Result<AdafactorFiles> files() const {
    for (const char* x : {"row_var", "col_var", "variance"}) {
      if (tensor_in(entry, std::string(x) + "_min_log") == nullptr) continue;
      const Leaf* q = tensor_in(entry, std::string(x) + "_q");
      const bool wide = q != nullptr && q->dtype->bytes == 2;
      return wide ? AdafactorFiles::kAdaptive16 : AdafactorFiles::kAdaptive8;
    }
    const Leaf* step = entry.find("step");
    if (step != nullptr && step->kind == Leaf::Kind::kValue && step->value.is(Value::Kind::kFloat))
      return AdafactorFiles::kLinear;
    return has_setting(group, "m_block_size") ? AdafactorFiles::kFixed : AdafactorFiles::kDivided;
  }

  /// Reads one of row_var, col_var, variance, under a name of torch's.
  Status second(const std::string& x, const std::string& name) {
    const Leaf* plain = tensor_in(entry, x);
    const Leaf* codes = tensor_in(entry, x + "_q");
    if (plain == nullptr && codes == nullptr) return fine();
    State s;
    s.name = name;
    s.is_signed = false;
    if (plain != nullptr) {
      s.shape = squeezed(plain->shape, x);
      s.stored_as = plain->dtype->name;
      s.bytes = plain->bytes();
      s.values = floats_of(*plain);
      s.leaves = {plain};
    } else {
      LB_TRY(generation, files());
      LB_CHECK(coded(s, x, *codes, generation));
    }
    if (x == "variance") {
      param.shape = s.shape;
      param.known_shape = true;
    }
    param.states.push_back(std::move(s));
    return fine();
  }

  /// row_var is [.., R, 1] and col_var [.., 1, C].
  static Shape squeezed(Shape shape, const std::string& x) {
    if (x.find("row_var") != std::string::npos && !shape.empty()) shape.pop_back();
    if (x.find("col_var") != std::string::npos && shape.size() > 1) shape.erase(shape.end() - 2);
    return shape;
  }

  /// A tensor that must have come through loading as it was.
  Result<const Leaf*> intact(const std::string& name, const char* dtype,
                             const char* other = "") const {
    const Leaf* leaf = tensor_in(entry, name);
    if (leaf == nullptr) return bad(what(name) + ": is missing");
    const std::string_view found = leaf->dtype->name;
    if (found != dtype && found != other)
      return bad(what(name) + ": is " + std::string(found) + ", not " + dtype +
                 ": torch's load_state_dict has cast it to the weight's type, which adafactor-8bit "
                 "before 0.4.5 lets it; the state cannot be recovered");
    return leaf;
  }

  Status coded(State& s, const std::string& x, const Leaf& codes, AdafactorFiles files) {
    const std::string name = x + "_q";
    const bool adaptive =
        files == AdafactorFiles::kAdaptive8 || files == AdafactorFiles::kAdaptive16;
    const bool wide = files == AdafactorFiles::kAdaptive16;
    LB_TRY(q, intact(name, wide ? "int16" : "uint8", wide ? "uint16" : "uint8"));
    LB_TRY(scale, intact(x + "_scale", "float32"));
    const auto shape = shape_in(entry, x + "_shape");
    if (!shape) return bad(what(x + "_shape") + ": is no shape");
    LB_TRY(count, elements(*shape, what(x + "_shape")));
    const uint64_t stored = volume(codes.shape), blocks = volume(scale->shape);
    if (blocks == 0 || stored % blocks != 0 || stored < count || stored - count >= stored / blocks)
      return bad(what(x) + ": " + std::to_string(stored) + " codes and " + std::to_string(blocks) +
                 " scales do not belong to a tensor of shape " + shape_text(*shape));
    BlockLayout layout{.count = count,
                       .block = static_cast<int64_t>(stored / blocks),
                       .bits = wide ? 16 : 8,
                       .coded = stored,
                       .stored = stored};
    std::vector<std::shared_ptr<Floats>> numbers = {floats_of(*scale)};
    s.leaves = {q, scale};
    if (adaptive) {
      LB_TRY(least, intact(x + "_min_log", "float32"));
      if (volume(least->shape) != blocks)
        return bad(what(x + "_min_log") + ": has " + std::to_string(volume(least->shape)) +
                   " numbers for " + std::to_string(blocks) + " blocks");
      numbers.push_back(floats_of(*least));
      s.leaves.push_back(least);
    } else {
      LB_CHECK(recoverable(x, *q, *scale, layout, files));
    }
    s.shape = squeezed(*shape, x);
    for (const Leaf* leaf : s.leaves) s.bytes += leaf->bytes();
    s.stored_as = std::string("adafactor-8bit of ") + versions_of(files) + ", blocks of " +
                  std::to_string(layout.block);
    s.values = block_floats(second_moment_rule(files), layout, q->source, numbers);
    // The codes of two generations are also lowbit's, where blocks end with rows.
    const MatrixShape m = matrix_of(s.shape);
    const bool fits = m.rows == 1 || m.cols % layout.block == 0;
    if (fits && (adaptive || files == AdafactorFiles::kFixed)) {
      Codes c;
      c.format = wide ? "log16" : adaptive ? "log8" : "log8_fixed";
      c.bits = layout.bits;
      c.rows = m.rows;
      c.cols = m.cols;
      c.block = layout.block;
      c.codes = wide ? bytes_of_words(q->source) : q->source;
      c.scales = adaptive ? interleaved(numbers[0], numbers[1]) : scale->source;
      s.codes = std::move(c);
    }
    return fine();
  }

  /// Whether the first block can be what that generation wrote, and says more than its largest value.
  Status recoverable(const std::string& x, const Leaf& q, const Leaf& scale,
                     const BlockLayout& layout, AdafactorFiles files) const {
    float s = 0;
    LB_CHECK(floats_of(scale)->read(0, 1, &s));
    const std::string guess =
        std::string("by its keys this is a file of adafactor-8bit ") + versions_of(files);
    if (files == AdafactorFiles::kDivided && s > 1.0f)
      return bad(what(x + "_scale") + ": is " + std::to_string(s) + "; " + guess +
                 ", whose scales are below 1, so its generation cannot be told");
    if (files != AdafactorFiles::kDivided) return fine();
    const uint64_t n = std::min<uint64_t>(layout.count, static_cast<uint64_t>(layout.block));
    std::vector<uint8_t> first(n);
    LB_CHECK(q.source->read(0, n, first.data()));
    const auto full = static_cast<uint64_t>(std::count(first.begin(), first.end(), 255));
    const auto zero = static_cast<uint64_t>(std::count(first.begin(), first.end(), 0));
    if (full > 1 && full + zero == n)
      return bad(
          what(x + "_q") + ": " + guess +
          ", written by its fallback without CUDA, which divides by 255 twice: every code is "
          "255, only the largest value of a block is left, and the state cannot be recovered");
    return fine();
  }

  Status momentum(const std::string& name) {
    const Leaf* plain = tensor_in(entry, "m");
    const Leaf* codes = tensor_in(entry, "m_q");
    if (plain == nullptr && codes == nullptr) return fine();
    State s;
    s.name = name;
    if (plain != nullptr) {
      s.shape = plain->shape;
      s.stored_as = plain->dtype->name;
      s.bytes = plain->bytes();
      s.values = floats_of(*plain);
      s.leaves = {plain};
      param.shape = s.shape;
      param.known_shape = true;
      param.states.push_back(std::move(s));
      return fine();
    }
    LB_TRY(q, intact("m_q", "uint8"));
    LB_TRY(scale, intact("m_scale", "float32"));
    if (const auto shape = shape_in(entry, "m_shape")) {
      param.shape = *shape;
      param.known_shape = true;
    }
    const auto block = value_in(entry, "m_block_size");
    const auto set = real_setting(group, "m_block_size");
    const uint64_t blocks = volume(scale->shape), bytes = volume(q->shape);
    int64_t length = block && block->is(Value::Kind::kInt) ? block->integer
                     : set                                 ? static_cast<int64_t>(*set)
                                                           : 0;
    const uint64_t codes4 = 2 * bytes;
    if (length <= 0 || blocks == 0 ||
        (static_cast<uint64_t>(length) * blocks != bytes &&
         static_cast<uint64_t>(length) * blocks != codes4))
      return bad(what("m_q") + ": " + std::to_string(bytes) + " bytes and " +
                 std::to_string(blocks) + " scales do not belong together with blocks of " +
                 std::to_string(length));
    const bool four = static_cast<uint64_t>(length) * blocks == codes4;
    BlockLayout layout{.block = length, .bits = four ? 4 : 8, .high_first = true};
    layout.coded = layout.stored = static_cast<uint64_t>(length) * blocks;
    layout.count = param.known_shape ? volume(param.shape) : layout.stored;
    if (layout.count > layout.stored || layout.blocks() != blocks)
      return bad(what("m_q") + ": " + std::to_string(blocks) + " blocks of " +
                 std::to_string(length) + " do not belong to a tensor of shape " +
                 shape_text(param.shape));
    LB_TRY(kind, kind_of(four, *q, layout));
    s.shape = param.shape;
    s.leaves = {q, scale};
    s.bytes = q->bytes() + scale->bytes();
    s.stored_as = std::string("adafactor-8bit momentum ") + ckpt::name_of(kind) + ", blocks of " +
                  std::to_string(length);
    if (!param.known_shape) {
      s.stored_as += ", of a shape that the file does not tell (--model PATH gives it)";
      param.states.push_back(std::move(s));
      return fine();
    }
    s.values = block_floats(momentum_rule(kind), layout, q->source, {floats_of(*scale)});
    const MatrixShape m = matrix_of(s.shape);
    if (param.known_shape && (m.rows == 1 || m.cols % length == 0) &&
        (kind == AdafactorMomentum::kDynamic4 || kind == AdafactorMomentum::kDynamic8)) {
      s.codes = Codes{.format = four ? "dynamic4" : "dynamic8",
                      .bits = layout.bits,
                      .rows = m.rows,
                      .cols = m.cols,
                      .block = length,
                      .codes = four ? swapped_nibbles(q->source) : q->source,
                      .scales = scale->source};
    }
    param.states.push_back(std::move(s));
    return fine();
  }

  Result<AdafactorMomentum> kind_of(bool four, const Leaf& q, const BlockLayout& layout) const {
    auto type = value_in(entry, "m_quant_type");
    if (!type || !type->is(Value::Kind::kText)) {
      const Value* set = setting(group, "m_quant_type");
      if (set != nullptr) type = *set;
    }
    if (type && type->is(Value::Kind::kText)) {
      using enum AdafactorMomentum;
      for (const AdafactorMomentum kind : {kUniform4, kUniform8, kDynamic4, kDynamic8}) {
        if (type->text != ckpt::name_of(kind)) continue;
        if ((bits_of(kind) == 4) != four)
          return bad(what("m_q") + ": is said to be " + type->text + ", but its codes have " +
                     (four ? "4" : "8") + " bits");
        return kind;
      }
      return bad(what("m_quant_type") + ": is " + printable(type->text) +
                 ", which no version that is known writes");
    }
    if (!four) return AdafactorMomentum::kUniform8;
    if (seed_counter) return AdafactorMomentum::kUniform4;
    // 0.2.1 and 0.2.2 never write code 0; the table of 0.2.4 and 0.2.5 has the largest magnitude of
    // half of the blocks there.
    const uint64_t blocks = std::min<uint64_t>(layout.blocks(), 1024);
    std::vector<uint16_t> codes(blocks * static_cast<uint64_t>(layout.block));
    LB_CHECK(CodeReader(q.source, layout).read(0, codes.size(), codes.data()));
    if (std::find(codes.begin(), codes.end(), 0) != codes.end()) return AdafactorMomentum::kNormal4;
    uint64_t used = 0;
    for (uint64_t b = 0; b < blocks; ++b) {
      const auto* first = codes.data() + b * static_cast<uint64_t>(layout.block);
      used += !std::all_of(first, first + layout.block, [](uint16_t c) { return c == 8; });
    }
    if (used >= 64) return AdafactorMomentum::kInt4;
    return bad(
        what("m_q") +
        ": is momentum in 4 bits of adafactor-8bit 0.2.1 to 0.2.5, whose versions mean different "
        "numbers by the same codes, and the file does not tell which wrote it");
  }
};

Result<Model> read(std::shared_ptr<const Document> document) {
  LB_TRY(skeleton, skeleton_of(*document));
  Model model = model_of(skeleton, "adafactor8bit", document);
  std::vector<const Group*> group_of(model.params.size());
  for (const Group& g : model.groups) {
    for (const size_t p : g.params) group_of[p] = &g;
  }
  bool seed_counter = false;
  for (const Leaf& leaf : model.rest)
    seed_counter |= !leaf.path.empty() && leaf.path.back().text() == "_apollo_seed_counter";
  static const Group kNone;
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Entry& entry = skeleton.params[i];
    Param& param = model.params[i];
    const Leaf* weight = weight_of(model, param);
    param.known_shape = weight != nullptr;
    if (weight != nullptr) param.shape = weight->shape;
    for (const auto& [name, leaf] : entry.leaves) {
      if (name.starts_with("apollo_seed") || name.find("_low") != std::string::npos)
        return bad(
            shown(param) + ", " + printable(name) +
            ": adafactor-8bit's low-rank state cannot be recovered: its moments are of gradients "
            "projected by torch's random numbers, which differ between devices; start that "
            "optimizer anew");
      if (name.starts_with("lag_") || name == "fira_prev_norm")
        model.warnings.push_back(shown(param) + ": " + printable(name) + " is left out");
    }
    const Group& group = group_of[i] == nullptr ? kNone : *group_of[i];
    Reader reader{model, entry, param, group, seed_counter};
    const bool momentum = entry.find("m") != nullptr || entry.find("m_q") != nullptr;
    const bool confidence =
        entry.find("conf_row") != nullptr || entry.find("conf_row_q") != nullptr;
    const bool factored = entry.find("row_var") != nullptr || entry.find("row_var_q") != nullptr;
    const Value* relative = setting(group, "relative_step");
    // A second moment by elements beside momentum and fixed steps is its AdamW.
    const bool adam =
        momentum && !factored && !confidence && (relative == nullptr || relative->integer == 0);
    const std::string second = adam || confidence ? "exp_avg_sq" : "variance";
    LB_CHECK(reader.second("row_var", second + "_row"));
    LB_CHECK(reader.second("col_var", second + "_col"));
    LB_CHECK(reader.second("variance", second));
    LB_CHECK(reader.second("conf_row", "exp_avg_res_row"));
    LB_CHECK(reader.second("conf_col", "exp_avg_res_col"));
    if (factored && param.states.size() >= 2) {
      Shape shape = param.states[0].shape;
      if (!param.states[1].shape.empty()) shape.push_back(param.states[1].shape.back());
      param.shape = std::move(shape);
      param.known_shape = true;
    }
    LB_CHECK(reader.momentum("exp_avg"));
    if (momentum) std::rotate(param.states.begin(), param.states.end() - 1, param.states.end());
    if (const Leaf* step = entry.find("step")) {
      LB_TRY(number, number_of(*step));
      param.numbers.emplace_back("step", std::move(number));
    }
  }
  model.algorithm = algorithm_of(model);
  return model;
}

// Writing: the newest generation, al8 and uf8.

struct Writer {
  const Model& model;
  const Param& param;
  const Wanted& wanted;
  DialectReport& report;
  std::vector<Leaf>& leaves;
  bool quantized = false;

  Path at(const std::string& key) const { return state_path(model, param, key); }

  void plain(const State& s, const std::string& x, const Shape& shape) {
    report_of(report, param, s, "float32", true);
    leaves.push_back(tensor_leaf(at(x), find_dtype("float32"), shape, float32_source(s.values)));
  }

  void shape_leaves(const std::string& x, const Shape& shape, uint64_t pad) {
    Value size{.kind = Value::Kind::kSize};
    for (const int64_t n : shape) size.items.push_back(Value::number(n));
    leaves.push_back(value_leaf(at(x + "_shape"), std::move(size)));
    leaves.push_back(value_leaf(at(x + "_pad"), Value::number(static_cast<int64_t>(pad))));
  }

  Status second(const State& s, const std::string& x, const Shape& shape) {
    if (!quantized) {
      plain(s, x, shape);
      return fine();
    }
    BlockLayout layout{.count = volume(shape), .block = kBlock};
    layout.coded = layout.stored = layout.blocks() * kBlock;
    const auto blocks = static_cast<int64_t>(layout.blocks());
    const bool own = s.codes && s.codes->format == "log8" && s.codes->block == kBlock &&
                     layout.stored == layout.count &&
                     (s.codes->rows == 1 || s.codes->cols % kBlock == 0);
    const bool copied = !own && model.dialect == "adafactor8bit" && s.leaves.size() == 3 &&
                        s.leaves[0]->dtype->bytes == 1 &&
                        volume(s.leaves[0]->shape) == layout.stored;
    if (wanted.keep && !own && !copied)
      return bad(shown(param) + ", " + s.name + ": " + s.stored_as +
                 " cannot become adafactor-8bit's codes without rounding");
    StateReport* entry =
        report_of(report, param, s, "adafactor-8bit al8, blocks of 2048", own || copied);
    const auto rule = second_moment_rule(AdafactorFiles::kAdaptive8);
    std::shared_ptr<Source> codes, scales, least;
    if (own) {
      codes = s.codes->codes;
      scales = every_other(s.codes->scales, 0);
      least = every_other(s.codes->scales, 1);
    } else if (copied) {
      codes = s.leaves[0]->source, scales = s.leaves[1]->source, least = s.leaves[2]->source;
    } else {
      const auto values = locked(s.values);
      codes = block_codes(rule, layout, values, entry);
      scales = float32_source(block_scales(rule, layout, values, 0));
      least = float32_source(block_scales(rule, layout, values, 1));
    }
    const Dtype* f32 = find_dtype("float32");
    leaves.push_back(tensor_leaf(at(x + "_q"), find_dtype("uint8"), {blocks, kBlock}, codes));
    leaves.push_back(tensor_leaf(at(x + "_scale"), f32, {blocks}, scales));
    leaves.push_back(tensor_leaf(at(x + "_min_log"), f32, {blocks}, least));
    shape_leaves(x, shape, layout.stored - layout.count);
    return fine();
  }

  Status momentum(const State& s) {
    if (!quantized) {
      plain(s, "m", s.shape);
      return fine();
    }
    BlockLayout layout{.count = volume(s.shape), .block = kMomentumBlock};
    layout.coded = layout.stored = layout.blocks() * kMomentumBlock;
    const bool copied = model.dialect == "adafactor8bit" && s.leaves.size() == 2 &&
                        s.stored_as.find("uf8") != std::string::npos &&
                        s.leaves[0]->shape == Shape{static_cast<int64_t>(layout.stored)};
    // d8 is lowbit's dynamic8.
    const bool own = !copied && s.codes && s.codes->format == "dynamic8" &&
                     s.codes->block == kMomentumBlock && layout.stored == layout.count &&
                     (s.codes->rows == 1 || s.codes->cols % kMomentumBlock == 0);
    if (wanted.keep && !copied && !own)
      return bad(shown(param) + ", " + s.name + ": " + s.stored_as +
                 " cannot become adafactor-8bit's codes without rounding");
    const auto kind = own ? AdafactorMomentum::kDynamic8 : AdafactorMomentum::kUniform8;
    StateReport* entry = report_of(
        report, param, s, std::string("adafactor-8bit ") + ckpt::name_of(kind) + ", blocks of 256",
        copied || own);
    const auto values = locked(s.values);
    const auto rule = momentum_rule(kind);
    leaves.push_back(tensor_leaf(at("m_q"), find_dtype("uint8"),
                                 {static_cast<int64_t>(layout.stored)},
                                 copied ? s.leaves[0]->source
                                 : own  ? s.codes->codes
                                        : block_codes(rule, layout, values, entry)));
    leaves.push_back(tensor_leaf(at("m_scale"), find_dtype("float32"),
                                 {static_cast<int64_t>(layout.blocks())},
                                 copied ? s.leaves[1]->source
                                 : own  ? s.codes->scales
                                        : float32_source(block_scales(rule, layout, values, 0))));
    leaves.push_back(value_leaf(at("m_block_size"), Value::number(kMomentumBlock)));
    leaves.push_back(value_leaf(at("m_quant_type"), Value::words(ckpt::name_of(kind))));
    return fine();
  }
};

Result<Document> write(const Model& model, const Wanted& wanted, DialectReport& report) {
  const std::string& f = wanted.state_format;
  if (!f.empty() && f != "8bit" && f != "log8" && f != "float32")
    return Error{Exit::kUsage, "adafactor-8bit's states are not written as " + printable(f) +
                                   "; take 8bit (of 0.4.0 and later) or float32"};
  if (wanted.block != 0 && wanted.block != kBlock)
    return Error{Exit::kUsage, "adafactor-8bit's blocks are written with 2048 values"};
  if (model.flattened) return bad("adafactor-8bit loads no flattened state");
  Document out;
  if (model.document != nullptr) out.manifest = model.document->manifest;
  for (const Param& param : model.params) {
    if (param.states.empty()) continue;
    if (const State* beside = beside_of(param))
      return bad(shown(param) + ": adafactor-8bit keeps nothing beside a weight, and here is " +
                 printable(beside->name));
    if (!param.known_shape)
      return bad(shown(param) +
                 ": its shape is nowhere in the checkpoint; give the weights with --model");
    const uint64_t n = volume(param.shape);
    Writer writer{model,      param,
                  wanted,     report,
                  out.leaves, f != "float32" && n >= kLeastQuantized && !stays_wide(param, wanted)};
    int64_t step = 0;
    for (const auto& [name, value] : param.numbers) {
      if (name != "step") continue;
      LB_TRY(whole, whole_of(value, shown(param) + ", step"));
      step = whole;
    }
    out.leaves.push_back(value_leaf(writer.at("step"), Value::number(step)));
    out.leaves.push_back(value_leaf(writer.at("is_quantized"), Value::boolean(writer.quantized)));
    out.leaves.push_back(value_leaf(writer.at("block_size"), Value::number(kBlock)));
    for (const State& s : param.states) {
      Shape shape = s.shape;
      if (s.name == "exp_avg") {
        LB_CHECK(writer.momentum(s));
      } else if (s.name == "variance" || s.name == "exp_avg_sq") {
        LB_CHECK(writer.second(s, "variance", shape));
      } else if (s.name.ends_with("_row") || s.name.ends_with("_col")) {
        const bool row = s.name.ends_with("_row");
        if (row) shape.push_back(1);
        if (!row) shape.insert(shape.end() - 1, 1);
        const std::string base = s.name.starts_with("exp_avg_res") ? "conf" : "";
        const char* x =
            base.empty() ? (row ? "row_var" : "col_var") : (row ? "conf_row" : "conf_col");
        LB_CHECK(writer.second(s, x, shape));
      } else {
        return bad(shown(param) + ": adafactor-8bit keeps no " + printable(s.name) +
                   "; it has variance, its rows and columns, and momentum");
      }
    }
    if (writer.quantized)
      out.leaves.push_back(value_leaf(writer.at("v_quant_type"), Value::words("al8")));
  }
  std::vector<Settings> settings;
  for (const Group& group : model.groups) {
    Settings s = group.settings;
    if (model.dialect != "adafactor8bit") {
      set_in(s, "quantize", Value::boolean(f != "float32"));
      set_in(s, "block_size", Value::number(kBlock));
      set_in(s, "min_8bit_size", Value::number(kLeastQuantized));
    }
    settings.push_back(std::move(s));
  }
  add_groups(model, settings, out.leaves);
  out.leaves.insert(out.leaves.end(), model.rest.begin(), model.rest.end());
  return out;
}

}  // namespace

extern const Dialect kAdafactor8bit;
const Dialect kAdafactor8bit = {"adafactor8bit", "adafactor-8bit: logarithmic 8-bit second moments",
                                recognize, read, write};

}  // namespace lowbit::ckpt
