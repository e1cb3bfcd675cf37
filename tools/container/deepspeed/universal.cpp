// DeepSpeed's Universal Checkpoint, as ds_to_universal of 0.19.8 writes it: zero/NAME has a file
// for each state of a parameter, zero/optimizer_state.pt the groups, and *_model_states.pt the
// rest.
#include <algorithm>

#include "container/common/open.h"
#include "container/deepspeed/file_names.h"
#include "container/deepspeed/model_states.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kSuffix = ".pt";
constexpr const char* kWeight = "fp32.pt";

/// Whether a file or folder is the system's, such as .DS_Store.
bool is_hidden(const std::string& name) { return name.starts_with('.'); }

/// A parameter that ZeRO flattens.
struct Flattened {
  size_t group;
  Shape shape;           // of a rank's part, or padded, until the whole one is read
  bool of_file = false;  // the shape is that of the weight's file
};

/// Whether ds_to_universal gave a file another first dimension than the parameter has: it strips
/// the padding of a vocabulary, and puts the ranks' experts of AutoEP together.
bool is_resized(const PartFile& part, const Shape& own, const Shape& said) {
  const bool same = own.size() == said.size() && !own.empty() &&
                    std::equal(own.begin() + 1, own.end(), said.begin() + 1);
  if (!same) return false;
  if (part.is_on({"vocab_tensor"})) return own[0] <= said[0];
  const Value* const experts = part.value({"ep_num_experts"});
  return part.is_on({"is_expert_param"}) && experts != nullptr && experts->is(Value::Kind::kInt) &&
         experts->integer == own[0] && own[0] >= said[0];
}

class UniversalReader {
 public:
  explicit UniversalReader(Parts& parts) : parts_(parts) {}

  Status read() {
    RETURN_IF_ERROR(read_models());
    ASSIGN_OR_RETURN(zero, parts_.folder().folder("zero"));
    ASSIGN_OR_RETURN(names, zero->list());
    ASSIGN_OR_RETURN(common, parts_.read("zero/optimizer_state.pt"));
    common_ = common;
    for (const std::string& name : names) {
      if (!is_entry_name(name) || name == "optimizer_state.pt" ||
          (is_hidden(name) && !params_.contains(name)))
        continue;
      ASSIGN_OR_RETURN(folder, zero->folder(name));
      ASSIGN_OR_RETURN(files, folder->list());
      std::erase_if(files, [](const std::string& file) {
        return is_hidden(file) || !file.ends_with(kSuffix);
      });
      folders_.emplace(name, std::move(files));
    }
    RETURN_IF_ERROR(add_weights());
    RETURN_IF_ERROR(check_files());
    for (const FlatGroup& group : states_.groups) {
      for (const auto& [name, shape] : group) RETURN_IF_ERROR(add_states(name));
    }
    // Stage 3's numbers are of its flat vectors, of which a group may have several.
    const Path nested = {"optimizer_state_dict", "param_groups"};
    RETURN_IF_ERROR(add_param_groups(parts_, manifest_, *common_,
                                     common_->has_below(nested) ? nested : Path{"param_groups"},
                                     states_.groups, *models_[0]));
    RETURN_IF_ERROR(add_rest(parts_, manifest_, *models_[0]));
    return add_loss_scaler(parts_, manifest_, *common_);
  }

  Manifest manifest_;

 private:
  /// The files with names and shapes: one, or one for each stage of a pipeline or rank that shares
  /// tensors.
  Status read_models() {
    ASSIGN_OR_RETURN(names, parts_.folder().list());
    // lowbit-ckpt writes one under both names, so that every stage finds it.
    const bool shared = std::ranges::any_of(names, [](const std::string& name) {
      const auto file = model_file(name);
      return file && !file->per_rank;
    });
    for (const std::string& name : names) {
      const auto file = model_file(name);
      if (!file || file->rank > 0 || (shared && file->per_rank)) continue;
      ASSIGN_OR_RETURN(read, parts_.read(name));
      models_.push_back(read);
      stage3_ = file->per_rank;
    }
    if (models_.empty())
      return bad(parts_.what() +
                 ": has no *_model_states.pt, which ds_to_universal copies, so its "
                 "groups are not known");
    for (const auto& model : models_) {
      ASSIGN_OR_RETURN(states, read_model_states(*model));
      RETURN_IF_ERROR(join(std::move(states), model->what()));
    }
    return fine();
  }

