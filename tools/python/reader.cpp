#include "python/reader.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "container/common/open.h"
#include "container/dcp/items.h"
#include "container/dcp/key_kinds.h"
#include "container/dcp/value_archive.h"
#include "dialect/common/dialect.h"
#include "dialect/megatron_view/megatron.h"
#include "dialect/model/formats.h"
#include "dialect/tree/cpu_offload.h"
#include "io/parallel.h"
#include "io/text.h"
#include "pickle/writer.h"
#include "pipeline/zero_rank.h"
#include "python/values.h"
#include "python/work.h"

namespace lowbit::ckpt::python {
namespace {

/// Raises ValueError where a box is not inside a shape.
void check_box(const Shape& whole, const Shape& offset, const Shape& shape) {
  bool inside = offset.size() == whole.size() && shape.size() == whole.size();
  for (size_t d = 0; inside && d < whole.size(); ++d)
    inside = offset[d] >= 0 && shape[d] >= 0 && offset[d] <= whole[d] &&
             shape[d] <= whole[d] - offset[d];
  if (!inside)
    raise(PyExc_ValueError, "a box of " + shape_text(shape) + " at " + shape_text(offset) +
                                " is not inside " + shape_text(whole));
}

/// A path as torch's planner has it: numbers are places in lists.
Object planner_path(Path path) {
  for (size_t i = 0; i < path.size(); ++i) {
    if (!KeyKinds::written_as_number(path, i)) path[i] = Key(path[i].text());
  }
  return to_python(path);
}

/// A box of row-major elements, by as long runs as there are: `read(first, count, out)`, `out` in
/// elements.
template <class Read>
Status read_runs(const Shape& whole, const Shape& offset, const Shape& shape, const Read& read) {
  if (volume(shape) == 0) return fine();
  const Shape stride = row_major(whole);
  size_t outer = whole.size();  // dimensions before the run
  uint64_t run = 1;
  while (outer > 0) {
    --outer;
    run *= static_cast<uint64_t>(shape[outer]);
    if (shape[outer] != whole[outer]) break;
  }
  Shape at(outer, 0);
  for (uint64_t to = 0;; to += run) {
    int64_t first = 0;
    for (size_t d = 0; d < whole.size(); ++d)
      first += (offset[d] + (d < outer ? at[d] : 0)) * stride[d];
    RETURN_IF_ERROR(read(static_cast<uint64_t>(first), run, to));
    size_t d = outer;
    while (d > 0 && ++at[d - 1] == shape[d - 1]) at[--d] = 0;
    if (d == 0) return fine();
  }
}

}  // namespace

Reader::Reader(const std::string& path, std::optional<std::string> optimizer) {
  without_gil([&]() -> Status {
    ASSIGN_OR_RETURN(document, open_checkpoint(path));
    document.optimizer = std::move(optimizer);
    document_ = std::make_shared<const Document>(std::move(document));
    return fine();
  });
  reader_ = std::make_unique<TensorReader>(*document_->manifest);
  for (const Leaf& leaf : document_->leaves) {
    leaves_.emplace(leaf.name(), &leaf);
    if (leaf.kind == Leaf::Kind::kTensor || leaf.kind == Leaf::Kind::kSubclass)
      tensors_.push_back(&leaf);
  }
}

Object Reader::container() const { return text(container_name(document_->manifest->kind)); }

Object Reader::optimizers() const {
  return list_by(joined_offload(*document_, optimizer_roots(*document_)),
                 [](const OptimizerRoot& root) { return text(flat_name(root.path)); });
}

Object Reader::tensors() const {
  List out;
  for (const Leaf* leaf : tensors_) {
    Dict parts, made;
    for (const Leaf& part : leaf->parts)
      parts.set(text(part.name()), tuple_of(text(part.dtype->name), to_python(part.shape)));
    made.set("name", text(leaf->name()));
    made.set("path", to_python(leaf->path));
    made.set("dtype", text(leaf->dtype->name));
    made.set("shape", to_python(leaf->shape));
    made.set("bytes", count(leaf->bytes()));
    made.set("cls", text(leaf->cls));
    made.set("parts", std::move(parts).done());
    out.append(std::move(made).done());
  }
  return std::move(out).done();
}

Object Reader::values() const {
  Dict out;
  for (const Leaf& leaf : document_->leaves) {
    if (leaf.kind == Leaf::Kind::kValue) out.set(text(leaf.name()), to_python(leaf.value));
  }
  return std::move(out).done();
}

Object Reader::opaque() const {
  List out;
  for (const Leaf& leaf : document_->leaves) {
    if (leaf.kind == Leaf::Kind::kOpaque) out.append(text(leaf.name()));
  }
  return std::move(out).done();
}

Object Reader::read(size_t tensor, int part, const Shape& offset, const Shape& shape) {
  if (tensor >= tensors_.size())
    raise(PyExc_IndexError, "there is no tensor " + std::to_string(tensor) +
                                ": the checkpoint has " + std::to_string(tensors_.size()));
  const Leaf* leaf = tensors_[tensor];
  const std::string name = printable(leaf->name());
  if (part >= 0) {
    if (static_cast<size_t>(part) >= leaf->parts.size())
      raise(PyExc_IndexError, name + " has no part " + std::to_string(part) + ": it is made of " +
                                  std::to_string(leaf->parts.size()));
    leaf = &leaf->parts[static_cast<size_t>(part)];
  }
  if (leaf->source == nullptr)
    raise(bad(name + ": is a tensor subclass, whose values are read as those of a parameter")
              .at(name));
  return read_leaf(*leaf, name, offset, shape);
}

Object Reader::read_leaf(const Leaf& leaf, const std::string& name, const Shape& offset,
                         const Shape& shape) {
  check_box(leaf.shape, offset, shape);
  const auto width = static_cast<uint64_t>(leaf.dtype->bytes);
  Buffer out(volume(shape) * width);
  char* to = out.data;
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    if (leaf.stored != nullptr && leaf.stored->chunks.size() > 0)
      return volume(shape) == 0 ? fine() : reader_->read(*leaf.stored, Box{offset, shape}, to);
    const Status done =
        read_runs(leaf.shape, offset, shape, [&](uint64_t first, uint64_t count, uint64_t at) {
          return leaf.source->read(first, count, to + at * width);
        });
    return done.ok() ? fine() : Status(done.error().at(name));
  });
  return std::move(out.object);
}

