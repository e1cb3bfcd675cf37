#include "container/pickled/tensor_node.h"

#include <algorithm>

#include "container/pickled/globals.h"
#include "io/text.h"
#include "pickle/plain.h"
#include "pickle/schema.h"

namespace lowbit::ckpt {
namespace {

Result<Shape> naturals(const Pickle& p, NodeId tuple, const std::string& what) {
  Shape out;
  // Old torch has a torch.Size where a tuple is now.
  if (p.is(tuple, Kind::kCall)) tuple = p.item(p.item(tuple, 1), 0);
  for (const NodeId id : p.items(tuple)) {
    if (p.integer(id) < 0) return bad(what + ": has a negative size or stride");
    out.push_back(p.integer(id));
  }
  if (out.size() > 64) return bad(what + ": has more than 64 dimensions");
  return out;
}

/// Bytes that an expanded tensor may stand for: a few bytes of a file must not become a full disk.
constexpr uint64_t kMaxExpanded = 1ull << 28;

/// Whether one value stands for many elements, as after torch's `expand`.
bool is_expanded(const Payload& t) {
  for (size_t d = 0; d < t.shape.size(); ++d) {
    if (t.shape[d] > 1 && t.stride[d] == 0) return volume(t.shape) > 0;
  }
  return false;
}

/// Whether the elements lie inside `held` elements, each in its own place: taken by rising stride,
/// each stride is longer than all that the smaller ones reach. Dimensions of stride 0 do not count.
Status check_strides(const Payload& t, uint64_t held, const std::string& what) {
  if (volume(t.shape) == 0) return fine();
  std::vector<std::pair<uint64_t, uint64_t>> steps;  // stride, size
  for (size_t d = 0; d < t.shape.size(); ++d) {
    if (t.shape[d] > 1 && t.stride[d] != 0)
      steps.emplace_back(static_cast<uint64_t>(t.stride[d]), static_cast<uint64_t>(t.shape[d]));
  }
  std::ranges::sort(steps);
  uint64_t reach = 0;  // the furthest element, from the first
  for (const auto& [stride, size] : steps) {
    if (stride <= reach)
      return bad(what + ": its strides " + shape_text(t.stride) +
                 " give one value to many elements");
    if (size - 1 > held / stride) return bad(what + ": reaches beyond its record");
    reach += stride * (size - 1);
  }
  return t.first < held && reach < held - t.first
             ? fine()
             : Status(bad(what + ": reaches beyond its record"));
}

/// The storages of quantized tensors, which are only walked over: by a type of the same size.
const Dtype* quantized_storage(std::string_view type) {
  if (type == "QInt32Storage") return find_storage("IntStorage");
  const bool bytes = type == "QUInt8Storage" || type == "QInt8Storage" ||
                     type == "QUInt4x2Storage" || type == "QUInt2x4Storage";
  return bytes ? find_storage("ByteStorage") : nullptr;
}

Result<StorageName> storage_name(const Pickle& p, NodeId persistent, const std::string& what,
                                 bool quantized = false) {
  const NodeId id = p.item(persistent, 0);
  const auto parts = p.items(id);
  // Old files have a sixth item: a view into another storage, or None.
  const bool fits = p.is(id, Kind::kTuple) && (parts.size() == 5 || parts.size() == 6) &&
                    p.is(parts[0], Kind::kString) && p.text(parts[0]) == "storage" &&
                    p.is(parts[1], Kind::kGlobal) && p.is(parts[2], Kind::kString) &&
                    p.is(parts[3], Kind::kString) && p.is(parts[4], Kind::kInt);
  if (!fits) return bad(what + ": its tensor has no storage");
  if (parts.size() == 6 && !p.is(parts[5], Kind::kNone))
    return bad(what + ": its storage is a view of another, as only torch before 0.4 wrote");
  constexpr size_t kLongestKey = 256;  // of a number; any tensor may recall it
  if (p.text(parts[2]).size() > kLongestKey)
    return bad(what + ": has a storage with a name of " + std::to_string(p.text(parts[2]).size()) +
               " bytes, which torch never writes");
  const std::string_view type = p.global(parts[1])->name;
  StorageName out;
  out.key = std::string(p.text(parts[2]));
  out.dtype = type == "UntypedStorage" ? nullptr : find_storage(type);
  if (quantized && out.dtype == nullptr) out.dtype = quantized_storage(type);
  if (out.dtype == nullptr && type != "UntypedStorage")
    return bad(what + ": has the storage " + std::string(type) + ", which is unknown");
  if (p.integer(parts[4]) < 0) return bad(what + ": has a storage of a negative size");
  out.count = static_cast<uint64_t>(p.integer(parts[4]));
  if (out.count >> 56 != 0) return bad(what + ": has a storage of an impossible size");
  return out;
}

class TensorParser {
 public:
  TensorParser(const Pickle& p, Storages& storages, const std::string& what)
      : p_(p), storages_(storages), what_(what) {}

