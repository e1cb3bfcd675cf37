// "did you mean": the word that was probably meant.
#pragma once

#include <string>
#include <vector>

namespace lowbit::ckpt {

/// The one of `known` that is nearest to `word`, by letters that are added, left out, changed or
/// swapped; empty where none is near.
std::string nearest_word(const std::string& word, const std::vector<std::string>& known);

/// "; did you mean --world-size?" where a word is near, else empty.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& known);

}  // namespace lowbit::ckpt
