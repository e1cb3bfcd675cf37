// lpmm's state dicts (thu-ml/low-bit-optimizers).
//
// A quantized state is a run of packed bytes, the first code lowest, with <name>_qstate beside it:
// the map of values, and in `overhead` the scales and how they lie: for groups of the flattened
// tensor (group), or one maximum for each index of each dimension, of which an element takes the
// least (rank1). Codes are padded to 2048 and followed by a byte that means nothing. The parameter's
// shape is nowhere as such: it follows from the strides where rows are longer than a group.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "dialect/adapters.h"
#include "dialect/lpmm_config.h"
#include "dialect/lpmm_rank_one.h"
#include "dialect/peer.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPack = 2048;
constexpr int64_t kGroup = 128;
constexpr int64_t kThreshold = 4096;  // larger tensors are quantized
constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq", "momentum_buffer"};

bool is_signed(const std::string& state) { return state != "exp_avg_sq"; }

Result<int> recognize(const Document& document) {
  if (!has_skeleton(document)) return 0;
  LB_TRY(skeleton, skeleton_of(document));
  for (const Entry& e : skeleton.params) {
    for (const auto& [name, leaf] : e.leaves) {
      if (name.find("_qstate") != std::string::npos) return 3;
    }
  }
  for (const Leaf* leaf : skeleton.rest) {
    if (leaf->path.size() > skeleton.root.size() &&
        leaf->path[skeleton.root.size()].text() == "qconfig")
      return 2;
  }
  return 0;
}

/// A map of lowbit's that has these values, of the two to the power of `bits` codes; "" where there
/// is none.
std::string format_of(const std::vector<float>& map, int bits, bool is_signed) {
  for (const char* kind : {"dynamic", "power1_", "power2_"}) {
    const std::string name = kind + std::to_string(bits) + (is_signed ? "" : "_unsigned");
    if (find_format(name) == nullptr) continue;
    if (map == map_of(name)) return name;
  }
  return "";
}

/// int32 codes, which lpmm writes where it does not pack them, as bytes.
std::shared_ptr<Source> narrowed(std::shared_ptr<Source> source) {
  class Narrow : public Source {
   public:
    explicit Narrow(std::shared_ptr<Source> s) : source_(std::move(s)) {}
    Status read(uint64_t first, uint64_t count, void* out) override {
      codes_.resize(count);
      LB_CHECK(source_->read(first, count, codes_.data()));
      for (uint64_t i = 0; i < count; ++i)
        static_cast<uint8_t*>(out)[i] = static_cast<uint8_t>(std::clamp(codes_[i], 0, 255));
      return fine();
    }

   private:
    const std::shared_ptr<Source> source_;
    std::vector<int32_t> codes_;
  };
  return std::make_shared<Narrow>(std::move(source));
}

/// Of the settings that lpmm keeps beside state and groups.
bool is_config(const Model& model, const Leaf& leaf) {
  Path path = model.root;
  path.emplace_back("qconfig");
  return leaf.path.size() >= path.size() && std::equal(path.begin(), path.end(), leaf.path.begin());
}

// Reading

struct Reader {
  const Entry& entry;
  Param& param;
  std::string what(const std::string& key) const { return shown(param) + ", " + key; }

  /// The shape of a contiguous tensor of `groups` groups, by its strides; nothing where more than
  /// one fits.
  static std::optional<Shape> shape_of(const Shape& stride, uint64_t groups, uint64_t group) {
    if (stride.empty() || stride.back() != 1) return std::nullopt;
    Shape shape(stride.size());
    for (size_t d = 1; d < stride.size(); ++d) {
      if (stride[d] == 0 || stride[d - 1] % stride[d] != 0) return std::nullopt;
      shape[d] = stride[d - 1] / stride[d];
    }
    const auto inner = static_cast<uint64_t>(stride[0]);
    if (inner == 0) return std::nullopt;
    const uint64_t rows = groups * group / inner;
    if (rows * inner + group <= groups * group || rows == 0) return std::nullopt;
    if (rows > 1 && (rows - 1) * inner + group > groups * group) return std::nullopt;
    shape[0] = static_cast<int64_t>(rows);
    return shape;
  }