  Result<TensorNode> read(NodeId node, int depth = 0) {
    if (!p_.is(node, Kind::kCall)) return bad(what_ + ": holds something else than a tensor");
    return build(*p_.global(node), p_.item(node, 1), depth);
  }

 private:
  /// The tensor of rule(*arguments), which were held against the rule's schema.
  Result<TensorNode> build(const GlobalRule& rule, NodeId arguments, int depth) {
    if (depth == 4) return bad(what_ + ": holds a tensor inside a tensor inside a tensor");
    if (const char* kind = refused_kind(rule.name))
      return bad(what_ + ": is " + kind + "; convert it before saving");
    if (rule.name == "_rebuild_tensor" || rule.name == "_rebuild_tensor_v2" ||
        rule.name == "_rebuild_tensor_v3") {
      return dense(rule, arguments);
    }
    if (rule.name == "_rebuild_parameter" || rule.name == "_rebuild_parameter_with_state") {
      ASSIGN_OR_RETURN(out, read(p_.item(arguments, 0), depth + 1));
      if (out.alias) out.gradient = {true, p_.integer(p_.item(arguments, 1)) != 0};
      if (rule.name != "_rebuild_parameter") out.dropped = "attributes of a parameter";
      return out;
    }
    if (rule.name == "_rebuild_from_type_v2") return typed(arguments, depth);
    return bad(what_ + ": holds something else than a tensor");
  }

  Result<TensorNode> dense(const GlobalRule& rule, NodeId arguments) {
    ASSIGN_OR_RETURN(name, storage_name(p_, p_.item(arguments, 0), what_));
    const bool v3 = rule.name == "_rebuild_tensor_v3";
    if (v3 != (name.dtype == nullptr))
      return bad(what_ + ": its function and its storage do not go together");
    const NodeId metadata = p_.item(arguments, v3 ? 7 : 6);
    if (metadata != kNoNode && !p_.items(metadata).empty())
      return bad(what_ + ": is a conjugated or negated view; save it resolved");
    Payload out;
    const GlobalRule* named = p_.global(p_.item(arguments, 6));  // of v3
    if (v3 && named == nullptr) return bad(what_ + ": has a dtype that is unknown");
    out.dtype = v3 ? find_dtype(named->name) : name.dtype;
    if (out.dtype == nullptr)
      return bad(what_ + ": has the dtype " + std::string(named->name) + ", which is unknown");
    const int64_t first = p_.integer(p_.item(arguments, 1));
    if (first < 0) return bad(what_ + ": has a negative storage offset");
    out.first = static_cast<uint64_t>(first);
    ASSIGN_OR_RETURN(shape, naturals(p_, p_.item(arguments, 2), what_));
    ASSIGN_OR_RETURN(stride, naturals(p_, p_.item(arguments, 3), what_));
    if (shape.size() != stride.size()) return bad(what_ + ": has other strides than sizes");
    RETURN_IF_ERROR(elements(shape, what_).ok() ? fine()
                                                : Status(bad(what_ + ": has an impossible size")));
    out.shape = std::move(shape);
    out.stride = std::move(stride);
    ASSIGN_OR_RETURN(record, storages_.find(name, what_));
    const auto width = static_cast<uint64_t>(out.dtype->bytes);
    if (record.size != name.count * (v3 ? 1 : width) || record.size % width != 0)
      return bad(what_ + ": its record has " + std::to_string(record.size) +
                 " bytes, which contradicts its pickle");
    RETURN_IF_ERROR(check_strides(out, record.size / width, what_));
    const bool expanded = is_expanded(out);
    if (expanded && volume(out.shape) > kMaxExpanded / width)
      return bad(what_ + ": its strides expand " + std::to_string(record.size / width) +
                 " elements to " + shape_text(out.shape) +
                 ", which is too much to write; save it without expand()");
    out.record = std::move(record);
    TensorNode node;
    node.dtype = out.dtype;
    node.is_expanded = expanded;
    node.shape = out.shape;
    node.alias = Alias{name.key, out.first, out.stride, out.record.size / width};
    const NodeId grad = p_.item(arguments, 4);
    node.gradient.requires_grad = p_.is(grad, Kind::kBool) && p_.integer(grad) != 0;
    node.stored.parts.emplace_back("", std::move(out));
    return node;
  }

