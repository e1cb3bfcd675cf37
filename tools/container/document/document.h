// A checkpoint as a tree of readable leaves, from a file or from a conversion. Containers read one,
// dialects turn one into another, and writers read the elements they need.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "container/manifest/box.h"
#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

/// The elements of one dense tensor, usually read with rising ranges. Leaves that different threads
/// write may share one: a thread waits until another one's read has ended.
class Source {
 public:
  virtual ~Source() = default;
  /// Reads elements [first, first + count), row-major and in the dtype of the leaf, into `out`.
  Status read(uint64_t first, uint64_t count, void* out) {
    const std::lock_guard lock(mutex_);
    return do_read(first, count, out);
  }

 private:
  virtual Status do_read(uint64_t first, uint64_t count, void* out) = 0;
  std::mutex mutex_;
};

/// A Base (Source, or Floats) that is read by a function, which owns what it captures.
template <class Base, class Out, class Read>
std::shared_ptr<Base> reading_by(Read read) {
  class Made : public Base {
   public:
    explicit Made(Read read) : read_(std::move(read)) {}
    Status do_read(uint64_t first, uint64_t count, Out* out) override {
      return read_(first, count, out);
    }

   private:
    Read read_;
  };
  return std::make_shared<Made>(std::move(read));
}
template <class Read>
std::shared_ptr<Source> source_by(Read read) {
  return reading_by<Source, void>(std::move(read));
}

/// A leaf of the tree: a tensor whose elements can be read from anywhere, or a value. The second of
/// the forms that one tensor takes on its way through a conversion, after Tensor and before State.
struct Leaf {
  enum class Kind : uint8_t { kTensor, kSubclass, kValue, kOpaque };
  Kind kind = Kind::kTensor;
  Path path;
  // kTensor; of a kSubclass these are the outer ones, and it has no source:
  const Dtype* dtype = nullptr;
  Shape shape;
  std::shared_ptr<Source> source;
  const Tensor* stored = nullptr;  // in Document::manifest, where the bytes are those of a tensor
                                   // there: its items may be copied as they are
  // Not empty: leaves with the same text here have the same new values, and are one tensor in
  // memory where the container can say so. Tied weights stay tied when they are rounded.
  std::string tied = {};
  // kSubclass: a tensor subclass of class `cls`, one item as a whole (torch.save, or one DCP chunk)
  std::string cls;
  Value attributes;
  std::vector<Leaf> parts;  // named by a path of one name
  // For a cut of a directory inside a block: the box as a leaf without a path, requantized, or
  // plain, as its library stores it. Empty: such a cut is an error.
  std::function<Result<Leaf>(const Box&)> recut = {};
  // kValue; kOpaque: an item of a directory that is not a plain value and is copied as it is, or
  // the names of the classes of a file's objects, which cannot be written
  Value value;
  std::string too_large = {};  // kOpaque: why its value was not read, where it passes a limit
  const Blob* blob = nullptr;  // in Document::manifest, where it came from there unchanged

  std::string name() const { return flat_name(path); }
  uint64_t bytes() const { return volume(shape) * static_cast<uint64_t>(dtype->bytes); }
};

/// A checkpoint's leaves, and the manifests that they are read from.
struct Document {
  /// The item of a DCP directory that is Megatron-Core's common state from 0.19 on: what is not a
  /// tensor, as a list of one dict.
  static constexpr std::string_view kCommonItem = "common_state/shard_0_1";

  std::shared_ptr<const Manifest> manifest;  // where leaves were read from; null where nowhere
  std::vector<Leaf> leaves;                  // in the tree's order; paths are unique
  std::shared_ptr<const Document> model;     // another checkpoint, with the weights, where the
                                             // user gave one: dialects may ask it for shapes
  std::vector<DictInfo> dicts = {};          // see Manifest; those without leaves are not written
  /// The flat path of the optimizer's state dict that is meant, where the user said it; "" is the
  /// top.
  std::optional<std::string> optimizer = {};
  /// Megatron-Core's common state: its common.pt beside a DCP directory, or the item kCommonItem.
  std::shared_ptr<const Document> common = {};
  /// Whose parameters are in which group, where the user said it and the common state does not:
  /// "N=PATTERN", the number of a group and names in it.
  std::vector<std::string> members = {};
  /// Further checkpoints that its sources read: the original of one that a dialect made.
  std::vector<std::shared_ptr<const Manifest>> others = {};
  /// Verifies records that were read in part, and that no file changed. Call it after the last read
  /// and before trusting the result; writers do so before their output appears.
  Status finish() const;
  /// The paths that are read. None of them may be written.
  std::vector<std::string> sources() const;
  /// The number of records read that had no checksum.
  uint64_t unchecked() const;
};

/// The leaves of a manifest. A subclass in a container of one file is a kSubclass. In a DCP
/// directory, a tensor whose first chunk is a subclass is a kTensor without a source, and dialects
/// read it through `manifest->container->stored`.
Result<Document> document_of(std::shared_ptr<const Manifest> manifest);

/// The error of a writer of one file for a kOpaque.
Error unwritable(const Leaf& leaf);

/// The elements of a tensor of the manifest. `tensor` must live as long as `manifest`.
std::shared_ptr<Source> source_of(std::shared_ptr<const Manifest> manifest, const Tensor& tensor);
/// The elements of a payload that lies row-major. `what` names it in errors.
std::shared_ptr<Source> source_of(std::shared_ptr<const Manifest> manifest, Payload payload,
                                  std::string what);

/// Calls `use(bytes, first, count)` with elements [begin, end) of a leaf, in pieces of at most
/// `limit` bytes.
Status for_elements(const Leaf& leaf, uint64_t begin, uint64_t end, uint64_t limit,
                    const std::function<Status(const char*, uint64_t, uint64_t)>& use);

}  // namespace lowbit::ckpt
