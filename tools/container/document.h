// A checkpoint as a tree of leaves that can be read, wherever their bytes come from: a file, or a
// conversion of one. Readers give one, dialects take one and make another, writers ask it for the
// elements they want.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "container/box.h"
#include "container/manifest.h"

namespace lowbit::ckpt {

/// The elements of one dense tensor. `read` is called with rising ranges as a rule, and from one
/// thread at a time; different sources may be read from different threads.
class Source {
 public:
  virtual ~Source() = default;
  /// Elements [first, first + count) in row-major order, in the leaf's dtype, into `out`.
  virtual Status read(uint64_t first, uint64_t count, void* out) = 0;
};

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
  // kSubclass: a tensor subclass of class `cls`, one item as a whole (torch.save, or one DCP chunk)
  std::string cls;
  Value attributes;
  std::vector<Leaf> parts;  // named by a path of one name
  // Where a directory's cut falls inside a block: the box as a leaf without a path, by new codes or
  // plain, as its library would keep it there. None: such a cut is an error.
  std::function<Result<Leaf>(const Box&)> recut = {};
  // kValue; kOpaque: a pickle that is no plain value, copied as it is
  Value value;
  const Blob* blob = nullptr;  // in Document::manifest, where it came from there unchanged

  std::string name() const { return flat_name(path); }
  uint64_t bytes() const { return volume(shape) * static_cast<uint64_t>(dtype->bytes); }
};

struct Document {
  std::shared_ptr<const Manifest> manifest;  // where leaves were read from; null where nowhere
  std::vector<Leaf> leaves;                  // in the tree's order; paths are unique
  std::shared_ptr<const Document> model;     // another checkpoint, with the weights, where the
                                             // user gave one: dialects may ask it for shapes
  std::vector<Holder> holders = {};          // see Manifest; those without leaves are not written
  /// Further checkpoints that its sources read: the original of one that a dialect made.
  std::vector<std::shared_ptr<const Manifest>> others = {};
  /// The leaf at a path or with a flat name; null where there is none.
  const Leaf* find(std::string_view name) const;
  /// To be called when all that is wanted was read, and before it is trusted: checks what was read
  /// only in part, and that no file changed meanwhile. Writers do, before what they wrote appears.
  Status finish() const;
  /// The paths that are read, none of which may be written.
  std::vector<std::string> sources() const;
  /// Records that were read and had no checksum.
  uint64_t unchecked() const;
};

/// Leaves of a manifest. A subclass in a container of one file is a kSubclass. In a DCP directory, a
/// tensor whose first chunk holds one becomes a
/// kTensor without a source for dialects to look into (`manifest->container->stored`).
Result<Document> document_of(std::shared_ptr<const Manifest> manifest);

/// The elements of a tensor of the manifest. `tensor` must live as long as `manifest`.
std::shared_ptr<Source> source_of(std::shared_ptr<const Manifest> manifest, const Tensor& tensor);

/// Calls `use(bytes, first, count)` with the leaf's elements [begin, end) in pieces of at most
/// `most` bytes.
Status for_elements(const Leaf& leaf, uint64_t begin, uint64_t end, uint64_t most,
                    const std::function<Status(const char*, uint64_t, uint64_t)>& use);

}  // namespace lowbit::ckpt