  /// _rebuild_from_type_v2(function, type, arguments, state).
  Result<TensorNode> typed(NodeId arguments, int depth) {
    if (p_.global(p_.item(arguments, 0)) == nullptr || p_.global(p_.item(arguments, 1)) == nullptr)
      return bad(what_ + ": is a tensor of a class that is not known");
    const GlobalRule& function = *p_.global(p_.item(arguments, 0));
    const GlobalRule& type = *p_.global(p_.item(arguments, 1));
    const NodeId inner = p_.item(arguments, 2);
    if (function.arguments == nullptr || !arguments_match(p_, inner, function.arguments))
      return bad(what_ + ": calls " + std::string(function.name) +
                 " in a way that torch never does");
    if (function.name == "_rebuild_wrapper_subclass")
      return wrapper(type, inner, state_of(p_.item(arguments, 3)), depth);
    ASSIGN_OR_RETURN(out, build(function, inner, depth + 1));
    if (type.name != "Tensor" && type.name != "Parameter")
      return bad(what_ + ": is a " + std::string(type.module) + "." + std::string(type.name) +
                 ", which is not known");
    out.dropped = "attributes of a tensor";
    return out;
  }

  /// What the values of a DTensor's local part are, by its DTensorSpec: "" under Replicate and
  /// Shard, where it is the whole if it has the whole's shape. Any other placement may be a part at
  /// the same shape, as Partial and its kin (_NormPartial, _MaskPartial) are.
  std::string share_of(NodeId spec) const {
    const NodeId state = state_of(p_.item(spec, 2));
    const NodeId placements = p_.is(spec, Kind::kObject) && p_.is(state, Kind::kDict)
                                  ? p_.find(state, "placements")
                                  : kNoNode;
    if (p_.items(placements).empty()) return "values whose placement is not known";
    for (const NodeId placement : p_.items(placements)) {
      const GlobalRule* type = p_.is(placement, Kind::kObject) ? p_.global(placement) : nullptr;
      if (type == nullptr) {
        const std::string_view name = p_.opaque_name(placement);
        return "values placed as " + (name.empty() ? "nothing known" : printable(name));
      }
      if (type->name.ends_with("Partial")) return "a summand";
      if (type->name != "Replicate" && type->name != "Shard" && type->name != "_StridedShard")
        return "values placed as " + std::string(type->name);
    }
    return "";
  }

  /// The attributes by name: a dict, or with slots a pair of two.
  NodeId state_of(NodeId state) const {
    if (p_.is(state, Kind::kTuple) && p_.items(state).size() == 2) return p_.item(state, 1);
    return state;
  }

