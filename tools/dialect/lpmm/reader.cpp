// lpmm's state dicts (thu-ml/low-bit-optimizers).
//
// A quantized state is a run of packed bytes, the first code in the low bits, with <name>_qstate
// beside it: the codebook (qmap), and in `overhead` the scales. There is one scale for each group
// of the flattened tensor (group), or an absmax for each index of each dimension, of which an
// element takes the least (rank1). Codes are padded to 2048 and followed by a byte without meaning.
// No key holds the shape of the parameter: it follows from the strides if rows are longer than a
// group.
#include "dialect/lpmm/lpmm.h"

#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/lpmm/rank_one.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/dequantize.h"
#include "dialect/requantize/nearest.h"
#include "dialect/tree/weights.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<int> recognize_lpmm(const Document& /*document*/, const OptimizerTree& tree) {
  for (const Entry& e : tree.params) {
    for (const auto& [name, leaf] : e.leaves) {
      if (name.find("_qstate") != std::string::npos) return 3;
    }
  }
  for (const Leaf* leaf : tree.rest) {
    if (leaf->path.size() > tree.root.size() && leaf->path[tree.root.size()].text() == "qconfig")
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
    if (map == codebook_of(name)) return name;
  }
  return "";
}

struct LpmmReader {
  const Entry& entry;
  Param& param;
  const Group& group;
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
    param.learn(shape);
    return fine();
  }

  /// What tells the parameter's shape, before the states that need it.
  Status shapes() {
    const Leaf* row = tensor_in(entry, "exp_avg_sq_row");
    const Leaf* col = tensor_in(entry, "exp_avg_sq_col");
    if (row != nullptr && col != nullptr && !col->shape.empty()) {
      RETURN_IF_ERROR(learn_shape(shape_of_means(row->shape, col->shape), "exp_avg_sq_row"));
    }
    for (const std::string name : kLpmmStates) {
      const Leaf* leaf = tensor_in(entry, name);
      if (leaf == nullptr || placeholder(name, *leaf)) continue;
      const std::string_view dtype = leaf->dtype->name;
      if (dtype != "int8" && dtype != "int32") {
        if (shape_in(entry, name + "_qstate.overhead.scaled_shape"))
          return bad(what(name) + ": its codes are " + std::string(dtype) +
                     ", which lpmm casts them to when it loads a file of this ROUND_TYPE; convert "
                     "the file that it loaded, or let it take a step and save again");
        RETURN_IF_ERROR(learn_shape(leaf->shape, name));
        continue;
      }
      const std::string over = name + "_qstate.overhead.";
      const auto scaled = shape_in(entry, over + "scaled_shape"),
                 stride = shape_in(entry, over + "stride");
      if (!scaled) continue;
      const Leaf* absmax = tensor_in(entry, over + "max1");
      const bool grouped =
          absmax != nullptr && scaled->size() == 2 && absmax->shape == Shape{(*scaled)[0], 1};
      if (!grouped) {  // cross-tile scales, which are read along the parameter's dimensions
        RETURN_IF_ERROR(learn_shape(*scaled, name));
      } else if (stride) {
        const auto shape = shape_of(*stride, static_cast<uint64_t>((*scaled)[0]),
                                    static_cast<uint64_t>((*scaled)[1]));
        if (shape) {
          RETURN_IF_ERROR(learn_shape(*shape, name));
        }
      }
    }
    return fine();
  }

  /// 0-D before the first step, and always without momentum, whatever the parameter is.
  bool placeholder(const std::string& name, const Leaf& leaf) const {
    if (!leaf.shape.empty()) return false;
    if (name == "momentum_buffer" && real_setting(group, "momentum") == 0.0) return true;
    const auto enable = value_in(entry, name + "_qstate.enable");
    return enable && enable->is_on();
  }

  Status state(const std::string& name) {
    const Leaf* leaf = tensor_in(entry, name);
    if (leaf == nullptr || placeholder(name, *leaf)) return fine();
    State s = plain_state(name, *leaf);
    for (const auto& [key, beside] : entry.leaves) {
      if (key.starts_with(name + "_qstate")) s.leaves.push_back(beside);
    }
    const std::string dtype = leaf->dtype->name;
    if (dtype == "int8" || dtype == "int32") {
      s.shape = param.shape;
      s.values = nullptr;
      RETURN_IF_ERROR(coded(s, *leaf));
    }
    param.states.push_back(std::move(s));
    return fine();
  }

  /// How many bits a code of a codebook of that many values has.
  static int bits_of(uint64_t entries) {
    int bits = 1;
    while (bits < 8 && (uint64_t{1} << bits) < entries) ++bits;
    return bits;
  }

  /// The codebook of a state: the value of each code, rising.
  Result<std::vector<float>> codebook(const State& s) const {
    const Leaf* map_leaf = tensor_in(entry, s.name + "_qstate.qmap");
    if (map_leaf == nullptr)
      return bad(what(s.name) +
                 ": has no map of its codes (qmap): lpmm's linear maps are not read; "
                 "save with QUANT_TYPE nonlinear, power-1 or power-2");
    const uint64_t entries = volume(map_leaf->shape);
    const int bits = bits_of(entries);
    if (entries != uint64_t{1} << bits || map_leaf->shape.size() != 1)
      return bad(what(s.name) + ": its map has the shape " + shape_text(map_leaf->shape) +
                 ", which is not a power of two from 2 to 256");
    std::vector<float> map(entries);
    RETURN_IF_ERROR(floats_of(*map_leaf)->read(0, entries, map.data()));
    for (size_t i = 1; i < map.size(); ++i) {
      if (!(map[i - 1] <= map[i])) return bad(what(s.name) + ": its map does not rise");
    }
    return map;
  }

  /// How the codes and scales of a state lie. Scales of groups are in `absmax`, cross-tile ones in
  /// `cross_tile`.
  struct Stored {
    BlockLayout layout;
    const Leaf* absmax;
    bool fused;
    std::vector<CrossTileScale> cross_tile;
  };
  Result<Stored> stored(const State& s, const Leaf& leaf, int bits, bool packed) const {
    const std::string over = s.name + "_qstate.overhead.";
    const Leaf* absmax = tensor_in(entry, over + "max1");
    const auto scaled = shape_in(entry, over + "scaled_shape");
    for (const char* other : {"max_dim0", "max_dim1", "max0"}) {
      if (tensor_in(entry, over + other) != nullptr)
        return bad(what(s.name) + ": its scales are of lpmm's types dim01, dim10 or rank1-group (" +
                   std::string(other) + "), which are not read; save with group or rank1");
    }
    Stored out;
    BlockLayout& layout = out.layout;
    layout = {.bits = packed && (bits == 1 || bits == 2 || bits == 4) ? bits : 8};
    const bool fused = absmax != nullptr && absmax->shape.size() == 1 && !scaled;
    if (fused) {
      layout.block = kLpmmGroup;
      layout.count = layout.stored =
          param.known_shape ? volume(param.shape) : 2 * volume(leaf.shape);
      if (absmax->shape[0] != static_cast<int64_t>(layout.blocks()) ||
          volume(leaf.shape) != (layout.count + 1) / 2)
        return bad(what(s.name) + ": " + std::to_string(volume(leaf.shape)) +
                   " bytes of fused codes and " + std::to_string(absmax->shape[0]) +
                   " scales do not belong together");
    } else {
      if (!scaled)
        return bad(what(s.name) +
                   ": its overhead has no scaled_shape, so there is no telling how its "
                   "codes lie");
      ASSIGN_OR_RETURN(count, elements(*scaled, what(s.name)));
      layout.count = count;
      layout.stored = (count + kLpmmPack - 1) / kLpmmPack * kLpmmPack;
      const uint64_t bytes = packed ? layout.elements() + 1 : count;
      if (volume(leaf.shape) != bytes)
        return bad(what(s.name) + ": has " + std::to_string(volume(leaf.shape)) +
                   " codes' bytes where " + std::to_string(bytes) + " belong");
      RETURN_IF_ERROR(scales(s, over, *scaled, absmax, layout, out.cross_tile));
    }
    out.absmax = absmax;
    out.fused = fused;
    return out;
  }

  Error other_size(const State& s, uint64_t codes, const char* compared) const {
    return bad(what(s.name) + ": has " + std::to_string(codes) +
               " codes, its parameter of the shape " + shape_text(param.shape) + " " + compared +
               " elements");
  }

  /// A quantized state: its values, and its codes where they are lowbit's too.
  Status coded(State& s, const Leaf& leaf) {
    const bool packed = std::string_view(leaf.dtype->name) == "int8";
    ASSIGN_OR_RETURN(map, codebook(s));
    const int bits = bits_of(map.size());
    ASSIGN_OR_RETURN(how, stored(s, leaf, bits, packed));
    const BlockLayout& layout = how.layout;
    const std::shared_ptr<Source> codes = packed ? leaf.source : bytes_of_int32(leaf.source);
    const std::string format = format_of(map, bits, s.is_signed);
    s.stored_as = "lpmm " + std::to_string(bits) + "-bit " +
                  (format.empty() ? "by its own map" : format) +
                  (how.cross_tile.empty() ? ", groups of " + std::to_string(layout.block)
                                          : ", rank-1 scales") +
                  (how.fused ? ", fused" : "");
    for (const Leaf* beside : s.leaves) {
      if (beside != &leaf && beside->kind == Leaf::Kind::kTensor) s.bytes += beside->bytes();
    }
    if (param.known_shape && volume(param.shape) > layout.count)
      return other_size(s, layout.count, "more");
    if (!param.known_shape) {
      s.stored_as += ", of a shape that the file does not tell (--model PATH gives it)";
      return fine();
    }
    if (!how.cross_tile.empty()) {
      s.values = rank_one_floats(map, layout, codes, s.shape, std::move(how.cross_tile));
      return fine();
    }
    s.values =
        block_floats(std::make_shared<TableRule>(map), layout, codes, {floats_of(*how.absmax)});
    if (layout.bits == bits && !format.empty() && is_float32(*how.absmax))
      s.codes = codes_of_rows(s.shape, format, bits, layout.block, codes, how.absmax->source);
    return fine();
  }

  /// The scales of a state that is not fused: one for each group, or cross-tile ones.
  Status scales(const State& s, const std::string& over, const Shape& scaled, const Leaf* absmax,
                BlockLayout& layout, std::vector<CrossTileScale>& cross_tile) const {
    if (absmax == nullptr) {
      for (size_t d = 0; d < scaled.size(); ++d) {
        const Leaf* m = tensor_in(entry, over + "max_dims." + std::to_string(d));
        if (m == nullptr || volume(m->shape) != static_cast<uint64_t>(scaled[d]))
          return bad(what(s.name) + ": has no maxima along dimension " + std::to_string(d) +
                     "; its scales are of no type that is read: group, rank1, tensor, dim0, dim1");
        cross_tile.push_back({static_cast<int>(d), float32_source(floats_of(*m))});
      }
      return fine();
    }
    // One number for each index of one dimension, or a single one.
    if (absmax->shape.size() != scaled.size())
      return bad(what(s.name) + ": its scales have the shape " + shape_text(absmax->shape) +
                 ", its codes " + shape_text(scaled));
    int along = CrossTileScale::kWhole;
    for (size_t d = 0; d < scaled.size(); ++d) {
      if (absmax->shape[d] == 1) continue;
      if (absmax->shape[d] != scaled[d] || along != CrossTileScale::kWhole)
        return bad(what(s.name) + ": its scales have the shape " + shape_text(absmax->shape) +
                   ", its codes " + shape_text(scaled));
      along = static_cast<int>(d);
    }
    const bool one_group = along == CrossTileScale::kWhole && scaled.size() == 2 && scaled[0] == 1;
    if (along == 0 || one_group) {
      layout.block = 1;
      for (size_t d = 1; d < scaled.size(); ++d) layout.block *= scaled[d];
      // The last group is filled up with zeros, which are not values.
      if (param.known_shape) {
        const uint64_t values = volume(param.shape);
        if (values + static_cast<uint64_t>(layout.block) <= layout.count)
          return other_size(s, layout.count, "fewer");
        layout.count = std::min(layout.count, values);
      }
    } else {
      cross_tile.push_back({along, float32_source(floats_of(*absmax))});
    }
    return fine();
  }
};

}  // namespace

