// A checkpoint of DeepSpeed's ZeRO, stages 1 to 3 (0.19.8): each rank's file has its part of flat
// vectors, into which the parameters of a group were laid one after the other.
#include <algorithm>

#include "container/common/open.h"
#include "container/deepspeed/layout.h"
#include "container/deepspeed/model_states.h"
#include "container/deepspeed/momentum.h"
#include "container/deepspeed/rank_files.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kMomentum = "momentum_buffer";  // of Muon

/// What a rank's file has of one flat vector.
struct RankPart {
  std::vector<std::pair<std::string, Payload>> vectors;  // master weights as "fp32", and states
  RankMomentum momentum;                                 // where Muon steps the parameters
};

/// What the ranks read so far have of one parameter.
struct Gathered {
  std::map<std::string, std::vector<Slice>> slices;  // by state; the master weight is "fp32"
  std::map<std::string, uint64_t> done;
};

class ZeroReader {
 public:
  explicit ZeroReader(Parts& parts) : parts_(parts) {}

  Status read() {
    ASSIGN_OR_RETURN(files, find_rank_files(parts_));
    files_ = std::move(files);
    RETURN_IF_ERROR(read_model());
    layouts_.assign(states_.groups.size(), std::vector<RankVector>(files_.size()));
    held_.assign(states_.groups.size(), std::vector<RankPart>(files_.size()));
    for (size_t rank = 0; rank < files_.size(); ++rank) {
      ASSIGN_OR_RETURN(file, parts_.read(files_[rank]));
      if (rank == 0) first_ = file;
      RETURN_IF_ERROR(read_rank(*file, rank));
    }
    RETURN_IF_ERROR(take_vectors());
    RETURN_IF_ERROR(add_weights());
    RETURN_IF_ERROR(add_states());
    RETURN_IF_ERROR(check_layouts());
    RETURN_IF_ERROR(add_param_groups(parts_, manifest_, *first_, below(base(), "param_groups"),
                                     states_.groups, *model_));
    RETURN_IF_ERROR(add_rest(parts_, manifest_, *model_));
    tell();
    return add_loss_scaler(parts_, manifest_, *first_);
  }

  Manifest manifest_;

 private:
  Path base() const {
    return {"optimizer_state_dict", stage3_ ? "optimizer_state_dict" : "base_optimizer_state"};
  }

  Status read_model() {
    const std::string shared = "mp_rank_00_model_states.pt", own = "zero_pp_rank_0_" + shared;
    stage3_ = parts_.folder().has(own);
    if (stage3_ && parts_.folder().has(shared))
      return bad(parts_.what() + ": has " + shared + ", as stages 1 and 2 write it, and " + own +
                 ", as stage 3: remove those of the older save");
    if (!stage3_ && !parts_.folder().has(shared))
      return bad(parts_.what() + ": has no " + shared + " and no " + own +
                 ", which tells the parameters' names and shapes");
    ASSIGN_OR_RETURN(model, parts_.read(stage3_ ? own : shared));
    model_ = model;
    ASSIGN_OR_RETURN(states, read_model_states(*model));
    states_ = std::move(states);
    for (const FlatGroup& group : states_.groups) lengths_.push_back(lengths_of(group));
    return fine();
  }

  Status read_rank(const PartFile& file, size_t rank) {
    RETURN_IF_ERROR(check_rank_count(file, parts_, files_.size(), base()));
    const Path vectors = {"optimizer_state_dict",
                          stage3_ ? "fp32_flat_groups" : "single_partition_of_fp32_groups"};
    if (file.find(below(vectors, place(states_.groups.size()))).tensor != nullptr)
      return bad(file.what() + ": has more flat vectors than the " +
                 std::to_string(states_.groups.size()) + " of " + model_->what());
    for (size_t i = 0; i < states_.groups.size(); ++i) {
      const FileLeaf master = file.find(below(vectors, place(i)));
      if (master.tensor == nullptr)
        return bad(file.what() + ": has no " + printable(flat_name(below(vectors, place(i)))) +
                   ", though " + model_->what() + " names " +
                   std::to_string(states_.groups.size()) + " flat vectors" +
                   (stage3_ ? "; was its state offloaded to NVMe?" : ""));
      const auto length = volume(master.tensor->shape);
      ASSIGN_OR_RETURN(
          fragments, stage3_ ? stage3_fragments(file, i, rank, length) : mapped_fragments(file, i));
      layouts_[i][rank] = {length, std::move(fragments)};
      ASSIGN_OR_RETURN(payload, file.payload(*master.tensor));
      held_[i][rank].vectors.emplace_back("fp32", std::move(payload));
      RETURN_IF_ERROR(read_states(file, i, length, held_[i][rank]));
    }
    return fine();
  }