  Status learn_shape(const Shape& shape, const std::string& from) {
    if (param.known_shape && param.shape != shape)
      return bad(what(from) + ": is of the shape " + shape_text(shape) + ", its parameter " +
                 shape_text(param.shape));
    param.shape = shape;
    param.known_shape = true;
    return fine();
  }

  /// What tells the parameter's shape, before the states that need it.
  Status shapes() {
    const Leaf* row = tensor_in(entry, "exp_avg_sq_row");
    const Leaf* col = tensor_in(entry, "exp_avg_sq_col");
    if (row != nullptr && col != nullptr && !col->shape.empty()) {
      Shape shape = row->shape;
      shape.push_back(col->shape.back());
      LB_CHECK(learn_shape(shape, "exp_avg_sq_row"));
    }
    for (const std::string name : kStates) {
      const Leaf* leaf = tensor_in(entry, name);
      if (leaf == nullptr || placeholder(name, *leaf)) continue;
      const std::string_view dtype = leaf->dtype->name;
      if (dtype != "int8" && dtype != "int32") {
        LB_CHECK(learn_shape(leaf->shape, name));
        continue;
      }
      const std::string over = name + "_qstate.overhead.";
      const auto scaled = shape_in(entry, over + "scaled_shape"),
                 stride = shape_in(entry, over + "stride");
      if (!scaled || !stride) continue;
      const Leaf* most = tensor_in(entry, over + "max1");
      const bool grouped =
          most != nullptr && scaled->size() == 2 && most->shape == Shape{(*scaled)[0], 1};
      if (!grouped) {
        LB_CHECK(learn_shape(*scaled, name));
      } else if (const auto shape = shape_of(*stride, static_cast<uint64_t>((*scaled)[0]),
                                             static_cast<uint64_t>((*scaled)[1]))) {
        LB_CHECK(learn_shape(*shape, name));
      }
    }
    return fine();
  }

  /// 0-D before the first step, whatever the parameter is.
  bool placeholder(const std::string& name, const Leaf& leaf) const {
    if (!leaf.shape.empty()) return false;
    const auto enable = value_in(entry, name + "_qstate.enable");
    return enable && enable->integer != 0;
  }

  Status state(const std::string& name) {
    const Leaf* leaf = tensor_in(entry, name);
    if (leaf == nullptr || placeholder(name, *leaf)) return fine();
    State s;
    s.name = name;
    s.is_signed = is_signed(name);
    s.shape = param.shape;
    s.bytes = leaf->bytes();
    s.leaves = {leaf};
    for (const auto& [key, beside] : entry.leaves) {
      if (key.starts_with(name + "_qstate")) s.leaves.push_back(beside);
    }
    const std::string dtype = leaf->dtype->name;
    if (dtype == "int8" || dtype == "int32") {
      LB_CHECK(coded(s, *leaf));
    } else {
      s.stored_as = dtype;
      s.values = floats_of(*leaf);
      s.shape = leaf->shape;
    }
    param.states.push_back(std::move(s));
    return fine();
  }

