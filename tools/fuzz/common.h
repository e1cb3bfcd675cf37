// What several targets do with what they have read.
#pragma once

#include <string>
#include <string_view>

#include "container/document/document.h"

namespace lowbit::ckpt {

constexpr const char* kFuzz = "fuzz";

/// A promise of ours that an input broke: the fuzzer shall stop here.
void demand(bool held, const char* what);
/// The path of a file that holds the input: readers of whole files open them by name. The next call
/// overwrites it.
const std::string& named(std::string_view input);
/// Reads the leaves of a document, all of each that is small.
bool pull(const Document& document);
/// Whose optimizer state it is, and what it means; then writes it in every dialect.
bool understand(Document document);

// Targets that have a file of their own.
bool read_folder_on_disk(std::string_view input);
bool read_store(std::string_view input);
bool read_boxes(std::string_view input);
bool read_name_and_head(std::string_view input);
bool read_inner_zip(std::string_view input);
bool read_tree_pickle(std::string_view input);
bool read_any_value(std::string_view input);
bool read_zstd(std::string_view input);

}  // namespace lowbit::ckpt