  /// Stages 1 and 2 say where each parameter's slice lies.
  Result<std::vector<Fragment>> mapped_fragments(const PartFile& file, size_t group) {
    std::vector<Fragment> out;
    const Path at = {"optimizer_state_dict", "param_slice_mappings"};
    if (!file.has_below(at))
      return bad(file.what() +
                 ": does not say where parameters lie (param_slice_mappings): it was "
                 "written by an old DeepSpeed; load and save it with a newer one");
    const Status read = file.for_below(
        below(at, place(group)), [&](const Path& path, const FileLeaf& leaf) -> Status {
          if (path.empty()) return fine();  // a rank without a slice
          const bool known = path.size() == 1 && leaf.value != nullptr &&
                             leaf.value->items.size() == 2 && leaf.value->items[0].integer >= 0 &&
                             leaf.value->items[1].integer >= 0;
          if (!known)
            return bad(file.what() + ": what param_slice_mappings say of " +
                       printable(flat_name(path)) + " are not two numbers");
          out.push_back({path[0].text(), static_cast<uint64_t>(leaf.value->items[1].integer),
                         static_cast<uint64_t>(leaf.value->items[0].integer)});
          return fine();
        });
    if (!read.ok()) return read.error();
    for (const Fragment& f : out) {
      if (!lengths_[group].contains(f.name))
        return bad(file.what() + ": has a slice of " + printable(f.name) + ", which " +
                   model_->what() + " does not name in that group");
    }
    return out;
  }

  /// Stage 3 cuts each parameter for itself, into parts of ceil(elements / ranks).
  Result<std::vector<Fragment>> stage3_fragments(const PartFile& file, size_t group, size_t rank,
                                                 uint64_t length) {
    std::vector<Fragment> out;
    uint64_t at = 0;
    for (const auto& [name, shape] : states_.groups[group]) {
      const uint64_t all = volume(shape), each = (all + files_.size() - 1) / files_.size(),
                     begin = std::min(all, rank * each);
      out.push_back({name, at, std::min(each, all - begin)});
      at += each;
    }
    if (at == length) return out;
    return bad(file.what() + ": its flat vector " + std::to_string(group) + " has " +
               std::to_string(length) + " elements, where the shapes of " + model_->what() +
               " make " + std::to_string(at));
  }

  /// The elements by which a rank's states may be longer than its master weights.
  static uint64_t padding_of(const PartFile& file, size_t group) {
    const Value* said = file.value({"optimizer_state_dict", "group_paddings"});
    const bool known = said != nullptr && group < said->items.size() &&
                       said->items[group].is(Value::Kind::kInt) && said->items[group].integer > 0;
    return known ? static_cast<uint64_t>(said->items[group].integer) : 0;
  }

  /// Whether a state is as long as the master weights, with their padding or without. An old
  /// DeepSpeed counts the padding of several ranks for the last one, where that has nothing else.
  static bool fits(uint64_t held, uint64_t length, uint64_t padding) {
    return held == length || held == length + padding || (length == 0 && held <= padding);
  }