Object Reader::layout() const {
  const Manifest& manifest = *document_->manifest;
  if (manifest.kind != ContainerKind::kDcp) {
    const bool folder =
        manifest.kind == ContainerKind::kZero || manifest.kind == ContainerKind::kUniversal;
    const std::string what = folder ? "a folder of DeepSpeed"
                                    : std::string("a file of ") + container_name(manifest.kind);
    raise(
        usage(printable(manifest.path) + ": is " + what +
              " and no directory of torch.distributed.checkpoint; lowbit-ckpt convert makes one"));
  }
  const auto chunk = [](const Chunk& c) {
    return tuple_of(to_python(c.offset), to_python(c.shape));
  };
  Dict out;
  out.set("tensors", list_by(manifest.tensors, [&](const Tensor& t) {
            return tuple_of(text(t.name), planner_path(t.path), text(t.dtype->name),
                            to_python(t.shape), list_by(t.chunks, chunk), count(t.place));
          }));
  out.set("values", list_by(manifest.blobs, [](const Blob& b) {
            return tuple_of(text(b.name), planner_path(b.path), count(b.place));
          }));
  out.set("has_paths", boolean(manifest.has_paths));
  out.set("digest", text(manifest.metadata_digest));
  return std::move(out).done();
}

Result<const Recorded*> Reader::recorded() {
  const std::lock_guard once(recorded_lock_);
  if (!recorded_) {
    ASSIGN_OR_RETURN(digests, read_recorded(*document_->manifest));
    recorded_ = std::move(digests);
  }
  return recorded_->has_value() ? &**recorded_ : nullptr;
}

Status Reader::check_digest(const Leaf& leaf) {
  if (leaf.blob == nullptr) return fine();
  ASSIGN_OR_RETURN(said, recorded());
  if (said == nullptr || !said->values) return fine();
  const auto known = said->values->find(leaf.blob->name);
  if (known == said->values->end()) return fine();
  const Manifest& manifest = *document_->manifest;
  ASSIGN_OR_RETURN(digest, value_digest(manifest, *leaf.blob));
  if (digest == known->second) return fine();
  const std::string file = manifest.container->files().name(leaf.blob->extent.file);
  const std::string name = printable(leaf.name());
  return damaged(file + ": " + name +
                 ": its digest is not the one in lowbit.json: the file, or its digest there, is "
                 "damaged")
      .at(name, file);
}