  Status coded(State& s, const Leaf& leaf) {
    const std::string over = s.name + "_qstate.overhead.";
    const Leaf* map_leaf = tensor_in(entry, s.name + "_qstate.qmap");
    if (map_leaf == nullptr)
      return bad(what(s.name) +
                 ": has no map of its codes (qmap): lpmm's linear maps are not read; "
                 "save with QUANT_TYPE nonlinear, power-1 or power-2");
    const uint64_t entries = volume(map_leaf->shape);
    int bits = 1;
    while (bits < 8 && (uint64_t{1} << bits) < entries) ++bits;
    if (entries != uint64_t{1} << bits || map_leaf->shape.size() != 1)
      return bad(what(s.name) + ": its map has the shape " + shape_text(map_leaf->shape) +
                 ", which is no power of two from 2 to 256");
    std::vector<float> map(entries);
    LB_CHECK(floats_of(*map_leaf)->read(0, entries, map.data()));
    for (size_t i = 1; i < map.size(); ++i) {
      if (!(map[i - 1] <= map[i])) return bad(what(s.name) + ": its map does not rise");
    }
    const Leaf* most = tensor_in(entry, over + "max1");
    const auto scaled = shape_in(entry, over + "scaled_shape");
    for (const char* other : {"max_dim0", "max_dim1", "max0"}) {
      if (tensor_in(entry, over + other) != nullptr)
        return bad(what(s.name) + ": its scales are of lpmm's types dim01, dim10 or rank1-group (" +
                   std::string(other) + "), which are not read; save with group or rank1");
    }
    const bool packed = std::string_view(leaf.dtype->name) == "int8";
    BlockLayout layout{.bits = packed && (bits == 1 || bits == 2 || bits == 4) ? bits : 8};
    const bool fused = most != nullptr && most->shape.size() == 1 && !scaled;
    std::vector<Maxima> maxima;
    if (fused) {
      layout.block = kGroup;
      layout.count = layout.stored =
          param.known_shape ? volume(param.shape) : 2 * volume(leaf.shape);
      if (most->shape[0] != static_cast<int64_t>(layout.blocks()) ||
          volume(leaf.shape) != (layout.count + 1) / 2)
        return bad(what(s.name) + ": " + std::to_string(volume(leaf.shape)) +
                   " bytes of fused codes and " + std::to_string(most->shape[0]) +
                   " scales do not belong together");
    } else {
      if (!scaled)
        return bad(what(s.name) +
                   ": its overhead has no scaled_shape, so there is no telling how its "
                   "codes lie");
      LB_TRY(stored, elements(*scaled, what(s.name)));
      layout.count = stored;
      layout.stored = (stored + kPack - 1) / kPack * kPack;
      const uint64_t bytes = packed ? layout.elements() + 1 : stored;
      if (volume(leaf.shape) != bytes)
        return bad(what(s.name) + ": has " + std::to_string(volume(leaf.shape)) +
                   " codes' bytes where " + std::to_string(bytes) + " belong");
      LB_CHECK(scales(s, over, *scaled, most, layout, maxima));
    }
    const std::shared_ptr<Source> codes = packed ? leaf.source : narrowed(leaf.source);
    const std::string format = format_of(map, bits, s.is_signed);
    s.stored_as =
        "lpmm " + std::to_string(bits) + "-bit " + (format.empty() ? "by its own map" : format) +
        (maxima.empty() ? ", groups of " + std::to_string(layout.block) : ", rank-1 scales") +
        (fused ? ", fused" : "");
    for (const Leaf* beside : s.leaves) {
      if (beside != &leaf && beside->kind == Leaf::Kind::kTensor) s.bytes += beside->bytes();
    }
    if (!param.known_shape) {
      s.stored_as += ", of a shape that the file does not tell (--model PATH gives it)";
      return fine();
    }
    if (!maxima.empty()) {
      s.values = rank_one_floats(map, layout, codes, s.shape, std::move(maxima));
      return fine();
    }
    s.values = block_floats(std::make_shared<TableRule>(map), layout, codes, {floats_of(*most)});
    const MatrixShape m = matrix_of(s.shape);
    const bool rows_fit = m.rows == 1 || m.cols % layout.block == 0;
    if (param.known_shape && rows_fit && layout.bits == bits && !format.empty() &&
        std::string_view(most->dtype->name) == "float32")
      s.codes = Codes{.format = format,
                      .bits = bits,
                      .rows = m.rows,
                      .cols = m.cols,
                      .block = layout.block,
                      .codes = codes,
                      .scales = most->source};
    return fine();
  }

