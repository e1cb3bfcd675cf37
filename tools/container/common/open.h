// Opens any checkpoint: finds its container and reads its manifest.
#pragma once

#include <string>

#include "container/document/document.h"

namespace lowbit::ckpt {

class Archive;

/// Reads a DCP directory, a folder of DeepSpeed's, a torch.save file (zip or legacy) or a
/// safetensors file; the names in a folder and the first bytes of a file tell which. Only headers
/// and pickles are read. "OUTER.zip/INNER.pth" is a torch.save file inside another zip.
Result<std::shared_ptr<const Manifest>> read_manifest(const std::string& path);
/// Reads the same as a document.
Result<Document> open_checkpoint(const std::string& path);

// One for each container:
Result<Manifest> read_dcp(const std::string& path);
/// `member`: the record of another zip that is read; "": the file itself.
Result<Manifest> read_torch_zip(const std::string& path, const std::string& member = "");
Result<Manifest> read_torch_zip(std::shared_ptr<Archive> archive, const std::string& member = "");
/// `item`: what is read of the archive's file, an item of a DCP directory.
Result<Manifest> read_torch_item(std::shared_ptr<Archive> archive, const FileExtent& item);
Result<Manifest> read_torch_legacy(const std::string& path);
Result<Manifest> read_safetensors(const std::string& path);
/// The files that DeepSpeed's ZeRO wrote, one for each rank, as one checkpoint.
Result<Manifest> read_zero(const std::string& path);
/// What DeepSpeed's ds_to_universal wrote: a folder for each parameter.
Result<Manifest> read_universal(const std::string& path);

}  // namespace lowbit::ckpt