Result<std::string> Reader::archive_of(const Leaf& leaf) const {
  if (leaf.blob == nullptr) return bad("it is a tensor");
  return value_archive(*document_->manifest, *leaf.blob);
}

Object Reader::value_item(const std::string& name, bool verify) {
  const auto found = leaves_.find(name);
  if (found == leaves_.end()) raise(PyExc_KeyError, printable(name));
  const Leaf* leaf = found->second;
  // The archive itself first: it tells types that a Value does not, such as numpy's numbers.
  Result<std::string> archive = failed("");
  without_gil([&]() -> Status {
    if (verify) RETURN_IF_ERROR(check_digest(*leaf));
    archive = archive_of(*leaf);
    return fine();
  });
  if (archive.ok()) return bytes(archive.value());
  if (leaf->blob != nullptr && !leaf->blob->more.empty()) raise(archive.error());
  // Of a checksum that is wrong: another reader would load the damage.
  if (archive.error().cause == Cause::kDamaged) raise(archive.error().at(printable(name)));
  if (leaf->kind != Leaf::Kind::kValue)
    raise(bad(printable(document_->manifest->path) + ": " + printable(name) +
              " is not plain data: to load it is to run what it names. Leave it out of the state "
              "dict, or load it with torch's FileSystemReader if you trust the file. Found: " +
              archive.error().text)
              .at(printable(name)));
  PickleWriter pickle(2);
  write_value(pickle, leaf->value);
  std::string made;
  Output out(&made);
  if (const auto written = write_value_item(pickle.finish(), out); !written.ok())
    raise(written.error());
  return bytes(made);
}

Object Reader::read_into(const std::vector<Want>& wanted, int threads, bool verify,
                         PyObject* callback) {
  const Manifest& manifest = *document_->manifest;
  std::unordered_map<std::string_view, const Tensor*> known;
  for (const Tensor& t : manifest.tensors) known.emplace(t.name, &t);
  uint64_t total = 0, done = 0, read = 0;
  std::vector<const Tensor*> tensors;
  for (const Want& want : wanted) {
    const auto found = known.find(want.name);
    if (found == known.end()) raise(PyExc_KeyError, printable(want.name));
    check_box(found->second->shape, want.offset, want.shape);
    const uint64_t bytes = volume(want.shape) * static_cast<uint64_t>(found->second->dtype->bytes);
    if (bytes != want.bytes)
      raise(PyExc_ValueError, printable(want.name) + ": " + std::to_string(want.bytes) +
                                  " bytes do not hold " + shape_text(want.shape) + " of " +
                                  found->second->dtype->name);
    tensors.push_back(found->second);
    total += bytes;
  }
  std::mutex lock;
  run(callback, [&](const Progress& progress) -> Status {
    const Recorded* digests = nullptr;
    if (verify) {
      ASSIGN_OR_RETURN(said, recorded());
      digests = said;
    }
    VerifiedReader reader(manifest, digests, verify, payloads_);
    RETURN_IF_ERROR(parallel(wanted.size(), std::clamp(threads, 1, 256), [&](size_t i) -> Status {
      const Want& want = wanted[i];
      const uint64_t n = volume(want.shape);
      if (n > 0) RETURN_IF_ERROR(reader.read(*tensors[i], {want.offset, want.shape}, want.to));
      const std::lock_guard held(lock);
      done += n * static_cast<uint64_t>(tensors[i]->dtype->bytes);
      return progress(done, total) ? fine() : Status(failed("interrupted"));
    }));
    read = reader.bytes();
    mapped_ += reader.mapped();
    return reader.finish();
  });
  return count(read);
}

Object Reader::model() {
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    if (model_ != nullptr && !told_since_) return fine();  // of another thread
    RETURN_IF_ERROR(check_no_zero_rank(*document_));
    RETURN_IF_ERROR(check_no_rank_part(*document_));
    RETURN_IF_ERROR(check_megatron_rank(document_->manifest->path));
    ASSIGN_OR_RETURN(found, recognize(*document_));
    for (const auto& [param, shape] : told_) {
      if (param < found.tree.params.size()) found.tree.params[param].told = shape;
    }
    ASSIGN_OR_RETURN(made, found.dialect->read(document_, found.tree));
    auto model = std::make_unique<Model>(std::move(made));
    model_.swap(model);
    if (model != nullptr) old_models_.push_back(std::move(model));
    told_since_ = false;
    return fine();
  });
  return to_python(*model_);
}

