// Which leaves a command is about: globs on torch's flat names.
#pragma once

#include <string_view>

#include "container/document.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {

/// Whether `name` fits the pattern: `*` any text (dots too), `?` one character, `[abc]`, `[a-z]`,
/// `[!abc]` one of a set, `\` takes the next character as it is. The time is at most the product
/// of both lengths.
bool glob_matches(std::string_view pattern, std::string_view name);

/// Fits one of `include` (or there is none), and none of `exclude`.
bool selected(const Selection& selection, std::string_view name);

/// The leaves that are selected.
Document select(Document document, const Selection& selection);

/// An error (usage) where a pattern of `include` fits no leaf: a typing mistake would else write a
/// checkpoint without what was asked for.
Status check_selection(const Document& document, const Selection& selection);

}  // namespace lowbit::ckpt