  /// Adds the names that a rank has.
  Status join(ModelStates more, const std::string& what) {
    const std::vector<FlatGroup> groups = std::move(more.groups);
    if (states_.groups.empty()) {
      states_ = std::move(more);
      states_.groups.resize(groups.size());
    } else {
      states_.buffers.insert(more.buffers.begin(), more.buffers.end());
      states_.frozen.insert(states_.frozen.end(), more.frozen.begin(), more.frozen.end());
    }
    if (groups.size() != states_.groups.size())
      return bad(what + ": has " + std::to_string(groups.size()) + " groups, others " +
                 std::to_string(states_.groups.size()));
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const auto& [name, shape] : groups[i]) {
        const auto [known, fresh] = params_.emplace(name, Flattened{i, shape});
        if (fresh) states_.groups[i].emplace_back(name, shape);
        if (known->second.group != i)
          return bad(what + ": has " + printable(name) + " in group " + std::to_string(i) +
                     ", others in group " + std::to_string(known->second.group));
      }
    }
    return fine();
  }

  bool has(const std::string& param, const std::string& file) const {
    const auto folder = folders_.find(param);
    return folder != folders_.end() && std::ranges::binary_search(folder->second, file);
  }

  /// Adds the tensor of a file: {"param": tensor}, or from stage 3 a flat tensor.
  Status add_tensor(Path path, const std::string& name, const std::string& file) {
    ASSIGN_OR_RETURN(part, parts_.read("zero/" + name + "/" + file));
    FileLeaf leaf = part->find({"param"});
    const bool flat = leaf.tensor == nullptr;
    if (flat) leaf = part->find({});
    if (leaf.tensor == nullptr)
      return bad(part->what() + ": is neither a tensor nor a dict with the tensor `param`");
    ASSIGN_OR_RETURN(payload, part->payload(*leaf.tensor));
    const Shape& own = leaf.tensor->shape;
    const auto param = params_.find(name);
    if (param == params_.end()) return parts_.add(manifest_, std::move(path), payload, own);
    auto& [group, shape, of_file] = param->second;
    if (!flat && file == kWeight && (models_.size() > 1 || is_resized(*part, own, shape))) {
      shape = own;
      of_file = true;
    }
    if (!flat && own != shape)
      return bad(part->what() + ": has the shape " + shape_text(own) + ", and " +
                 (of_file ? kWeight : models_[0]->what()) + " says " + shape_text(shape));
    return parts_.add(manifest_, std::move(path), payload, shape);
  }

  Status add_weights() {
    std::set<std::string> known;
    for (const FlatGroup& group : states_.groups) {
      for (const auto& [name, shape] : group) {
        if (!has(name, kWeight))
          return bad(parts_.what() + ": has no zero/" + printable(name) + "/fp32.pt, though " +
                     models_[0]->what() + " names that parameter");
        RETURN_IF_ERROR(add_tensor({"model", name}, name, kWeight));
        known.insert(name);
      }
    }
    for (const auto& [name, owner] : states_.shared) {
      if (!known.contains(owner) || !known.insert(name).second) continue;
      RETURN_IF_ERROR(add_tensor({"model", name}, owner, kWeight));
    }
    // Whoever shares tensors has parts of these too; else the module has them in their own dtype.
    if (models_.size() == 1) {
      if (stage3_) RETURN_IF_ERROR(add_frozen(parts_, manifest_, states_, known));
      RETURN_IF_ERROR(add_module(parts_, manifest_, *models_[0], states_, known, stage3_));
      RETURN_IF_ERROR(models_[0]->for_below({"module"}, [&](const Path& path, const FileLeaf&) {
        known.insert(flat_name(path));
        return fine();
      }));
    }
    for (const auto& [name, files] : folders_) {
      if (params_.contains(name)) continue;
      if (known.contains(name) && files.size() < 2) continue;
      if (!has(name, kWeight) || files.size() > 1)
        return bad(parts_.what() + ": zero/" + printable(name) + " is of no parameter that " +
                   models_[0]->what() + " names");
      RETURN_IF_ERROR(add_tensor({"model", name}, name, kWeight));
      known.insert(name);
    }
    return models_.size() == 1 ? fine() : name_unread(known);
  }

  /// Warns of buffers and frozen parameters that only the several models have.
  Status name_unread(const std::set<std::string>& known) {
    std::set<std::string> unread = states_.buffers;
    for (const auto& [name, shape] : states_.frozen) unread.insert(name);
    for (const auto& model : models_) {
      RETURN_IF_ERROR(model->for_below({"module"}, [&](const Path& path, const FileLeaf& leaf) {
        if (leaf.tensor != nullptr) unread.insert(flat_name(path));
        return fine();
      }));
    }
    std::erase_if(unread, [&](const std::string& name) { return known.contains(name); });
    if (unread.empty()) return fine();
    const std::string text = some_of({unread.begin(), unread.end()}, 8);
    manifest_.warnings.push_back("buffers and frozen parameters of " +
                                 std::to_string(models_.size()) +
                                 " model_states.pt are not read, since no file says how they "
                                 "share tensors: " +
                                 text);
    return fine();
  }

  /// A copy that broke off lacks files. Those of one group have the same states, and where any
  /// group has some, all have: ZeRO steps all its vectors. A parameter without elements lies in
  /// none, and ds_to_universal writes its weight alone.
  Status check_files() const {
    const std::string* stepped = nullptr;  // a parameter with state, and one without
    const std::string* bare = nullptr;
    for (const FlatGroup& group : states_.groups) {
      const std::string* first = nullptr;
      for (const auto& [name, shape] : group) {
        if (volume(params_.at(name).shape) == 0) continue;
        if (first == nullptr) first = &name;
        if (folders_.at(name) != folders_.at(*first)) return not_whole(name, *first);
        (folders_.at(name).size() > 1 ? stepped : bare) = &name;
      }
    }
    return stepped != nullptr && bare != nullptr ? Status(not_whole(*bare, *stepped)) : fine();
  }

  Error not_whole(const std::string& param, const std::string& other) const {
    return bad(parts_.what() + ": zero/" + printable(param) + " has not the files that zero/" +
               printable(other) + " has, so the folder is not whole: copy it again");
  }

  Status add_states(const std::string& name) {
    const std::vector<std::string>& files = folders_.at(name);
    bool stepped = false;
    for (const std::string& file : files) {
      const std::string state = file.substr(0, file.size() - kSuffix.size());
      if (file == kWeight) continue;
      if (file == "step.pt") {
        ASSIGN_OR_RETURN(part, parts_.read("zero/" + name + "/" + file));
        const FileLeaf leaf = part->find({});
        const bool number =
            leaf.value != nullptr || (leaf.tensor != nullptr && volume(leaf.tensor->shape) == 1);
        if (!number) return bad(part->what() + ": is not a number");
        RETURN_IF_ERROR(parts_.add(manifest_, state_path_of(name, "step"), *part, leaf));
        stepped = true;
        continue;
      }
      RETURN_IF_ERROR(add_tensor(state_path_of(name, state), name, file));
    }
    return stepped || files.size() < 2 ? fine() : add_common_step(name);
  }

  /// Stage 3 keeps one count, and says it in the common file.
  Status add_common_step(const std::string& name) {
    const Path at = {"optimizer_state_dict", "state", Key(Key::Kind::kNumber, 0), "step"};
    const FileLeaf leaf = common_->find(at);
    if (leaf.tensor == nullptr && leaf.value == nullptr)
      return bad(parts_.what() + ": has no zero/" + printable(name) +
                 "/step.pt, and no step in zero/optimizer_state.pt");
    return parts_.add(manifest_, state_path_of(name, "step"), *common_, leaf);
  }

  Parts& parts_;
  std::vector<std::shared_ptr<const PartFile>> models_;
  std::shared_ptr<const PartFile> common_;
  ModelStates states_;
  bool stage3_ = false;
  std::map<std::string, Flattened> params_;
  std::map<std::string, std::vector<std::string>> folders_;
};

}  // namespace

Result<Manifest> read_universal(const std::string& path) {
  ASSIGN_OR_RETURN(parts, Parts::open(path));
  UniversalReader reader(*parts);
  RETURN_IF_ERROR(reader.read());
  parts->finish(parts, ContainerKind::kUniversal, reader.manifest_);
  return std::move(reader.manifest_);
}

}  // namespace lowbit::ckpt