void Reader::tell_shape(size_t param, Shape shape) {
  without_gil([&]() -> Status {  // who holds the lock may wait for Python to read from a store
    const std::lock_guard guard(lock_);
    told_[param] = std::move(shape);
    told_since_ = true;
    return fine();
  });
}

const State& Reader::state(size_t param, size_t state) const {
  const size_t params = model_ == nullptr ? 0 : model_->params.size();
  if (param >= params)
    raise(PyExc_IndexError, "there is no parameter " + std::to_string(param) +
                                ": the checkpoint has " + std::to_string(params));
  const size_t states = model_->params[param].states.size();
  if (state >= states)
    raise(PyExc_IndexError, "there is no state " + std::to_string(state) + " of parameter " +
                                std::to_string(param) + ", which has " + std::to_string(states));
  return model_->params[param].states[state];
}

Object Reader::read_state(size_t param, size_t number, uint64_t first, uint64_t count) {
  const State& s = state(param, number);
  const auto all = static_cast<int64_t>(volume(s.shape));
  check_box({all}, {static_cast<int64_t>(first)}, {static_cast<int64_t>(count)});
  return read_floats(param, number, count, [&](float* to) {
    return count == 0 ? fine() : s.values->read(first, count, to);
  });
}

Object Reader::read_state_box(size_t param, size_t number, const Shape& offset,
                              const Shape& shape) {
  const State& s = state(param, number);
  check_box(s.shape, offset, shape);
  return read_floats(param, number, volume(shape), [&](float* to) {
    return read_runs(s.shape, offset, shape, [&](uint64_t first, uint64_t count, uint64_t at) {
      return s.values->read(first, count, to + at);
    });
  });
}

Object Reader::read_floats(size_t param, size_t number, uint64_t count,
                           const std::function<Status(float*)>& read) {
  const State& s = state(param, number);
  const std::string name = printable(model_->params[param].name + "." + s.name);
  if (s.values == nullptr)
    raise(bad(name + ": is " + s.stored_as + ", whose values cannot be recovered").at(name));
  Buffer out(count * sizeof(float));
  auto* to = reinterpret_cast<float*>(out.data);
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    const Status done = read(to);
    return done.ok() ? fine() : Status(done.error().at(name));
  });
  return std::move(out.object);
}

Object Reader::read_own(size_t param, size_t number, size_t tensor, const Shape& offset,
                        const Shape& shape) {
  const State& s = state(param, number);
  const OwnTensors own = own_tensors(s);
  if (tensor >= own.size())
    raise(PyExc_IndexError, "there is no tensor " + std::to_string(tensor) +
                                " of lowbit's own in this state, which has " +
                                std::to_string(own.size()));
  return read_leaf(*own[tensor].second, printable(model_->params[param].name + "." + s.name),
                   offset, shape);
}

Object Reader::read_codes(size_t param, size_t number, int64_t begin, int64_t end, bool scales) {
  const State& s = state(param, number);
  const FormatInfo* format = s.codes ? find_format(s.codes->format) : nullptr;
  if (format == nullptr) raise(PyExc_ValueError, "this state has no codes of lowbit's formats");
  const Codes& c = *s.codes;
  check_box({c.rows}, {begin}, {end - begin});
  if (scales && (c.scales == nullptr || c.block <= 0))
    raise(PyExc_ValueError, "this state has no scales");
  // Elements of a row, and their bytes.
  const auto cols = static_cast<uint64_t>(c.cols), bits = static_cast<uint64_t>(c.bits);
  const auto block = static_cast<uint64_t>(c.block);
  const uint64_t row =
      scales ? (cols + block - 1) / block * uint64_t(format->scale_numbers) : (cols * bits + 7) / 8;
  const uint64_t width = scales ? uint64_t(format->scale_dtype->bytes) : 1;
  const auto first = static_cast<uint64_t>(begin), rows = static_cast<uint64_t>(end - begin);
  Buffer out(rows * row * width);
  char* to = out.data;
  const std::string name = printable(model_->params[param].name + "." + s.name);
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    if (rows * row == 0) return fine();
    const Status done = (scales ? c.scales : c.codes)->read(first * row, rows * row, to);
    return done.ok() ? fine() : Status(done.error().at(name));
  });
  return std::move(out.object);
}

Object Reader::finish() {
  without_gil([&] {
    const std::lock_guard guard(lock_);
    return document_->finish();
  });
  return none();
}

}  // namespace lowbit::ckpt::python