  Status read_states(const PartFile& file, size_t group, uint64_t length, RankPart& part) {
    const uint64_t padding = stage3_ ? 0 : padding_of(file, group);
    const bool muon = !stage3_ && is_stepped_by_muon(file, below(base(), "param_groups"), group);
    const Path at = below(base(), "state", Key(Key::Kind::kNumber, static_cast<int64_t>(group)));
    return file.for_below(at, [&](const Path& path, const FileLeaf& leaf) -> Status {
      const std::string what = file.what() + ": its state " + printable(flat_name(path)) +
                               " of group " + std::to_string(group);
      if (path.size() > 1)
        return bad(what +
                   " is of a parameter's slice by itself, quantized, as lowbit keeps it "
                   "under DeepSpeed; save with bind(engine, export=\"fp32\"), or by "
                   "lowbit.flat.get_state_dict and torch.distributed.checkpoint");
      if (path.empty()) return bad(what + " is not a dict");
      const std::string name = path[0].text();
      if (leaf.value != nullptr && leaf.value->is(Value::Kind::kNone)) return fine();
      const bool number = leaf.value != nullptr || leaf.tensor->shape.empty() ||
                          (name == "step" && volume(leaf.tensor->shape) == 1);
      if (number) return take_number(file, group, name, leaf, what);
      const uint64_t held = volume(leaf.tensor->shape);
      const bool vector = leaf.tensor->shape.size() == 1;
      const std::string shaped = what + " has the shape " + shape_text(leaf.tensor->shape);
      if (vector && muon && name == kMomentum) {
        part.momentum = {shaped, held, length, padding, configured_for_slices(file)};
      } else if (!vector || !fits(held, length, padding)) {
        return bad(shaped + ", which is not that of the flat vector of " + std::to_string(length) +
                   " elements");
      }
      ASSIGN_OR_RETURN(payload, file.payload(*leaf.tensor));
      part.vectors.emplace_back(name, std::move(payload));
      return fine();
    });
  }

  Status take_vectors() {
    for (size_t i = 0; i < states_.groups.size(); ++i) {
      if (!stage3_) {
        ASSIGN_OR_RETURN(paddings, read_paddings(*first_, i, states_.groups[i].size()));
        if (!lie_in_order(states_.groups[i], paddings, layouts_[i])) contradictory_.insert(i);
      }
      ASSIGN_OR_RETURN(whole, is_whole_momentum(i));
      for (size_t rank = 0; rank < files_.size(); ++rank) {
        for (const auto& [state, payload] : held_[i][rank].vectors)
          take(state, payload, layouts_[i][rank].fragments,
               whole && state == kMomentum ? &lengths_[i] : nullptr);
      }
      take_empty(i);
    }
    return fine();
  }

  /// Whether the momentum of a group is of whole parameters.
  Result<bool> is_whole_momentum(size_t group) const {
    std::vector<RankMomentum> momenta;
    for (const RankPart& part : held_[group]) momenta.push_back(part.momentum);
    if (contradictory_.contains(group)) return false;  // check_layouts says so
    return holds_whole_parameters(lengths_[group], layouts_[group], momenta);
  }

  /// No rank of stages 1 and 2 names a slice of a parameter without elements: it has the states of
  /// its group.
  void take_empty(size_t group) {
    for (const auto& [name, shape] : states_.groups[group]) {
      if (volume(shape) != 0) continue;
      for (const auto& [state, payload] : held_[group][0].vectors) {
        auto& slices = params_[name].slices[state];
        if (slices.empty()) slices.push_back({payload, 0, 0, 0});
      }
    }
  }

  /// Last, since an error of one parameter says more.
  Status check_layouts() const {
    if (contradictory_.empty()) return fine();
    return bad(parts_.what() + ": the order of the parameters in param_shapes of " +
               model_->what() +
               " is not that of param_slice_mappings in the ranks' files, in group " +
               std::to_string(*contradictory_.begin()) + ": are the files of one save?");
  }

  /// Takes a rank's slices out of its vector, which has them at the fragments' places, or has whole
  /// parameters one after the other: then of these lengths.
  void take(const std::string& state, const Payload& payload,
            const std::vector<Fragment>& fragments, const Lengths* whole) {
    uint64_t begin = 0;  // of the parameter in a vector of whole ones
    for (const Fragment& f : fragments) {
      Gathered& param = params_[f.name];
      uint64_t& done = param.done[state];
      const uint64_t first = whole != nullptr ? begin + done : f.first;
      if (whole != nullptr) begin += whole->at(f.name);
      // Nothing of it here; an empty parameter has one empty slice.
      if (f.count == 0 && done > 0) continue;
      param.slices[state].push_back({payload, first, done, f.count});
      done += f.count;
    }
  }

