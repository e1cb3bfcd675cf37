#include <algorithm>
#include <set>

#include "container/document/writer.h"
#include "container/safetensors/safetensors.h"
#include "io/text.h"
#include "io/write/new_file.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

struct Member {
  SafetensorsEntry entry;
  const Leaf* leaf = nullptr;
};

class SafetensorsPlan {
 public:
  Status add(const Leaf& leaf) {
    Described d;
    d.path = leaf.path;
    const std::string what = printable(leaf.name());
    switch (leaf.kind) {
      case Leaf::Kind::kOpaque:
        return unwritable(leaf);
      case Leaf::Kind::kValue:
        d.kind = Described::Kind::kValue;
        d.value = leaf.value;
        break;
      case Leaf::Kind::kTensor: {
        ASSIGN_OR_RETURN(name, member(leaf, leaf.name(), what));
        d.tensor = name;
        if (leaf.stored != nullptr) d.gradient = leaf.stored->gradient;
        break;
      }
      case Leaf::Kind::kSubclass:
        d.kind = Described::Kind::kSubclass;
        d.cls = leaf.cls;
        d.dtype = leaf.dtype;
        d.shape = leaf.shape;
        d.value = leaf.attributes;
        for (const Leaf& part : leaf.parts) {
          ASSIGN_OR_RETURN(name, member(part, leaf.name() + "." + part.path[0].name, what));
          d.parts.emplace_back(part.path[0].name, name);
        }
    }
    flat_ = flat_ && d.gradient == Gradient{} && leaf.kind == Leaf::Kind::kTensor &&
            leaf.path.size() == 1 && leaf.path[0].is_name() && d.tensor == leaf.path[0].name;
    description.leaves.push_back(std::move(d));
    return fine();
  }

  /// Largest dtypes first, as the format's own writer does, so that all are aligned.
  void sort() {
    std::ranges::sort(members, [](const Member& a, const Member& b) {
      const int x = find_safetensors(*a.entry.dtype)->rank,
                y = find_safetensors(*b.entry.dtype)->rank;
      return x != y ? x > y : a.entry.name < b.entry.name;
    });
    uint64_t at = 0;
    for (Member& m : members) {
      m.entry.begin = at;
      at = m.entry.end = at + m.leaf->bytes();
    }
  }
  /// Whether the names alone say everything.
  bool is_flat() const { return flat_ && description.dicts.empty(); }

  std::vector<Member> members;
  Description description;

 private:
  Result<std::string> member(const Leaf& leaf, const std::string& wanted, const std::string& what) {
    if (leaf.source == nullptr)
      return bad(what + ": is a tensor subclass in parts, which --to torchao joins");
    if (find_safetensors(*leaf.dtype) == nullptr)
      return bad(what + ": is " + leaf.dtype->name + ", which safetensors does not have");
    if (leaf.dtype->name == std::string_view("float4_e2m1fn_x2") && leaf.shape.empty())
      return bad(what +
                 ": is a float4_e2m1fn_x2 without dimensions, which safetensors does not have");
    // A name that is not text, or that the format reserves, is written as its path.
    std::string name = is_utf8(wanted, false) ? wanted : printable(wanted);
    if (name.empty() || name == "__metadata__") name = "tensor" + name;
    if (!names_.insert(name).second)
      return bad(what + ": two tensors would be called " + printable(name));
    Member m;
    m.entry.name = name;
    m.entry.dtype = leaf.dtype;
    m.entry.shape = leaf.shape;
    m.leaf = &leaf;
    members.push_back(std::move(m));
    return name;
  }

  std::set<std::string> names_;
  bool flat_ = true;
};

}  // namespace

Result<WriteReport> write_safetensors(const Document& document, const std::string& path,
                                      const WriteOptions& options) {
  SafetensorsPlan plan;
  plan.description.dicts = document.dicts;
  for (const Leaf& leaf : document.leaves) RETURN_IF_ERROR(plan.add(leaf));
  plan.sort();
  std::vector<SafetensorsEntry> entries;
  uint64_t total = 0;
  for (const Member& m : plan.members) {
    entries.push_back(m.entry);
    total = m.entry.end;
  }
  std::vector<std::pair<std::string, std::string>> metadata;
  if (document.manifest != nullptr) metadata = document.manifest->texts;
  if (std::ranges::none_of(metadata, [](const auto& entry) { return entry.first == "format"; }))
    metadata.emplace_back("format", "pt");
  constexpr const char* kInstead = "; write a torch.save file or a directory";
  if (!plan.is_flat()) {
    auto description =
        describe(plan.description, printable(path) + ": the description of the other values");
    if (!description.ok()) return too_large(description.error().text + kInstead);
    metadata.emplace_back(kConvention, std::move(description.value()));
  }
  const auto made = safetensors_header(entries, metadata, printable(path));
  if (!made.ok()) return too_large(made.error().text + kInstead);
  const std::string& header = made.value();
  if (header.size() > kMaxSafetensorsHeader)
    return bad(printable(path) + ": its header would have " + std::to_string(header.size()) +
               " bytes, more than safetensors allows; write a torch.save file or a directory");

  ASSIGN_OR_RETURN(file, NewFile::create(path, options.replace, document.sources()));
  Output& out = file->output();
  RETURN_IF_ERROR(out.write(little(header.size(), 8) + header));
  WriteReport report;
  const uint64_t piece = std::clamp<uint64_t>(options.memory, 4096, 4u << 20);
  for (const Member& m : plan.members) {
    const auto width = static_cast<uint64_t>(m.leaf->dtype->bytes);
    RETURN_IF_ERROR(for_elements(*m.leaf, 0, volume(m.leaf->shape), piece,
                                 [&](const char* data, uint64_t, uint64_t count) -> Status {
                                   RETURN_IF_ERROR(out.write(data, count * width));
                                   report.bytes += count * width;
                                   return options.progress(report.bytes, total)
                                              ? fine()
                                              : Status(interrupted());
                                 }));
  }
  RETURN_IF_ERROR(document.finish());
  RETURN_IF_ERROR(file->commit());
  report.unchecked = document.unchecked();
  for (const Leaf& leaf : document.leaves) {
    report.tensors += leaf.kind != Leaf::Kind::kValue;
    report.values += leaf.kind == Leaf::Kind::kValue;
  }
  report.chunks = plan.members.size();
  return report;
}

}  // namespace lowbit::ckpt
