// Which leaves a command is about: globs (io/glob.h) on torch's flat names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dialect/model/model.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {

/// Adds lines behind others.
void append(std::vector<std::string>& to, const std::vector<std::string>& lines);

/// Fits one of `include` (or there is none), and none of `exclude`.
bool selected(const Selection& selection, std::string_view name);

/// The same of something that has several names: one of them must fit `include`, none `exclude`.
bool selected(const Selection& selection, const std::vector<std::string>& names);
/// The names of a document's leaves, in its order.
std::vector<std::string> leaf_names(const Document& document);
/// What a state may be called: `name`, which is PARAMETER.STATE, and as the leaves that hold it.
std::vector<std::string> names_of(const std::string& name, const State& state);

/// The leaves that are selected.
Document select(Document document, const Selection& selection);
/// The same for a target: places of lists before others that stay hold None, with a warning for
/// each, or for the first of many. What `warn_of_exclude` says, too: the target has what the
/// pattern was to leave out. An opaque attribute of an OrderedDict may be excluded by its name,
/// which is that of the dict with its own behind it.
Document select_to_write(Document document, const Selection& selection,
                         std::vector<std::string>& warnings);

/// The opaque attributes of OrderedDicts by their names, and dicts with such values inside.
std::vector<std::pair<std::string, Value>> opaque_attributes(const Document& document);

/// Leaves out objects that only the program that wrote them can make again; a place in a list
/// stays, as None, and so do attributes of an OrderedDict that are plain. Returns a warning for
/// each, or for the first of many. `target`: what is written; a directory keeps the items of
/// another as they are, and files of safetensors have no arrays of numpy, but for the numbers of
/// those without dimensions. An error where one is a tensor, or has tensors anywhere inside: they
/// are data, which nothing leaves out unasked.
Result<std::vector<std::string>> leave_out_opaque(Document& document, ContainerKind target);

/// An error where an optimizer would lose part of its state or of its settings. Where it is copied
/// and not `converted`, only data counts: tensors that are not read, and arrays that `target`
/// lacks.
Status check_no_opaque_state(const Document& document, bool converted, ContainerKind target);

/// A warning where the whole is not a dict, which is all that torch loads of a directory.
std::vector<std::string> warn_of_top_level(const Document& source);

/// A warning for each hidden folder or file that a killed run left beside `target`.
std::vector<std::string> warn_of_leftovers(const std::string& target);
/// A line that names what lies in the folder `target` and is of no checkpoint: a new one is put
/// between it.
std::vector<std::string> warn_of_others(const std::string& target);
/// A line that names what lies in the source's folder and is not part of the checkpoint: the target
/// has none of it.
std::vector<std::string> warn_of_left_behind(const Manifest& source);
/// A line that names texts of a safetensors file, such as its title and licence, which `target`
/// does not have.
std::vector<std::string> warn_of_texts(const Manifest& source, ContainerKind target);

/// An error (usage) where a pattern of `include` fits no leaf: a typing mistake would else write a
/// checkpoint without what was asked for, or find that nothing differs.
Status check_selection(const Document& document, const Selection& selection);
/// The same of names.
Status check_selection(const std::vector<std::string>& names, const Selection& selection);
/// A warning for each pattern of `exclude` that fits no name, or no leaf of the document.
std::vector<std::string> warn_of_exclude(const std::vector<std::string>& names,
                                         const Selection& selection);
std::vector<std::string> warn_of_exclude(const Document& document, const Selection& selection);

}  // namespace lowbit::ckpt