  /// _rebuild_wrapper_subclass(class, dtype, size, stride, offset, layout, device, requires_grad)
  /// with its inner tensors among its attributes.
  Result<TensorNode> wrapper(const GlobalRule& type, NodeId arguments, NodeId state, int depth) {
    const std::string cls = std::string(type.module) + "." + std::string(type.name);
    if (p_.global(p_.item(arguments, 0)) != &type || !p_.is(state, Kind::kDict))
      return bad(what_ + ": is a " + cls + " that torch would not have written");
    if (const auto key = p_.repeated_key(state))
      return bad(what_ + ": has the attribute " + printable(*key) + " twice");
    TensorNode out;
    out.dtype = find_dtype(p_.global(p_.item(arguments, 1))->name);
    if (out.dtype == nullptr)
      return bad(what_ + ": has the dtype " + std::string(p_.global(p_.item(arguments, 1))->name) +
                 ", which is unknown");
    ASSIGN_OR_RETURN(shape, naturals(p_, p_.item(arguments, 2), what_));
    RETURN_IF_ERROR(elements(shape, what_).ok() ? fine()
                                                : Status(bad(what_ + ": has an impossible size")));
    out.shape = std::move(shape);
    if (type.name == "DTensor") {
      const NodeId local = p_.find(state, "_local_tensor");
      if (local == kNoNode) return bad(what_ + ": is a DTensor without a local tensor");
      ASSIGN_OR_RETURN(part, read(local, depth + 1));
      part.is_local = true;
      part.whole = out.shape;
      part.share = share_of(p_.find(state, "_spec"));
      return part;
    }
    if (!is_known_subclass(cls)) return bad(what_ + ": is a " + cls + ", which is not known");
    out.stored.cls = cls;
    out.stored.attributes.kind = Value::Kind::kDict;
    const auto items = p_.items(state);
    PickleBudget attributes{.text = 1u << 16, .arrays = 0};  // there may be as many as tensors
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!p_.is(items[i], Kind::kString))
        return bad(what_ + ": has an attribute that is not called by text");
      const std::string name(p_.text(items[i]));
      if (name.empty()) return bad(what_ + ": has an attribute without a name");
      if (is_tensor(p_, items[i + 1])) {
        ASSIGN_OR_RETURN(part, read(items[i + 1], depth + 1));
        if (!part.stored.cls.empty() || part.is_local)
          return bad(what_ + ": its " + printable(name) + " is a tensor subclass too");
        out.stored.parts.emplace_back(name, std::move(part.stored.parts[0].second));
      } else {
        ASSIGN_OR_RETURN(value, plain_value(p_, items[i + 1], what_ + ": its " + printable(name),
                                            1u << 12, attributes));
        out.stored.attributes.items.push_back(Value::words(name));
        out.stored.attributes.items.push_back(std::move(value));
      }
    }
    if (out.stored.parts.empty()) return bad(what_ + ": is a " + cls + " without tensors");
    return out;
  }

  const Pickle& p_;
  Storages& storages_;
  const std::string& what_;
};

}  // namespace

void write_tensor(PickleWriter& to, const StorageView& view) {
  const bool typed = view.dtype.storage[0] != '\0', parameter = view.gradient.parameter;
  const auto sizes = [&to](const Shape& shape) {
    to.integers(shape);
    if (!shape.empty()) to.put();
  };
  const auto no_hooks = [&to] { to.global("collections", "OrderedDict").tuple(0).call().put(); };
  if (parameter) to.global("torch._utils", "_rebuild_parameter");
  to.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").mark();
  to.mark().text("storage");
  to.global(typed ? "torch" : "torch.storage", typed ? view.dtype.storage : "UntypedStorage");
  const uint64_t count = typed ? view.bytes / static_cast<uint64_t>(view.dtype.bytes) : view.bytes;
  to.own_text(view.key).text("cpu").integer(static_cast<int64_t>(count)).tuple(5).put();
  to.persistent().integer(static_cast<int64_t>(view.first));
  sizes(view.shape);
  sizes(view.stride);
  to.boolean(view.gradient.requires_grad && !parameter);
  no_hooks();
  if (!typed) to.global("torch", view.dtype.name);
  to.tuple(7).put().call().put();
  if (!parameter) return;
  to.boolean(view.gradient.requires_grad);
  no_hooks();
  to.tuple(3).put().call().put();
}

Status for_storages(const Pickle& pickle, const std::function<Status(const StorageName&)>& use) {
  const std::string what;
  for (NodeId id = 0; id < pickle.nodes.size(); ++id) {
    if (!pickle.is(id, Kind::kPersistent)) continue;
    const auto name = storage_name(pickle, id, what, true);
    if (name.ok()) RETURN_IF_ERROR(use(name.value()));
  }
  return fine();
}

bool is_tensor(const Pickle& p, NodeId node) {
  return p.is(node, Kind::kCall) && p.global(node)->name.starts_with("_rebuild_");
}

Result<TensorNode> read_tensor(const Pickle& pickle, NodeId node, Storages& storages,
                               const std::string& what) {
  return TensorParser(pickle, storages, what).read(node);
}

}  // namespace lowbit::ckpt