  /// A number is the same on all ranks.
  Status take_number(const PartFile& file, size_t group, const std::string& name,
                     const FileLeaf& leaf, const std::string& what) {
    Value value;
    if (leaf.value != nullptr) {
      value = *leaf.value;
    } else {
      ASSIGN_OR_RETURN(number, file.number(*leaf.tensor));
      value = Value::floating(number);
    }
    const auto [at, fresh] = numbers_.emplace(std::pair(group, name), value);
    if (!fresh && !(at->second == value))
      return bad(what + " is another one than on the ranks before");
    if (!fresh || leaf.tensor == nullptr) return fine();
    ASSIGN_OR_RETURN(payload, file.payload(*leaf.tensor));
    number_tensors_.emplace(std::pair(group, name), std::move(payload));
    return fine();
  }

  Status add_weights() {
    std::set<std::string> known;
    std::map<std::string, const Shape*> shapes;
    for (const FlatGroup& group : states_.groups) {
      for (const auto& [name, shape] : group) {
        RETURN_IF_ERROR(
            parts_.add(manifest_, {"model", name}, params_[name].slices["fp32"], shape));
        known.insert(name);
        shapes.emplace(name, &shape);
      }
    }
    for (const auto& [name, owner] : states_.shared) {
      if (!shapes.contains(owner) || known.contains(name)) continue;
      RETURN_IF_ERROR(
          parts_.add(manifest_, {"model", name}, params_[owner].slices["fp32"], *shapes[owner]));
    }
    if (stage3_) RETURN_IF_ERROR(add_frozen(parts_, manifest_, states_, known));
    return add_module(parts_, manifest_, *model_, states_, known, stage3_);
  }

  Status add_states() {
    for (size_t i = 0; i < states_.groups.size(); ++i) {
      for (const auto& [name, shape] : states_.groups[i]) {
        for (const auto& [state, slices] : params_[name].slices) {
          if (state != "fp32")
            RETURN_IF_ERROR(parts_.add(manifest_, state_path_of(name, state), slices, shape));
        }
        for (const auto& [key, value] : numbers_) {
          if (key.first != i) continue;
          const auto tensor = number_tensors_.find(key);
          Path path = state_path_of(name, key.second);
          RETURN_IF_ERROR(
              tensor == number_tensors_.end()
                  ? parts_.add(manifest_, std::move(path), value)
                  : parts_.add(manifest_, std::move(path), tensor->second, tensor->second.shape));
        }
      }
    }
    return fine();
  }

  void tell() {
    const Value* version = first_->value({"ds_version"});
    const Value* stage = first_->value({"ds_config", "zero_optimization", "stage"});
    std::string text = "DeepSpeed";
    if (version != nullptr && version->is(Value::Kind::kText))
      text += " " + printable(version->text);
    text += stage != nullptr && stage->is(Value::Kind::kInt)
                ? ", ZeRO stage " + std::to_string(stage->integer)
            : stage3_ ? ", ZeRO stage 3"
                      : ", ZeRO stage 1 or 2";
    manifest_.facts.push_back(text + ", " + std::to_string(files_.size()) + " ranks");
  }

  Parts& parts_;
  std::vector<std::string> files_;  // by rank
  std::shared_ptr<const PartFile> model_, first_;
  ModelStates states_;
  std::vector<Lengths> lengths_;  // by group
  bool stage3_ = false;
  std::vector<std::vector<RankVector>> layouts_;  // by group and rank, as is held_
  std::vector<std::vector<RankPart>> held_;
  std::set<size_t> contradictory_;  // groups of stages 1 and 2
  std::map<std::string, Gathered> params_;
  std::map<std::pair<size_t, std::string>, Value> numbers_;  // by group and name
  std::map<std::pair<size_t, std::string>, Payload> number_tensors_;
};

}  // namespace

Result<Manifest> read_zero(const std::string& path) {
  ASSIGN_OR_RETURN(parts, Parts::open(path));
  ZeroReader reader(*parts);
  RETURN_IF_ERROR(reader.read());
  parts->finish(parts, ContainerKind::kZero, reader.manifest_);
  return std::move(reader.manifest_);
}

}  // namespace lowbit::ckpt