  /// The scales of a state that is not fused: groups, or maxima.
  Status scales(const State& s, const std::string& over, const Shape& scaled, const Leaf* most,
                BlockLayout& layout, std::vector<Maxima>& maxima) {
    if (most == nullptr) {
      for (size_t d = 0; d < scaled.size(); ++d) {
        const Leaf* m = tensor_in(entry, over + "max_dims." + std::to_string(d));
        if (m == nullptr || volume(m->shape) != static_cast<uint64_t>(scaled[d]))
          return bad(what(s.name) + ": has no maxima along dimension " + std::to_string(d) +
                     "; its scales are of no type that is read: group, rank1, tensor, dim0, dim1");
        maxima.push_back({static_cast<int>(d), float32_source(floats_of(*m))});
      }
      return fine();
    }
    // One number for each index of one dimension, or a single one.
    if (most->shape.size() != scaled.size())
      return bad(what(s.name) + ": its scales have the shape " + shape_text(most->shape) +
                 ", its codes " + shape_text(scaled));
    int along = Maxima::kWhole;
    for (size_t d = 0; d < scaled.size(); ++d) {
      if (most->shape[d] == 1) continue;
      if (most->shape[d] != scaled[d] || along != Maxima::kWhole)
        return bad(what(s.name) + ": its scales have the shape " + shape_text(most->shape) +
                   ", its codes " + shape_text(scaled));
      along = static_cast<int>(d);
    }
    const bool one_group = along == Maxima::kWhole && scaled.size() == 2 && scaled[0] == 1;
    if (along == 0 || one_group) {
      layout.block = 1;
      for (size_t d = 1; d < scaled.size(); ++d) layout.block *= scaled[d];
      // The last group is filled up with zeros, which are no values.
      if (param.known_shape) layout.count = std::min(layout.count, volume(param.shape));
    } else {
      maxima.push_back({along, float32_source(floats_of(*most))});
    }
    return fine();
  }
};

Result<Model> read(std::shared_ptr<const Document> document) {
  LB_TRY(skeleton, skeleton_of(*document));
  if (skeleton.flattened)
    return bad("lpmm's states cannot be flattened, and these are; take the file that lpmm wrote");
  Model model = model_of(skeleton, "lpmm", document);
  // Its settings are nobody else's; the document still has them.
  std::erase_if(model.rest, [&](const Leaf& leaf) { return is_config(model, leaf); });
  for (size_t i = 0; i < model.params.size(); ++i) {
    Param& param = model.params[i];
    const Entry& entry = skeleton.params[i];
    Reader reader{entry, param};
    param.known_shape = false;
    if (const Leaf* weight = weight_of(model, param)) {
      param.shape = weight->shape;
      param.known_shape = true;
    }
    LB_CHECK(reader.shapes());
    for (const char* name : kStates) LB_CHECK(reader.state(name));
    for (const char* name : {"exp_avg_sq_row", "exp_avg_sq_col"}) {
      const Leaf* leaf = tensor_in(entry, name);
      if (leaf == nullptr) continue;
      State s;
      s.name = name;
      s.shape = leaf->shape;
      s.is_signed = false;
      s.stored_as = leaf->dtype->name;
      s.bytes = leaf->bytes();
      s.values = floats_of(*leaf);
      s.leaves = {leaf};
      for (const auto& [key, beside] : entry.leaves) {
        if (std::string_view(name).ends_with("row") && key.starts_with("exp_avg_sq_qstate"))
          s.leaves.push_back(beside);
      }
      param.states.push_back(std::move(s));
    }
    if (const Leaf* step = entry.find("step")) {
      LB_TRY(number, number_of(*step));
      param.numbers.emplace_back("step", std::move(number));
    }
  }
  model.algorithm = algorithm_of(model);
  return model;
}

// Writing

struct Writer {
  const Model& model;
  const Param& param;
  const LpmmConfig& config;
  const Wanted& wanted;
  DialectReport& report;
  std::vector<Leaf>& leaves;

  Path at(const std::string& key) const { return state_path(model, param, key); }
  static Path below(Path path, std::initializer_list<Key> keys) {
    path.insert(path.end(), keys);
    return path;
  }

  Status state(const State& s) {
    if (s.name == "exp_avg_sq_row" || s.name == "exp_avg_sq_col") {
      report_of(report, param, s, "float32", true);
      leaves.push_back(
          tensor_leaf(at(s.name), find_dtype("float32"), s.shape, float32_source(s.values)));
      if (s.name.ends_with("col")) qstate("exp_avg_sq", false);
      return fine();
    }
    if (std::find(std::begin(kStates), std::end(kStates), s.name) == std::end(kStates))
      return bad(shown(param) + ": lpmm keeps no " + printable(s.name) +
                 "; it has exp_avg, exp_avg_sq and momentum_buffer");
    const auto n = volume(s.shape);
    const bool enable =
        config.quantized && n > static_cast<uint64_t>(kThreshold) && !stays_wide(param, wanted);
    if (!enable) {
      report_of(report, param, s, "float32", true);
      leaves.push_back(
          tensor_leaf(at(s.name), find_dtype("float32"), s.shape, float32_source(s.values)));
      qstate(s.name, false);
      return fine();
    }
    return config.rank1 && !is_signed(s.name) && s.shape.size() > 1 ? rank_one(s) : groups(s);
  }

