// Whatever a path holds: which container it is, and its manifest.
#pragma once

#include <string>

#include "container/document.h"

namespace lowbit::ckpt {

/// A DCP directory, a file of torch.save (zip or legacy), or a safetensors file, by its first
/// bytes. Only headers and pickles are read.
Result<std::shared_ptr<const Manifest>> read_manifest(const std::string& path);
/// The same, as a document.
Result<Document> open_checkpoint(const std::string& path);

// One for each container:
Result<Manifest> read_dcp(const std::string& path);
Result<Manifest> read_torch_zip(const std::string& path);
Result<Manifest> read_torch_legacy(const std::string& path);
Result<Manifest> read_safetensors(const std::string& path);

}  // namespace lowbit::ckpt
