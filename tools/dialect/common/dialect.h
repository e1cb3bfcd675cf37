// Who wrote an optimizer's state, and how it says things. One folder for each; dialects.cpp lists
// them.
#pragma once

#include <span>
#include <string>

#include "dialect/model/model.h"
#include "dialect/numbers/report.h"
#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

/// How one state shall be kept, for dialects that can keep it in more than one way.
struct Wanted {
  std::string state_format;  // lowbit's presets or formats: "8bit", "4bit", "fp8", "log8",
                             // "dynamic8", "float32", ...; "" the dialect's own default
  int64_t block = 0;         // 0: the format's
  bool keep = false;         // never requantize: an error where the bits cannot stay
  bool lossy = false;        // what the target cannot keep may be left out, with a warning
  std::vector<std::string> full_precision;  // patterns of names that stay float32
  std::string weights;  // what float32 weights become afterwards; "": as they are
};

/// One of the settings that some libraries lack (settings_kept.cpp lists them), kept by this one.
struct KeptSetting {
  const char* algorithm;  // in whose groups: "adam", "sgd", ...; "": in all
  const char* key;
};
/// What the Adam of a library does with weight decay.
struct AdamDecay {
  bool always_decoupled = false;       // whatever a class or an argument says
  bool decoupled_beside_muon = false;  // where it steps what Muon does not
  const char* coupled = nullptr;       // a warning where it was part of the gradient, or null
};

struct Dialect {
  const char* name;   // on the command line
  const char* about;  // one line for --help
  /// How sure this dialect is that the optimizer state is its own, 0 to 3 (a class name or a marker
  /// of its own is 3, key names 2, shapes 1). Reads names and small values only. `tree` is the
  /// document's, here and for `read`.
  Result<int> (*recognize)(const Document& document, const OptimizerTree& tree);
  Result<Model> (*read)(std::shared_ptr<const Document> document, const OptimizerTree& tree);
  /// Null where this version does not write it. `report` must outlive the document.
  Result<Document> (*write)(const Model& model, const Wanted& wanted, DialectReport& report);
  /// Of the settings that not all libraries have, those that its files keep: the others give a
  /// warning when they are dropped.
  std::span<const KeptSetting> settings = {};
  AdamDecay decay = {};  // the default gives no warnings
};

std::span<const Dialect* const> dialects();
const Dialect* find_dialect(const std::string& name);

/// Whose a document's optimizer state is, and its tree, which `dialect->read` takes.
struct Recognized {
  const Dialect* dialect;
  OptimizerTree tree;
};
/// The dialect that is surest; an error where none is sure at all, or two are equally.
Result<Recognized> recognize(const Document& document);
/// The same where the tree is known already.
Result<const Dialect*> recognize(const Document& document, const OptimizerTree& tree);

}  // namespace lowbit::ckpt
