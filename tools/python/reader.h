// A checkpoint that Python reads piece by piece.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "container/dcp/verified_reader.h"
#include "container/document/document.h"
#include "container/manifest/tensor_reader.h"
#include "dialect/model/model.h"
#include "python/object.h"

namespace lowbit::ckpt::python {

/// Everything may be called from any thread; one reads at a time.
class Reader {
 public:
  /// `optimizer`: the place of the one that `model` means, by its flat name.
  Reader(const std::string& path, std::optional<std::string> optimizer);

  Object container() const;
  /// The places of optimizer state dicts, by flat names; "" is the top.
  Object optimizers() const;
  /// [{"name", "path", "dtype", "shape", "bytes", "cls", "parts": {name: (dtype, shape)}}]
  Object tensors() const;
  /// What is plain data, by flat names.
  Object values() const;
  /// Names of what is not.
  Object opaque() const;
  /// A box of a tensor (or of a part of a subclass), row-major bytes.
  Object read(size_t tensor, int part, const Shape& offset, const Shape& shape);

  /// {"tensors": [(name, path, dtype, shape, [(offset, shape), ...], place), ...], "values":
  /// [(name, path, place), ...], "has_paths", "digest"}, of a directory. A place is one in the
  /// metadata's order; the digest is that of `.metadata`, "" where ranks wrote their own.
  Object layout() const;
  /// A value as torch.save writes it: serialized again from what was understood
  /// (dcp/value_archive.h). `verify`: an error where its digest is not the one in lowbit.json.
  Object value_item(const std::string& name, bool verify);
  struct Want {
    std::string name;
    Shape offset, shape;
    char* to;
    uint64_t bytes;  // that lie there
  };
  /// Boxes of tensors into memory of the caller's, on several threads. Returns the bytes of values
  /// that were read.
  Object read_into(const std::vector<Want>& wanted, int threads, bool verify, PyObject* progress);
  /// Of the bytes that `read_into` has read so far, those from mapped pages.
  Object mapped() const { return count(mapped_); }

  /// {"dialect", "algorithm", "flattened", "warnings", "refusal", "params", "groups"}; see
  /// lowbit/checkpoint/checkpoint.py.
  Object model();
  /// Tells the shape of a parameter that the checkpoint does not; `model` is read anew then.
  void tell_shape(size_t param, Shape shape);
  /// Values [first, first + count) of a state, float32.
  Object read_state(size_t param, size_t state, uint64_t first, uint64_t count);
  /// A box of them.
  Object read_state_box(size_t param, size_t state, const Shape& offset, const Shape& shape);
  /// A box of one of the tensors that lowbit keeps a state in, as they lie in the file.
  Object read_own(size_t param, size_t state, size_t tensor, const Shape& offset,
                  const Shape& shape);
  /// Rows of a state's codes, or of their scales.
  Object read_codes(size_t param, size_t state, int64_t begin, int64_t end, bool scales);

  /// Holds the checksums of what was read in part.
  Object finish();

 private:
  const State& state(size_t param, size_t state) const;
  /// lowbit.json, read once; null where there is none.
  Result<const Recorded*> recorded();
  Status check_digest(const Leaf& leaf);
  Result<std::string> archive_of(const Leaf& leaf) const;
  Object read_leaf(const Leaf& leaf, const std::string& name, const Shape& offset,
                   const Shape& shape);
  Object read_floats(size_t param, size_t state, uint64_t count,
                     const std::function<Status(float*)>& read);

  std::mutex lock_;
  std::shared_ptr<const Document> document_;
  std::vector<const Leaf*> tensors_;
  std::unordered_map<std::string, const Leaf*> leaves_;  // by flat name
  std::unique_ptr<TensorReader> reader_;
  std::unique_ptr<Model> model_;
  std::vector<std::unique_ptr<Model>> old_models_;  // from which another thread may be reading
  std::map<size_t, Shape> told_;  // shapes, by the place of their parameter in the model
  bool told_since_ = false;       // since the model was read
  std::mutex recorded_lock_;
  std::optional<std::optional<Recorded>> recorded_;  // lowbit.json, once it was read
  PayloadCache payloads_;
  std::atomic<uint64_t> mapped_ = 0;
};

}  // namespace lowbit::ckpt::python
