#include "fuzz/targets.h"

#include <string>

#include "container/common/open.h"
#include "container/dcp/dcp.h"
#include "container/manifest/tiling.h"
#include "container/pickled/globals.h"
#include "container/pickled/item.h"
#include "container/safetensors/safetensors.h"
#include "container/zip/zip.h"
#include "fuzz/common.h"
#include "fuzz/mutate.h"
#include "io/read/open.h"
#include "pickle/plain.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {
namespace {

constexpr PickleLimits kLimits{.bytes = 1u << 20, .nodes = 1u << 16, .stack = 1u << 16};

Result<Pickle> plain_pickle(std::string_view input) {
  static const Allowlist plain{plain_globals(), true};
  return read_pickle(std::string(input), plain, kFuzz, kLimits);
}

/// The machine, the stack, and what values unfold to.
bool pickle(std::string_view input) {
  const auto read = plain_pickle(input);
  if (read.ok()) static_cast<void>(plain_value(read.value(), read.value().root, kFuzz));
  return read.ok();
}

/// Plain values, and back.
bool value(std::string_view input) {
  const auto read = plain_pickle(input);
  if (!read.ok()) return false;
  const auto first = plain_value(read.value(), read.value().root, kFuzz);
  if (!first.ok()) return false;
  PickleWriter writer(2);
  write_value(writer, first.value());
  const std::string bytes = writer.finish();
  const auto again = plain_pickle(bytes);
  if (!again.ok() && bytes.size() > kLimits.bytes / 2) return true;  // shared parts were unfolded
  demand(again.ok(), "a value that was written is read");
  const auto second = plain_value(again.value(), again.value().root, kFuzz);
  demand(second.ok(), "a value that was written is plain");
  PickleWriter rewriter(2);
  write_value(rewriter, second.value());
  demand(rewriter.finish() == bytes, "a value comes back as it was");  // bytes: NaN is not NaN
  return true;
}

bool zip(std::string_view input) {
  const auto file = File::of_bytes(input, kFuzz);
  if (!file.ok()) return false;
  const auto index = read_zip(*file.value(), 0, input.size(), kFuzz);
  if (!index.ok()) return false;
  uint64_t end = 0;
  for (const ZipRecord& record : index.value().records) {
    demand(record.offset >= end && record.offset <= input.size() &&
               record.size <= input.size() - record.offset,
           "records lie in the file, one behind the other");
    end = record.offset + record.size;
    static_cast<void>(check_crc(*file.value(), index.value(), record, kFuzz));
  }
  return true;
}

/// `.metadata` to a manifest, whether its boxes tile their tensors, and back.
bool metadata(std::string_view input) {
  const auto manifest = parse_metadata(std::string(input), kFuzz);
  if (!manifest.ok()) return false;
  for (const Tensor& t : manifest.value().tensors) {
    if (!check_tiling(t).ok()) return false;
  }
  const auto again = parse_metadata(metadata_bytes(manifest.value(), kFuzz), kFuzz);
  demand(again.ok(), "metadata that was written is read");
  demand(again.value().tensors.size() == manifest.value().tensors.size() &&
             again.value().blobs.size() == manifest.value().blobs.size(),
         "metadata comes back with its leaves");
  return true;
}

/// Two ranks' metadata, joined.
bool join_ranks(std::string_view input) {
  if (input.size() < 2) return false;
  const size_t cut = static_cast<uint8_t>(input[0]) | static_cast<uint8_t>(input[1]) << 8;
  const std::string_view body = input.substr(2);
  if (cut > body.size()) return false;
  auto all = parse_metadata(std::string(body.substr(0, cut)), kFuzz);
  auto part = parse_metadata(std::string(body.substr(cut)), kFuzz);
  if (!all.ok() || !part.ok()) return false;
  if (!join(all.value(), std::move(part.value()), kFuzz).ok()) return false;
  for (const Tensor& t : all.value().tensors) {
    if (!check_tiling(t).ok()) return false;
  }
  return true;
}

/// One item of a DCP directory, with a tensor, plain or a subclass.
bool tensor_item(std::string_view input) {
  const auto file = File::of_bytes(input, kFuzz);
  if (!file.ok()) return false;
  return read_stored(*file.value(), {0, 0, 0, input.size()}, kFuzz).ok();
}

/// One item of a DCP directory, without a tensor.
bool value_item(std::string_view input) {
  const auto file = File::of_bytes(input, kFuzz);
  if (!file.ok()) return false;
  return read_value(*file.value(), {0, 0, 0, input.size()}, kFuzz).ok();
}

bool document_at(std::string_view input, Result<Manifest> (*reader)(const std::string&)) {
  auto manifest = reader(named(input));
  if (!manifest.ok()) return false;
  const auto document = document_of(std::make_shared<const Manifest>(std::move(manifest.value())));
  return document.ok() && pull(document.value());
}

bool torch_file(std::string_view input) {
  return document_at(input, [](const std::string& path) { return read_torch_zip(path); });
}
bool legacy(std::string_view input) { return document_at(input, read_torch_legacy); }
bool safetensors(std::string_view input) { return document_at(input, read_safetensors); }

/// The header alone, and back. The bytes behind it are as many as it asks for.
bool header(std::string_view input) {
  for (const uint64_t room : {uint64_t{0}, uint64_t{24}, uint64_t{1} << 20}) {
    const auto read = parse_safetensors(input, room, kFuzz);
    if (!read.ok()) continue;
    const auto text = safetensors_header(read.value().entries, read.value().metadata, kFuzz);
    demand(text.ok(), "a header that was read is written");
    const auto again = parse_safetensors(text.value(), room, kFuzz);
    demand(again.ok() && again.value().entries.size() == read.value().entries.size(),
           "a header that was written is read");
    return true;
  }
  return false;
}

/// What we keep in a header's `__metadata__`, and back.
bool convention(std::string_view input) {
  const auto read = parse_description(input, kFuzz);
  if (!read.ok()) return false;
  const auto text = describe(read.value(), kFuzz);
  demand(text.ok(), "a description that was read is written");
  const auto again = parse_description(text.value(), kFuzz);
  demand(again.ok(), "a description that was written is read");
  const auto second = describe(again.value(), kFuzz);
  demand(second.ok() && second.value() == text.value(), "a description comes back as it was");
  return true;
}

/// A file of whatever kind, whose optimizer state is it, and what it means.
bool dialect(std::string_view input) {
  auto opened = open_checkpoint(named(input));
  return opened.ok() && understand(std::move(opened.value()));
}

constexpr FuzzTarget kTargets[] = {
    {"pickle", "pickle", pickle, mutate_pickle},
    {"value", "pickle", value, mutate_pickle},
    {"tree", "pickle", read_tree_pickle, mutate_pickle},
    {"zip", "zip", zip, mutate_zip},
    {"metadata", "pickle", metadata, mutate_pickle},
    {"join", "pickle", join_ranks, mutate_two_pickles},
    {"tensor_item", "zip", tensor_item, mutate_zip},
    {"value_item", "zip", value_item, mutate_zip},
    {"any_value", "zip", read_any_value, mutate_zip},
    {"torch", "zip", torch_file, mutate_zip},
    {"inner_zip", "zip", read_inner_zip, mutate_zip},
    {"legacy", "pickle", legacy, mutate_pickle},
    {"safetensors", "json", safetensors, mutate_safetensors},
    {"header", "json", header, mutate_json},
    {"convention", "json", convention, mutate_json},
    {"zstd", "folder", read_zstd, mutate_bytes},
    {"head", "folder", read_name_and_head, mutate_bytes},
    {"dialect", "zip", dialect, mutate_file},
    {"folder", "folder", read_folder_on_disk, mutate_folder},
    {"store", "folder", read_store, mutate_folder},
    {"boxes", "folder", read_boxes, mutate_folder},
};

}  // namespace

std::span<const FuzzTarget> fuzz_targets() { return kTargets; }

const FuzzTarget* find_fuzz_target(std::string_view name) {
  for (const FuzzTarget& target : kTargets) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

}  // namespace lowbit::ckpt
