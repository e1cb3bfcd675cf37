// Files that DeepSpeed's ZeRO writes, one for each rank.
#pragma once

#include <memory>
#include <string>

#include "container/document/document.h"
#include "io/status.h"

namespace lowbit::ckpt {

/// An error (exit code 3) where the document is one rank's file: its state is named like a whole
/// optimizer's, but belongs to slices of flat vectors. The error begins with `source`, if it is not
/// empty.
Status check_no_zero_rank(const Document& document, const std::string& source = "");

/// An error (exit code 3) where a tensor of the document is one rank's part of a larger one, as
/// torch.save writes a DTensor: nothing may take it for the whole. The error begins with `source`,
/// if it is not empty, and names --exclude then.
Status check_no_rank_part(const Document& document, const std::string& source = "");

/// The checkpoint of --model, which tells shapes and names; null where `path` is empty. An error
/// too where it has a rank's part of a tensor.
Result<std::shared_ptr<const Document>> open_weights(const std::string& path);

}  // namespace lowbit::ckpt
