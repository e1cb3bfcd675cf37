// What the program and the Python module do, one function each. Options in, a report out; the
// report's JSON is the same for both.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "container/document/writer.h"
#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

using Json = nlohmann::ordered_json;

/// An error of a report, which may be infinite: no number of JSON is.
inline Json error_number(double x) { return std::isfinite(x) ? Json(x) : Json("infinite"); }

/// Which leaves a command is about: globs on flat names. No include: all.
struct Selection {
  std::vector<std::string> include, exclude;
};

struct InspectOptions {
  Selection select;
  bool health = false;  // reads everything: scales' range, zero and saturated codes, NaN
  bool digest = false;
  Progress progress = [](uint64_t, uint64_t) { return true; };
};
/// {"path", "container", "dialect", "facts", "warnings", "steps", "groups", "tensors": [{"name",
/// "shape", "dtype", "chunks", "bytes", "kind", "class"?, "stored_as"?}], "states": [{"parameter",
/// "state", "shape", "stored_as", "bytes", "health"?}], "values", "bytes", "bytes_by_dtype",
/// "bytes_by_kind", "digest"?}
Result<Json> inspect(const std::string& path, const InspectOptions& options);
/// The report of `inspect` (with health) as one self-contained page.
std::string html_page(const Json& report);

struct VerifyOptions {
  Selection select;
  bool opaque = false;  // warn of opaque objects, which torch would import and run, and continue
  bool finite = true;   // also values: NaN, Inf, negative second moments, bad scales
  int threads = 1;
  Progress progress = [](uint64_t, uint64_t) { return true; };
};
/// {"path", "container", "ok": true, "checked": {...}, "warnings": [...], "findings": [{"file",
/// "item", "tensor", "what"}]}. Findings are about values (exit code 4); a structure that is not
/// sound is an error (3).
Result<Json> verify(const std::string& path, const VerifyOptions& options);

struct ConvertOptions {
  std::string to;    // dialect; "" keeps the source's
  std::string from;  // dialect of the source; "": the one that is surest
  // "dcp", "torch", "safetensors"; "" by the target's name, else the source's
  std::string container;
  Wanted wanted;
  Selection select;
  bool dry_run = false;
  std::string weights;    // "": as they are; "bfloat16_stochastic", ...: rounds float32 weights
  uint64_t seed = 0;      // of that rounding
  std::string optimizer;  // where its state dict lies, if there are several: "optimizers.0"
  std::vector<std::string> members;  // "N=PATTERN": whose parameters are in Megatron's group N
  std::string model;   // a checkpoint with the weights, where shapes or names are needed
  WriteOptions write;  // mesh.parts empty: as many ranks as the source has
};
/// Values of `from`, of `to`, which takes dialects that can be written, and of `container`.
std::vector<std::string> dialect_names();
std::vector<std::string> written_dialect_names();
std::vector<std::string> container_names();
/// "a, b or c".
std::string alternatives(const std::vector<std::string>& words);
/// {"source", "target", "dry_run", "from", "to", "container", "ranks", "states": [{"param",
/// "state", "from", "to", "exact", "max_error"?, "relative_error"?}], "tensors", "values",
/// "copied", "source_bytes", "bytes", "unchecked", "notes", "warnings"}
Result<Json> convert(const std::string& source, const std::string& target,
                     const ConvertOptions& options);

struct ReshardOptions {
  Selection select;
  bool dry_run = false;
  bool requantize = false;  // new codes where a cut falls inside a block of torchao's state
  WriteOptions write;
};
/// {"source", "target", "dry_run", "ranks", "mesh", "dims", "tensors", "recut", "requantized",
/// "values", "chunks", "copied", "bytes", "unchecked", "warnings"}
Result<Json> reshard(const std::string& source, const std::string& target,
                     const ReshardOptions& options);

struct DiffOptions {
  Selection select;
  bool bytes = false;    // not by meaning
  double tolerance = 0;  // of the difference, relative to the larger tensor's 2-norm
  std::string model;     // a checkpoint with the weights, where shapes or names are needed
  Progress progress = [](uint64_t, uint64_t) { return true; };
};
/// {"same": bool, "warnings": [...], "opaque": [names of what is not read, so not compared],
/// "differences": [{"name", "what", "first": index, "count", "max"}]}
Result<Json> diff(const std::string& a, const std::string& b, const DiffOptions& options);

/// XXH3-128, in hex, of all tensors by name: name, dtype, shape and row-major bytes, of torchao's
/// quantized ones the float32 values that they stand for. It does not depend on how they are cut.
Result<std::string> digest(const Document& document, const Progress& progress);

}  // namespace lowbit::ckpt
