// What a Universal Checkpoint of DeepSpeed says of an optimizer in torch's dialect.
#pragma once

#include <string>
#include <vector>

#include "container/deepspeed/writer.h"

namespace lowbit::ckpt {

/// The files from which DeepSpeed 0.19.8 resumes (load_universal_checkpoint) in ZeRO's stages 1 to
/// 3 on any number of ranks. `document` has the float32 state of Adam, by name, and the weights;
/// what has no place there is left out with a warning. An error where something that DeepSpeed asks
/// for is missing.
Result<std::vector<FolderFile>> universal_files(const Document& document,
                                                std::vector<std::string>& warnings);

}  // namespace lowbit::ckpt