  Path qstate(const std::string& name, bool enable) {
    const Path path = at(name + "_qstate");
    leaves.push_back(value_leaf(below(path, {"enable"}), Value::boolean(enable)));
    if (!enable)
      leaves.push_back(value_leaf(below(path, {"overhead"}), Value{.kind = Value::Kind::kDict}));
    const std::vector<float> map = map_of(LpmmConfig::format(is_signed(name)));
    std::string bytes(reinterpret_cast<const char*>(map.data()), map.size() * sizeof(float));
    leaves.push_back(tensor_leaf(below(path, {"qmap"}), find_dtype("float32"),
                                 {static_cast<int64_t>(map.size())},
                                 constant_source(std::move(bytes), 4)));
    return below(path, {"overhead"});
  }

  void common(const Path& overhead, const State& s) {
    Value stride = Value::tuple({});
    for (const int64_t n : row_major(s.shape)) stride.items.push_back(Value::number(n));
    leaves.push_back(value_leaf(below(overhead, {"dtype"}),
                                Value{.kind = Value::Kind::kGlobal, .text = "torch float32"}));
    leaves.push_back(value_leaf(below(overhead, {"stride"}), std::move(stride)));
  }
  void scaled_shape(const Path& overhead, const Shape& shape) {
    Value size{.kind = Value::Kind::kSize};
    for (const int64_t n : shape) size.items.push_back(Value::number(n));
    leaves.push_back(value_leaf(below(overhead, {"scaled_shape"}), std::move(size)));
  }
  /// With the byte behind them, which means nothing.
  void codes_leaf(const State& s, const BlockLayout& layout, std::shared_ptr<Source> codes) {
    const auto bytes = static_cast<int64_t>(layout.elements());
    leaves.push_back(tensor_leaf(at(s.name), find_dtype("int8"), {bytes + 1},
                                 filled_up(std::move(codes), layout.elements(), 0)));
  }
  Status groups(const State& s) {
    const std::string format = LpmmConfig::format(s.is_signed);
    const auto rule = std::make_shared<TableRule>(map_of(format));
    const uint64_t n = volume(s.shape);
    BlockLayout layout{.count = n, .block = kGroup, .bits = LpmmConfig::kBits};
    layout.coded = layout.blocks() * kGroup;
    layout.stored = (layout.coded + kPack - 1) / kPack * kPack;
    layout.filler = rule->nearest(0.0f);
    const bool own = s.codes && s.codes->format == format && s.codes->block == kGroup &&
                     (s.codes->rows == 1 || s.codes->cols % kGroup == 0) && n % 2 == 0 &&
                     n % kGroup == 0;
    if (wanted.keep && !own)
      return bad(shown(param) + ", " + s.name + ": " + s.stored_as +
                 " cannot become lpmm's codes without rounding");
    StateReport* entry =
        report_of(report, param, s, "lpmm 4-bit " + format + ", groups of 128", own);
    const auto groups = static_cast<int64_t>(layout.blocks());
    std::shared_ptr<Source> codes, scales;
    if (own) {
      // Codes of lowbit's, with what lpmm puts behind them.
      codes = filled_up(s.codes->codes, n / 2,
                        static_cast<uint8_t>(layout.filler | layout.filler << 4));
      scales = s.codes->scales;
    } else {
      const auto values = locked(s.values);
      codes = block_codes(rule, layout, values, entry);
      scales = float32_source(block_scales(rule, layout, values, 0));
    }
    codes_leaf(s, layout, std::move(codes));
    const Path overhead = qstate(s.name, true);
    common(overhead, s);
    leaves.push_back(tensor_leaf(below(overhead, {"max1"}), find_dtype("float32"), {groups, 1},
                                 std::move(scales)));
    scaled_shape(overhead, {groups, kGroup});
    return fine();
  }

