// The objects in the pickle of `.metadata`: which globals it may name, and how to look into them.
#pragma once

#include <string>
#include <string_view>

#include "container/manifest/dtype.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {

/// Where torch 2.2 and older keep TensorProperties.
inline constexpr std::string_view kMetadataModule2_2 =
    "torch.distributed._shard.sharded_tensor.metadata";

const Allowlist& metadata_globals();

/// A pickle of metadata. `what` names the file in errors, and must outlive this.
class MetadataPickle {
 public:
  MetadataPickle(const Pickle& pickle, const std::string& what) : p_(pickle), what_(what) {}

 protected:
  Error no(const std::string& why) const { return bad(what_ + ": " + why); }
  /// The attributes of an object of class `cls`, no key twice.
  Result<NodeId> state_of(NodeId object, std::string_view cls) const;
  /// A torch.Size, or a plain tuple or list of sizes.
  Result<Shape> size(NodeId node) const;

  const Pickle& p_;
  const std::string& what_;
};

}  // namespace lowbit::ckpt