bool is_lpmm_config(const Model& model, const Leaf& leaf) {
  return is_below(leaf.path, below(model.root, "qconfig"));
}

Result<Model> read_lpmm(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  if (tree.flattened)
    return bad("lpmm's states cannot be flattened, and these are; take the file that lpmm wrote");
  Model model = model_of(tree, "lpmm", document);
  // Its settings are nobody else's; the document still has them.
  std::erase_if(model.rest, [&](const Leaf& leaf) { return is_lpmm_config(model, leaf); });
  const Weights weights(*document, tree);
  const std::vector<const Group*> group_of = groups_by_param(model);
  for (size_t i = 0; i < model.params.size(); ++i) {
    Param& param = model.params[i];
    const Entry& entry = tree.params[i];
    LpmmReader reader{entry, param, *group_of[i]};
    ASSIGN_OR_RETURN(weight, weights.find(param.name, Weights::Asked::kShape));
    if (weight != nullptr) {
      param.learn(weight->shape);
    }
    RETURN_IF_ERROR(reader.shapes());
    for (const char* name : kLpmmStates) RETURN_IF_ERROR(reader.state(name));
    for (const char* name : {"exp_avg_sq_row", "exp_avg_sq_col"}) {
      const Leaf* leaf = tensor_in(entry, name);
      if (leaf == nullptr) continue;
      State s = plain_state(name, *leaf);
      for (const auto& [key, beside] : entry.leaves) {
        if (std::string_view(name).ends_with("row") && key.starts_with("exp_avg_sq_qstate"))
          s.leaves.push_back(beside);
      }
      param.states.push_back(std::move(s));
    }
    RETURN_IF_ERROR(read_step(entry, param));
  }
  model.algorithm = algorithm_of(model);
  return model;
}

constexpr KeptSetting kKeptByLpmm[] = {{"sgd", "dampening"}, {"sgd", "nesterov"}};

extern const Dialect kLpmm;
const Dialect kLpmm = {"lpmm",
                       "lpmm: 4-bit states by groups or of rank 1",
                       recognize_lpmm,
                       read_lpmm,
                       write_lpmm,
                       kKeptByLpmm,
                       {.always_decoupled = true, .coupled = "lpmm's AdamW decouples it"}};

}  // namespace lowbit::ckpt