  Status rank_one(const State& s) {
    const std::string format = LpmmConfig::format(s.is_signed);
    if (wanted.keep)
      return bad(shown(param) + ", " + s.name + ": " + s.stored_as +
                 " cannot become lpmm's codes without rounding");
    StateReport* entry =
        report_of(report, param, s, "lpmm 4-bit " + format + ", rank-1 scales", false);
    BlockLayout layout{.count = volume(s.shape), .bits = LpmmConfig::kBits};
    layout.coded = layout.count;
    layout.stored = (layout.count + kPack - 1) / kPack * kPack;
    std::vector<int> dims(s.shape.size());
    for (size_t d = 0; d < dims.size(); ++d) dims[d] = static_cast<int>(d);
    // One row: lpmm's codes know nothing of rows.
    auto [codes, most] = rank_one_codes(locked(s.values), s.shape, map_of(format), layout, entry);
    codes_leaf(s, layout, std::move(codes));
    const Path overhead = qstate(s.name, true);
    common(overhead, s);
    leaves.push_back(
        value_leaf(below(overhead, {"dim"}), Value::number(static_cast<int64_t>(s.shape.size()))));
    for (size_t d = 0; d < s.shape.size(); ++d) {
      Shape shape(s.shape.size(), 1);
      shape[d] = s.shape[d];
      leaves.push_back(tensor_leaf(
          below(overhead, {"max_dims", Key(Key::Kind::kIndex, static_cast<int64_t>(d))}),
          find_dtype("float32"), shape, most[d]));
    }
    leaves.push_back(value_leaf(below(overhead, {"max1"}), Value::none()));
    scaled_shape(overhead, s.shape);
    return fine();
  }
};

Result<Document> write(const Model& model, const Wanted& wanted, DialectReport& report) {
  if (model.flattened) return bad("lpmm's states cannot be flattened");
  const bool copied = model.dialect == "lpmm" && wanted.state_format.empty();
  LB_TRY(config, LpmmConfig::of(wanted));
  Document out;
  if (model.document != nullptr) out.manifest = model.document->manifest;
  for (const Param& param : model.params) {
    if (const State* beside = beside_of(param))
      return bad(shown(param) + ": lpmm keeps nothing beside a weight, and here is " +
                 printable(beside->name) + "; convert the weights to float32 first");
    Writer writer{model, param, config, wanted, report, out.leaves};
    for (const auto& [name, value] : param.numbers) {
      if (name != "step") continue;
      LB_TRY(step, real_of(value, shown(param) + ", step"));
      out.leaves.push_back(scalar_leaf(writer.at("step"), static_cast<float>(step)));
    }
    for (const State& s : param.states) {
      if (!param.known_shape && !copied)
        return bad(shown(param) +
                   ": its shape is nowhere in the checkpoint; give the weights with --model");
      if (copied) {
        report_of(report, param, s, s.stored_as, true);
        for (const Leaf* leaf : s.leaves) out.leaves.push_back(*leaf);
      } else {
        LB_CHECK(writer.state(s));
      }
    }
  }
  std::vector<Settings> settings;
  for (const Group& group : model.groups) {
    Settings s = group.settings;
    if (model.dialect != "lpmm" && model.algorithm == "adam") {
      set_in(s, "fused", Value::boolean(false));
      set_in(s, "use_first_moment", Value::boolean(true));
      bool factored = false;
      for (const size_t p : group.params) {
        for (const State& state : model.params[p].states)
          factored |= state.name == "exp_avg_sq_row";
      }
      set_in(s, "factor_second_moment", Value::boolean(factored));
    }
    settings.push_back(std::move(s));
  }
  add_groups(model, settings, out.leaves);
  if (copied) {
    for (const Leaf& leaf : model.document->leaves) {
      if (is_config(model, leaf)) out.leaves.push_back(leaf);
    }
  } else {
    Path qconfig = model.root;
    qconfig.emplace_back("qconfig");
    out.leaves.push_back(value_leaf(std::move(qconfig), config.value()));
  }
  for (const Leaf& leaf : model.rest) {
    if (!is_config(model, leaf)) out.leaves.push_back(leaf);
  }
  return out;
}

}  // namespace

extern const Dialect kLpmm;
const Dialect kLpmm = {"lpmm", "lpmm: 4-bit states by groups or of rank 1", recognize, read, write};

}  // namespace lowbit::ckpt
